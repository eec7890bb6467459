"""Benches that compare this plugin with stock SGLang or its routers."""
