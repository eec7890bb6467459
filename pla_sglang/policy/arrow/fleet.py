"""Arrow by name, with and without changes of roles."""

from __future__ import annotations

from collections.abc import Mapping

from pla_sglang.policy.arrow.policy import ArrowKnobs, ArrowPolicy
from pla_sglang.policy.arrow.role_switches import RoleSwitchKnobs
from pla_sglang.policy.common.fleet_policy import Built, FleetPolicy, Setup, on_static_split
from pla_sglang.policy.common.predictor import PredictorKnobs

KNOBS: Mapping[str, tuple[type, ...]] = {
    "arrow": (ArrowKnobs, RoleSwitchKnobs),
    "predictor": (PredictorKnobs,),
}


def make_policy(setup: Setup, *, adaptive: bool = True) -> ArrowPolicy:
    """``adaptive``: it changes roles."""
    flips, room = setup.tune("arrow", RoleSwitchKnobs()), {"": setup.running_tokens()}
    knobs = ArrowKnobs(setup.ttft_slo_s, setup.tpot_slo_s, room, flips, adaptive=adaptive)
    return ArrowPolicy(setup.tune("arrow", knobs), setup.predictor_of_ttft(), setup.running_tokens)


def _make(setup: Setup) -> Built:
    policy = make_policy(setup)
    return policy, (policy,), setup.split()


POLICIES: Mapping[str, FleetPolicy] = {
    "arrow": FleetPolicy(_make, live=True, flips=True, knobs=KNOBS),
    "arrow-no-flips": FleetPolicy(
        on_static_split(lambda setup: make_policy(setup, adaptive=False)), live=True, fixed_split=True
    ),
}
