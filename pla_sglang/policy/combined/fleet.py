"""The combination of Arrow, DOPD, STAR and PLA-Serve, by name."""

from __future__ import annotations

from collections.abc import Mapping

from pla_sglang.policy.arrow.fleet import KNOBS as ARROW_KNOBS
from pla_sglang.policy.arrow.fleet import make_policy as make_arrow
from pla_sglang.policy.arrow.policy import ArrowPolicy
from pla_sglang.policy.combined.colocation import ColocationKnobs, ColocationMode
from pla_sglang.policy.combined.cost import CostKnobs, InstanceCost
from pla_sglang.policy.combined.policy import CombinedKnobs, CombinedPolicy, Parts
from pla_sglang.policy.combined.stall_budget import InPlace, InPlaceKnobs
from pla_sglang.policy.common.dispatch import split_roles
from pla_sglang.policy.common.eviction import EvictionCost, EvictionKnobs
from pla_sglang.policy.common.fleet_policy import NO_PLANNER, Built, FleetPolicy, Setup
from pla_sglang.policy.dopd.dispatch import DopdDispatcher, DopdDispatchKnobs
from pla_sglang.policy.dopd.fleet import KNOBS as DOPD_KNOBS
from pla_sglang.policy.dopd.fleet import make_controller as make_dopd
from pla_sglang.policy.interface.fleet import Role
from pla_sglang.policy.pla.fitted_boundary import FittedBoundary
from pla_sglang.policy.pla.pressure import PressureController, PressureKnobs
from pla_sglang.policy.pla.spatial import SpatialDispatcher, SpatialKnobs
from pla_sglang.policy.star.fleet import KNOBS as STAR_KNOBS
from pla_sglang.policy.star.fleet import make_controller as make_star

# New tokens at which a prefill belongs to the pool of long ones, in a fleet with roles. A class that is busy shares the
# whole pool, so that a wrong boundary makes nobody late. Half and twice as much moved no share in target on five named
# workloads at short spans, where no constant of fleets with roles did.
BOUNDARY_TOKENS = 256
IN_PLACE_TOKENS = 2048  # what it costs decides, and its own guard on the stall (bench/lab/docs/fleets.md)


def _mode(setup: Setup, arrow: ArrowPolicy) -> ColocationMode:
    knobs = setup.tune("unite", ColocationKnobs())
    return ColocationMode(knobs, arrow, setup.steps, mixes=setup.riding_tokens is not None)


def _cost(setup: Setup, arrow: ArrowPolicy) -> InstanceCost:
    eviction = EvictionCost(setup.tune("eviction", EvictionKnobs()), arrow.predictor)
    return InstanceCost(setup.tune("cost", CostKnobs()), arrow, setup.steps, eviction, small_first=setup.small_first)


def _always_colocated(setup: Setup) -> Built:
    """The combination where no role can change and no request can move.

    It takes the least cost of both phases over the instances that do both, and Arrow's request scheduling over others.
    """
    arrow = make_arrow(setup, adaptive=False)
    parts = Parts(arrow, unite=_mode(setup, arrow), cost=_cost(setup, arrow))
    policy = CombinedPolicy(setup.tune("combined", CombinedKnobs()), parts)
    return policy, (policy,), split_roles(setup.instances, setup.prefills or 0)


def _combined(setup: Setup, *, scaling: bool = False, unite: bool = True) -> Built:
    if unite and not setup.stateless:
        return _always_colocated(setup)
    arrow = make_arrow(setup)
    cost = _cost(setup, arrow) if unite else None
    boundary = FittedBoundary(fixed_tokens=setup.boundary_tokens or BOUNDARY_TOKENS)
    local = setup.tune("dopd", DopdDispatchKnobs(local_max_tokens=IN_PLACE_TOKENS))
    parts = Parts(
        arrow,
        in_place=InPlace(setup.tune("in_place", InPlaceKnobs()), arrow, setup.steps, setup.riding_tokens),
        local=DopdDispatcher(local, arrow.predictor),
        spatial=SpatialDispatcher(SpatialKnobs(setup.ttft_slo_s, spill_at=1.0), arrow.predictor, boundary),
        pressure=PressureController(PressureKnobs(setup.ttft_slo_s), arrow.predictor),
        star=make_star(setup, balance=False) if setup.migrates else None,
        planner=make_dopd(setup) if scaling and setup.planner == NO_PLANNER else None,
        unite=_mode(setup, arrow) if unite else None,
        cost=cost,
    )
    policy = CombinedPolicy(setup.tune("combined", CombinedKnobs()), parts)
    return policy, (policy,), [Role.MIXED] * setup.instances if unite else setup.split()


_KNOBS: Mapping[str, tuple[type, ...]] = {
    "combined": (CombinedKnobs,),
    "in_place": (InPlaceKnobs,),
    "dopd": (DopdDispatchKnobs,),
    **ARROW_KNOBS,
    **STAR_KNOBS,
}

_COLOCATED: Mapping[str, tuple[type, ...]] = {
    "unite": (ColocationKnobs,),
    "cost": (CostKnobs,),
    "eviction": (EvictionKnobs,),
}

POLICIES: Mapping[str, FleetPolicy] = {
    "combined": FleetPolicy(_combined, live=True, flips=True, knobs={**_KNOBS, **_COLOCATED}),
    "combined-roles": FleetPolicy(lambda setup: _combined(setup, unite=False), live=True, flips=True, knobs=_KNOBS),
    "combined-scaling": FleetPolicy(  # DOPD plans counts of roles
        lambda setup: _combined(setup, scaling=True, unite=False), knobs={**_KNOBS, **DOPD_KNOBS}
    ),
}
