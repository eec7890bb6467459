"""STAR Figure 13: variance of step times by cluster size, and the time of one decision (section 6.3)."""

from __future__ import annotations

import argparse

from bench.papers.charts import draw, lines
from bench.papers.context import Context
from bench.papers.finding import Claim, Finding, Point, Row, ordered
from bench.papers.star_cases import STRATEGIES, StarCase, simulated
from bench.papers.star_common import Pooled, pooled
from bench.star_decision import measure

RATE_PER_INSTANCE = 0.3 / 8  # section 6.3
STRESS = 2.0  # times that rate: half of the KV cache in use, as in section 5.3
DECISION_LIMIT_MS = {256: 10.0, 1024: 60.0}
CURVE_ONLY = "the paper shows bars without numbers"
Key = tuple[int, float, str]


def run(context: Context) -> Finding:
    sizes = context.pick([8], [8, 16, 32], [8, 16, 32, 64, 128, 256])
    arrivals_s = context.pick(30.0, 1000.0, 2000.0)
    keys = [(size, load, strategy) for load in (1.0, STRESS) for size in sizes for strategy in STRATEGIES]
    cases = [
        StarCase(simulated(size), strategy, load * RATE_PER_INSTANCE * size, arrivals_s, context.seed)
        for size, load, strategy in keys
    ]
    found = dict(zip(keys, pooled(context, cases, 1), strict=True))
    decisions = decision_times(context)
    rows = [
        Row(
            f"{size} instances, {load:g} x the paper's rate: variance, {strategy}",
            None,
            one.variance,
            "ms^2",
            CURVE_ONLY,
        )
        for (size, load, strategy), one in found.items()
    ]
    why = "The paper gives a bound for its own scheduler; ours sums what workers report (see docs/policies/star.md)."
    rows.append(Row("decision at 256 instances", 300.0, decisions[256], "ms", why))
    rows.append(Row("decision at 1,024 instances", None, decisions[1024], "ms", "not in the paper"))
    return Finding(
        "star_fig13",
        "STAR, Figure 13",
        f"RTX 4090D, 7B W8A8, ShareGPT lengths, 25 Gbps, {arrivals_s:g} s of Poisson arrivals",
        rows,
        [*claims(found), *decision_claims(decisions)],
        points(found, decisions),
        picture(found, sizes),
        {f"star_decision_ms_{size}": value for size, value in decisions.items() if size in DECISION_LIMIT_MS},
    )


def decision_times(context: Context) -> dict[int, float]:
    """Mean ms of one decision by instances."""
    options = argparse.Namespace(requests=64, states=context.pick(2, 10, 20), seed=context.seed)
    return {size: measure(size, options)["mean_ms"] for size in (8, 64, 256, 1024)}


def claims(found: dict[Key, Pooled]) -> list[Claim]:
    made = []
    for size, load in dict.fromkeys((size, load) for size, load, _ in found):
        of = {strategy: found[size, load, strategy] for strategy in STRATEGIES}
        setting = f"{size} instances, {load:g} x the paper's rate"
        made.append(
            Claim(f"{setting}: variance falls", *ordered({name: one.variance for name, one in of.items()}, slack=0.05))
        )
        made.append(
            Claim(
                f"{setting}: P99 TPOT falls", *ordered({name: one.p99_tpot_ms for name, one in of.items()}, slack=0.02)
            )
        )
    return made


def decision_claims(decisions: dict[int, float]) -> list[Claim]:
    return [
        Claim(
            f"a decision at {size} instances takes less than {limit:g} ms",
            decisions[size] < limit,
            f"{decisions[size]} ms",
        )
        for size, limit in DECISION_LIMIT_MS.items()
    ]


def points(found: dict[Key, Pooled], decisions: dict[int, float]) -> list[Point]:
    made: list[Point] = [one.point(load=load, decision_ms=None) for (_, load, _), one in found.items()]
    return made + [{"decodes": size, "decision_ms": value} for size, value in decisions.items()]


def picture(found: dict[Key, Pooled], sizes: list[int]) -> bytes:
    panels = []
    for load in (1.0, STRESS):
        for label, field in (("variance, ms^2", "variance"), ("P99 TPOT, ms", "p99_tpot_ms")):
            shown = {
                strategy: (sizes, [getattr(found[size, load, strategy], field) for size in sizes])
                for strategy in STRATEGIES
            }
            panels.append(lines(shown, x=f"instances, {load:g} x the paper's rate", y=label, log_x=True, log_y=True))
    return draw(panels, "STAR Fig. 13: by cluster size")
