"""Open-loop replay of traces: what ``bench.replay`` is made of."""
