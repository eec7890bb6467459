"""Packs a short prefill batch into the static buffers of a captured graph."""
