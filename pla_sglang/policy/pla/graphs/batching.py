"""Batches that fit captured shapes: what AWD asks before it sends one (PLA-Serve 3.1, "graph-aware batching").

A graph computes its whole bucket, so a batch costs what its bucket costs, and one more request costs nothing while it
still fits.
"""

from __future__ import annotations

from collections.abc import Sequence

from pla_sglang.policy.interface.prefill import WaitingView
from pla_sglang.policy.pla.graphs.layouts import Layout

GROUPED_VIEWS = 256  # of the waiting requests, so many are looked at for others of the same bucket


def computed_tokens(layout: Layout | None, lengths: Sequence[int]) -> int:
    """New tokens that a pass over this batch computes: those of its bucket, or its own where no graph takes it."""
    bucket = None if layout is None else layout.nearest(lengths)
    return sum(lengths) if bucket is None else bucket.tokens


def bucket_first(layout: Layout, waiting: Sequence[WaitingView], urgent: WaitingView | None) -> Sequence[WaitingView]:
    """The waiting requests that may share a batch (Algorithm 1 line 6, "bucket-first"), in their order.

    Those that are padded as ``urgent``, or without one as the head of the queue: so the oldest never waits for another
    group. For a layout that pads requests for the sake of others. ``waiting`` is not empty.
    """
    group = layout.batch_group((urgent or waiting[0]).new_tokens)
    return [view for view in waiting[:GROUPED_VIEWS] if layout.batch_group(view.new_tokens) == group]
