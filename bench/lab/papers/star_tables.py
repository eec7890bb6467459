"""STAR's Tables 3 and 4: how exact the prediction is, and how often it is made."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from bench.lab.papers.charts import bars, draw
from bench.lab.papers.context import Context
from bench.lab.papers.finding import Claim, Finding, Row
from bench.lab.papers.star_cluster import (
    ARRIVALS_S,
    LARGE,
    LOSE_ALL,
    SATURATED_RATES,
    Runs,
    StarCase,
    change_of,
    compare,
    mean_of,
    points_by_seed,
    runs_by_seed,
)

NONE = "no prediction"
Printed = Mapping[str, tuple[float, float, float]]  # execution variance, P99 TPOT, goodput above no prediction
TABLE3: Printed = {
    "full": (0.163, 26.49, 0.1056),
    "6-bin": (0.188, 26.91, 0.0915),
    "4-bin": (0.220, 27.70, 0.0423),
    "2-bin": (0.302, 31.47, 0.0),
    NONE: (0.322, 31.72, 0.0),
}
TABLE4: Printed = {
    "1 iter": (0.237, 27.84, 0.0423),
    "20 iter": (0.163, 26.49, 0.1056),
    "100 iter": (0.242, 29.43, 0.0211),
    NONE: (0.322, 31.72, 0.0),
}
WHY_TABLE = "How full the paper's caches were is not printed; our rate has its P99 TPOT of vLLM (star_goodput)."
WHY_GAIN = "Seeds differ by more than settings: how often a cache overflows decides (see the intervals)."


def measure_settings(context: Context, changes: Mapping[str, Mapping[str, Any]]) -> dict[str, Runs]:
    """Where caches are near their limit. ``changes``: what a setting has other than the rest of them."""
    rate, arrivals_s = SATURATED_RATES["large"], context.pick(20.0, *ARRIVALS_S[1:])
    base = StarCase(LARGE, "prediction", rate, arrivals_s, context.seed)
    cases = {name: dataclasses.replace(base, **of) for name, of in {**changes, NONE: {"strategy": NONE}}.items()}
    return runs_by_seed(context, cases)


def table(title: str, note: str, printed: Printed, results: Mapping[str, Runs], claims: Sequence[Claim]) -> Finding:
    rows = []
    for name, runs in results.items():
        variance, p99_ms, gain = printed[name]
        rows += [
            Row(f"{name}: execution variance", variance, mean_of(runs, "variance"), "ms^2", WHY_TABLE),
            Row(f"{name}: P99 TPOT", p99_ms, mean_of(runs, "p99_tpot_ms"), "ms", WHY_TABLE),
            Row(f"{name}: migrations, a run", None, mean_of(runs, "migrations"), "", "not in the paper"),
        ]
        if name != NONE:
            ours = change_of(runs, results[NONE], "goodput_per_s").share
            rows.append(Row(f"{name}: goodput above no prediction by", gain, ours, "", WHY_GAIN))
    panels = []
    for place, (field, label) in enumerate({"variance": "variance, ms^2", "p99_tpot_ms": "P99 TPOT, ms"}.items()):
        groups = {name: {"paper": of[place], "ours": mean_of(results[name], field)} for name, of in printed.items()}
        panels.append(bars(groups, y=label))
    setting = (
        f"6 decode instances (14B, H100 step times), {SATURATED_RATES['large']:g} req/s, ShareGPT lengths of Table 2,"
        f" {len(results[NONE])} seeds, {LOSE_ALL}; geometric means, differences with 95 % intervals{note}"
    )
    return Finding(setting, rows, claims, points_by_seed(results, "setting"), draw(panels, title))


def table3(context: Context) -> Finding:
    bins = {"full": 0, "6-bin": 6, "4-bin": 4, "2-bin": 2}
    results = measure_settings(context, {name: {"bins": count} for name, count in bins.items()})
    pairs = [*itertools.pairwise(results), ("full", NONE)]
    fields = {"variance": "variance", "p99_tpot_ms": "P99 TPOT", "goodput_per_s": "goodput"}
    claims = [claim for field, what in fields.items() for claim in compare(results, pairs, field, what)]
    return table("STAR Table 3: exactness of the prediction", "; full: errors as in Figure 7", TABLE3, results, claims)


def table4(context: Context) -> Finding:
    """How often to predict. Predicting costs 1.40 ms each time, spread over the steps between (section 5.3)."""
    shortest = context.pick(10, 10, 1)  # a decision every step takes twenty times as long to simulate as every 20
    iterations = {"1 iter": shortest, "20 iter": 20, "100 iter": 100}
    results = measure_settings(context, {name: {"iterations": count} for name, count in iterations.items()})
    pairs = [("20 iter", name) for name in results if name != "20 iter"]
    claims = compare(results, pairs, "variance", "variance") + compare(results, pairs, "p99_tpot_ms", "P99 TPOT")
    note = "" if shortest == 1 else f'; reduced: "1 iter" is every {shortest} steps'
    return table("STAR Table 4: interval of the prediction", note, TABLE4, results, claims)
