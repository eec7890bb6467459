"""Every router and planner policy by name (``--policy NAME``), built from one description of the fleet."""

from __future__ import annotations

from collections.abc import Mapping

from pla_sglang.common.checks import describe_allowed
from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.arrow import fleet as arrow
from pla_sglang.policy.baselines import fleet as baselines
from pla_sglang.policy.combined import fleet as combined
from pla_sglang.policy.common.fleet_policy import (
    DEFAULT_FORECASTER,
    FORECASTERS,
    PAPER_FORECASTER,
    FleetPolicy,
    Setup,
    on_mixed_instances,
    on_static_split,
)
from pla_sglang.policy.common.joining import join_pools
from pla_sglang.policy.dopd import fleet as dopd
from pla_sglang.policy.interface.decisions import PolicySet
from pla_sglang.policy.interface.fleet import Role
from pla_sglang.policy.interface.prefill import PrefillClass
from pla_sglang.policy.pla import fleet as pla
from pla_sglang.policy.planners import with_planner
from pla_sglang.policy.star import fleet as star

__all__ = [  # with what a policy in a package of its own is made from
    "DEFAULT_FORECASTER",
    "FORECASTERS",
    "PAPER_FORECASTER",
    "POLICIES",
    "FleetPolicy",
    "PolicySet",
    "Setup",
    "build",
    "build_policy",
    "live_policy_names",
    "on_mixed_instances",
    "on_static_split",
    "policy_names",
]

POLICIES: Mapping[str, FleetPolicy] = {
    **baselines.POLICIES,
    **pla.POLICIES,
    **arrow.POLICIES,
    **star.POLICIES,
    **dopd.POLICIES,
    **combined.POLICIES,
}


def policy_names() -> list[str]:
    """In the order of the docs: baselines, then the systems."""
    return list(POLICIES)


def live_policy_names() -> list[str]:
    """Those of ``policy_names`` that the router offers."""
    return [name for name, policy in POLICIES.items() if policy.live]


def build(name: str, setup: Setup) -> PolicySet:
    """Fresh objects for one run. Raises ConfigError for a name that is not known, or a setup that does not fit it."""
    policy = POLICIES.get(name)
    if policy is None:
        raise ConfigError(f"policy {name!r} is not known; {describe_allowed(name, POLICIES)}")
    return build_policy(name, policy, setup)


def build_policy(name: str, policy: FleetPolicy, setup: Setup) -> PolicySet:
    """Fresh objects of ``policy`` for one run, called ``name``, with the planner of ``setup`` beside it.

    Raises ConfigError for a setup that does not fit it.
    """
    policy = with_planner(policy, setup.planner)
    for knob_name in setup.knobs:
        policy.find_knob(knob_name)
    dispatcher, controllers, roles = policy.make(setup)
    classes = _length_classes(roles) if policy.pools else ()
    return PolicySet(name, dispatcher, controllers, tuple(roles), classes)


def _length_classes(roles: list[Role]) -> tuple[PrefillClass | None, ...]:
    """Pools over the prefill instances; one instance alone takes both classes."""
    prefills = [index for index, role in enumerate(roles) if role is not Role.DECODE]
    if len(prefills) < 2:
        return ()
    classes: list[PrefillClass | None] = [None] * len(roles)
    for index, length_class in zip(prefills, join_pools((), len(prefills)), strict=True):
        classes[index] = length_class
    return tuple(classes)
