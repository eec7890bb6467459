"""Attainment and goodput against hand-made runs; the capacity search against a known edge."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.metrics.goodput import Served, Slo, find_capacity, goodput, late_share

NAN = math.nan


def served(*rows: tuple[float, float, float, int]) -> Served:
    arrival, first, finish, tokens = zip(*rows, strict=True)
    return Served(np.array(arrival), np.array(first), np.array(finish), np.array(tokens))


RUN = served(
    (0.0, 1.0, 2.0, 11),  # TTFT 1.0, TPOT 0.1: meets both
    (0.0, 3.0, 4.0, 11),  # first token too late
    (1.0, 1.5, 9.5, 11),  # TPOT 0.8: too slow
    (2.0, 2.5, NAN, 11),  # failed after its first token
    (2.0, NAN, NAN, 5),  # refused
    (4.0, 4.5, 4.5, 1),  # one token: no TPOT to miss
)


def test_figures_of_a_run() -> None:
    figures = goodput(RUN, Slo(ttft_s=2.0, tpot_s=0.2))
    assert RUN.met(Slo(2.0, 0.2)).tolist() == [True, False, False, False, False, True]
    assert (figures.requests, figures.finished) == (6, 4)
    assert figures.attainment == pytest.approx(2 / 6)
    assert figures.ttft_attainment == pytest.approx(3 / 6)
    assert figures.tpot_attainment == pytest.approx(3 / 6)
    assert figures.span_s == pytest.approx(9.5)
    assert figures.goodput_per_s == pytest.approx(2 / 9.5)
    assert figures.output_tokens_per_s == pytest.approx(34 / 9.5)
    assert figures.ttft_p50_s == pytest.approx(0.5)
    assert figures.tpot_p50_s == pytest.approx(0.1)


def test_who_waits_many_times_the_target_or_for_ever_is_late() -> None:
    assert late_share(RUN, Slo(1.0, 1.0), 2.0) == pytest.approx(2 / 6)
    assert late_share(RUN, Slo(1.0, 1.0), 5.0) == pytest.approx(1 / 6)


def test_the_edge_of_a_target_is_met() -> None:
    assert served((0.0, 2.0, 4.0, 11)).met(Slo(2.0, 0.2)).all()


def test_a_run_where_nothing_finished() -> None:
    figures = goodput(served((0.0, NAN, NAN, 3), (1.0, NAN, NAN, 3)), Slo(1.0, 1.0))
    assert (figures.attainment, figures.finished) == (0.0, 0)
    assert math.isnan(figures.ttft_p99_s)


@pytest.mark.parametrize("value", [0.0, -1.0, NAN])
def test_a_target_of_zero_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"--slo-ttft-ms .* is out of range; allowed: above 0 ms"):
        Slo(value, 1.0)
    with pytest.raises(ConfigError, match="--slo-tpot-ms"):
        Slo(1.0, value)


def test_no_requests_and_ragged_columns() -> None:
    nothing = np.array([])
    with pytest.raises(ConfigError, match="at least one request"):
        goodput(Served(nothing, nothing, nothing, nothing.astype(int)), Slo(1, 1))
    with pytest.raises(ConfigError, match="differ in length"):
        Served(nothing, nothing, nothing, np.array([1]))


@pytest.mark.parametrize("start_per_s", [None, 1.0, 2.0, 7.0, 7.3, 7.5, 30.0, 64.0])
def test_capacity_finds_a_known_edge_from_any_estimate_and_from_none(start_per_s: float | None) -> None:
    edge = find_capacity(
        lambda rate: 1.0 if rate <= 7.3 else 0.5, low_per_s=1, high_per_s=64, tolerance=0.01, start_per_s=start_per_s
    )
    assert edge.held_per_s is not None
    assert edge.failed_per_s is not None
    assert edge.held_per_s <= 7.3 < edge.failed_per_s <= 1.01 * edge.held_per_s
    assert edge.tried[0][0] == (start_per_s or 1.0)
    assert len(edge.tried) < 20


@pytest.mark.parametrize("start_per_s", [None, 9])
def test_capacity_outside_the_bounds(start_per_s: float | None) -> None:
    none, every = (
        find_capacity(lambda rate, share=share: share, low_per_s=1, high_per_s=64, start_per_s=start_per_s)
        for share in (0.0, 1.0)
    )
    assert (none.held_per_s, none.failed_per_s) == (None, 1)
    assert (every.held_per_s, every.failed_per_s) == (64, None)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"low_per_s": 0, "high_per_s": 1}, "0 < low < high"),
        ({"low_per_s": 1, "high_per_s": 2, "target": 0}, "attainment target is 0"),
        ({"low_per_s": 1, "high_per_s": 2, "tolerance": 1}, "tolerance is 1"),
        ({"low_per_s": 1, "high_per_s": 2, "start_per_s": 3}, "start is 3; allowed: 1 to 2"),
    ],
)
def test_bad_searches(knobs: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_capacity(lambda rate: 1.0, **knobs)
