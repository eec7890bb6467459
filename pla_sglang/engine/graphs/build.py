"""Puts our prefill graphs together for one model runner, or says why there are none."""

from __future__ import annotations

import random
import time
from typing import Any

from pla_graphs.cache import Agree, GraphCache
from pla_graphs.recorder import CaptureError, capture_step
from pla_sglang.config import PlaConfig
from pla_sglang.engine.graphs import refusals
from pla_sglang.engine.graphs.attention import AttentionState, state_of
from pla_sglang.engine.graphs.host import GIB, CapturedForward, agree_over, allocated_bytes, free_bytes
from pla_sglang.engine.graphs.runner import GraphRunner
from pla_sglang.policy.pla.graphs.choose import LARGEST_TOKENS, LONGEST_TOKENS, LayoutKnobs, build_layout
from pla_sglang.policy.pla.graphs.expect import BatchPrior, expected_hits
from pla_sglang.policy.pla.graphs.layouts import Layout
from pla_sglang.policy.pla.graphs.plan import CaptureKnobs, CapturePlan
from pla_sglang.policy.pla.graphs.reasons import CaptureFailure

SEED = 0  # of the draws that estimate how often shapes are asked for; alike on all ranks


def layout_of(runner: Any, config: PlaConfig) -> Layout:
    """The shapes for this server: bounded by its request slots, its longest prefill, and a fixed boundary."""
    chunk = getattr(runner.server_args, "chunked_prefill_size", None) or -1
    largest = min(LARGEST_TOKENS, chunk) if chunk > 0 else LARGEST_TOKENS
    longest = LONGEST_TOKENS if config.boundary_tokens is None else min(config.boundary_tokens, largest)
    slots = max(1, min(64, runner.req_to_token_pool.size))
    pass_tokens = chunk if chunk > 0 else None
    return build_layout(LayoutKnobs(config.graph_layout, largest, min(longest, largest), slots, pass_tokens))


def reasons_against(runner: Any, config: PlaConfig) -> list[str]:
    """Why this server runs without our graphs; empty when it can have them."""
    reasons = refusals.of_server(runner)
    free = agree_over(runner.tp_group)([-free_bytes(runner)])[0] * -1
    if config.graph_budget_gb * GIB > free:
        reasons.append(f"--pla-graph-budget-gb {config.graph_budget_gb:g}, of which {free / GIB:.2f} are free")
    return reasons


def build_runner(runner: Any, stock: Any, config: PlaConfig) -> GraphRunner:
    """Our runner in front of ``stock``, with the most expected shapes captured. For a server with no reason against.

    Raises CaptureError where the static buffers cannot be had, on all ranks if on one.
    """
    state = state_of(runner.attn_backend, lambda: allocated_bytes(runner))
    assert state is not None, "asked for a backend that cannot be captured"
    layout = layout_of(runner, config)
    prior = BatchPrior(most_requests=max(bucket.slots for bucket in layout.buckets()))
    knobs = CaptureKnobs(
        budget_s=config.graph_capture_budget_s, busy_s_per_minute=config.graph_busy_capture_s_per_minute
    )
    plan = CapturePlan(expected_hits(layout, prior, random.Random(SEED)), knobs)
    agree = agree_over(runner.tp_group)
    forward = _forward_of(runner, state, layout, agree)
    cache = GraphCache(
        layout,
        plan,
        forward,
        budget_bytes=int(config.graph_budget_gb * GIB),
        clock=time.perf_counter,
        agree=agree,
    )
    cache.capture_at_start()
    return GraphRunner(stock, forward, cache)


def _forward_of(runner: Any, state: AttentionState, layout: Layout, agree: Agree) -> CapturedForward:
    forward, error = None, CaptureError(CaptureFailure.OTHER_RANK, "another rank could not allocate its buffers")
    try:
        with capture_step(CaptureFailure.BATCH):
            forward = CapturedForward(runner, state, layout.buckets())
    except CaptureError as own_error:
        error = own_error
    if agree([float(forward is None)])[0] or forward is None:
        raise error
    return forward
