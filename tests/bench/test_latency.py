from __future__ import annotations

import random

import pytest

from bench.harness.latency import (
    paired_ratio,
    percentile,
    spread,
    summarise,
    time_per_output_token,
)


def test_percentile_agrees_with_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    rng = random.Random(1)
    for size in (1, 2, 7, 11, 100):
        values = [rng.expovariate(1.0) for _ in range(size)]
        for q in (0, 12.5, 50, 90, 99, 100):
            assert percentile(values, q) == pytest.approx(float(numpy.percentile(values, q)))


@pytest.mark.parametrize("q", [-0.1, 100.1])
def test_percentile_refuses_an_impossible_q(q: float) -> None:
    with pytest.raises(ValueError, match="0 to 100"):
        percentile([1.0], q)


@pytest.mark.parametrize("function", [lambda v: percentile(v, 50), summarise, spread])
def test_nothing_has_no_figures(function) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="no "):
        function([])


def test_paired_ratio_cancels_a_drift_that_hits_both() -> None:
    drift = [1.0, 5.0, 2.0]
    ratio = paired_ratio([10 * d for d in drift], [2 * d for d in drift])
    assert (ratio.low, ratio.median, ratio.high) == (5.0, 5.0, 5.0)


@pytest.mark.parametrize(
    ("top", "bottom", "message"),
    [([1.0], [1.0, 2.0], "same number"), ([1.0], [0.0], "not positive"), ([], [], "no rounds")],
)
def test_paired_ratio_refuses(top: list[float], bottom: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paired_ratio(top, bottom)


@pytest.mark.parametrize(("tokens", "expected"), [(1, None), (0, None), (3, 0.5)])
def test_time_per_output_token(tokens: int, expected: float | None) -> None:
    assert time_per_output_token(1.0, 2.0, tokens) == expected
