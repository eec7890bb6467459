"""Differences between two ways to serve the same requests, over seeds, with their 95 % intervals. Pure functions.

Ratios are compared within each seed, since both ways get the same requests, and as logarithms: where memory ran out the
time per token is many times that of the next seed, and one such seed must not decide the mean.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Change:
    """By what share the later is above the earlier: the geometric mean over seeds, and its interval (Student's t)."""

    share: float
    low: float
    high: float
    seeds: int

    @property
    def is_decided(self) -> bool:
        """The interval excludes no change."""
        return self.high < 0 or self.low > 0

    @property
    def text(self) -> str:
        """With one seed there is no interval."""
        if self.seeds < 2:
            return f"{self.share:+.3g}, 1 seed"
        return f"{self.share:+.3g} ({self.low:+.3g} to {self.high:+.3g}), {self.seeds} seeds"


def geometric_mean(values: Sequence[float]) -> float:
    """nan where a value is not above 0."""
    return math.exp(statistics.fmean(map(math.log, values))) if min(values) > 0 else math.nan


def measure_change(later: Sequence[float], earlier: Sequence[float]) -> Change:
    """Seed by seed; nan where a value is not above 0. Raises ValueError unless both have the same number of seeds."""
    pairs = list(zip(later, earlier, strict=True))
    if min(map(min, pairs)) <= 0:
        return Change(math.nan, math.nan, math.nan, len(pairs))
    logs = [math.log(after / before) for after, before in pairs]
    mean = statistics.fmean(logs)
    half = math.inf if len(logs) < 2 else student_t(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Change(math.expm1(mean), math.expm1(mean - half), _expm1(mean + half), len(pairs))


def student_t(degrees: int) -> float:
    """The two-sided quantile for ``LEVEL``."""
    from scipy.stats import t

    return float(t.ppf((1 + LEVEL) / 2, degrees))


def _expm1(value: float) -> float:
    """Infinity beyond the largest float: few seeds far apart."""
    return math.expm1(value) if value < 700 else math.inf
