"""STAR's figures (section 6), on the clusters of ``star_cluster``; its tables are in ``star_tables``."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.lab.papers.charts import curves, draw
from bench.lab.papers.context import Context
from bench.lab.papers.finding import Claim, Finding, Point, Row, finite, listed, number
from bench.lab.papers.star_cluster import (
    ARRIVALS_S,
    FULL_SHARE,
    LARGE,
    LOSE_ALL,
    PAPER_RATES,
    SATURATED_RATES,
    SEEDS,
    SMALL,
    STRATEGIES,
    Runs,
    StarCase,
    StarRun,
    change_of,
    compare,
    mean_of,
    points_by_seed,
    runs_by_seed,
)
from bench.lab.papers.star_tables import table3 as table3
from bench.lab.papers.star_tables import table4 as table4
from bench.lab.star_decision import measure as measure_decisions

PAIRS = [*((later, earlier) for earlier, later in itertools.pairwise(STRATEGIES)), ("prediction", "vLLM")]

# -- Figure 10: strategies against the request rate ------------------------------------------------------------------

SHAREGPT, GENTLE, LARGER = "small, ShareGPT", "small, ShareGPT, one request lost at a time", "large, ShareGPT"
# testbed -> what its cases have, rates
TESTBEDS: Mapping[str, tuple[Mapping[str, Any], Sequence[float]]] = {
    SHAREGPT: ({"cluster": SMALL}, (PAPER_RATES["small"], SATURATED_RATES["small"])),
    GENTLE: ({"cluster": SMALL, "lose_all": False}, (SATURATED_RATES["small"],)),
    "small, Alpaca": ({"cluster": SMALL, "dataset": "alpaca"}, (PAPER_RATES["small"],)),
    LARGER: ({"cluster": LARGE}, (PAPER_RATES["large"], SATURATED_RATES["large"])),
}
MEASURES = {"P99 TPOT": "p99_tpot_ms", "goodput of what is offered": "goodput_per_s", "ended of it": "throughput_per_s"}
# testbed -> strategy -> at the printed rate P99 TPOT in ms, goodput and throughput as shares of the rate
PRINTED: Mapping[str, Mapping[str, Sequence[float | None]]] = {
    SHAREGPT: {"vLLM": (96.3,), "no prediction": (28.3,), "prediction": (24.3,)},
    LARGER: {
        "vLLM": (39.57, 0.102 / 0.20, 0.107 / 0.20),
        "no prediction": (31.72, 0.142 / 0.20, 0.145 / 0.20),
        "prediction": (26.49, 0.157 / 0.20, 0.159 / 0.20),
    },
}
# testbed -> strategy, the one it is compared with, field, printed change
CHANGES: Mapping[str, Sequence[tuple[str, str, str, float | None]]] = {
    SHAREGPT: [("prediction", "vLLM", "P99 TPOT", -0.751)],
    GENTLE: [("prediction", "vLLM", "P99 TPOT", None)],
    LARGER: [
        ("no prediction", "vLLM", "goodput of what is offered", 0.392),
        ("prediction", "no prediction", "goodput of what is offered", 0.106),
    ],
}
WHY_RATE = "At the printed rate our caches are less full than the paper's; compare the saturated rate."
WHY_SATURATED = "vLLM's P99 TPOT at this rate is near the paper's (star_goodput). By overflows seeds are far apart."


def fig10(context: Context) -> Finding:
    """P99 TPOT and goodput of four strategies, at the paper's rates and at those that fill the caches."""
    names = context.pick([SHAREGPT], list(TESTBEDS), list(TESTBEDS))
    cases = {
        (name, rate, strategy): StarCase(
            strategy=strategy, rate_per_s=rate, arrivals_s=context.pick(*ARRIVALS_S), seed=context.seed, **more
        )
        for name in names
        for more, rates in [TESTBEDS[name]]
        for rate, strategy in itertools.product(rates, STRATEGIES)
    }
    results = runs_by_seed(context, cases)
    rows, claims = [], []
    for name, rate in dict.fromkeys(key[:2] for key in cases):
        runs = {strategy: results[name, rate, strategy] for strategy in STRATEGIES}
        rows += rows_at(name, rate, runs)
        for what, field in (("P99 TPOT", "p99_tpot_ms"), ("goodput", "goodput_per_s")):
            claims += compare(runs, PAIRS, field, f"{name}, {rate:g} req/s: {what}")
    points = points_by_seed(results, "cluster", "rate_per_s", "strategy")
    fields = {"P99 TPOT, ms": "p99_tpot_ms", "goodput, req/s": "goodput_per_s"}
    panels = curves(points, fields, x="rate_per_s", by="strategy", label="{}: req/s", each="cluster", log_y=True)
    setting = (
        f"Poisson arrivals for {context.pick(*ARRIVALS_S):g} s with Table 2's lengths, {context.pick(*SEEDS)} seeds;"
        " small: 3 decode instances (RTX 4090D, 7B W8A8), large: 6 (14B, H100 step times); vLLM: no migration;"
        f" {LOSE_ALL}; geometric means, differences with 95 % intervals"
    )
    later, earlier = (results[SHAREGPT, SATURATED_RATES["small"], strategy] for strategy in ("prediction", "vLLM"))
    keys = {"star_p99_tpot_reduction": -change_of(later, earlier, "p99_tpot_ms").share}  # at the saturated rate
    picture = draw(panels, "STAR Fig. 10: strategies against the request rate (medians of seeds)")
    return Finding(setting, rows, claims, points, picture, keys)


