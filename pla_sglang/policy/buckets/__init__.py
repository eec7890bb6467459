"""Which prefill graphs there are, which one a batch takes, which are captured and kept, and what that means for AWD.

PLA-Serve section 3.1 ("Graph capture and bucketization", "Graph-aware memory-based batching"). ``layouts``: shapes and
the nearest one to a batch. ``expect``: how often each will be asked for. ``plan``: order of capture, lazy capture.
``keep``: the memory budget. ``batching``: batches that end where a shape ends. ``reasons``: why a batch has no graph.
"""
