"""Forecasters by GPU-hours: the replay against counts by hand, bounds that must hold, and the choice."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from bench.lab.fleets import forecast
from bench.lab.fleets.forecast import Cell, forecast_gpu_hours, measure_cell, winner
from bench.lab.fleets.interval_plans import (
    STARTUP_S,
    History,
    cheapest,
    fixed_fleet,
    forecasts,
    lower_bound_hours,
    perfect,
    planner_for,
    replay,
)
from bench.lab.fleets.load_series import LoadSeries, from_trace
from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.common.forecast import LastValue
from pla_sglang.policy.common.load_meter import LoadSample
from pla_sglang.sim.workload import Trace


def history_of(rates: list[float], interval_s: float = 60.0) -> History:
    counts = np.array(rates) * interval_s
    lengths = np.where(counts > 0, 1.0, np.nan)
    one = LoadSeries("t", interval_s, counts, lengths * 2000, lengths * 50)
    return History.of(one.samples(planner_for(interval_s), 8.0), interval_s)


def test_intervals_of_a_trace() -> None:
    trace = Trace("t", np.array([0.0, 30.0, 130.0, 185.0]), np.array([10, 30, 50, 70]), np.array([1, 3, 5, 7]))
    one = from_trace("t", trace, 60.0)
    assert one.requests.tolist() == [2, 0, 1]  # the last interval is not whole
    assert np.nan_to_num(one.input_tokens).tolist() == [20, 0, 50]
    assert np.nan_to_num(one.output_tokens).tolist() == [2, 0, 5]


def test_the_mean_load_is_scaled_to_the_wanted_number_of_busy_instances() -> None:
    history = history_of([1.0, 3.0, 0.0, 2.0])
    planner = planner_for(60.0)
    busy = [
        0.0
        if one.input_tokens is None
        else one.rate_per_s * planner.prefill_s(one.input_tokens) + one.concurrency / planner.knobs.concurrency_max
        for one in history.samples
    ]
    assert sum(busy) / 4 == pytest.approx(8.0)
    assert history.samples[1].rate_per_s == pytest.approx(3 * history.samples[0].rate_per_s)
    assert history.samples[2] == LoadSample(None, None, 0.0, 0.0)


def test_a_constant_load_is_planned_exactly_and_costs_what_it_needs() -> None:
    history = history_of([2.0] * 10)
    need = history.needs[0]
    assert need is not None
    bill = replay(planner_for(60.0), history, forecasts(history.samples, LastValue, corrected=True))
    assert (bill.attainment, bill.scalings) == (1.0, 0)
    assert bill.gpu_hours == pytest.approx(9 * 60 * (need.prefill + need.decode) / 3600)
    assert fixed_fleet(history, 0.99).gpu_hours <= bill.gpu_hours


def test_nobody_pays_less_than_the_lower_bound() -> None:
    history = history_of([1.0, 4.0, 0.0, 2.0, 9.0, 3.0] * 4)
    for target in (0.5, 0.95, 1.0):
        bound = lower_bound_hours(history, target)
        assert bound <= fixed_fleet(history, target).gpu_hours
        known = cheapest(history, perfect(history.samples), target)
        assert known.attainment < target or bound <= known.gpu_hours
    needs = [need for need in history.needs[1:] if need is not None]
    assert lower_bound_hours(history, 1.0) == pytest.approx(sum(need.prefill + need.decode for need in needs) / 60)


def test_what_comes_too_late_is_not_served() -> None:
    """From one to ten times the load: the last value has the instances one interval late."""
    history = history_of([1.0] * 5 + [10.0] * 5)
    late = replay(planner_for(60.0), history, forecasts(history.samples, LastValue, corrected=False))
    known = replay(planner_for(60.0), history, perfect(history.samples), startup_s=0.0)
    before, after = history.needs[4], history.needs[5]
    assert before is not None
    assert after is not None
    share = min(before.prefill / after.prefill, before.decode / after.decode)
    # 4 and 5 intervals at rates 1 and 10; of the first at rate 10 only `share`, of the second what start-up leaves
    new = 1 - STARTUP_S / 60
    second = min(
        (one + new * (whole - one)) / whole
        for one, whole in ((before.prefill, after.prefill), (before.decode, after.decode))
    )
    assert late.attainment == pytest.approx((4 + 10 * (share + second + 3)) / 54)
    assert known.attainment == 1.0


def test_at_equal_attainment_the_oracle_is_not_beaten_and_a_floor_is_worth_having() -> None:
    rates = [2 + 1.5 * math.sin(index / 6) + (6 if index % 17 == 0 else 0) for index in range(80)]
    history = history_of(rates)
    oracle = cheapest(history, perfect(history.samples), 0.95)
    last = cheapest(history, forecasts(history.samples, LastValue, corrected=True), 0.95)
    fixed = fixed_fleet(history, 0.95)
    assert oracle.attainment >= 0.95
    assert last.attainment >= 0.95
    assert oracle.gpu_hours <= last.gpu_hours * 1.001
    assert last.gpu_hours <= 1.1 * fixed.gpu_hours


def row(forecaster: str, trace: str, hours: float, **fields: Any) -> dict[str, Any]:
    return {
        "trace": trace,
        "forecaster": forecaster,
        "target": 0.99,
        "attainment": 0.99,
        "gpu_hours": hours,
    } | fields


def test_the_winner_has_the_least_hours_and_a_miss_counts_as_the_fixed_fleet() -> None:
    rows = [
        row("fixed", "a", 10.0),
        row("fixed", "b", 20.0),
        row("last", "a", 8.0),
        row("last", "b", 5.0, attainment=0.9),
        row("arima", "a", 9.0),
        row("arima", "b", 10.0),
    ]
    assert forecast_gpu_hours(rows)["last"] == {"a": 8.0}
    assert winner(rows) == "arima"
    with pytest.raises(ConfigError, match="nothing to choose from"):
        winner(rows[:2])


@pytest.mark.parametrize("name", [*forecast.FORECASTERS, forecast.ORACLE, forecast.FIXED])
def test_every_forecaster_has_a_bill(name: str) -> None:
    samples = tuple(history_of([2 + math.sin(index) for index in range(20)]).samples)
    found = measure_cell(Cell("t", name, 60.0, samples))
    assert set(found["by_target"]) == {"0.95", "0.99"}
    assert all(bill["gpu_hours"] > 0 for bill in found["by_target"].values())
