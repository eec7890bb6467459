"""What one scheduler still has to compute, and what it holds: the load figures of a report.

Reads the scheduler's fields by the names of ``snapshot``; works with and without our scheduling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pla_sglang.load.report import Backlog, ClassQueue
from pla_sglang.plugin.engine.fleet_part import fleet_part
from pla_sglang.plugin.engine.host.requests import extend_end
from pla_sglang.plugin.engine.snapshot import ARRIVAL_ATTRIBUTE
from pla_sglang.policy.interface.prefill import PrefillClass, WaitingView


def iterate_waiting(scheduler: Any) -> Iterator[Any]:
    """Requests that wait for their prefill; on a PD prefill instance also those that wait for their handshake."""
    yield from scheduler.waiting_queue
    bootstrap = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
    if bootstrap is not None:
        yield from bootstrap.queue


def iterate_unfinished(scheduler: Any) -> Iterator[Any]:
    """``iterate_waiting`` and the request whose prefill is under way."""
    yield from iterate_waiting(scheduler)
    if scheduler.chunked_req is not None:
        yield scheduler.chunked_req


def read_arrival_s(req: Any) -> float:
    """By this process's monotonic clock."""
    stamped: float | None = getattr(req, ARRIVAL_ATTRIBUTE, None)
    return req.time_stats.scheduler_recv_time if stamped is None else stamped


def count_tokens(scheduler: Any, req: Any) -> tuple[int, int]:
    """New and history tokens of a request that waits or is under way."""
    if req is scheduler.chunked_req:
        history = extend_end(req) or 0
        return max(0, len(req.full_untruncated_fill_ids) - history), history
    adapter = getattr(scheduler, "pla", None)
    if adapter is not None:  # with fcfs the host matches no prefix before admission, we do
        view = adapter.views.find_view(req)
        return view.new_tokens, view.history_tokens
    total = len(req.origin_input_ids) + len(req.output_ids)
    history = min(req.num_matched_prefix_tokens, total)
    return total - history, history


def sum_backlog(scheduler: Any, in_flight: Backlog) -> Backlog:
    """Sums over what waits or is under way; ``in_flight`` was launched and is not done."""
    prefills, tokens = in_flight.prefills, in_flight.tokens
    attention, histories = in_flight.attention, in_flight.history_tokens
    for req in iterate_unfinished(scheduler):
        new, history = count_tokens(scheduler, req)
        if new:
            prefills += 1
            tokens += new
            attention += new * (new + 2 * history)
            histories += history
    return Backlog(prefills, tokens, attention, histories)


def group_by_class(scheduler: Any) -> dict[PrefillClass, list[WaitingView]]:
    """Views of what waits, by class. Only where our scheduling is on."""
    adapter = scheduler.pla
    short_prompts, long_prompts = adapter.policy.prefills.classify(
        [adapter.views.find_view(req) for req in iterate_waiting(scheduler)]
    )
    return {PrefillClass.SHORT: short_prompts, PrefillClass.LONG: long_prompts}


def sum_class_queue(views: list[WaitingView]) -> ClassQueue:
    return ClassQueue(len(views), sum(view.new_tokens for view in views))


def measure_oldest_s(scheduler: Any, now_s: float) -> float:
    """Age of the oldest prefill that is not done; 0 without one."""
    first_s = min(map(read_arrival_s, iterate_unfinished(scheduler)), default=now_s)
    return max(0.0, now_s - first_s)


def list_decoding(scheduler: Any, joining: Sequence[Any]) -> list[Any]:
    """Requests that decode: those of the running batch, and ``joining``, which the host has not put back there yet.

    A request may be in both; one that has ended or was retracted may still be in either, and in a fleet one that will
    decode elsewhere.
    """
    decodes_here = fleet_part(scheduler).decodes_here
    reqs = {id(req): req for req in (*scheduler.running_batch.reqs, *joining)}
    return [req for req in reqs.values() if not req.finished() and not req.is_retracted and decodes_here(req)]


def count_decode_waiting(scheduler: Any) -> tuple[int, int]:
    """Decodes that wait for their KV, for memory or for a place: requests and KV tokens. Of PD decode instances and
    members of a fleet.
    """
    queues = (
        getattr(scheduler, "disagg_decode_prealloc_queue", None),
        getattr(scheduler, "disagg_decode_transfer_queue", None),
    )
    reqs = [entry.req for queue in queues if queue is not None for entry in queue.queue]
    reqs += fleet_part(scheduler).list_joining()
    return len(reqs), sum(len(req.origin_input_ids) + len(req.output_ids) for req in reqs)


def count_kv_used_tokens(scheduler: Any) -> int:
    """KV tokens that cannot be evicted."""
    free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
    return max(0, int(scheduler.max_total_num_tokens - free))
