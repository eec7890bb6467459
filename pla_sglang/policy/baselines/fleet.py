"""The baselines by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from random import Random

from pla_sglang.policy.baselines.dispatch import CacheAware, MinimalLoad, RoundRobin, TwoChoices, least_requests
from pla_sglang.policy.baselines.migration import LoadMigration
from pla_sglang.policy.baselines.scalers import (
    SlaKnobs,
    SlaScaler,
    ThresholdKnobs,
    ThresholdPlanner,
    ThresholdScaler,
)
from pla_sglang.policy.common.dispatch import least_tokens
from pla_sglang.policy.common.fleet_policy import (
    NO_PLANNER,
    PAPER_FORECASTER,
    Built,
    FleetPolicy,
    Setup,
    on_mixed_instances,
    on_static_split,
)
from pla_sglang.policy.common.scaling import Limits, make_scaling


def _minimal_load(setup: Setup) -> MinimalLoad:
    return MinimalLoad(setup.predictor_of_ttft())


def _load_migration(setup: Setup) -> Built:
    return least_tokens(), (LoadMigration(setup.move_interval_s, setup.client_gain()),), setup.split()


def _threshold_knobs(setup: Setup) -> ThresholdKnobs:
    return ThresholdKnobs(setup.ttft_slo_s, role_max=max(1, setup.instances_max // 2))


def _threshold(setup: Setup) -> Built:
    dispatcher = _minimal_load(setup)
    scaler = ThresholdScaler(_threshold_knobs(setup), dispatcher.predictor)
    return dispatcher, (scaler,) if setup.planner == NO_PLANNER else (), setup.split()


def _sla_knobs(setup: Setup) -> SlaKnobs:
    return SlaKnobs(
        setup.tpot_slo_s,
        setup.concurrency(),
        role_max=max(1, setup.instances_max // 2),
        interval_s=setup.plan_interval_s,
    )


def _sla(setup: Setup) -> Built:
    scaler = SlaScaler(_sla_knobs(setup), *setup.tables(), setup.make_forecaster(PAPER_FORECASTER))
    return _minimal_load(setup), (scaler,) if setup.planner == NO_PLANNER else (), setup.split()


def make_threshold(setup: Setup, *, by_role: bool) -> ThresholdPlanner:
    """Beside a policy (``policy/planners.py``). ``by_role``: instances keep their roles; else it plans the total."""
    knobs = setup.tune("threshold", _threshold_knobs(setup))
    limits = Limits(setup.instances_min, setup.instances_max)
    return ThresholdPlanner(knobs, setup.predictor_of_ttft(), make_scaling(limits, by_role=by_role))


def make_sla(setup: Setup, *, by_role: bool) -> SlaScaler:
    """As ``make_threshold``."""
    knobs = setup.tune("sla", dataclasses.replace(_sla_knobs(setup), headroom=setup.headroom))
    limits = Limits(setup.instances_min, setup.instances_max, cool_down_s=knobs.cool_down_s)
    scaling = make_scaling(limits, by_role=by_role)
    return SlaScaler(knobs, *setup.tables(), setup.make_forecaster(), scaling=scaling)


POLICIES: Mapping[str, FleetPolicy] = {
    "round-robin": FleetPolicy(on_mixed_instances(lambda setup: RoundRobin()), live=True, length_blind=True),
    "least-requests": FleetPolicy(on_mixed_instances(lambda setup: least_requests()), live=True, length_blind=True),
    "least-tokens": FleetPolicy(on_mixed_instances(lambda setup: least_tokens()), live=True, length_blind=True),
    "two-choices": FleetPolicy(
        on_mixed_instances(lambda setup: TwoChoices(Random(setup.seed))), live=True, length_blind=True
    ),
    "cache-aware": FleetPolicy(on_mixed_instances(lambda setup: CacheAware()), live=True),
    "static-pd-round-robin": FleetPolicy(
        on_static_split(lambda setup: RoundRobin()), live=True, length_blind=True, fixed_split=True
    ),
    "static-pd": FleetPolicy(on_static_split(_minimal_load), live=True, fixed_split=True),
    "minimal-load": FleetPolicy(on_static_split(_minimal_load), live=True, fixed_split=True),
    "load-migration": FleetPolicy(_load_migration, live=True, fixed_split=True, migrates=True),
    "threshold-scaler": FleetPolicy(_threshold, scales=True),
    "sla-scaler": FleetPolicy(_sla, scales=True),
}