def rows_at(name: str, rate: float, runs: Mapping[str, Runs]) -> list[Row]:
    """Goodput and throughput as shares of the requests offered: the rates are not the same."""
    at, why = f"{name}, {rate:g} req/s", WHY_SATURATED if rate in SATURATED_RATES.values() else WHY_RATE
    rows = []
    for strategy, of in runs.items():
        for (what, field), paper in zip(MEASURES.items(), PRINTED.get(name, {}).get(strategy, [None]), strict=False):
            per, unit = (1.0, "ms") if field == "p99_tpot_ms" else (rate, "")
            rows.append(Row(f"{at}: {what}, {strategy}", paper, mean_of(of, field) / per, unit, why))
    for later, earlier, what, paper in CHANGES.get(name, []):
        change = change_of(runs[later], runs[earlier], MEASURES[what]).share
        rows.append(Row(f"{at}: {what}, {later} against {earlier}", paper, change, "", why))
    return rows


# -- the abstract: 2.63 times the goodput ----------------------------------------------------------------------------

SCANNED = {
    "small": (SMALL, (0.17, 0.20, 0.24, 0.28, 0.30), 96.3),  # and P99 TPOT of vLLM as printed, ms
    "large": (LARGE, (0.20, 0.40, 0.52, 0.56), 39.57),
}
WHY_GOODPUT = "The abstract names no load, Figure 10 prints no such number. Ours is the largest of the rates scanned."
FULL_TIME = "share of the time with some cache above 99 %, vLLM, as the dashed line of Figure 12"
BY_RATE = "goodput, prediction over vLLM; the paper prints none by rate"


