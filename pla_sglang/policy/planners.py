"""Planners of how many instances a fleet has, by name (``--planner NAME``): they stand beside any policy.

Where instances keep their roles, a planner plans a number for each. Where they have none, or the policy changes them,
it plans how many there are in all; the roles stay with the policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from pla_sglang.policy.baselines.fleet import make_sla, make_threshold
from pla_sglang.policy.baselines.scalers import SlaKnobs, ThresholdKnobs
from pla_sglang.policy.common.fleet_policy import NO_PLANNER, Built, FleetPolicy, Setup
from pla_sglang.policy.dopd.fleet import make_planner as make_dopd
from pla_sglang.policy.dopd.planner import PlannerKnobs
from pla_sglang.policy.interface.decisions import Controller
from pla_sglang.policy.interface.fleet import Role


class MakePlanner(Protocol):
    """``by_role``: instances keep their roles."""

    def __call__(self, setup: Setup, *, by_role: bool) -> Controller: ...


@dataclasses.dataclass(frozen=True)
class FleetPlanner:
    """How a planner is made, and its knobs as in ``FleetPolicy.knobs``."""

    make: MakePlanner
    knobs: Mapping[str, tuple[type, ...]]


PLANNERS: Mapping[str, FleetPlanner] = {
    "dopd": FleetPlanner(make_dopd, {"dopd": (PlannerKnobs,)}),
    "threshold": FleetPlanner(make_threshold, {"threshold": (ThresholdKnobs,)}),
    "sla": FleetPlanner(make_sla, {"sla": (SlaKnobs,)}),
}


def plans_by_role(policy: FleetPolicy, setup: Setup, roles: Sequence[Role]) -> bool:
    """Instances with ``roles`` at the start keep them."""
    return not (policy.flips and setup.stateless) and any(role is not Role.MIXED for role in roles)


def with_planner(policy: FleetPolicy, name: str) -> FleetPolicy:
    """``policy`` with this planner as its last controller; as it is for no planner, and for one that it has itself."""
    if name in (NO_PLANNER, policy.own_planner):
        return policy
    planner = PLANNERS[name]

    def make(setup: Setup) -> Built:
        dispatcher, controllers, roles = policy.make(setup)
        added = planner.make(setup, by_role=plans_by_role(policy, setup, roles))
        return dispatcher, (*controllers, added), roles

    parts = {part: policy.knobs.get(part, ()) for part in (*policy.knobs, *planner.knobs)}
    knobs = {part: tuple(dict.fromkeys((*known, *planner.knobs.get(part, ())))) for part, known in parts.items()}
    return dataclasses.replace(policy, make=make, knobs=knobs)
