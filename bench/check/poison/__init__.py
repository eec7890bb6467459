"""The bench ``poison``: generated requests, the kinds of engine that get them, and which of them ended one."""
