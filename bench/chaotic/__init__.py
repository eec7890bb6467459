"""Parts of ``bench.chaos``."""
