"""Top-level kernels of pla_sglang: one folder per op, each with checks and a plain torch reference."""
