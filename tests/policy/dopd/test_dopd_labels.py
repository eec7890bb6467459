"""DOPD's ratio on a fleet of stateless instances: which roles change, when, and when not."""

from __future__ import annotations

import dataclasses

import pytest
from support.fleets import LinearSteps

from pla_sglang.policy.common.load_meter import LoadSample
from pla_sglang.policy.common.tables import DecodeTable, PrefillTable
from pla_sglang.policy.dopd.labels import RatioController, Settling, share_prefills
from pla_sglang.policy.dopd.planner import FleetPlan, Planner, PlannerKnobs
from pla_sglang.policy.dopd.ratio import kingman_wait_s
from pla_sglang.policy.interface.decisions import Hold, ScaleTo, SetRole
from pla_sglang.policy.interface.fleet import FleetView, InstanceKind, InstanceView, RequestView, Role
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.policy.registry import Setup, build

P, D = Role.PREFILL, Role.DECODE
IDLE = LoadSample(100.0, 100.0, 0.1, 0.1)


class Planned(Planner):
    """Plans what it is told: for the load itself, and for the one that is higher by the margin."""

    def __init__(self, plan: tuple[int, int], careful: tuple[int, int] | None = None) -> None:
        steps = LinearSteps()
        super().__init__(PlannerKnobs(1.0, 8), PrefillTable.profile(steps), DecodeTable.profile(steps))
        self.plans = [plan, careful or plan]

    def plan(self, load: LoadSample) -> FleetPlan:
        prefill, decode = self.plans[load.concurrency > IDLE.concurrency]
        return FleetPlan(prefill, decode, 1.0, load)


def fleet(*roles: Role, fixed: int = 0) -> FleetView:
    return FleetView(
        [
            InstanceView(index, f"i{index}", InstanceKind.STATELESS, role, fixed_role=index < fixed)
            for index, role in enumerate(roles)
        ]
    )


def test_prefill_instances_are_told_the_forecast_length_and_a_timeout_by_their_wait() -> None:
    controller = RatioController(Planned((1, 1)), corrected=False)
    view = fleet(P, P, D)
    assert controller.batching is None
    for index in range(5):
        request = RequestView(f"r{index}", 300 + 100 * index, index / 10)
        controller.on_arrival(request, request.arrival_s)
        controller.on_finish(request, 20, 0.45)
    controller.tick(view, 0.5)
    assert controller.batching is not None
    assert controller.batching.i_next_tokens == 500, "the mean input"
    planner = controller.planner
    service_s, sample = planner.prefill_s(500), LoadSample(500.0, 20.0, 1.0, 10.0, 0.0, 0.08)
    wait_s = kingman_wait_s(5.0, service_s, 0.0, 0.08)
    assert planner.plan_batching(sample, 2).timeout_s == pytest.approx(min(0.5 * wait_s, 0.1))
    hopeless = dataclasses.replace(sample, rate_per_s=1e6)
    assert planner.plan_batching(hopeless, 2).timeout_s == 0.1
    assert planner.plan_batching(dataclasses.replace(sample, input_tokens=1e9), 2).i_next_tokens == 1 << 20


@pytest.mark.parametrize(
    ("plan", "instances", "prefills"),
    [((1, 1), 4, 2), ((3, 1), 4, 3), ((9, 1), 4, 3), ((1, 9), 4, 1), ((1, 3), 2, 1), ((2, 1), 6, 4)],
)
def test_the_fleet_is_shared_in_proportion_to_the_plan(plan: tuple[int, int], instances: int, prefills: int) -> None:
    assert share_prefills(FleetPlan(*plan, 1.0, IDLE), instances) == prefills


def test_the_least_loaded_change_at_once_where_the_phase_can_spare_them() -> None:
    view = fleet(P, D, D, D)
    view.instances[1].running, view.instances[1].context_tokens = 1, 500
    view.instances[2].running, view.instances[2].context_tokens = 1, 100
    actions = RatioController(Planned((3, 1))).follow(IDLE, view)
    assert [(a.instance.index, a.role, a.reason) for a in actions if isinstance(a, SetRole)] == [
        (3, P, FleetReason.DOPD_RATIO),
        (2, Role.DECODE_TO_PREFILL, FleetReason.DOPD_RATIO),
    ]
    assert len(actions) == 2
    back = RatioController(Planned((1, 3))).follow(IDLE, fleet(P, P, P, D))
    assert [a.role for a in back if isinstance(a, SetRole)] == [D, D]


def test_a_phase_that_cannot_spare_any_gives_after_several_plans() -> None:
    controller, view = RatioController(Planned((3, 1), (6, 3))), fleet(P, P, D, D)
    seen = [controller.follow(IDLE, view)[0] for _ in range(3)]
    assert [action.reason for action in seen] == [
        FleetReason.DOPD_HYSTERESIS,
        FleetReason.DOPD_HYSTERESIS,
        FleetReason.DOPD_RATIO,
    ]
    assert isinstance(seen[2], SetRole)


def test_nothing_changes_where_the_ratio_is_right_or_nothing_can() -> None:
    hold = [Hold(FleetReason.DOPD_UNCHANGED)]
    assert RatioController(Planned((2, 2))).follow(IDLE, fleet(P, Role.DECODE_TO_PREFILL, D, D)) == hold
    assert RatioController(Planned((9, 1))).follow(IDLE, fleet(P)) == hold
    assert RatioController(Planned((9, 1))).follow(IDLE, fleet(P, D, D, fixed=3)) == hold


def test_members_of_transitional_pools_settle() -> None:
    view = fleet(P, Role.DECODE_TO_PREFILL, Role.PREFILL_TO_DECODE, Role.DECODE_TO_PREFILL)
    view.instances[3].running = 1
    settled = Settling().tick(view, 1.0)
    assert [(a.instance.index, a.role) for a in settled if isinstance(a, SetRole)] == [(2, D), (1, P)]


def test_live_nothing_is_scaled() -> None:
    setup = Setup(LinearSteps(), kv_capacity_tokens=10_000, ttft_slo_s=1.0, tpot_slo_s=0.1, scales=False)
    ratio, settling = build("dopd", setup).controllers
    assert isinstance(ratio, RatioController)
    assert isinstance(settling, Settling)
    assert not any(isinstance(action, ScaleTo) for action in ratio.follow(IDLE, fleet(P, D)))  # type: ignore[attr-defined]
