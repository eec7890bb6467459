"""What the scripts of STAR share: runs of several seeds, taken together or side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from bench.papers.context import Context
from bench.papers.finding import Point, number
from bench.papers.star_cases import StarCase, StarRun, run_case


@dataclasses.dataclass(frozen=True)
class Pooled:
    """Runs of one setting under several seeds: means of what is a mean, quantiles over all requests together."""

    case: StarCase
    variance: float
    p99_tpot_ms: float
    p50_tpot_ms: float
    goodput_per_s: float
    throughput_per_s: float
    ooms: float
    full_share: float
    migrations: float
    runs: int

    def point(self, **more: float | int | str | bool | None) -> Point:
        """A record for the result table."""
        case = self.case
        own = {name: value for name, value in dataclasses.asdict(self).items() if name != "case"}
        return {
            "strategy": case.strategy,
            "decodes": case.cluster.decodes,
            "rate_per_s": case.rate_per_s,
            "dataset": case.dataset,
            "bins": case.bins,
            "iterations": case.iterations,
            **own,
            **more,
        }


def pool(runs: Sequence[StarRun]) -> Pooled:
    """All of one setting."""
    tpot_ms = np.concatenate([run.tpot_ms for run in runs])
    known = tpot_ms[np.isfinite(tpot_ms)]

    def mean(name: str) -> float:
        return float(np.mean([getattr(run, name) for run in runs]))

    return Pooled(
        runs[0].case,
        variance=mean("variance"),
        p99_tpot_ms=float(np.percentile(known, 99)),
        p50_tpot_ms=float(np.percentile(known, 50)),
        goodput_per_s=mean("goodput_per_s"),
        throughput_per_s=mean("throughput_per_s"),
        ooms=mean("ooms"),
        full_share=mean("full_share"),
        migrations=mean("migrations"),
        runs=len(runs),
    )


def by_seed(context: Context, cases: Sequence[StarCase], seeds: Sequence[int]) -> list[list[StarRun]]:
    """Each setting with its number of seeds, the first of which is the run's."""
    work = [
        dataclasses.replace(case, seed=context.seed + extra)
        for case, count in zip(cases, seeds, strict=True)
        for extra in range(count)
    ]
    runs = iter(context.map(run_case, work))
    return [[next(runs) for _ in range(count)] for count in seeds]


def pooled(context: Context, cases: Sequence[StarCase], seeds: int) -> list[Pooled]:
    """Each setting with so many seeds, taken together."""
    return [pool(runs) for runs in by_seed(context, cases, [seeds] * len(cases))]


@dataclasses.dataclass(frozen=True)
class Spread:
    """One figure over several seeds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(float(np.median(values)), min(values), max(values))

    def __str__(self) -> str:
        return f"{number(self.median)} ({number(self.least)} to {number(self.most)})"


def reduction(before: float, after: float) -> float:
    """Share by which ``after`` is below ``before``."""
    return 1 - after / before
