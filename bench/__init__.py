"""Live benchmarks. They talk HTTP to servers that they start themselves; run each as ``python -m bench.NAME``."""
