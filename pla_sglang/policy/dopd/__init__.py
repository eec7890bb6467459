"""DOPD: optimal prefill/decode ratio in closed form, load forecast, length-aware prefill batching, in-place prefill."""
