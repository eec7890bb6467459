"""Batches that fit captured shapes: what AWD asks before it sends one (PLA-Serve 3.1, "graph-aware batching").

A graph computes its whole bucket, so a batch costs what its bucket costs. Three things follow: a batch that is full
anyway ends where a bucket ends; one more request costs nothing while it still fits; and the wait for exactly the one
that fills the request slots is worth more than any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from pla_sglang.policy.interface.prefill import WaitingView
from pla_sglang.policy.pla.graphs.layouts import Layout

GROUPED_VIEWS = 256  # of the waiting requests, so many are looked at for others of the same bucket
LEAST_KEPT = 0.875  # of a full batch's tokens; cutting more off would undo the batching


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


def fitting_prefix(layout: Layout, lengths: Sequence[int]) -> int:
    """How many of a full batch's first requests to keep, so that little of the last bucket is padding.

    At least ``LEAST_KEPT`` of the tokens stay. Where even that is too much for every bucket, all of it stays: the batch
    runs without a graph of ours, and cutting would not help.
    """
    whole = sum(lengths)
    best, best_share = len(lengths), 0.0
    kept = whole
    for count in range(len(lengths), 0, -1):
        if kept < LEAST_KEPT * whole:
            break
        bucket = layout.nearest(lengths[:count])
        share = 0.0 if bucket is None else kept / bucket.tokens
        if share > best_share:
            best, best_share = count, share
        kept -= lengths[count - 1]
    return best


def one_fills(layout: Layout, lengths: Sequence[int]) -> bool:
    """One more request of the batch's mean size would fill the request slots and still fit the same bucket."""
    bucket = layout.nearest(lengths)
    if bucket is None or bucket.slots != len(lengths) + 1:
        return False
    return layout.nearest([*lengths, max(1, sum(lengths) // len(lengths))]) == bucket
