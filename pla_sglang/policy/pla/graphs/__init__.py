"""Shapes of prefill graphs, their choice for a batch, capture and eviction, and their use in AWD.

PLA-Serve section 3.1 ("Graph capture and bucketization", "Graph-aware memory-based batching"). ``layouts``: shapes and
the nearest one to a batch. ``expect``: expected use of each. ``plan``: order of capture, lazy capture.
``keep``: the memory budget. ``batching``: batches that end where a shape ends. ``reasons``: why a batch has no graph.
"""
