"""The best configurations of stock engines by workload, as kept in a file: what everything else is compared with.

The file is made by ``python -m bench best_stock --sweep``. Rates are of a fleet of ``fleet_arms.INSTANCES`` instances
with the default step profile; they hold for the span of arrivals and the precision that stand beside them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.lab.fleet_arms import FleetArm, read_arm
from bench.lab.stock_search import HeldRate
from pla_sglang.common.errors import ConfigError
from pla_sglang.common.reading import read_json
from pla_sglang.sim.metrics.goodput import LEAST_SPAN_S

STOCK, OURS_AT_STOCK, OURS_AT_OWN = AT_LIMITS = ("stock", "ours_at_stock", "ours")  # the last at our own rate


@dataclasses.dataclass(frozen=True)
class Limit:
    """The highest rates for one workload at which a target is kept, requests/s.

    Attributes:
        target: share of the requests that meet both latency targets.
        span_s: of arrivals.
        step: from one rate that was tried to the next; each rate is below the limit by at most this factor.
        stock: the best stock arms, best first.
        ours_per_s: None: at no rate that was tried, or not measured.
        upper_bound_per_s: what no scheduler can exceed (``upper_bound.py``); None: not known.
        high_per_s: where searches end; a rate there is a lower bound.
        at_limits: figures of single arms at single rates, the worse of the runs, by the names of ``AT_LIMITS``; empty
            in files from before they were kept.
    """

    workload: str
    target: float
    span_s: float
    step: float
    stock: Sequence[HeldRate]
    ours_per_s: float | None
    upper_bound_per_s: float | None
    high_per_s: float
    at_limits: Mapping[str, Mapping[str, float | None]] = dataclasses.field(default_factory=dict)

    @property
    def best(self) -> HeldRate:
        return self.stock[0]

    @property
    def ours_vs_stock(self) -> float | None:
        """Above 1: ours bears more. None where a rate is not known, or its search ended at its end, and for a burst."""
        ours, stock = self.ours_per_s, self.best.rate_per_s
        if ours is None or stock is None or self.span_s < LEAST_SPAN_S:
            return None
        return None if max(ours, stock) * self.step > self.high_per_s else ours / stock

    def as_json(self) -> dict[str, Any]:
        stock = [{"arm": held.arm.as_json(), "rate_per_s": held.rate_per_s} for held in self.stock]
        return {**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)}, "stock": stock}


def parse_limits(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, float], Limit]:
    """Of ``Limit.as_json``, by workload and target."""
    limits = [
        Limit(**{**row, "stock": [HeldRate(read_arm(held["arm"]), held["rate_per_s"]) for held in row["stock"]]})
        for row in rows
    ]
    return {(limit.workload, limit.target): limit for limit in limits}


def read_limits(path: Path) -> dict[tuple[str, float], Limit]:
    """By workload and target. Raises ConfigError for a file that is not there, or is none of these."""
    try:
        return parse_limits(read_json(path, ConfigError)["limits"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no frontier of stock engines: {error!r}") from None


def best_stock_arm(path: Path, workload: str, target: float = 0.9) -> FleetArm:
    """The one to compare with. Raises ConfigError where the file has none for this workload and target."""
    limits = read_limits(path)
    if (workload, target) not in limits:
        known = ", ".join(f"{name} at {share:g}" for name, share in limits)
        raise ConfigError(f"no best stock arm of {workload} at {target:g} is known; allowed: {known}")
    return limits[workload, target].best.arm


def geometric_mean_of_ratios(limits: Mapping[tuple[str, float], Limit], target: float) -> float | None:
    """Of ours over the best stock arm; None where no ratio is known."""
    ratios = [
        limit.ours_vs_stock for limit in limits.values() if limit.target == target and limit.ours_vs_stock is not None
    ]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
