"""PLA-Serve: temporal scheduling in an engine, spatial pools and their pressure controller, prefill graphs."""
