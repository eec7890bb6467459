"""PLA-Serve Figure 5: latency and throughput of short prefills by waiting window, 64 users."""

from __future__ import annotations

import dataclasses
import random

import numpy as np

from bench.papers.charts import draw, lines
from bench.papers.context import Context
from bench.papers.finding import Claim, Finding, Point, Row, number
from bench.papers.measure import Steady, steady
from bench.papers.pla_cases import MODES, SHORT, TTFT_SLO_S, world
from pla_sglang.metrics.goodput import Slo
from pla_sglang.workload import Arrivals, LengthModel, Trace, generated_trace
from pla_sglang.workload.lengths import fixed

MODEL, USERS = "14B", 64
LONGEST_TOKENS = 255  # "prompt length less than 256": all are short
WHY_FITTED = (
    "The model's boundary of 234 tokens lies among these prompts: the longest of them wait for all others, and in a"
    " closed loop the short queue then runs dry, one memory-bound pass a prompt."
)
CURVE_ONLY = "the paper shows curves without numbers"


@dataclasses.dataclass(frozen=True)
class Job:
    """``window_ms`` None: the adaptive window of Algorithm 1. ``boundary_tokens`` None: from the step model."""

    window_ms: float | None
    boundary_tokens: int | None
    requests: int
    seed: int


def shorts(requests: int, seed: int) -> Trace:
    """Prompts under 256 tokens, as the paper says; median and shape are ours. One token out."""
    rng = random.Random(seed)
    lengths = LengthModel((1.0,), (4.1,), (0.8,), least=8, most=LONGEST_TOKENS)
    trace = generated_trace(requests, Arrivals(1.0, rng), lengths, fixed(1))
    return dataclasses.replace(trace, client=np.full(requests, SHORT))


def measure(job: Job) -> Steady:
    trace = shorts(job.requests, job.seed)
    wait_s = None if job.window_ms is None else job.window_ms / 1e3
    made = world(
        MODES["PLA"],
        model=MODEL,
        instances=1,
        users={SHORT: USERS},
        wait_s=wait_s,
        boundary_tokens=job.boundary_tokens,
    )
    return steady(made.run(trace).served, USERS, Slo(TTFT_SLO_S, 1.0))


def run(context: Context) -> Finding:
    windows = context.pick([0.0, 20.0], [0.0, 2.0, 5.0, 10.0, 20.0, 40.0], [0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0])
    requests = context.pick(600, 4000, 20_000)
    jobs = [Job(window, LONGEST_TOKENS + 1, requests, context.seed) for window in (None, *windows)]
    fitted, adaptive, *found = context.map(measure, [Job(None, None, requests, context.seed), *jobs])
    throughput = [one.requests_per_s for one in found]
    latency = [1e3 * one.ttft_mean_s for one in found]
    best = windows[throughput.index(max(throughput))]
    shown = f"{number(adaptive.requests_per_s)} of {number(max(throughput))} requests/s"
    return Finding(
        "pla_fig5",
        "PLA-Serve, Figure 5",
        f"one prefill instance, Qwen2.5-14B, H200 step times, {USERS} users, prompts under 256 tokens",
        [
            Row("window with the highest throughput", None, best, "ms", CURVE_ONLY),
            Row("mean latency without window", None, latency[0], "ms", CURVE_ONLY),
            Row("mean latency with the longest window", None, latency[-1], "ms", CURVE_ONLY),
            Row("throughput without window", None, throughput[0], "req/s", CURVE_ONLY),
            Row("throughput, adaptive window", None, adaptive.requests_per_s, "req/s", "not in the figure"),
            Row("throughput, adaptive window, boundary by the model", None, fitted.requests_per_s, "req/s", WHY_FITTED),
        ],
        [
            Claim(
                "the adaptive window is within 5 % of the best fixed one",
                adaptive.requests_per_s > 0.95 * max(throughput),
                shown,
            )
        ],
        [point(window, one) for window, one in zip((None, *windows), (adaptive, *found), strict=True)],
        draw(
            [
                lines({"latency": (windows, latency)}, x="window, ms", y="mean TTFT, ms"),
                lines({"throughput": (windows, throughput)}, x="window, ms", y="requests/s"),
            ],
            "PLA-Serve Fig. 5: the waiting window",
        ),
    )


def point(window_ms: float | None, one: Steady) -> Point:
    return {"window_ms": window_ms, "requests_per_s": one.requests_per_s, "ttft_mean_ms": 1e3 * one.ttft_mean_s}
