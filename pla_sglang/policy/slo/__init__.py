"""What stands around PLA-Serve in an engine: TTFT targets that decide, and mixed batches. Ours, no paper's."""
