"""DOPD by name: counts of prefill and decode instances, or only their ratio where the fleet has a fixed size."""

from __future__ import annotations

from collections.abc import Mapping

from pla_sglang.policy.common.fleet_policy import NO_PLANNER, PAPER_FORECASTER, Built, FleetPolicy, Setup
from pla_sglang.policy.dopd.dispatch import DopdDispatcher, DopdDispatchKnobs
from pla_sglang.policy.dopd.labels import RatioController, Settling
from pla_sglang.policy.dopd.planner import DopdController, Planner, PlannerKnobs
from pla_sglang.policy.dopd.total import TotalController

KNOBS: Mapping[str, tuple[type, ...]] = {"dopd": (PlannerKnobs, DopdDispatchKnobs)}


def _make_planner(setup: Setup) -> Planner:
    knobs = PlannerKnobs(
        setup.ttft_slo_s,
        setup.concurrency(),
        interval_s=setup.plan_interval_s,
        instances_min=max(2, setup.instances_min),
        instances_max=max(2, setup.instances_max),
        headroom=setup.headroom,
    )
    return Planner(setup.tune("dopd", knobs), *setup.tables())


def make_controller(setup: Setup, kind: type[DopdController] = DopdController) -> DopdController:
    """Algorithm 2 as the paper has it. ``kind``: ``RatioController`` where instances can be neither started nor
    stopped."""
    return kind(_make_planner(setup), setup.make_forecaster(PAPER_FORECASTER))


def make_planner(setup: Setup, *, by_role: bool, follow_ratio: bool = False) -> DopdController:
    """Beside a policy (``policy/planners.py``). ``by_role``: instances keep their roles; else it plans the total, and
    with ``follow_ratio`` sets the roles too."""
    planner, forecaster = _make_planner(setup), setup.make_forecaster()
    if by_role:
        return DopdController(planner, forecaster, looks_ahead=True)
    bounds = (setup.instances_min, setup.instances_max)
    return TotalController(planner, forecaster, bounds, follow_ratio=follow_ratio)


def _make(setup: Setup) -> Built:
    dispatcher, roles = (
        DopdDispatcher(setup.tune("dopd", DopdDispatchKnobs()), setup.predictor_of_ttft()),
        setup.split(),
    )
    if setup.planner == OWN_PLANNER:
        planner = make_planner(setup, by_role=not setup.stateless, follow_ratio=True)
        return dispatcher, (planner, Settling()) if setup.stateless else (planner,), roles
    if setup.planner == NO_PLANNER and setup.scales:
        return dispatcher, (make_controller(setup),), roles
    if setup.planner == NO_PLANNER or setup.stateless:  # the number is another planner's, or fixed; the ratio is ours
        return dispatcher, (make_controller(setup, RatioController), Settling()), roles
    return dispatcher, (), roles


OWN_PLANNER = "dopd"
POLICIES: Mapping[str, FleetPolicy] = {
    "dopd": FleetPolicy(_make, live=True, flips=True, own_planner=OWN_PLANNER, knobs=KNOBS)
}
