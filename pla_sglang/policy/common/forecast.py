"""One-step forecasts of a load series, behind one interface (DOPD section V-D).

ARIMA, which needs statsmodels, is in ``arima.py``. DOPD also scales each forecast by how far recent ones were off
(section II-A); ``Corrected`` does that for any forecaster.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection, Sequence
from typing import Protocol

from pla_sglang.common.checks import Range, check_fields, knob, require


class Forecaster(Protocol):
    """``add`` takes the value of the interval that has ended, ``next_value`` estimates one that is to come.

    ``name``: who makes the next estimate, for ``plan_log.py``.
    """

    @property
    def name(self) -> str: ...

    def add(self, value: float) -> None: ...

    def next_value(self, steps: int = 1) -> float | None:
        """The value of the interval ``steps`` from the ended one on, 1: the coming one. None before there is data."""
        ...


def next_values(series: Sequence[Forecaster], ended: Sequence[float | None], steps: int = 1) -> list[float] | None:
    """Adds what an interval has brought, one value a series; the largest forecast of each over the next ``steps``
    intervals, None until every series has data."""
    for one, value in zip(series, ended, strict=True):
        if value is not None:
            one.add(value)
    found = [
        max(values)
        for one in series
        if (values := [value for step in range(1, steps + 1) if (value := one.next_value(step)) is not None])
    ]
    return found if len(found) == len(series) else None


class LastValue:
    """The last value: the baseline that a forecast has to beat."""

    name = "last"

    def __init__(self) -> None:
        self._last: float | None = None

    def add(self, value: float) -> None:
        self._last = value

    def next_value(self, steps: int = 1) -> float | None:
        return self._last


class RecentPeak:
    """The largest of the last ``count`` values: the capacity of a service that must not be late.

    Raises ConfigError for a count below 1.
    """

    name = "peak"

    def __init__(self, count: int = 10) -> None:
        require("peak count", count, 1)
        self._recent: deque[float] = deque(maxlen=count)

    def add(self, value: float) -> None:
        self._recent.append(value)

    def next_value(self, steps: int = 1) -> float | None:
        return max(self._recent, default=None)


class SteadyLevel:
    """The least level that would have served ``SERVED`` of the last ``COUNT`` values: a fleet that does not change."""

    name = "level"
    COUNT, SERVED = 96, 0.95

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=self.COUNT)

    def add(self, value: float) -> None:
        self._recent.append(value)

    def next_value(self, steps: int = 1) -> float | None:
        return level_for(self._recent, self.SERVED) if self._recent else None


def level_for(values: Collection[float], share: float) -> float:
    """The least level that serves ``share`` of ``values``: sum(min(value, level)) = share * sum(values)."""
    missing, left = share * sum(values), len(values)
    for value in sorted(values):
        if value * left >= missing:
            return missing / left
        missing -= value
        left -= 1
    return max(values, default=0.0)  # all is to be served, and rounding has left some of it


@dataclasses.dataclass(frozen=True)
class HoltWintersKnobs:
    """Smoothing of level, trend and season, damping of the trend, all in (0, 1]; ``season`` in intervals, 0: none."""

    level: float = knob(0.5, allowed=Range(0, 1, above=True))
    trend: float = knob(0.1, allowed=Range(0, 1, above=True))
    seasonal: float = knob(0.2, allowed=Range(0, 1, above=True))
    season: int = knob(0, allowed=Range(0))
    damping: float = knob(0.9, allowed=Range(0, 1, above=True))

    def __post_init__(self) -> None:
        check_fields(self, "holt-winters")


class HoltWinters:
    """Additive Holt-Winters with damped trend: O(1) a step."""

    name = "holt_winters"

    def __init__(self, knobs: HoltWintersKnobs | None = None) -> None:
        self.knobs = knobs or HoltWintersKnobs()
        self._level: float | None = None
        self._trend = 0.0
        self._season = [0.0] * self.knobs.season
        self._count = 0

    def add(self, value: float) -> None:
        knobs = self.knobs
        seasonal = self._seasonal(self._count)
        if self._level is None:
            self._level = value
        else:
            before = self._level
            ahead = before + knobs.damping * self._trend
            self._level = knobs.level * (value - seasonal) + (1 - knobs.level) * ahead
            self._trend = knobs.trend * (self._level - before) + (1 - knobs.trend) * knobs.damping * self._trend
        if knobs.season:
            slot = self._count % knobs.season
            self._season[slot] = knobs.seasonal * (value - self._level) + (1 - knobs.seasonal) * seasonal
        self._count += 1

    def next_value(self, steps: int = 1) -> float | None:
        if self._level is None:
            return None
        damped = sum(self.knobs.damping**step for step in range(1, steps + 1))
        return self._level + damped * self._trend + self._seasonal(self._count + steps - 1)

    def _seasonal(self, count: int) -> float:
        return self._season[count % self.knobs.season] if self.knobs.season else 0.0


class Corrected:
    """Scales a forecaster by a running ratio of observed to forecast (section II-A, "correction factor").

    An interval without load has no ratio: a gap of days would leave the factor at its lower bound.

    Args:
        inner: whose forecasts are scaled.
        weight: of the newest ratio, in (0, 1].
        bound: the factor stays within [1/bound, bound].
    """

    def __init__(self, inner: Forecaster, *, weight: float = 0.2, bound: float = 2.0) -> None:
        require("correction weight", weight, 0, 1, above=True)
        require("correction bound", bound, 1)
        self.inner = inner
        self.factor = 1.0
        self._weight = weight
        self._bound = bound

    @property
    def name(self) -> str:
        return self.inner.name

    def add(self, value: float) -> None:
        expected = self.inner.next_value()
        if expected is not None and expected > 0 and value > 0:
            ratio = min(max(value / expected, 1 / self._bound), self._bound)
            self.factor += self._weight * (ratio - self.factor)
        self.inner.add(value)

    def next_value(self, steps: int = 1) -> float | None:
        value = self.inner.next_value(steps)
        return None if value is None else value * self.factor
