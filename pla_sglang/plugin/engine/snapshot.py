"""What a pass is decided on, read from SGLang's scheduler.

What versions of SGLang name otherwise stands in ``engine/host/``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, CacheAwarePolicy

from pla_sglang.common.checks import AGE_RANGE_MS, SLO_RANGE_MS, describe_bad_ms
from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.engine.host import memory
from pla_sglang.plugin.engine.host.requests import extend_end
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.interface.prefill import PassView, WaitingView
from pla_sglang.policy.pla.graphs.layouts import Layout
from pla_sglang.policy.slo.reservation import reservation_view

ARRIVAL_ATTRIBUTE = "pla_arrival_s"
SLO_KEY = "slo_ttft_ms"
TPOT_KEY = "slo_tpot_ms"
AGE_KEY = "pla_age_ms"


def check_slo_ms(value: Any, where: str) -> float:
    """A target given by a client, in milliseconds. Raises ConfigError (HTTP 400) naming value and range."""
    return _check_ms(value, where, SLO_RANGE_MS)


def _check_ms(value: Any, where: str, allowed: tuple[float, float]) -> float:
    low, high = allowed
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if isinstance(value, bool) or not low <= number <= high:
        raise ConfigError(describe_bad_ms(where, value, allowed))
    return number


def slo_s(req: Any, default_ms: float | None, key: str = SLO_KEY) -> float | None:
    """TTFT target of a request in seconds: its own, else the server's, else None."""
    params = req.sampling_params.custom_params
    value = params.get(key) if isinstance(params, dict) else None
    if value is None:
        return None if default_ms is None else default_ms / 1e3
    try:
        return check_slo_ms(value, key) / 1e3
    except ConfigError:
        return None  # refused at the front door; a worker that does not load plugins lets it through


def tpot_target_s(req: Any, default_ms: float | None) -> float | None:
    """TPOT target of a request in seconds, likewise."""
    return slo_s(req, default_ms, TPOT_KEY)


def check_age_ms(value: Any, where: str) -> float:
    """How long a request was at its router, in milliseconds. Raises ConfigError naming value and range."""
    return _check_ms(value, where, AGE_RANGE_MS)


def read_age_s(req: Any) -> float:
    """How long a request was at its router before it came here; 0 where nobody says so."""
    params = req.sampling_params.custom_params
    value = params.get(AGE_KEY) if isinstance(params, dict) else None
    try:
        return 0.0 if value is None else check_age_ms(value, AGE_KEY) / 1e3
    except ConfigError:
        return 0.0  # as ``slo_s``


def find_deadline_s(req: Any, arrival_s: float, default_slo_ms: float | None, clock: DeviceClock) -> float | None:
    """When its first token is due, of a request that came at ``arrival_s`` of the device; None without a target.

    The target counts from its first arrival at its router. The time of its arrival here stays as it is: by an age that
    is too high a client gets no more than by a target that is too low.
    """
    target_s = slo_s(req, default_slo_ms)
    return None if target_s is None else arrival_s + clock.device_s(target_s - read_age_s(req))


