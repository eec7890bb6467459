"""STAR Figures 11 and 12: variance of step times and the fullest KV cache over time, small cluster."""

from __future__ import annotations

import numpy as np

from bench.papers.charts import Line, draw, lines
from bench.papers.context import Context
from bench.papers.finding import Claim, Finding, Point, Row, ordered
from bench.papers.star_cases import FULL_SHARE, SMALL, STRATEGIES, StarCase, StarRun, run_case
from bench.papers.star_common import pool

RATE_PER_S = 0.17  # the point of Figure 10 that the paper describes; Figure 11 says "high load" only
SHOWN_POINTS = 400
WHY = (
    "Our rescheduler has moves to spare on three instances (one a decision, a decision every 20 steps), so it keeps"
    " them closer together than the paper's does."
)
CURVE_ONLY = "the paper shows a trace without numbers"


def run(context: Context) -> Finding:
    arrivals_s = context.pick(60.0, 2000.0, 2000.0)
    seeds = range(context.seed, context.seed + context.pick(1, 2, 10))
    cases = [StarCase(SMALL, strategy, RATE_PER_S, arrivals_s, seed) for strategy in STRATEGIES for seed in seeds]
    runs = context.map(run_case, cases)
    by_strategy = {name: [one for one in runs if one.case.strategy == name] for name in STRATEGIES}
    found = {name: pool(of) for name, of in by_strategy.items()}
    variance = {name: one.variance for name, one in found.items()}
    first = {name: of[0] for name, of in by_strategy.items()}
    rescued = found["vLLM"].ooms - max(found[name].ooms for name in STRATEGIES[2:])
    return Finding(
        "star_fig11",
        "STAR, Figures 11 and 12",
        f"3 decode instances (RTX 4090D, 7B W8A8), {RATE_PER_S} req/s, ShareGPT lengths of Table 2, {len(seeds)} seeds",
        [
            Row("execution time variance, vLLM", None, variance["vLLM"], "ms^2", CURVE_ONLY),
            Row("execution time variance, no prediction", None, variance["no prediction"], "ms^2", CURVE_ONLY),
            Row("execution time variance, prediction", 0.78, variance["prediction"], "ms^2", WHY),
            Row("execution time variance, oracle", None, variance["oracle"], "ms^2", CURVE_ONLY),
            *[Row(f"requests thrown out, {name}", None, one.ooms, "", CURVE_ONLY) for name, one in found.items()],
        ],
        [
            Claim("vLLM throws requests out of a full cache", found["vLLM"].ooms > 0, f"{found['vLLM'].ooms:g} a run"),
            Claim("prediction prevents that", rescued > 0 and found["prediction"].full_share < 0.005, "see the rows"),
            Claim("variance falls from strategy to strategy", *ordered(variance, slack=0.1)),
        ],
        [point for one in first.values() for point in over_time(one)],
        draw(
            [
                lines(traces(first, "step_ms_var"), x="s", y="variance of the decode step, ms^2", log_y=True),
                lines(traces(first, "usage"), x="s", y="fullest KV cache", mark=FULL_SHARE),
            ],
            f"STAR Fig. 11 and 12: small cluster, {RATE_PER_S} requests/s",
        ),
    )


def thinned(one: StarRun) -> slice:
    return slice(None, None, max(1, len(one.at_s) // SHOWN_POINTS))


def traces(first: dict[str, StarRun], field: str) -> dict[str, Line]:
    """Over time; zero variance (nothing runs) is left out of a logarithmic axis."""
    shown: dict[str, Line] = {}
    for name, one in first.items():
        values = getattr(one, field)[thinned(one)]
        shown[name] = (one.at_s[thinned(one)].tolist(), np.where(values > 0, values, np.nan).tolist())
    return shown


def over_time(one: StarRun) -> list[Point]:
    columns = zip(one.at_s[thinned(one)], one.step_ms_var[thinned(one)], one.usage[thinned(one)], strict=True)
    return [
        {"strategy": one.case.strategy, "at_s": float(at_s), "variance_ms2": float(variance), "usage": float(usage)}
        for at_s, variance, usage in columns
    ]