def goodput(context: Context) -> Finding:
    """Goodput with prediction over that of vLLM, and how full caches are, by rate."""
    cases = {
        (name, rate, strategy): StarCase(cluster, strategy, rate, context.pick(*ARRIVALS_S), context.seed)
        for name, (cluster, rates, _) in SCANNED.items()
        for rate in rates
        for strategy in ("vLLM", "prediction")
    }
    results, gains, rows, claims = runs_by_seed(context, cases), {}, [], []
    for name, (_, rates, printed_ms) in SCANNED.items():
        p99_ms = {rate: mean_of(results[name, rate, "vLLM"], "p99_tpot_ms") for rate in rates}
        for rate in rates:
            at, of = f"{name}, {rate:g} req/s", {each: results[name, rate, each] for each in ("vLLM", "prediction")}
            gains[at] = 1 + change_of(of["prediction"], of["vLLM"], "goodput_per_s").share
            claims += compare(of, [("prediction", "vLLM")], "goodput_per_s", f"{at}: goodput")
            rows.append(Row(f"{at}: full", None, mean_of(of["vLLM"], "full_share"), "", f"{name}: {FULL_TIME}"))
            rows.append(Row(f"{at}: goodput", None, gains[at], "", f"{name}: {BY_RATE}"))
        nearest = min(rates, key=lambda rate: abs(math.log(p99_ms[rate] / printed_ms)))
        text = f"{name}: vLLM's P99 TPOT is nearest to the printed {printed_ms:g} ms at {SATURATED_RATES[name]:g} req/s"
        claims.append(Claim(text, nearest == SATURATED_RATES[name], listed(p99_ms)))
    best = max(gains, key=lambda at: gains[at])
    rows.append(Row("goodput, prediction over vLLM, at most", 2.63, gains[best], "", WHY_GOODPUT))
    points = points_by_seed(results, "cluster", "rate_per_s", "strategy")
    fields = {"goodput, req/s": "goodput_per_s", "share of time with a full cache": "full_share"}
    panels = curves(points, fields, x="rate_per_s", by="strategy", label="{}: requests/s", each="cluster")
    setting = (
        "3 decode instances (RTX 4090D, 7B W8A8) and 6 (14B, H100 step times), ShareGPT lengths of Table 2, Poisson"
        f" arrivals for {context.pick(*ARRIVALS_S):g} s, {LOSE_ALL}; geometric means and 95 % intervals,"
        f" {context.pick(*SEEDS)} seeds"
    )
    keys = {"star_goodput_vs_vllm": finite(gains[best]), "star_goodput_at": best}
    return Finding(setting, rows, claims, points, draw(panels, "STAR: goodput and full caches by rate"), keys)


# -- Figures 11 and 12: over time ------------------------------------------------------------------------------------

SHOWN_POINTS = 400
TRACE_ONLY = "the paper shows a trace without numbers"
FIG11_WHY = "The load is not printed; ours fills the caches without migration as Figure 12 shows it (star_goodput)."


def fig11(context: Context) -> Finding:
    """Figures 11 and 12: variance of step times and the fullest KV cache over time, small cluster."""
    rate, arrivals_s = SATURATED_RATES["small"], context.pick(*ARRIVALS_S)
    cases = {name: StarCase(SMALL, name, rate, arrivals_s, context.seed) for name in STRATEGIES}
    results = runs_by_seed(context, cases)
    traced = runs_by_seed(context, {name: dataclasses.replace(of, sampled=True) for name, of in cases.items()}, seeds=1)
    points = [point for name, [run] in traced.items() for point in samples_of(name, run)]
    shared: dict[str, Any] = {"x": "at_s", "by": "strategy", "label": "s"}
    panels = [
        *curves(points, {"variance of the decode step, ms^2": "variance_ms2"}, **shared, log_y=True),
        *curves(points, {"fullest KV cache": "usage"}, **shared, mark=FULL_SHARE),
    ]
    rows = []
    for name, runs in results.items():
        printed, why = (0.78, FIG11_WHY) if name == "prediction" else (None, TRACE_ONLY)
        rows.append(Row(f"execution time variance, {name}", printed, mean_of(runs, "variance"), "ms^2", why))
    for what, field in (("requests that lose their cache, a run", "ooms"), ("time with a full cache", "full_share")):
        rows += [Row(f"{what}, {name}", None, mean_of(runs, field), "", TRACE_ONLY) for name, runs in results.items()]
    worst = max(run.full_share for run in results["prediction"])
    claims = [
        *compare(results, PAIRS, "variance", "variance"),
        Claim("with prediction no cache is ever above 99 %", worst == 0, f"worst seed {number(worst)} of the time"),
    ]
    setting = (
        f"3 decode instances (RTX 4090D, 7B W8A8), {rate} req/s for {arrivals_s:g} s, ShareGPT lengths, {LOSE_ALL};"
        f" {context.pick(*SEEDS)} seeds, the trace of the first"
    )
    picture = draw(panels, f"STAR Fig. 11 and 12: small cluster, {rate} requests/s")
    return Finding(setting, rows, claims, points, picture)


