"""Forecasters that are judged by what their plans would have cost: factors by hand, choices, horizons, gaps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pla_sglang.policy.common.forecast import Forecaster, LastValue, level_for
from pla_sglang.policy.common.judged import Judged, JudgedKnobs, least_factor
from pla_sglang.policy.registry import FORECASTERS


class Times:
    """The last value times a number for each interval ahead."""

    name = "times"

    def __init__(self, *factors: float) -> None:
        self._factors = factors
        self._last: float | None = None

    def add(self, value: float) -> None:
        self._last = value

    def next_value(self, steps: int = 1) -> float | None:
        factor = self._factors[min(steps, len(self._factors)) - 1]
        return None if self._last is None else self._last * factor


def judged(makers: Mapping[str, Callable[[], Forecaster]], **changes: float) -> Judged:
    return Judged(makers, JudgedKnobs(**changes))  # type: ignore[arg-type]


def feed(one: Judged, values: Iterator[float], count: int, steps: int = 1) -> None:
    for value in itertools.islice(values, count):
        one.add(value)
        for step in range(1, steps + 1):
            one.next_value(step)


def test_factors_by_hand() -> None:
    """10 and 10 are expected, 5 and 15 come: 1.5 serves all, 1.1 serves 5 + 11 of 20."""
    expected, came = [10.0, 10.0], [5.0, 15.0]
    assert least_factor(expected, came, 1.0) == pytest.approx(1.5)
    assert least_factor(expected, came, 0.8) == pytest.approx(1.1)
    assert least_factor([0.0, 10.0], came, 0.75) == pytest.approx(1.5)
    assert least_factor([0.0, 10.0], came, 0.8) == float("inf")


POSITIVE = st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)), min_size=1, max_size=20)


@given(POSITIVE, st.floats(0.05, 1.0))
def test_the_factor_is_enough_and_no_more(pairs: list[tuple[float, float]], share: float) -> None:
    expected, came = zip(*pairs, strict=True)
    factor = least_factor(expected, came, share)
    served = np.minimum(factor * np.array(expected), came).sum() / sum(came)
    assert served == pytest.approx(share, rel=1e-6)


def test_the_cheapest_is_asked_and_scaled() -> None:
    """Of a series that stands still, one that says twice as much at times has to pay more for the same share."""

    class Wild(LastValue):
        count = 0

        def add(self, value: float) -> None:
            self.count += 1
            super().add(value * (1 + self.count % 2))

    one = judged({"wild": Wild, "high": lambda: Times(1.25)}, served=1.0)
    feed(one, itertools.repeat(8.0), 11)
    assert (one.chosen, one.factor) == ("wild", 1.0), "nobody is judged yet"
    feed(one, itertools.repeat(8.0), 30)
    assert (one.chosen, one.changes) == ("high", 1)
    assert one.next_value() == pytest.approx(8.0)


def test_forecasts_are_judged_at_the_horizon_at_which_they_are_used() -> None:
    """Right for one interval, three times too high for the fourth."""
    makers = {"steep": lambda: Times(1.0, 1.5, 2.0, 3.0)}
    near, far = (judged(makers, bound=4.0, served=1.0, window=30) for _ in range(2))
    feed(near, itertools.repeat(6.0), 40)
    feed(far, itertools.repeat(6.0), 40, steps=4)
    assert near.next_value() == pytest.approx(6.0)
    assert far.next_value(4) == pytest.approx(6.0)


@pytest.mark.parametrize("gap", [1, 12, 13, 7 * 1440])
def test_a_gap_of_days_teaches_nobody(gap: int) -> None:
    """A daily wave of minutes, then nothing, then the wave goes on."""
    values = [10.0 + 3.0 * (minute % 7) for minute in range(150)]
    one = Judged({name: FORECASTERS[name] for name in ("holt_winters", "last", "peak")})
    feed(one, iter(values), 150)
    before = one.chosen, one.factor
    feed(one, itertools.repeat(0.0), gap)
    assert one.chosen == before[0]
    assert one.factor == pytest.approx(before[1], rel=0.1)
    if gap > 12:
        assert one.next_value() == 0.0
    one.add(20.0)
    assert 5.0 < (one.next_value() or 0.0) < 45.0


def hours(values: list[float], knobs: JudgedKnobs) -> tuple[float, float]:
    """What a plan by these forecasts pays, and the share that it serves."""
    one = Judged({name: FORECASTERS[name] for name in ("holt_winters", "last", "peak")}, knobs)
    paid = served = 0.0
    for value in values:
        expected = one.next_value() or 0.0
        paid, served = paid + expected, served + min(expected, value)
        one.add(value)
    return paid / sum(values), served / sum(values)


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("name", ["window", "first", "margin", "bound"])
def test_no_constant_has_to_be_exact(name: str, factor: float) -> None:
    """Half and twice each (of ``bound`` what is above 1) on ten noisy days by the hour.

    GPU-hours stay within 3 %, the share that is served within one point.
    """
    rng = np.random.default_rng(7)
    day = 10 + 8 * np.sin(2 * np.pi * np.arange(240) / 24)
    values = (day * rng.lognormal(0.0, 0.15, 240)).tolist()
    plain = JudgedKnobs()
    least = 1.0 if name == "bound" else 0.0
    value = least + factor * (getattr(plain, name) - least)
    changed = JudgedKnobs(**{name: type(getattr(plain, name))(value)})
    before, after = hours(values, plain), hours(values, changed)
    assert after[0] == pytest.approx(before[0], rel=0.03)
    assert after[1] == pytest.approx(before[1], abs=0.01)


@pytest.mark.parametrize("times", [0.5, 1.0, 2.0])
def test_what_is_served_is_what_was_asked_for(times: float) -> None:
    """Half and twice the share that is missed, on the same days: it is the target, and has its price."""
    rng = np.random.default_rng(7)
    day = 10 + 8 * np.sin(2 * np.pi * np.arange(240) / 24)
    values = (day * rng.lognormal(0.0, 0.15, 240)).tolist()
    plain = JudgedKnobs()
    missed = times * (1 - plain.served)
    paid, served = hours(values, JudgedKnobs(served=1 - missed))
    assert served == pytest.approx(1 - missed, abs=0.015)
    before = hours(values, plain)[0]
    dearer = {0.5: 1.10, 1.0: 1.0, 2.0: 0.88}[times]
    assert paid / before == pytest.approx(dearer, abs=0.02)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20), st.floats(0.05, 1.0))
@example([1.8934182587157267, 62.475346798512454], 1.0)  # the sum less the first is above the second, by rounding
def test_the_level_is_enough_and_no_more(values: list[float], share: float) -> None:
    level = level_for(values, share)
    assert np.minimum(level, values).sum() == pytest.approx(share * sum(values), rel=1e-6)
    assert level <= max(values) * (1 + 1e-9)


def test_of_bursts_that_nobody_sees_coming_it_asks_for_what_a_fleet_of_fixed_size_has() -> None:
    """A burst of one interval in ten, at random, planned four intervals ahead. Beside such bursts a forecast of the
    last value with its factor pays several times as much."""
    rng = np.random.default_rng(3)
    values = np.where(rng.random(400) < 0.1, 50.0, 5.0)
    one = Judged({name: FORECASTERS[name] for name in ("peak", "last", "holt_winters", "level")})
    paid, served = [], []
    for at, value in enumerate(values[:-4]):
        one.add(value)
        expected = max(one.next_value(step) or 0.0 for step in range(1, 5))
        paid.append(expected)
        served.append(min(expected, values[at + 1]) / values[at + 1])
    assert one.name == "level"
    assert np.mean(served[100:]) > 0.95
    assert np.mean(paid[100:]) <= 1.02 * level_for([values[at : at + 4].max() for at in range(396)], 0.95)


def test_it_is_known_by_name_and_lets_nobody_go_before_it_knows_the_load() -> None:
    one = FORECASTERS["judged"]()
    assert isinstance(one, Judged)
    assert one.chosen == "peak"
    assert one.next_value() is None
