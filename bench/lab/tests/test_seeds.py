from __future__ import annotations

import math
import random

import pytest

from bench.lab.papers.seeds import geometric_mean, measure_change


def test_a_change_common_to_all_seeds_is_found_whatever_the_seeds_are_like() -> None:
    earlier = [1.0, 100.0, 10_000.0]
    change = measure_change([0.5, 52.0, 4900.0], earlier)
    assert change.share == pytest.approx(-0.5, abs=0.01)
    assert change.is_decided
    assert change.low < change.share < change.high < 0


def test_the_interval_is_students() -> None:
    """Two seeds, logarithms 0 and 2: mean 1, standard error 1, quantile 12.706."""
    change = measure_change([1.0, math.exp(2.0)], [1.0, 1.0])
    assert change.share == pytest.approx(math.e - 1)
    assert (math.log1p(change.low), math.log1p(change.high)) == pytest.approx((1 - 12.706, 1 + 12.706), abs=1e-3)
    assert not change.is_decided


def test_the_interval_holds_the_truth_in_19_of_20_runs() -> None:
    rng = random.Random(1)
    runs = [measure_change([math.exp(rng.gauss(0.1, 0.3)) for _ in range(6)], [1.0] * 6) for _ in range(1000)]
    assert sum(run.low < math.expm1(0.1) < run.high for run in runs) / 1000 == pytest.approx(0.95, abs=0.02)


def test_one_seed_decides_nothing() -> None:
    change = measure_change([1.0], [9.0])
    assert not change.is_decided
    assert change.text == "-0.889, 1 seed"


def test_values_that_have_no_ratio() -> None:
    change = measure_change([0.0, 1.0], [1.0, 1.0])
    assert math.isnan(change.share)
    assert not change.is_decided
    assert math.isnan(geometric_mean([0.0, 1.0]))
    assert geometric_mean([1.0, 100.0]) == pytest.approx(10.0)
    with pytest.raises(ValueError, match="zip"):
        measure_change([1.0], [1.0, 2.0])