def samples_of(name: str, run: StarRun) -> list[Point]:
    thinned = slice(None, None, max(1, len(run.at_s) // SHOWN_POINTS))
    columns = {"at_s": run.at_s, "variance_ms2": run.step_ms_var, "usage": run.usage}
    rows = zip(*(column[thinned].tolist() for column in columns.values()), strict=True)
    return [{"strategy": name} | dict(zip(columns, row, strict=True)) for row in rows]


# -- Figure 13: variance of step times by cluster size, and the time of one decision (section 6.3) -------------------

RATE_PER_INSTANCE = 0.3 / 8
STRESS = 2.0  # times that rate: half of the KV cache in use, as in section 5.3
DECODES = (8, 16, 32, 64, 128, 256)
# instances and load, by size of a run
SIZES = [(8, 1.0)], [(8, 1.0), (16, 1.0), (32, 1.0), (8, STRESS)], [*itertools.product(DECODES, (1.0, STRESS))]
COMPARED = {"variance": ("variance", "ms^2"), "P99 TPOT": ("p99_tpot_ms", "ms")}  # field of runs, unit
DECISION_LIMIT_MS = {256: 10.0, 1024: 60.0}
BARS_ONLY = "the paper shows bars without numbers"
WHY_DECISION = "The paper gives a bound for its scheduler; ours sums what workers report (page of STAR)."


def fig13(context: Context) -> Finding:
    """Runs of one size and load share their requests seed by seed, so that strategies are compared within each."""
    arrivals_s, sizes = context.pick(30.0, 600.0, 2000.0), context.pick(*SIZES)
    cases = {
        (size, load, name): StarCase(
            SMALL.resized(size), name, load * RATE_PER_INSTANCE * size, arrivals_s, context.seed
        )
        for size, load in sizes
        for name in STRATEGIES
    }
    seeds = context.pick(2, 4, SEEDS[2])
    results = runs_by_seed(context, cases, seeds=seeds)
    decisions: dict[int, float] = {}
    for size in (8, 64, 256, 1024):  # one after the other, as they are timed
        decisions |= context.measure(decision_ms, [size], states=context.pick(2, 10, 20), seed=context.seed)
    rows, claims = [], []
    for (size, load), (name, (field, unit)) in itertools.product(sizes, COMPARED.items()):
        runs = {strategy: results[size, load, strategy] for strategy in STRATEGIES}
        at = f"{size} instances, {load:g} x the paper's rate: {name}"
        rows += [Row(f"{at}, {strategy}", None, mean_of(of, field), unit, BARS_ONLY) for strategy, of in runs.items()]
        claims += compare(runs, PAIRS, field, at)
    points = points_by_seed(results, "decodes", "load", "strategy")
    labels = {f"{name}, {unit}": field for name, (field, unit) in COMPARED.items()}
    label = "instances, {:g} x the paper's rate"
    panels = curves(points, labels, x="decodes", by="strategy", label=label, each="load", log_x=True, log_y=True)
    for size, limit_ms in DECISION_LIMIT_MS.items():
        text = f"a decision at {size} instances takes less than {limit_ms:g} ms"
        claims.append(Claim(text, decisions[size] < limit_ms, f"{number(decisions[size])} ms"))
    for size, printed_ms in ((256, 300.0), (1024, None)):
        rows.append(Row(f"decision at {size:,} instances", printed_ms, decisions[size], "ms", WHY_DECISION))
    setting = (
        f"RTX 4090D, 7B W8A8, ShareGPT lengths, 25 Gbps, {arrivals_s:g} s of Poisson arrivals; geometric means and 95 %"
        f" intervals over {seeds} seeds; {LOSE_ALL}"
    )
    keys = {f"star_decision_ms_{size}": decisions[size] for size in DECISION_LIMIT_MS}
    return Finding(setting, rows, claims, points, draw(panels, "STAR Fig. 13: by cluster size (medians)"), keys)


def decision_ms(decodes: int, *, states: int, seed: int) -> float:
    return measure_decisions(decodes, argparse.Namespace(requests=64, states=states, seed=seed))["mean_ms"]
