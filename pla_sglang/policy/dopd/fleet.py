"""DOPD by name: counts of prefill and decode instances, or only their ratio where the fleet has a fixed size."""

from __future__ import annotations

from collections.abc import Mapping

from pla_sglang.policy.common.fleet_policy import Built, FleetPolicy, Setup
from pla_sglang.policy.dopd.dispatch import DopdDispatcher, DopdDispatchKnobs
from pla_sglang.policy.dopd.labels import RatioController, Settling
from pla_sglang.policy.dopd.planner import DopdController, Planner, PlannerKnobs

KNOBS: Mapping[str, tuple[type, ...]] = {"dopd": (PlannerKnobs, DopdDispatchKnobs)}


def make_controller(setup: Setup, kind: type[DopdController] = DopdController) -> DopdController:
    """``kind``: ``RatioController`` where instances can be neither started nor stopped."""
    knobs = PlannerKnobs(
        setup.ttft_slo_s,
        setup.concurrency(),
        interval_s=setup.plan_interval_s,
        instances_min=max(2, setup.instances_min),
        instances_max=max(2, setup.instances_max),
        headroom=setup.headroom,
    )
    return kind(Planner(setup.tune("dopd", knobs), *setup.tables()), setup.make_forecaster())


def _make(setup: Setup) -> Built:
    dispatcher = DopdDispatcher(setup.tune("dopd", DopdDispatchKnobs()), setup.predictor_of_ttft())
    if not setup.scales:
        return dispatcher, (make_controller(setup, RatioController), Settling()), setup.split()
    return dispatcher, (make_controller(setup),), setup.split()


POLICIES: Mapping[str, FleetPolicy] = {"dopd": FleetPolicy(_make, live=True, flips=True, knobs=KNOBS)}
