"""Captured prefill graphs: what records them (``recorder``, ``cuda``, ``tape``), who keeps them (``cache``)."""
