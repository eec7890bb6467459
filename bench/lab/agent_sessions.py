"""Recorded agent sessions, the stock arms that may serve them best, and what a run of them says.

Sessions of a coding agent as closed loops (``named_workloads``), for ``bench agentic``, simulated and live. Stock:
unified engines with mixed chunks of 1,024 to 4,096, each order of prefills that SGLang has, behind cache-aware and
least-tokens routing.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import numpy as np

from bench.harness.steps import Row
from bench.lab.fleet_arms import ORDERS, FleetArm
from bench.lab.named_workloads import Workload, workload
from pla_sglang.sim.core.experiment import ExperimentResult
from pla_sglang.sim.workload import AgenticKnobs, Trace

NAME = "agentic"  # of the workload
STOCK_ARMS = tuple(
    FleetArm(router, mixed=True, chunk_tokens=chunk_tokens, order=order)
    for router in ("cache-aware", "least-tokens")
    for chunk_tokens in (1024, 2048, 4096)
    for order in ORDERS
)
ATTAINMENT, TTFT_P50_S, TTFT_P99_S, JOB_P50_S, HIT_RATE, HIT_ERROR = (
    "attainment",
    "ttft_p50_s",
    "ttft_p99_s",
    "job_time_p50_s",
    "hit_rate",
    "predicted_hit_error",
)


@functools.lru_cache(maxsize=4)
def sessions_of(folder: Path | None, seed: int, knobs: AgenticKnobs | None = None) -> Workload:
    """The workload with other starts of its sessions. ``knobs``: None: its own. Raises ConfigError."""
    load = workload(NAME, folder, agentic=knobs)
    return load.with_trace(start_anew(load.trace, seed), None)


def start_anew(trace: Trace, seed: int) -> Trace:
    """Whole sessions in an order that is drawn, their starts a Poisson process of one a second."""
    assert trace.session is not None
    _, session = np.unique(trace.session, return_inverse=True)
    count, rng = int(session.max()) + 1, np.random.default_rng(seed)
    starts_s = np.cumsum(rng.exponential(1.0, count)) - 1.0
    starts_s = rng.permutation(np.maximum(starts_s - starts_s[0], 0.0))
    return trace.with_arrivals(starts_s[session] + (trace.arrival_s - trace.start_s()))


def figures_of(run: ExperimentResult, trace: Trace) -> Row:
    """``hit_rate``: tokens of prompts that were in a prefix cache as the prefill began, over all tokens of prompts.

    ``predicted_hit_error``: by how many of them the router was wrong when it chose the instance, over the same.
    """
    figures, found, expected = run.figures, run.result.hit_tokens, run.result.predicted_hit_tokens
    prompt_tokens = int(trace.input_tokens.sum())
    times_s = {TTFT_P50_S: figures.ttft_p50_s, TTFT_P99_S: figures.ttft_p99_s, JOB_P50_S: figures.job_p50_s}
    return {
        ATTAINMENT: figures.attainment,
        **{name: value_s for name, value_s in times_s.items() if math.isfinite(value_s)},
        HIT_RATE: int(found.sum()) / prompt_tokens,
        HIT_ERROR: int(np.abs(found - expected).sum()) / prompt_tokens,
        "requests": len(trace),
        "sessions": len(trace.session_starts()),
    }
