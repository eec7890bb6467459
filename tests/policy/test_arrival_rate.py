"""Arrival rate: no expectation without evidence, and none from long ago."""

from __future__ import annotations

import pytest

from pla_sglang.policy.pla.arrival_rate import ArrivalRate


def observed(*times_s: float, tokens: int = 10) -> ArrivalRate:
    rate = ArrivalRate()
    for time_s in times_s:
        rate.observe(time_s, tokens)
    return rate


@pytest.mark.parametrize(
    ("name", "times_s", "now_s", "expected"),
    [
        ("nothing yet", (), 5.0, 0.0),
        ("one", (1.0,), 5.0, 0.0),
        ("two are no evidence", (1.0, 2.0), 5.0, 0.0),
        ("three, just now", (0.0, 1.0, 2.0), 2.0, 1.0),  # two intervals in two seconds
        ("silence since lowers it", (0.0, 1.0, 2.0), 4.0, 0.5),
        ("all at once", (3.0, 3.0, 3.0), 3.0, 0.0),  # no interval to divide by
        ("a burst, then time passes", (3.0, 3.0, 3.0), 3.5, 4.0),
        ("too old", (0.0, 1.0, 2.0), 32.5, 0.0),
        ("the old part expires", (0.0, 29.0, 29.5, 30.0), 30.5, 2 / 1.5),
    ],
)
def test_per_second(name: str, times_s: tuple[float, ...], now_s: float, expected: float) -> None:
    assert observed(*times_s).per_second(now_s) == pytest.approx(expected)


def test_tokens_per_second() -> None:
    assert observed(0.0, 1.0, 2.0, tokens=30).tokens_per_second(4.0) == pytest.approx(15.0)
    assert observed(0.0, 1.0).tokens_per_second(4.0) == 0.0, "no evidence"


def test_window_bounds_what_counts() -> None:
    slow = [0.1 * index for index in range(100)]
    fast = [10.0 + 0.001 * index for index in range(ArrivalRate.WINDOW)]
    assert observed(*slow, *fast).per_second(fast[-1]) == pytest.approx(1000.0)


def test_mean_tokens() -> None:
    rate = ArrivalRate()
    assert rate.mean_tokens() == 0.0
    rate.observe(0.0, 10)
    rate.observe(0.1, 30)
    assert rate.mean_tokens() == 20.0


def test_the_usual_rate_outlives_the_evidence_and_fades() -> None:
    rate = observed(0.0, 1.0, 2.0)
    assert rate.usual_per_second(2.0) == rate.per_second(2.0) == pytest.approx(1.0)
    assert rate.per_second(302.0) == 0.0
    assert rate.usual_per_second(302.0) == pytest.approx(0.5)
    assert rate.mean_tokens() == 10.0


def test_there_is_no_usual_rate_without_evidence() -> None:
    assert observed(0.0, 1.0).usual_per_second(1.0) == 0.0
    assert ArrivalRate().usual_per_second(5.0) == 0.0
