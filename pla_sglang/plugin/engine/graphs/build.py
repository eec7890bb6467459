"""Puts our prefill graphs together for one model runner, or says why there are none."""

from __future__ import annotations

import random
import time
from typing import Any

from pla_graphs.cache import GraphCache
from pla_graphs.recorder import CaptureError, capture_step
from pla_sglang.common.errors import PlaError
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.engine.graphs import refusals
from pla_sglang.plugin.engine.graphs.attention import AttentionState, state_of
from pla_sglang.plugin.engine.graphs.compare import HostTimes, measure_host_times
from pla_sglang.plugin.engine.graphs.host import GIB, CapturedForward, agree, allocated_bytes, free_bytes
from pla_sglang.plugin.engine.graphs.runner import GraphRunner
from pla_sglang.plugin.engine.host.arguments import resolve
from pla_sglang.policy.pla.graphs.choose import LARGEST_TOKENS, LONGEST_TOKENS, LayoutKnobs, build_layout
from pla_sglang.policy.pla.graphs.expect import BatchPrior, expected_hits
from pla_sglang.policy.pla.graphs.layouts import Layout
from pla_sglang.policy.pla.graphs.plan import CaptureKnobs, CapturePlan
from pla_sglang.policy.pla.graphs.reasons import CaptureFailure

SEED = 0  # of the draws that estimate how often shapes are asked for; alike on all ranks
AUTO, AUTO_LAYOUT = "auto", "varlen"  # what auto takes where graphs pay: less padding than the grid, see graphs.md


class NoGainError(PlaError):
    """With ``--pla-graph-layout auto``: our graphs do not pay here. The message says why."""


def layout_name(config: PlaConfig) -> str:
    return AUTO_LAYOUT if config.graph_layout == AUTO else config.graph_layout


def layout_of(runner: Any, config: PlaConfig) -> Layout:
    """The shapes for this server: bounded by its request slots, its longest prefill, and a fixed boundary."""
    chunk = getattr(resolve(runner.server_args), "chunked_prefill_size", None) or -1
    largest = min(LARGEST_TOKENS, chunk) if chunk > 0 else LARGEST_TOKENS
    longest = LONGEST_TOKENS if config.boundary_tokens is None else min(config.boundary_tokens, largest)
    slots = max(1, min(64, runner.req_to_token_pool.size))
    pass_tokens = chunk if chunk > 0 else None
    return build_layout(LayoutKnobs(layout_name(config), largest, min(longest, largest), slots, pass_tokens))


def reasons_against(runner: Any, config: PlaConfig) -> list[str]:
    """Why this server runs without our graphs; empty when it can have them."""
    reasons = refusals.of_server(runner)
    free = agree([-free_bytes(runner)])[0] * -1
    if config.graph_budget_gb * GIB > free:
        reasons.append(f"--pla-graph-budget-gb {config.graph_budget_gb:g}, of which {free / GIB:.2f} are free")
    return reasons


def build_runner(runner: Any, stock: Any, eager: Any, config: PlaConfig) -> GraphRunner:
    """Our runner in front of ``stock``, with the most expected shapes captured. For a server with no reason against.

    ``eager``: the host's runner for what ``stock`` does not take.

    Raises, on all ranks if on one:
        CaptureError: the static buffers cannot be had.
        NoGainError: with ``auto``, our passes take the host as long as its own.
    """
    state = state_of(runner.attn_backend, lambda: allocated_bytes(runner))
    assert state is not None, "asked for a backend that cannot be captured"
    layout = layout_of(runner, config)
    prior = BatchPrior(most_requests=max(bucket.slots for bucket in layout.buckets()))
    knobs = CaptureKnobs(
        budget_s=config.graph_capture_budget_s, busy_s_per_minute=config.graph_busy_capture_s_per_minute
    )
    plan = CapturePlan(expected_hits(layout, prior, random.Random(SEED)), knobs)
    forward = _forward_of(runner, state, layout)
    cache = GraphCache(
        layout,
        plan,
        forward,
        budget_bytes=int(config.graph_budget_gb * GIB),
        clock=time.perf_counter,
        agree=agree,
    )
    times = _judge(forward, cache, stock, eager) if config.graph_layout == AUTO else None
    cache.capture_at_start()
    return GraphRunner(stock, forward, cache, times)


def _judge(forward: CapturedForward, cache: GraphCache, stock: Any, eager: Any) -> HostTimes:
    """By the most expected shape, which is captured for it. Raises NoGainError, with nothing left captured."""
    cache.capture_at_start(most=1)
    if not cache.captured:
        raise NoGainError("no shape could be captured")
    bucket, failure, times = cache.captured[0], "", HostTimes(0, 0)
    try:
        times = measure_host_times(forward, cache.recording(bucket), bucket, stock=stock, eager=eager)
    except Exception as error:  # as for captures: a graph is never worth the server
        failure = f"they could not be compared with SGLang's own: {type(error).__name__}: {error}"
    failed, ours_s, stock_s = agree([float(bool(failure)), *times])
    times = HostTimes(ours_s, stock_s)
    if not failed and times.pays:
        return times
    cache.close()
    ours_ms, theirs_ms = times.to_ms().values()
    slow = f"a pass takes the host {ours_ms:g} ms with them and {theirs_ms:g} ms with SGLang's own"
    raise NoGainError((failure or "another rank could not compare them with SGLang's own") if failed else slow)


def _forward_of(runner: Any, state: AttentionState, layout: Layout) -> CapturedForward:
    forward, error = None, CaptureError(CaptureFailure.OTHER_RANK, "another rank could not allocate its buffers")
    try:
        with capture_step(CaptureFailure.BATCH):
            forward = CapturedForward(runner, state, layout.buckets())
    except CaptureError as own_error:
        error = own_error
    if agree([float(forward is None)])[0] or forward is None:
        raise error
    return forward
