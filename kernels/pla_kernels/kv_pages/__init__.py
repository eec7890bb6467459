"""Copies KV pages of all layers between the paged pool and one contiguous staging buffer."""
