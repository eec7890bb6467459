"""PLA-Serve's spatial disaggregation: pools of instances for short and for long prompts."""

from __future__ import annotations

from collections.abc import Mapping

from pla_sglang.policy.common.curve import solve_nonnegative
from pla_sglang.policy.common.fleet_policy import Built, FleetPolicy, Setup
from pla_sglang.policy.pla.averaged_pressure import AveragedPressure
from pla_sglang.policy.pla.fitted_boundary import fleet_boundary
from pla_sglang.policy.pla.pressure import PressureKnobs
from pla_sglang.policy.pla.spatial import SpatialDispatcher, SpatialKnobs


def _make(setup: Setup) -> Built:
    predictor = setup.predictor_of_ttft()
    boundary = fleet_boundary(setup.steps, solve_nonnegative, setup.boundary_tokens)
    dispatcher = SpatialDispatcher(SpatialKnobs(setup.ttft_slo_s), predictor, boundary)
    knobs = PressureKnobs(
        setup.ttft_slo_s,
        tau=setup.pressure_hysteresis,
        cool_down_s=setup.pressure_cool_down_s,
        interval_s=setup.pressure_interval_s,
    )
    return dispatcher, (AveragedPressure(knobs, predictor),), setup.split()


POLICIES: Mapping[str, FleetPolicy] = {"pla": FleetPolicy(_make, live=True, pools=True, fixed_split=True)}
