"""STAR Table 4: how often to predict."""

from __future__ import annotations

import dataclasses

from bench.papers.charts import bars, draw
from bench.papers.context import Context
from bench.papers.finding import Claim, Finding, number
from bench.papers.star_cases import LARGE, StarCase
from bench.papers.star_table3 import PAPER_RATE, STRESS_RATE, compared, measured, setting

# setting -> execution variance, P99 TPOT, goodput as printed
PAPER = {
    "1 iter": (0.237, 27.84, 0.148),
    "20 iter": (0.163, 26.49, 0.157),
    "100 iter": (0.242, 29.43, 0.145),
    "no prediction": (0.322, 31.72, 0.142),
}
EVERY_STEP = 5  # instead of 1, in reduced runs: a decision every step takes twenty times as long to simulate


def cases_of(base: StarCase, shortest: int) -> dict[str, StarCase]:
    """Rows of the table. Predicting costs 1.40 ms each time, spread over the steps between (section 5.3)."""
    iterations = {"1 iter": shortest, "20 iter": 20, "100 iter": 100}
    made = {name: dataclasses.replace(base, iterations=count) for name, count in iterations.items()}
    return {**made, "no prediction": setting("no prediction", base)}


def run(context: Context) -> Finding:
    base = StarCase(LARGE, "prediction", PAPER_RATE, context.pick(20.0, 1200.0, 2000.0), context.seed)
    shortest = context.pick(EVERY_STEP, EVERY_STEP, 1)
    found = measured(context, cases_of(base, shortest), (PAPER_RATE, STRESS_RATE))
    variance = {name: found[name, PAPER_RATE].variance for name in PAPER}
    p99 = {name: found[name, STRESS_RATE].p99_tpot_ms for name in PAPER}
    best = min(p99, key=lambda name: p99[name])
    return Finding(
        "star_table4",
        "STAR, Table 4",
        "as Table 3" + ("" if shortest == 1 else f'; reduced: "1 iter" is every {shortest} steps'),
        compared(found, PAPER),
        [
            Claim("100 iterations are staler than 20", variance["100 iter"] > variance["20 iter"], both(variance)),
            Claim("20 iterations give the best P99 TPOT under stress", best == "20 iter", both(p99)),
        ],
        [one.point(setting=name) for (name, _), one in found.items()],
        draw(
            [
                bars({name: {"paper": PAPER[name][0], "ours": variance[name]} for name in PAPER}, y="variance, ms^2"),
                bars({name: {"0.40 req/s": p99[name]} for name in PAPER}, y="P99 TPOT, ms"),
            ],
            "STAR Table 4: interval of the prediction",
        ),
    )


def both(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in values.items())
