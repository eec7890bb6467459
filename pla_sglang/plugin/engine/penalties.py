"""Penalties count each token of an answer once, and at the same step, wherever and however the answer was computed.

SGLang 0.5.17 counts before each decode step the token that it knows to be the last. With the overlap schedule that is
the one before the token under way (before the first step: the last of the prompt), so each token is counted one step
late. But when a prefill of others runs between two decode steps, the token under way is known too: it is counted at
once, and again in the next step. Here the token that is due follows from how much KV is committed, and is the same with
and without others.

The host also begins anew whenever it builds a batch: a request that was retracted, or that came with a part of its
answer, would be penalised for nothing of it. What an undisturbed request would have been counted is counted again then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pla_sglang.plugin.engine.host.requests import kv_committed_len

_KINDS = ("frequency", "presence", "repetition")


def find_due_token(req: Any, *, overlap: bool) -> int:
    """What is to be counted before the next decode step of ``req``."""
    place = kv_committed_len(req) - int(overlap) - len(req.origin_input_ids)
    if place < 0 or not req.output_ids:
        return int(req.origin_input_ids[-1])
    return int(req.output_ids[min(place, len(req.output_ids) - 1)])


def count_due_tokens(original: Callable[[Any], None], batch: Any) -> None:
    """In place of the host's ``cumulate_penalty_output_tokens``, which is left to count where it counts the same."""
    late = int(batch.enable_overlap)
    if all(kv_committed_len(req) - late == len(req.origin_input_ids) + len(req.output_ids) - 1 for req in batch.reqs):
        original(batch)  # the last known token is the one that is due
        return
    import torch

    due = [find_due_token(req, overlap=batch.enable_overlap) for req in batch.reqs]
    pinned = torch.device(batch.device).type == "cuda"  # as the host's: a copy that waits for no forward pass
    tokens = torch.tensor(due, dtype=torch.int64, pin_memory=pinned).to(batch.device, non_blocking=True)
    batch.sampling_info.penalizer_orchestrator.cumulate_output_tokens(tokens)


def order_penalizers(orchestrator: Any) -> None:
    """What is subtracted first, then what is divided by, as the overlap schedule has it.

    SGLang 0.5.17 keeps its penalizers in a set of classes, whose order is another one in each process: without the
    overlap schedule two kinds of penalties together gave other tokens after a restart, or at another instance.
    """
    kinds = sorted(orchestrator.penalizers, key=lambda kind: (kind.is_multiplicative, kind.__name__))
    orchestrator.penalizers = {kind: orchestrator.penalizers[kind] for kind in kinds}


def count_again(batch: Any, *, steps_under_way: int) -> None:
    """For a batch that was just built: what its requests had been counted before, and in which order kinds apply.

    Args:
        steps_under_way: 1 for a batch whose pass samples the next token, 0 for one that decodes afterwards, as that
            decode step counts by itself.
    """
    orchestrator = batch.sampling_info.penalizer_orchestrator
    order_penalizers(orchestrator)  # others may join that have penalties
    if not orchestrator.is_required:
        return
    for row, req in enumerate(batch.reqs):
        steps = len(req.output_ids) - 1 + steps_under_way
        if steps > 0:
            late = [req.origin_input_ids[-1]] if batch.enable_overlap else []
            _count(orchestrator, row, [*late, *req.output_ids][:steps])


def _count(orchestrator: Any, row: int, tokens: Sequence[int]) -> None:
    import torch

    places = torch.tensor(tokens, dtype=torch.int64, device=orchestrator.device)
    for kind, counts, weights in _tables(orchestrator):
        if kind == "frequency":
            counts[row].index_add_(0, places, weights[row].expand(len(tokens)))
        else:
            counts[row, places] = weights[row, 0]
    for penalizer in orchestrator.penalizers.values():
        if penalizer.is_prepared() and hasattr(penalizer, "len_output_tokens"):  # the least length of an answer
            penalizer.len_output_tokens[row] += len(tokens)


def _tables(orchestrator: Any) -> Iterator[tuple[str, Any, Any]]:
    """Kind, counted penalties ``[requests, vocabulary]`` and weights ``[requests, 1]`` of each penalizer in use."""
    for penalizer in orchestrator.penalizers.values():
        if not penalizer.is_prepared():
            continue
        for kind in _KINDS:
            counts = getattr(penalizer, f"cumulated_{kind}_penalties", None)
            if counts is not None:
                yield kind, counts, getattr(penalizer, f"{kind}_penalties")
