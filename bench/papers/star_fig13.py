"""STAR Figure 13: variance of step times by cluster size, and the time of one decision (section 6.3).

Runs of one size and load share their requests seed by seed, so that strategies can be compared within each seed. Small
clusters get more seeds: a large one averages over its own instances.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence

from bench.papers.charts import draw, lines
from bench.papers.context import Context
from bench.papers.finding import Claim, Finding, Point, Row, number, ordered
from bench.papers.star_cases import STRATEGIES, StarCase, StarRun, simulated
from bench.papers.star_common import Spread, by_seed
from bench.star_decision import measure

RATE_PER_INSTANCE = 0.3 / 8  # section 6.3
STRESS = 2.0  # times that rate: half of the KV cache in use, as in section 5.3
SEEDS = {8: 8, 16: 6, 32: 4, 64: 3, 128: 2, 256: 2}
STRESS_SEEDS = {8: 6, 16: 4, 32: 2}
FULL_SEEDS = 10
SLACK = {"variance": 0.05, "P99 TPOT": 0.02}  # by which medians may be the wrong way round
UNITS = {"variance": "ms^2", "P99 TPOT": "ms"}
DECISION_LIMIT_MS = {256: 10.0, 1024: 60.0}
CURVE_ONLY = "the paper shows bars without numbers"
Key = tuple[int, float, str]  # instances, load, strategy
Runs = Mapping[Key, Sequence[StarRun]]


def settings(context: Context) -> dict[tuple[int, float], int]:
    """(instances, load) -> seeds."""
    if context.size == 0:
        return {(8, 1.0): 2}
    if context.size == 2:
        return {(size, load): FULL_SEEDS for load in (1.0, STRESS) for size in SEEDS}
    return {(size, 1.0): count for size, count in SEEDS.items()} | {
        (size, STRESS): count for size, count in STRESS_SEEDS.items()
    }


def run(context: Context) -> Finding:
    arrivals_s = context.pick(30.0, 1000.0, 2000.0)
    seeds = settings(context)
    keys = [(size, load, strategy) for size, load in seeds for strategy in STRATEGIES]
    cases = [
        StarCase(simulated(size), strategy, load * RATE_PER_INSTANCE * size, arrivals_s, context.seed)
        for size, load, strategy in keys
    ]
    found = dict(zip(keys, by_seed(context, cases, [seeds[key[:2]] for key in keys]), strict=True))
    decisions = decision_times(context)
    why = "The paper gives a bound for its own scheduler; ours sums what workers report (see docs/policies/star.md)."
    return Finding(
        "star_fig13",
        "STAR, Figure 13",
        f"RTX 4090D, 7B W8A8, ShareGPT lengths, 25 Gbps, {arrivals_s:g} s of Poisson arrivals; medians over"
        f" {min(seeds.values())} to {max(seeds.values())} seeds, with the least and the largest",
        [
            *[
                Row(f"{size} instances, {load:g} x the paper's rate: {name}, {strategy}", None, one, unit, CURVE_ONLY)
                for (size, load, strategy), runs in found.items()
                for name, unit in UNITS.items()
                for one in [spread(runs, name).median]
            ],
            Row("decision at 256 instances", 300.0, decisions[256], "ms", why),
            Row("decision at 1,024 instances", None, decisions[1024], "ms", "not in the paper"),
        ],
        [*(claim(found, *setting, name) for setting in seeds for name in UNITS), *decision_claims(decisions)],
        points(found, decisions),
        picture(found, list(seeds)),
        {f"star_decision_ms_{size}": value for size, value in decisions.items() if size in DECISION_LIMIT_MS},
    )


def values(runs: Sequence[StarRun], name: str) -> list[float]:
    """One figure, ``variance`` or ``P99 TPOT``, seed by seed."""
    return [one.variance if name == "variance" else one.p99_tpot_ms() for one in runs]


def spread(runs: Sequence[StarRun], name: str) -> Spread:
    return Spread.of(values(runs, name))


def decision_times(context: Context) -> dict[int, float]:
    """Mean ms of one decision by instances."""
    options = argparse.Namespace(requests=64, states=context.pick(2, 10, 20), seed=context.seed)
    return {size: measure(size, options)["mean_ms"] for size in (8, 64, 256, 1024)}


def claim(found: Runs, size: int, load: float, name: str) -> Claim:
    """Medians fall from strategy to strategy; what one brings over the one before is told seed by seed."""
    of = {strategy: found[size, load, strategy] for strategy in STRATEGIES}
    medians = {strategy: spread(runs, name).median for strategy, runs in of.items()}
    holds, _ = ordered(medians, slack=SLACK[name])
    seen = ", ".join(f"{strategy} {spread(runs, name)}" for strategy, runs in of.items())
    pairs = [
        f"{later} / {earlier} {Spread.of(ratios(of[later], of[earlier], name))}"
        for earlier, later in itertools.pairwise(STRATEGIES[1:])
    ]
    setting = f"{size} instances, {load:g} x the paper's rate, {len(of[STRATEGIES[0]])} seeds"
    return Claim(f"{setting}: {name} falls", holds, f"{seen}; within a seed {', '.join(pairs)}")


def ratios(runs: Sequence[StarRun], others: Sequence[StarRun], name: str) -> list[float]:
    """Seed by seed."""
    return [one / other for one, other in zip(values(runs, name), values(others, name), strict=True)]


def decision_claims(decisions: Mapping[int, float]) -> list[Claim]:
    return [
        Claim(
            f"a decision at {size} instances takes less than {limit:g} ms",
            decisions[size] < limit,
            f"{number(decisions[size])} ms",
        )
        for size, limit in DECISION_LIMIT_MS.items()
    ]


def points(found: Runs, decisions: Mapping[int, float]) -> list[Point]:
    """One record a run, and one a decision time."""
    made: list[Point] = [
        {
            "decodes": size,
            "load": load,
            "strategy": strategy,
            "seed": one.case.seed,
            "variance": one.variance,
            "p99_tpot_ms": one.p99_tpot_ms(),
            "goodput_per_s": one.goodput_per_s,
            "ooms": one.ooms,
            "migrations": one.migrations,
            "decision_ms": None,
        }
        for (size, load, strategy), runs in found.items()
        for one in runs
    ]
    return made + [{"decodes": size, "decision_ms": value} for size, value in decisions.items()]


def picture(found: Runs, seeds: Sequence[tuple[int, float]]) -> bytes:
    """Medians."""
    panels = []
    for load in dict.fromkeys(load for _, load in seeds):
        sizes = [size for size, own in seeds if own == load]
        for name, unit in UNITS.items():
            shown = {
                strategy: (sizes, [spread(found[size, load, strategy], name).median for size in sizes])
                for strategy in STRATEGIES
            }
            label = f"instances, {load:g} x the paper's rate"
            panels.append(lines(shown, x=label, y=f"{name}, {unit}", log_x=True, log_y=True))
    return draw(panels, "STAR Fig. 13: by cluster size")
