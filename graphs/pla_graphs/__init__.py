"""Captured prefill graphs: recording (``recorder``, ``cuda``, ``tape``) and caching (``cache``)."""
