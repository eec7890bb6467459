"""Several forecasters of one series, judged anew each interval by what their plans would have cost.

Instances follow the load. A forecast of ``F`` where ``x`` came has paid for ``F`` and served ``min(F, x)``. Of the last
``window`` such pairs each forecaster gets the least factor with which it would have served the share ``served`` of all
that came: equal attainment. What it would have paid then is its price. The cheapest is asked, with its factor, so a
trend that overshoots is held back, or not asked at all. One of them should be ``SteadyLevel``: of bursts that end
before an instance has started no forecast is worth what it costs.

Pairs are of the horizon at which forecasts are used: the largest forecast of the next intervals, as many as were asked
for, beside the largest value that came in them. A forecast of one interval says little of one four intervals ahead.

A gap is the end of a load and no series of its own: its intervals judge nobody, and after ``first`` of them in a row
they are not added any more.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from pla_sglang.common.checks import Range, check_fields, knob
from pla_sglang.policy.common.forecast import Forecaster


@dataclasses.dataclass(frozen=True)
class JudgedKnobs:
    """Attributes:
    window: pairs that are looked at, as many as values of ARIMA's fits: all know the same past.
    first: pairs before the first choice, as many as values before ARIMA's first fit. Until then the first is asked.
    served: share of the load at which prices are compared, a usual target. It is no setting to be found: what is served
        follows it, and each half of what is missed costs a tenth more.
    margin: another is asked only if it is cheaper by this share; below that the order of two is chance.
    bound: the factor stays within [1/bound, bound], as in ``Corrected``.
    """

    window: int = knob(96, allowed=Range(1))
    first: int = knob(12, allowed=Range(1))
    served: float = knob(0.95, allowed=Range(0, 1, above=True))
    margin: float = knob(0.02, allowed=Range(0))
    bound: float = knob(2.0, allowed=Range(1))

    def __post_init__(self) -> None:
        check_fields(self, "judged")


@dataclasses.dataclass(slots=True)
class _Open:
    """Forecasts of intervals that are not over: how many are left, and the largest value that came so far."""

    left: int
    expected: tuple[float, ...]
    came: float = 0.0


def least_factor(expected: Sequence[float], came: Sequence[float], share: float) -> float:
    """The least factor on ``expected`` with which ``share`` of ``came`` is served; infinite where none is enough."""
    pairs = sorted(
        (value / forecast, forecast, value) for forecast, value in zip(expected, came, strict=True) if forecast > 0
    )
    missing = share * sum(came)  # of what is not served as a whole
    scaled = sum(expected)
    for ratio, forecast, value in pairs:
        if ratio * scaled >= missing * (1 - 1e-12):
            return missing / scaled
        missing -= value
        scaled -= forecast
    return float("inf")


class Judged:
    """Asks the cheapest of several forecasters.

    Attributes:
        chosen: its name.
        factor: on its forecasts.
        changes: how often another was chosen.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Forecaster]], knobs: JudgedKnobs | None = None) -> None:
        self.knobs = knobs or JudgedKnobs()
        self.chosen = next(iter(makers))
        self.factor = 1.0
        self.changes = 0
        self._known = {name: make() for name, make in makers.items()}
        self._open: deque[_Open] = deque()
        self._pairs: deque[tuple[tuple[float, ...], float]] = deque(maxlen=self.knobs.window)
        self._steps = 1  # the most that were asked for since the last value
        self._without = 0  # intervals in a row without load

    @property
    def name(self) -> str:
        return self.chosen

    def add(self, value: float) -> None:
        self._without = 0 if value > 0 else self._without + 1
        if self._without > self.knobs.first:
            return
        self._close(value)
        for one in self._known.values():
            one.add(value)
        self._judge()
        steps = range(1, self._steps + 1)
        expected = tuple(max(one.next_value(step) or 0.0 for step in steps) for one in self._known.values())
        self._open.append(_Open(self._steps, expected))
        self._steps = 1

    def next_value(self, steps: int = 1) -> float | None:
        self._steps = max(self._steps, steps)
        value = self._known[self.chosen].next_value(steps)
        if value is None or self._without > self.knobs.first:
            return None if value is None else 0.0
        return value * self.factor

    def _close(self, value: float) -> None:
        """``value`` came; pairs whose last interval that was are complete."""
        for one in self._open:
            one.left -= 1
            one.came = max(one.came, value)
        done = [one for one in self._open if one.left <= 0]
        self._open = deque(one for one in self._open if one.left > 0)
        self._pairs.extend((one.expected, one.came) for one in done if one.came > 0)

    def _judge(self) -> None:
        if len(self._pairs) < self.knobs.first:
            return
        knobs, came = self.knobs, [value for _, value in self._pairs]
        factors, prices = {}, {}
        for place, name in enumerate(self._known):
            expected = [forecasts[place] for forecasts, _ in self._pairs]
            factors[name] = max(least_factor(expected, came, knobs.served), 1 / knobs.bound)
            prices[name] = factors[name] * sum(expected)
        cheapest = min(prices, key=lambda name: prices[name])
        if prices[cheapest] < (1 - knobs.margin) * prices[self.chosen]:
            self.chosen = cheapest
            self.changes += 1
        self.factor = min(factors[self.chosen], knobs.bound)