def output_tokens(req: Any) -> int:
    """What the host's admission counts for the rest of the decode."""
    return min(max(req.sampling_params.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)


def graph_layout(scheduler: Any) -> Layout | None:
    """Shapes of our captured prefill graphs; None where the server has none."""
    runner = getattr(getattr(scheduler, "tp_worker", None), "model_runner", None)
    graphs = getattr(runner, "prefill_cuda_graph_runner", None)
    return getattr(graphs, "pla_layout", None)


def make_view(req: Any, now_s: float, default_slo_ms: float | None, clock: DeviceClock) -> WaitingView:
    """A view of a request that enters the queue at ``now_s`` of the device (or comes back retracted: its arrival is
    then kept). The request is stamped with wall time."""
    arrival_s = _stamp_arrival_s(req, now_s, clock)
    return WaitingView(
        rid=req.rid,
        new_tokens=len(req.origin_input_ids) + len(req.output_ids),
        history_tokens=0,
        arrival_s=arrival_s,
        deadline_s=find_deadline_s(req, arrival_s, default_slo_ms, clock),
        resumed=len(req.output_ids) > 0,  # retracted, or begun at another instance
        output_tokens=output_tokens(req),
        handle=req,
    )


def make_reservation_view(req: Any, now_s: float, config: PlaConfig, clock: DeviceClock, *, begun: bool) -> WaitingView:
    """A view of a request that comes at ``now_s`` of the device and waits for room for its KV, which is elsewhere.

    ``begun``: its client has tokens of it.
    """
    arrival_s = _stamp_arrival_s(req, now_s, clock)
    deadline_s = find_deadline_s(req, arrival_s, config.slo_ttft_ms, clock)
    if begun:
        tpot_s = tpot_target_s(req, config.slo_tpot_ms)
        deadline_s = None if tpot_s is None else arrival_s + clock.device_s(tpot_s)
    tokens = len(req.origin_input_ids) + len(req.output_ids)
    return reservation_view(req.rid, tokens, arrival_s, deadline_s=deadline_s, begun=begun)


def _stamp_arrival_s(req: Any, now_s: float, clock: DeviceClock) -> float:
    """Device time when ``req`` came here, which is now unless it was stamped before."""
    stamp_s: float | None = getattr(req, ARRIVAL_ATTRIBUTE, None)
    if stamp_s is None:
        stamp_s = clock.wall_s(now_s)
        setattr(req, ARRIVAL_ATTRIBUTE, stamp_s)
    return clock.device_s(stamp_s)


def update_chunk_view(req: Any, view: WaitingView) -> None:
    """What the request whose prefill is under way still has to prefill."""
    view.history_tokens = extend_end(req) or 0
    view.new_tokens = chunk_remaining_tokens(req)


def host_matches(scheduler: Any, queue: list[Any]) -> bool:
    """Tells whether the host, in ordering ``queue``, has brought the prefix match of every request up to date."""
    tree = scheduler.tree_cache
    if tree.disable or tree.supports_fast_match_prefix():
        return True
    return isinstance(scheduler.policy._determine_active_policy(queue), CacheAwarePolicy)


def tree_stamp(scheduler: Any) -> tuple[int, int]:
    """Changes with what the prefix cache holds: every insertion and eviction moves one of its two sizes."""
    tree = scheduler.tree_cache
    return tree.evictable_size(), tree.protected_size()


def match_prefix(scheduler: Any, req: Any) -> None:
    """What the host's own ordering does to each request where it sorts by prefixes; admission repeats it anyway."""
    memory.match_prefix(scheduler.tree_cache, req)


def chunk_remaining_tokens(req: Any) -> int:
    return len(req.full_untruncated_fill_ids) - (extend_end(req) or 0)


def kv_room_tokens(scheduler: Any) -> int:
    """KV tokens that a pass can allocate: free, or evictable from the prefix cache."""
    return int(scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size())


def expected_growth_tokens(scheduler: Any, running_batch: Any) -> int:
    """KV tokens that the running requests will still take, by the host's own estimate."""
    guessed = certain = 0
    # The sum of their ``output_tokens`` by ``growth_ratio``, without the calls: this runs in every pass.
    for req in running_batch.reqs:
        params = req.sampling_params
        left = params.max_new_tokens - len(req.output_ids)
        if left > 0:
            left = left if left < CLIP_MAX_NEW_TOKENS else CLIP_MAX_NEW_TOKENS
            if memory.CERTAIN_GROWTH_IN_FULL and params.ignore_eos:
                certain += left
            else:
                guessed += left
    return certain + math.ceil(guessed * scheduler.new_token_ratio_tracker.current)


def device_idle(scheduler: Any, running_batch: Any) -> bool:
    """Nothing runs and no result is outstanding."""
    in_flight = len(scheduler.result_queue) if scheduler.enable_overlap and hasattr(scheduler, "result_queue") else 0
    return running_batch.is_empty() and in_flight == 0


def free_slots(scheduler: Any, running_batch: Any, chunk: Any) -> int:
    """Requests that a short pass may add; a parked chunk keeps a slot for itself."""
    slots = scheduler.get_num_allocatable_reqs(len(running_batch.reqs)) - (chunk is not None)
    # With preemption the host makes room itself, so it must get the chance to try.
    return max(1, slots) if scheduler.enable_priority_preemption else slots


def set_priority_ranks(views: Sequence[WaitingView], reqs: Iterable[Any], *, low_first: bool) -> None:
    """Rank 0 is the best priority among ``views``, which are of ``reqs``."""
    sign = 1 if low_first else -1
    priorities = [req.priority * sign for req in reqs]
    rank = {value: index for index, value in enumerate(sorted(set(priorities)))}
    for view, priority in zip(views, priorities, strict=True):
        view.priority_rank = rank[priority]


def pass_view(
    scheduler: Any, running_batch: Any, views: list[WaitingView], chunk_view: WaitingView | None, decode_wait_s: float
) -> PassView:
    """Snapshot for one pass. ``views`` are in the order that the host's policy has just made."""
    chunk = scheduler.chunked_req
    if chunk_view is not None:
        update_chunk_view(chunk, chunk_view)
    if scheduler.enable_priority_scheduling:
        everyone = views if chunk_view is None else [*views, chunk_view]
        reqs: list[Any] = [view.handle for view in everyone]
        set_priority_ranks(everyone, reqs, low_first=scheduler.schedule_low_priority_values_first)
    budget = scheduler.max_prefill_tokens
    if scheduler.chunked_prefill_size is not None:
        budget = min(budget, scheduler.chunked_prefill_size)
    room_tokens = kv_room_tokens(scheduler)
    return PassView(
        waiting=views,
        chunk=chunk_view,
        pass_budget_tokens=budget,
        slots=free_slots(scheduler, running_batch, chunk),
        kv_free_tokens=room_tokens - expected_growth_tokens(scheduler, running_batch),
        kv_room_tokens=room_tokens,
        kv_capacity_tokens=scheduler.max_total_num_tokens,
        running=len(running_batch.reqs),
        decode_wait_s=decode_wait_s,
    )


def context_tokens(batch: Any) -> int:
    """KV tokens of a decode batch."""
    return int(batch.seq_lens_cpu.sum())


def prefill_count(batch: Any) -> int:
    """Requests of an extend batch that prefill. In a mixed batch decodes stand behind them, one token each."""
    piggybacked = len(batch.decoding_reqs or ()) if batch.forward_mode.is_mixed() else 0
    return len(batch.extend_lens) - piggybacked


def attention_of(batch: Any) -> int:
    """Sum of L*(L+2H) over the requests of an extend batch that prefill."""
    count = prefill_count(batch)
    lengths, histories = batch.extend_lens[:count], batch.prefix_lens[:count]
    return sum(new * (new + 2 * history) for new, history in zip(lengths, histories, strict=True))
