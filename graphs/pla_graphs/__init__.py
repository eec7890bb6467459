"""Prefill graph shapes that the host has captured, as the batching policy sees them."""
