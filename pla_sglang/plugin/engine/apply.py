"""Writes a decision into SGLang's scheduler for the length of one scheduling pass, and takes it back afterwards.

SGLang's ``waiting_queue`` stays the one truth: outside a pass it is always complete, so aborts, time-outs, retraction,
metrics and load reports need to know nothing of us. Within a pass the queue holds only what was selected. Four more
things are changed for a pass and restored at its end, whatever happens in it:

* ``chunked_req``: hidden while the running long is parked; SGLang then neither continues it nor refuses a batch.
* ``chunked_prefill_size``: None in a pass that must not cut a request, or a second chunked request would be born and
  overwrite the parked one; the chosen chunk in a pass of the long class.
* ``is_mixed_chunk``: whether running requests join this pass, where the host's flag lets them at all.
* ``batch_is_full``: a long that found no memory sets this flag, which would lock out short prompts that do fit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pla_sglang.plugin.engine.host.memory import growth_ratio, reserve_kv
from pla_sglang.plugin.engine.snapshot import chunk_remaining_tokens, output_tokens
from pla_sglang.policy.interface.prefill import Action, PassDecision, PassView
from pla_sglang.policy.pla.class_queues import find_places


@dataclasses.dataclass(slots=True)
class PassContext:
    """State of one scheduling pass. Lives from the entry of the host's prefill function to its exit.

    Attributes:
        running_batch: the host's running batch of this pass.
        full_before: its ``batch_is_full`` on entry.
        order: the host's list, complete and in its order, kept aside; None until the decision.
        shown: ids of the requests that the host may choose from in this pass.
        places: where they stand in ``order``, ascending; after ``leave`` where those stood that were admitted.
        held_tokens: new tokens that wait but were left out of this pass.
        view, decision: what was seen and decided; None until then.
        parked: the chunk that is hidden in this pass; owned by the context until ``leave``.
        reserve_tokens: KV tokens that the parked chunk will still take.
        lora_id: adapter of the parked chunk; must stay loadable beside what this pass admits.
        mixes: the host's ``is_mixed_chunk`` on entry.
        mixed_chunk_tokens: what the chunk may take in a mixed pass; None in all others.
    """

    running_batch: Any
    full_before: bool
    order: list[Any] | None = None
    shown: set[int] = dataclasses.field(default_factory=set)
    places: list[int] = dataclasses.field(default_factory=list)
    held_tokens: int = 0
    view: PassView | None = None
    decision: PassDecision | None = None
    parked: Any = None
    reserve_tokens: int = 0
    lora_id: str | None = None
    mixes: bool = False
    mixed_chunk_tokens: int | None = None


def chunk_grid_tokens(scheduler: Any) -> int:
    """The host cuts a prompt at multiples of this: whole pages, and under deterministic inference its tiles.

    The second is known late in the host's ``__init__``; until then there are pages only.
    """
    return max(scheduler.page_size, getattr(scheduler, "truncation_align_size", None) or 1)


def align_chunk(tokens: int, grid_tokens: int) -> int:
    """``tokens`` down to the grid, but never below one step of it."""
    return max(grid_tokens, tokens // grid_tokens * grid_tokens)


def enter_pass(context: PassContext, scheduler: Any, queue: list[Any]) -> None:
    """Make the host carry out ``context.decision``. ``queue`` is the host's list; it gets another one for the pass.

    The host reads its attribute again after it has ordered the queue, so nothing of a long queue need be copied.
    """
    decision, view = context.decision, context.view
    assert decision is not None and view is not None, "a decision precedes its application"
    assert queue is scheduler.waiting_queue, "the host ordered something other than its queue"
    context.order = queue
    scheduler.waiting_queue = [view.handle for view in decision.selected]
    context.shown = set(map(id, scheduler.waiting_queue))
    context.places = find_places(view.waiting, decision.selected)
    if decision.park:
        _park_chunk(context, scheduler)
    piggybacks = decision.piggyback is not None and decision.piggyback.joins
    scheduler.is_mixed_chunk = piggybacks
    if decision.shares_with_chunk:
        _mix_chunk(context, scheduler)
        if piggybacks:  # the host takes a token a piggybacked decode off it
            scheduler.chunked_prefill_size += view.running
    elif decision.chunk_tokens is None:
        scheduler.chunked_prefill_size = None  # whole requests only
    else:
        scheduler.chunked_prefill_size = align_chunk(decision.chunk_tokens, chunk_grid_tokens(scheduler))
        if piggybacks:  # the host takes a token a piggybacked decode off it
            scheduler.chunked_prefill_size += view.running
    if decision.action is Action.HOLD and scheduler.chunked_req is not None:
        _park_chunk(context, scheduler)


def _mix_chunk(context: PassContext, scheduler: Any) -> None:
    """The chunk gets what the others leave of the pass; the host adds it first."""
    decision, page = context.decision, scheduler.page_size
    assert decision is not None and decision.chunk_tokens is not None
    short_prompts = sum(-(-view.new_tokens // page) * page + page for view in decision.selected)
    context.mixed_chunk_tokens = align_chunk(decision.chunk_tokens - short_prompts, page)
    scheduler.chunked_prefill_size = context.mixed_chunk_tokens + short_prompts


def _park_chunk(context: PassContext, scheduler: Any) -> None:
    chunk = scheduler.chunked_req
    context.parked = chunk
    ratio = growth_ratio(chunk, scheduler.new_token_ratio_tracker.current)
    context.reserve_tokens = chunk_remaining_tokens(chunk) + int(output_tokens(chunk) * ratio)
    context.lora_id = chunk.lora_id
    scheduler.chunked_req = None


def leave_pass(context: PassContext, scheduler: Any, chunked_prefill_size: int | None, batch: Any) -> None:
    """Give the host its state back. Also runs when the pass raised; ``batch`` is None then."""
    scheduler.chunked_prefill_size = chunked_prefill_size
    scheduler.is_mixed_chunk = context.mixes
    if context.parked is not None:
        assert scheduler.chunked_req is None, "a pass beside a parked chunk cut a request"
        scheduler.chunked_req = context.parked
        context.parked = None
    if context.order is not None:
        _restore_queue(context, scheduler, batch)
    if batch is None and context.decision is not None and context.decision.action is not Action.SHORT:
        context.running_batch.batch_is_full = context.full_before


def _restore_queue(context: PassContext, scheduler: Any, batch: Any) -> None:
    """The complete queue in the host's order, without what was admitted, with what came in during the pass."""
    order = context.order
    assert order is not None
    # The host saw the selected ones only; whatever else stands in its queue now was added by it (preempted requests).
    shown = context.shown
    added = [req for req in scheduler.waiting_queue if id(req) not in shown]
    gone = set() if batch is None else set(map(id, batch.reqs))
    context.places = [place for place in context.places if id(order[place]) in gone]
    for place in reversed(context.places):
        del order[place]
    order += added
    scheduler.waiting_queue = order


def reserve_for_parked(context: PassContext, adder: Any) -> None:
    """Take the parked chunk's future KV tokens off what this pass may admit.

    Without it short prompts eat the memory that the long was admitted for; the host then forces its next chunk and dies
    of an allocation failure.
    """
    if context.parked is None:
        return
    reserve = context.reserve_tokens + adder.page_size
    reserve_kv(adder, reserve, chunk_remaining_tokens(context.parked) + adder.page_size)


def add_chunk(original: Any, context: PassContext | None, adder: Any, req: Any) -> Any:
    """Around the host's ``PrefillAdder.add_chunked_req``: in a mixed pass the chunk leaves room for the short
    prompts."""
    if context is None or context.mixed_chunk_tokens is None:
        return original(adder, req)
    whole = adder.rem_chunk_tokens
    part = min(whole, context.mixed_chunk_tokens)
    adder.rem_chunk_tokens = part
    try:
        return original(adder, req)
    finally:
        adder.rem_chunk_tokens += whole - part
