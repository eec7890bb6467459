"""Forecasters: closed cases by hand, ARIMA's recursion against statsmodels, refits only when needed."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from statsmodels.tsa.arima.model import ARIMA

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.common import arima
from pla_sglang.policy.common.arima import ArimaForecaster
from pla_sglang.policy.common.forecast import (
    Corrected,
    Forecaster,
    HoltWinters,
    HoltWintersKnobs,
    LastValue,
    RecentPeak,
    next_values,
)

MAKERS: dict[str, Callable[[], Forecaster]] = {
    "last": LastValue,
    "peak": RecentPeak,
    "holt_winters": HoltWinters,
    "arima": ArimaForecaster,
    "corrected": lambda: Corrected(LastValue()),
}


def draw_arma(count: int, *, ar: float, ma: float, mean: float = 50.0, seed: int = 5) -> list[float]:
    rng = random.Random(seed)
    values, last, shock = [], mean, 0.0
    for _ in range(count):
        fresh = rng.gauss(0.0, 1.0)
        last = mean + ar * (last - mean) + fresh + ma * shock
        shock = fresh
        values.append(last)
    return values


def error_of(forecaster: Forecaster, values: list[float], skip: int) -> float:
    """Mean absolute one-step error after the first ``skip`` values."""
    errors = []
    for index, value in enumerate(values):
        expected = forecaster.next_value()
        if index >= skip and expected is not None:
            errors.append(abs(value - expected))
        forecaster.add(value)
    return sum(errors) / len(errors)


@pytest.mark.parametrize("name", MAKERS)
def test_nothing_is_known_before_the_first_value(name: str) -> None:
    assert MAKERS[name]().next_value() is None


@pytest.mark.parametrize("name", MAKERS)
def test_a_constant_series_is_forecast_exactly(name: str) -> None:
    forecaster = MAKERS[name]()
    for _ in range(40):
        forecaster.add(7.0)
        assert forecaster.next_value() == pytest.approx(7.0)


@pytest.mark.parametrize("name", MAKERS)
def test_several_intervals_ahead(name: str) -> None:
    """Of a constant series the same, before the first value nothing; without a number one ahead is asked for."""
    forecaster = MAKERS[name]()
    assert forecaster.next_value(3) is None
    for value in (*draw_arma(30, ar=0.5, ma=0.2), *[7.0] * 120):
        forecaster.add(value)
        assert forecaster.next_value(1) == forecaster.next_value()
    assert forecaster.next_value(4) == pytest.approx(7.0, rel=1e-3)


def test_trend_and_season_go_on() -> None:
    line = HoltWinters(HoltWintersKnobs(damping=1.0))
    for step in range(80):
        line.add(100.0 + 3.0 * step)
    assert line.next_value(5) == pytest.approx(100.0 + 3.0 * 84, rel=1e-3)
    season = HoltWinters(HoltWintersKnobs(level=0.2, trend=0.01, seasonal=0.5, season=4))
    for step in range(400):
        season.add(100.0 + 30.0 * (step % 4))
    assert [season.next_value(step) for step in (1, 2, 3, 4)] == pytest.approx([100.0, 130.0, 160.0, 190.0], rel=0.01)


def test_the_largest_of_the_next_intervals() -> None:
    season = HoltWinters(HoltWintersKnobs(level=0.2, trend=0.01, seasonal=0.5, season=4))
    for value in (1.0, 2.0, 9.0, 3.0) * 100:
        season.add(value)
    series = [season, LastValue()]
    assert next_values(series, (None, 5.0), 2) == pytest.approx([2.0, 5.0], rel=0.01)
    assert next_values(series, (1.0, None), 2) == pytest.approx([9.0, 5.0], rel=0.01)
    assert next_values([LastValue()], (None,), 3) is None


def test_arima_by_recursion_is_what_statsmodels_forecasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arima, "FIRST_FIT", 80)
    monkeypatch.setattr(arima, "REFIT_ERROR", 99.0)
    values = [1000.0 + total for total in np.cumsum(draw_arma(100, ar=0.6, ma=0.3, mean=0.0))]
    ours = ArimaForecaster()
    for value in values[:80]:
        ours.add(value)
    theirs = ARIMA(np.array(values[:80]), order=(2, 1, 1), trend="n").fit(method_kwargs={"maxiter": 50})
    for value in values[80:]:
        told = [ours.next_value(step) for step in (1, 2, 3)]
        assert told == pytest.approx(list(map(float, theirs.forecast(3))), rel=1e-4)
        ours.add(value)
        theirs = theirs.append([value])


def test_arima_beats_the_last_value_where_there_is_something_to_learn() -> None:
    values = [1000.0 + total for total in np.cumsum(draw_arma(160, ar=0.9, ma=0.0, mean=0.0))]
    assert error_of(ArimaForecaster(), values, 60) < 0.7 * error_of(LastValue(), values, 60)


def test_no_refit_while_forecasts_are_good_and_one_after_a_shift() -> None:
    forecaster = ArimaForecaster()
    for value in draw_arma(60, ar=0.5, ma=0.0):
        forecaster.add(value)
    assert forecaster.fits == 1
    for value in draw_arma(20, ar=0.5, ma=0.0, mean=500.0):
        forecaster.add(value)
    assert forecaster.fits == 2


def test_a_forecast_is_never_negative() -> None:
    forecaster = ArimaForecaster()
    for value in range(40, -1, -1):
        forecaster.add(float(value))
    assert forecaster.next_value() == 0.0


class Constant:
    """Forecasts the same, whatever comes."""

    name = "constant"

    def __init__(self, value: float) -> None:
        self._value = value

    def add(self, value: float) -> None:
        pass

    def next_value(self, steps: int = 1) -> float:
        return self._value


def test_correction_takes_out_a_bias_within_its_bound() -> None:
    low = Corrected(Constant(10.0), weight=0.5)
    for _ in range(30):
        low.add(15.0)
    assert low.next_value() == pytest.approx(15.0)
    for _ in range(30):
        low.add(1000.0)
    assert low.factor == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HoltWintersKnobs(level=0.0), "level 0.0 is out of range; allowed: above 0"),
        (lambda: Corrected(LastValue(), bound=0.5), "correction bound"),
    ],
)
def test_bad_knobs(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_fit_that_fails_leaves_the_last_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise np.linalg.LinAlgError("Schur decomposition solver error")

    monkeypatch.setattr(ARIMA, "fit", fail)
    monkeypatch.setattr(arima, "REFIT_ERROR", 0.0)
    forecaster = ArimaForecaster()
    for value in draw_arma(40, ar=0.7, ma=0.2):
        forecaster.add(value)
        assert forecaster.next_value() == value
    assert forecaster.fits == 0
    assert 1 < forecaster.failed_fits <= 1 + 28 // arima.REFIT_GAP


def test_the_recent_peak_is_kept_for_as_long_as_it_is_recent() -> None:
    forecaster, told = RecentPeak(3), []
    for value in (1.0, 5.0, 2.0, 3.0, 2.0, 1.0):
        forecaster.add(value)
        told.append(forecaster.next_value())
    assert told == [1.0, 5.0, 5.0, 5.0, 3.0, 3.0]
    with pytest.raises(ConfigError, match="peak count 0 is out of range; allowed: at least 1"):
        RecentPeak(0)


def test_of_noise_few_fits_are_made() -> None:
    """Gaps of 6, 12, 24, 48, then 96 values: in 1,000 values of noise no more than 15 fits, not 160."""
    rng = random.Random(3)
    ours = ArimaForecaster()
    for _ in range(1000):
        ours.add(rng.expovariate(1.0))
    assert 2 <= ours.fits + ours.failed_fits <= 15


@pytest.mark.parametrize("name", MAKERS)
def test_a_gap_leaves_the_correction_as_it_was(name: str) -> None:
    """A day without load between two of 10 a minute: as much is expected after it as before."""
    corrected = Corrected(MAKERS[name]())
    for value in (*[10.0] * 60, *[0.0] * 1440):
        corrected.add(value)
    assert corrected.factor == pytest.approx(1.0)
    for _ in range(12):
        corrected.add(10.0)
    assert corrected.next_value() == pytest.approx(10.0, rel=0.15)
