"""The log of a planner: which answers are plans, what is kept of the fleet, what planners show of the load."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pla_sglang.common.legend.explanations import PLAN_FIGURES
from pla_sglang.policy.baselines.scalers import SlaKnobs, SlaScaler, ThresholdKnobs, ThresholdPlanner
from pla_sglang.policy.common.fleet_policy import Setup
from pla_sglang.policy.common.forecast import LastValue
from pla_sglang.policy.common.plan_log import FleetCount, Forecast, Look, PlanLog
from pla_sglang.policy.dopd.fleet import make_planner
from pla_sglang.policy.interface.decisions import Hold, ScaleTo
from pla_sglang.policy.interface.fleet import FleetView, InstanceView, RequestView, Role
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.profiles import load_profile

STEPS = load_profile("h100-llama3.1-8b-tp1")
SETUP = Setup(STEPS, 100_000, 1.0, 0.05, planner="dopd", forecaster="last", instances_min=1, instances_max=4)
TWO = FleetCount(2, 0, 0)
GROW = ScaleTo(Role.MIXED, 5, FleetReason.DOPD_TOTAL, start=2)


class Planner:
    def __init__(self) -> None:
        self.look: Look | None = None

    def see(self, load: float) -> None:
        self.look = {"requests": Forecast(load, 2 * load)}


def view(index: int) -> InstanceView:
    return InstanceView(index, f"i{index}", kv_capacity_tokens=100_000)


def test_a_plan_is_noted_once_and_says_what_there_would_be() -> None:
    log, planner = PlanLog(), Planner()
    log.note_tick([planner], [GROW], TWO, 1.0)
    assert log.last_plan is None, "it has seen nothing"
    planner.see(3.0)
    log.note_tick([planner, object()], [GROW], FleetCount(2, 1, 1), 2.0)
    log.note_tick([planner, object()], [Hold(FleetReason.NO_DATA)], TWO, 2.5)  # of another controller
    planner.see(4.0)
    leave = ScaleTo(Role.DECODE, 1, FleetReason.DOPD_RATIO, drain=(view(0),))
    log.note_tick([planner, object()], [GROW, leave], TWO, 3.0)
    planner.see(5.0)
    log.note_tick([planner, object()], [Hold(FleetReason.DOPD_UNCHANGED)], FleetCount(3, 0, 0), 4.0)
    assert [(plan.at_s, plan.planned, plan.look["requests"].load) for plan in log.plans] == [
        (2.0, 5, 3.0),
        (3.0, 3, 4.0),
        (4.0, 3, 5.0),
    ]


def test_of_two_that_could_plan_the_last_one_does() -> None:
    log, ratio, planner = PlanLog(), Planner(), Planner()
    ratio.see(1.0)
    log.note_tick([ratio, planner], [], TWO, 1.0)
    planner.see(2.0)
    log.note_tick([ratio, planner], [], TWO, 2.0)
    assert [plan.look for plan in log.plans] == [planner.look]


def test_of_times_without_a_change_both_ends_are_kept() -> None:
    log = PlanLog(window_s=10.0)
    for second in range(4):
        log.note_fleet(TWO, 0.1 * second, float(second))
    for second in range(4, 8):
        log.note_fleet(FleetCount(3, 0, 1), 0.1 * second, float(second))
    assert [point.at_s for point in log.points] == [0.0, 3.0, 4.0, 7.0]
    assert json.loads(json.dumps(log.to_document()))["fleet"][-1] == [7.0, 3, 0, 1, 0.7]


def test_what_held_when_the_window_began_stays() -> None:
    log, planner = PlanLog(window_s=10.0), Planner()
    for second in (0.0, 8.0, 16.0):
        planner.see(second)
        log.note_tick([planner], [], TWO, second)
        log.note_fleet(FleetCount(int(second), 0, 0), 0.0, second)
    log.note_start(0.0, 5.0, "ready")
    log.note_start(0.0, 15.0, "failed")
    log.note_fleet(TWO, 0.0, 20.0)
    assert [plan.at_s for plan in log.plans] == [8.0, 16.0]
    assert [point.at_s for point in log.points] == [8.0, 16.0, 20.0]
    assert log.to_document()["starts"] == [[0.0, 15.0, "failed"]]


def planners() -> list[Any]:
    return [
        make_planner(SETUP, by_role=False),
        make_planner(SETUP, by_role=True),
        SlaScaler(SlaKnobs(0.05, 32), *SETUP.tables(), LastValue),
        ThresholdPlanner(ThresholdKnobs(1.0), SETUP.predictor_of_ttft()),
    ]


@pytest.mark.parametrize("planner", planners(), ids=lambda one: type(one).__name__)
def test_every_planner_shows_its_load_by_figures_that_the_pages_know(planner: Any) -> None:
    fleet = FleetView([view(0), view(1)])
    if hasattr(planner, "on_finish"):
        for number in range(10):
            planner.on_arrival(RequestView(f"r{number}", 1000, float(number)), float(number))
        planner.on_finish(RequestView("r0", 1000, 0.0), 200, 9.0)
    planner.tick(fleet, 10.0)
    assert planner.look
    assert set(planner.look) <= set(PLAN_FIGURES)
    if "requests_per_s" in planner.look:
        assert planner.look["requests_per_s"][:2] == pytest.approx((10 / 10.0, 10 / 10.0), rel=0.12)
        assert planner.look["output_tokens"] == (200.0, 200.0, "last")
    else:
        assert planner.look["decode_utilisation"] == (0.0, None, None)
