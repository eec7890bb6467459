"""pla_sglang: prefill-length-aware scheduling for stock SGLang, shipped as an SGLang plugin."""

__version__ = "0.1.0"
