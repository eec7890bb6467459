"""Planners beside any policy: who gets which, limits that hold, how far they look ahead, and who leaves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fleets import LinearSteps, decode, fleet, mixed, prefill, request

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.baselines.scalers import SlaScaler, ThresholdPlanner, ThresholdScaler
from pla_sglang.policy.common import fleet_policy
from pla_sglang.policy.common.fleet_policy import PLANNER_NAMES
from pla_sglang.policy.common.load_meter import LoadSample
from pla_sglang.policy.common.scaling import Limits, PhaseScaling, Scaling, Wanted, choose_leaving, steps_ahead
from pla_sglang.policy.common.start_times import KEPT, StartTimes
from pla_sglang.policy.dopd.labels import RatioController
from pla_sglang.policy.dopd.planner import DopdController
from pla_sglang.policy.dopd.total import TotalController
from pla_sglang.policy.interface import fleet as policy_fleet
from pla_sglang.policy.interface.decisions import (
    FleetAction,
    Hold,
    MeasuredPass,
    PolicySet,
    PrefillSample,
    ScaleTo,
    SetRole,
)
from pla_sglang.policy.interface.fleet import COLD_S, FleetView, InstanceKind, InstanceState, InstanceView, Role
from pla_sglang.policy.interface.reasons import FleetReason as R
from pla_sglang.policy.planners import PLANNERS, plans_by_role, with_planner
from pla_sglang.policy.registry import POLICIES, Setup, build, policy_names
from pla_sglang.policy.runner import Effects, FleetRunner

SETUP = Setup(LinearSteps(), kv_capacity_tokens=200_000, ttft_slo_s=2.0, tpot_slo_s=0.1, instances=6, prefills=3)
NAMES = tuple(PLANNERS)


def built(policy: str, planner: str, **changes: Any) -> PolicySet:
    return build(policy, dataclasses.replace(SETUP, planner=planner, **changes))


def planner_of(policy: PolicySet) -> Any:
    return next(one for one in policy.controllers if isinstance(one, (DopdController, ThresholdScaler, SlaScaler)))


# -- who gets which ----------------------------------------------------------------------------------------------------


def test_names_are_those_of_a_setup() -> None:
    assert ("none", *NAMES) == PLANNER_NAMES
    with pytest.raises(ConfigError, match="planner 'x' is not known; allowed: none, dopd, threshold, sla"):
        dataclasses.replace(SETUP, planner="x")
    with pytest.raises(ConfigError, match="instances_max"):
        dataclasses.replace(SETUP, planner="dopd", instances_min=4, instances_max=3)


@pytest.mark.parametrize("name", policy_names())
def test_no_planner_leaves_a_policy_as_it_is(name: str) -> None:
    assert with_planner(POLICIES[name], "none") is POLICIES[name]


@pytest.mark.parametrize("planner", NAMES)
@pytest.mark.parametrize("name", policy_names())
def test_every_policy_has_one_planner(name: str, planner: str) -> None:
    policy = built(name, planner)
    found = [one for one in policy.controllers if isinstance(one, (DopdController, ThresholdScaler, SlaScaler))]
    planning = [one for one in found if type(one) is not RatioController]  # that one changes roles alone
    assert len(planning) == 1
    assert planning[0] in policy.observers()
    assert getattr(policy.dispatcher, "parts", None) is None or policy.dispatcher.parts.planner is None


@pytest.mark.parametrize(
    ("name", "stateless", "by_role"),
    [
        ("static-pd", True, True),
        ("static-pd", False, True),
        ("star", True, True),
        ("arrow", True, False),
        ("dopd", True, False),
        ("combined", True, False),
        ("combined", False, True),  # stock engines in a split keep their kinds
        ("least-tokens", True, True),  # a split was asked for
    ],
)
def test_fixed_roles_are_planned_one_by_one(name: str, stateless: bool, by_role: bool) -> None:
    setup = dataclasses.replace(SETUP, stateless=stateless)
    assert plans_by_role(POLICIES[name], setup, build(name, setup).roles) is by_role
    assert not plans_by_role(POLICIES[name], setup, [Role.MIXED] * 6)
    planner = planner_of(built(name, "dopd", stateless=stateless))
    assert isinstance(planner, TotalController) is not by_role


def test_dopd_plans_once_by_itself_and_leaves_the_number_to_another() -> None:
    own = built("dopd", "dopd").controllers
    assert [type(one) for one in own if isinstance(one, DopdController)] == [TotalController]
    other = built("dopd", "sla").controllers
    assert [type(one) for one in other if isinstance(one, (DopdController, SlaScaler))] == [RatioController, SlaScaler]
    stock = built("dopd", "threshold", stateless=False).controllers
    assert [type(one) for one in stock] == [ThresholdPlanner]


def test_knobs_of_the_planner_are_on_offer() -> None:
    planner = planner_of(built("least-tokens", "dopd", knobs={"dopd.down_intervals": 7}))
    assert planner.limits.down_intervals == 7
    assert planner_of(built("combined", "sla", knobs={"sla.cool_down_s": 9.0})).knobs.cool_down_s == 9.0
    assert planner_of(built("arrow", "threshold", knobs={"threshold.high": 0.6})).knobs.high == 0.6
    with pytest.raises(ConfigError, match="not known to the policy"):
        built("least-tokens", "sla", knobs={"dopd.down_intervals": 7})


# -- one number --------------------------------------------------------------------------------------------------------


def wanted(count: int, careful: int | None = None) -> Wanted:
    return Wanted(count, count if careful is None else careful, R.DOPD_TOTAL, R.DOPD_UNCHANGED, R.DOPD_HYSTERESIS)


def starting(view: FleetView, *roles: Role) -> FleetView:
    for role in roles:
        view.add(InstanceView(len(view.instances), "new", role=role, state=InstanceState.STARTING))
    return view


IDLE = (mixed(), mixed(), mixed())
DECISIONS: dict[str, tuple[FleetView, Wanted, int, int, R]] = {
    # what is wanted; instances to start, to drain, and the reason
    "more": (fleet(*IDLE), wanted(5), 2, 0, R.DOPD_TOTAL),
    "as many": (fleet(*IDLE), wanted(3), 0, 0, R.DOPD_UNCHANGED),
    "fewer": (fleet(*IDLE), wanted(2), 0, 1, R.DOPD_TOTAL),
    "fewer, with care": (fleet(*IDLE), wanted(1, 2), 0, 1, R.DOPD_TOTAL),
    "fewer, not with care": (fleet(*IDLE), wanted(1, 3), 0, 0, R.DOPD_HYSTERESIS),
    "below the least": (fleet(*IDLE), wanted(0), 0, 1, R.DOPD_TOTAL),
    "above the most": (fleet(*IDLE), wanted(99), 5, 0, R.DOPD_TOTAL),
    "starting ones count once": (starting(fleet(*IDLE), Role.MIXED, Role.PREFILL), wanted(6), 1, 0, R.DOPD_TOTAL),
    "no leave while some start": (starting(fleet(*IDLE), Role.MIXED, Role.MIXED), wanted(3), 0, 0, R.STARTING),
    "but of those beyond the plan": (starting(fleet(*IDLE), Role.MIXED), wanted(2), 0, 1, R.DOPD_TOTAL),
    "roles are added up": (fleet(prefill(), decode(), mixed()), wanted(4), 1, 0, R.DOPD_TOTAL),
    "one a phase stays": (fleet(prefill(), decode(), decode()), wanted(2), 0, 1, R.DOPD_TOTAL),
    "a phase has one each": (fleet(prefill(), prefill(role_epoch=1), decode()), wanted(2), 0, 1, R.DOPD_TOTAL),
}


@pytest.mark.parametrize(("view", "want", "start", "leave", "reason"), DECISIONS.values(), ids=DECISIONS)
def test_a_total(view: FleetView, want: Wanted, start: int, leave: int, reason: R) -> None:
    action = Scaling(Limits(2, 8)).decide(want, view, 0.0)
    assert action.reason is reason
    if isinstance(action, ScaleTo):
        assert (action.role, action.start, len(action.drain)) == (Role.MIXED, start, leave)
    else:
        assert (start, leave) == (0, 0)


def test_the_least_loaded_leave_and_no_phase_loses_its_last() -> None:
    view = fleet(prefill(), prefill(queued_tokens=5), decode(context_tokens=9), decode(context_tokens=7))
    assert [one.name for one in choose_leaving(view, view.ready, 4)] == ["i0", "i3"]
    pair = fleet(prefill(), decode())
    assert Scaling(Limits(1, 8)).decide(wanted(1), pair, 0.0) == Hold(R.LAST_OF_PHASE)
    stock = fleet(mixed(kind=InstanceKind.UNIFIED), mixed(kind=InstanceKind.UNIFIED))
    assert len(choose_leaving(stock, stock.ready, 2)) == 1


def test_instances_leave_after_several_plans_and_a_pause() -> None:
    scaling, view = Scaling(Limits(1, 8, down_intervals=2, cool_down_s=60.0)), fleet(*IDLE)
    assert scaling.decide(wanted(2), view, 0.0) == Hold(R.DOPD_HYSTERESIS)
    first = scaling.decide(wanted(2), view, 10.0)
    assert isinstance(first, ScaleTo)
    view.set_state(first.drain[0], InstanceState.DRAINING)
    reasons = [scaling.decide(wanted(1), view, now_s).reason for now_s in (20.0, 30.0, 69.0, 70.0)]
    assert reasons == [R.DOPD_HYSTERESIS, R.COOL_DOWN, R.COOL_DOWN, R.DOPD_TOTAL]


def test_both_phases_together_stay_within_the_limits() -> None:
    scaling, view = PhaseScaling(Limits(2, 6), together=True), fleet(prefill(), prefill(), decode())
    actions = scaling.decide(wanted(9), wanted(9), view, 0.0)
    assert [getattr(action, "count", None) for action in actions] == [5, None], "the other phase has one of six"
    full = fleet(*[prefill()] * 3, *[decode()] * 3)
    assert scaling.decide(wanted(3), wanted(4), full, 0.0) == [Hold(R.DOPD_UNCHANGED)] * 2
    swap = scaling.decide(wanted(2), wanted(4), full, 0.0)
    assert [action.count for action in swap if isinstance(action, ScaleTo)] == [2, 4]
    assert scaling.decide(Hold(R.COOL_DOWN), wanted(0), fleet(prefill(), decode()), 0.0)[0] == Hold(R.COOL_DOWN)


COUNTS = st.integers(0, 5)


@given(
    ready=st.tuples(COUNTS, COUNTS, COUNTS),
    starts=st.tuples(COUNTS, COUNTS, COUNTS),
    limits=st.tuples(st.integers(1, 6), st.integers(0, 6)),
    plans=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=8),
    by_role=st.booleans(),
)
def test_limits_are_never_left(
    ready: tuple[int, ...],
    starts: tuple[int, ...],
    limits: tuple[int, int],
    plans: list[tuple[int, int]],
    by_role: bool,
) -> None:
    least, most = limits[0] + by_role, limits[0] + by_role + limits[1]
    roles = (Role.PREFILL, Role.DECODE) if by_role else (Role.PREFILL, Role.DECODE, Role.MIXED)
    view = FleetView(
        [
            InstanceView(index, f"i{index}", role=role)
            for index, role in enumerate(role for role, count in zip(roles, ready, strict=False) for _ in range(count))
        ]
    )
    starting(view, *(role for role, count in zip(roles, starts, strict=False) for _ in range(count)))
    phases, total = PhaseScaling(Limits(least, most), together=True), Scaling(Limits(least, most))
    for first, second in plans:
        before = len(view.ready), sum(view.starting.values())
        if by_role:
            actions = phases.decide(wanted(first), wanted(second), view, 0.0)
        else:
            actions = [total.decide(wanted(first, second), view, 0.0)]
        change(view, actions)
        have = sum(before)
        after = len(view.ready) + sum(view.starting.values())
        assert min(least, have) <= after <= max(most, have)
        if after < have and not by_role:
            assert len(view.ready) >= min(max(first, least), most), "what is ready is enough for the plan"
        if before[0]:
            assert view.ready


def change(view: FleetView, actions: list[FleetAction]) -> None:
    """Carries out what scales, and checks that an action says what it does."""
    for action in actions:
        if not isinstance(action, ScaleTo):
            continue
        phases = bool(view.prefill_capable()), bool(view.decode_capable())
        assert not (action.start and action.drain)
        for one in action.drain:
            view.set_state(one, InstanceState.DRAINING)
        starting(view, *[action.role] * action.start)
        members = view.ready if action.role is Role.MIXED else view.by_role[action.role]
        count = sum(view.starting.values()) if action.role is Role.MIXED else view.starting[action.role]
        assert len(members) + count == action.count
        assert (bool(view.prefill_capable()), bool(view.decode_capable())) == phases


# -- looking ahead -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("startup_s", "steps"), [(None, 1), (0.0, 1), (0.1, 2), (10.0, 2), (10.1, 3), (30.0, 4)])
def test_how_far_a_plan_looks(startup_s: float | None, steps: int) -> None:
    view = fleet(mixed())
    view.startup_s = startup_s
    assert steps_ahead(view, 10.0) == steps
    assert view.without(frozenset(view.ready)).startup_s == startup_s


def first_order_s(planner: str, startup_s: float) -> float:
    """When the first instance is ordered while the load rises from interval to interval."""
    policy = built("combined", planner, plan_interval_s=10.0, forecaster="holt_winters", prefills=None, instances=2)
    controller: Any = planner_of(policy)
    view = fleet(mixed(), mixed())
    view.startup_s = startup_s
    controller.tick(view, 0.0)
    for interval in range(40):
        count = 2 * (1 + interval)
        for index in range(count):
            now_s = 10.0 * (interval + index / count)
            controller.on_arrival(request(300), now_s)
            controller.on_finish(request(300), 100, now_s)
        if any(isinstance(action, ScaleTo) and action.start for action in controller.tick(view, 10.0 * (interval + 1))):
            return 10.0 * (interval + 1)
    raise AssertionError("nothing was ordered")


@pytest.mark.parametrize("planner", ["dopd", "sla"])
def test_a_long_start_is_ordered_earlier(planner: str) -> None:
    assert first_order_s(planner, 30.0) < first_order_s(planner, 0.0)


class Rising:
    """Falls in the coming interval, and is high in the third."""

    name = "rising"

    def add(self, value: float) -> None:
        pass

    def next_value(self, steps: int = 1) -> float | None:
        return 100.0 if steps == 3 else 1.0


@pytest.mark.parametrize("planner", ["dopd", "sla"])
@pytest.mark.parametrize(("startup_s", "leaves"), [(None, True), (10.0, True), (20.0, False)])
def test_none_leaves_that_is_needed_before_another_could_be_there(
    planner: str, startup_s: float | None, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_policy, "FORECASTERS", {"rising": Rising})
    policy = built(
        "combined",
        planner,
        plan_interval_s=10.0,
        forecaster="rising",
        instances_min=1,
        prefills=None,
        knobs={"dopd.down_intervals": 1} if planner == "dopd" else {},
    )
    controller = planner_of(policy)
    view = fleet(*[mixed()] * 6)
    view.startup_s = startup_s
    controller.tick(view, 0.0)
    actions = controller.tick(view, 10.0)
    assert any(isinstance(action, ScaleTo) and action.drain for action in actions) is leaves


def test_few_requests_at_once_in_a_large_fleet_are_more_in_a_small_one() -> None:
    planner = planner_of(built("combined", "dopd")).planner
    light = LoadSample(input_tokens=300.0, output_tokens=100.0, concurrency=2.0, rate_per_s=20.0)
    full = planner.at_full_batches(light, 60.0)
    step_s = planner.step_s(planner.knobs.concurrency_max, 350.0)
    assert full.concurrency == pytest.approx(20.0 * 100.0 * step_s)


def test_a_backlog_is_work_that_is_done_once() -> None:
    """Of 4,900 requests too many, each there for a tenth of the time, 490 are there on average."""
    planner = planner_of(built("combined", "dopd")).planner
    queued = LoadSample(input_tokens=300.0, output_tokens=100.0, concurrency=5000.0, rate_per_s=20.0)
    full, answer_s = planner.full_concurrency(queued), planner.full_concurrency(queued) / 20.0
    found = planner.at_full_batches(queued, 10 * answer_s).concurrency
    assert found == pytest.approx(full + (5000.0 - full) / 10)
    assert planner.at_full_batches(queued, answer_s / 2).concurrency == 5000.0, "answers that outlast the horizon"
    idle = dataclasses.replace(queued, rate_per_s=0.0)
    assert planner.at_full_batches(idle, 10.0).concurrency == 5000.0, "how long they take is not known"


def test_phases_on_one_instance_are_rounded_up_together() -> None:
    """10 requests a second of 110 ms each and 0.4 of a decode instance: two that do both, three that do not.

    What waits as well does not count as work, but has to fit.
    """
    controller = planner_of(built("combined", "dopd", instances_min=1))
    concurrency_max = controller.planner.knobs.concurrency_max
    load = LoadSample(100.0, 100.0, 0.3 * concurrency_max, 10.0, 0.0, 0.0)
    plan = controller.planner.plan(load)
    assert (plan.united, plan.prefill + plan.decode) == (2, 3)
    crowd = dataclasses.replace(load, concurrency=3.5 * concurrency_max)
    assert controller.planner.plan(crowd).united == 4
    (action,) = controller.follow(load, fleet(mixed()))
    assert action.count == plan.united
    (action,) = controller.follow(load, fleet(prefill(), decode()))
    assert action.count == plan.prefill + plan.decode


def test_dopd_sets_roles_among_those_that_stay() -> None:
    controller = planner_of(built("dopd", "dopd", knobs={"dopd.down_intervals": 1}))
    view = fleet(prefill(), decode(context_tokens=9), *[decode(context_tokens=9)] * 4)
    load = LoadSample(100.0, 10.0, 1.0, 5.0, 0.0, 0.0)
    actions = controller.follow(load, view)
    assert isinstance(actions[0], ScaleTo)
    leaving = set(actions[0].drain)
    assert leaving
    assert not any(isinstance(action, SetRole) and action.instance in leaving for action in actions)


# -- what is measured --------------------------------------------------------------------------------------------------


def test_start_times_are_the_median_of_the_last() -> None:
    times = StartTimes(3)
    assert times.estimate_s() is None
    seen = []
    for seconds in (20.0, 300.0, 22.0, 24.0, 0.0):
        times.add(seconds)
        seen.append(times.estimate_s())
    assert seen == [20.0, 160.0, 22.0, 24.0, 22.0]
    with pytest.raises(ConfigError, match="start-up seconds"):
        times.add(-1.0)


@pytest.mark.parametrize(("kept", "odd", "followed"), [(KEPT // 2, 0, 2), (KEPT, 2, 3), (2 * KEPT, 4, 6)])
def test_how_many_start_times_are_kept(kept: int, odd: int, followed: int) -> None:
    """Half and twice as many: starts out of the ordinary that change nothing, and starts of another length until the
    estimate is theirs."""

    def estimate(slow: int) -> float | None:
        times = StartTimes(kept)
        for seconds in [20.0] * kept + [300.0] * slow:
            times.add(seconds)
        return times.estimate_s()

    assert estimate(odd) == 20.0
    assert estimate(odd + 1) != 20.0
    assert [estimate(slow) == 300.0 for slow in range(followed + 1)] == [False] * followed + [True]


@pytest.mark.parametrize("times", [0.5, 1.0, 2.0])
def test_how_long_an_instance_is_cold(times: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half and twice as long, where passes of the first 6 s take eight times as long as they should, and later ones
    1.2 times: predictions for all instances, over what they should be."""
    monkeypatch.setattr(policy_fleet, "COLD_S", times * COLD_S)
    policy = built("arrow", "dopd")
    view = fleet(*[prefill() if role is Role.PREFILL else decode() for role in policy.roles])
    runner = FleetRunner(policy, view, Effects())
    predictor: Any = policy.dispatcher.predictor  # type: ignore[attr-defined]
    fresh, warm = view.instances[:2]
    fresh.ready_s = 100.0
    factors = []
    for half in range(80):
        pass_s = predictor.curve(fresh).time_s(990, 0) * (8.0 if half < 12 else 1.2)
        step = MeasuredPass(990, 990 * 990, 0, pass_s)
        runner.prefilled(PrefillSample(fresh, 990, 990 * 990, 0, 1, pass_s, (step,)), 100.0 + half / 2)
        factors.append(predictor.factor(warm))
    if times < 1.0:
        assert max(factors) > 4.0, "what is cold is taken for a load of all"
        assert factors[40] > 1.3, "for a long time"
    else:
        assert max(factors) <= 1.2
        assert factors[40 if times == 1.0 else 60] == pytest.approx(1.2, abs=0.03), "later by as much"


def test_a_cold_instance_teaches_nobody() -> None:
    policy = built("arrow", "dopd")
    view = fleet(*[prefill() if role is Role.PREFILL else decode() for role in policy.roles])
    runner = FleetRunner(policy, view, Effects())
    predictor: Any = policy.dispatcher.predictor  # type: ignore[attr-defined]
    fresh, warm = view.instances[:2]
    fresh.ready_s = 100.0
    step = MeasuredPass(990, 990 * 990, 0, 20.0)
    slow = PrefillSample(fresh, 990, 990 * 990, 0, 1, 20.0, (step,))
    runner.prefilled(slow, 100.0 + COLD_S - 0.1)
    assert planner_of(policy)._passes == [0.0, 0.0]
    assert predictor.factor(warm) == 1.0
    runner.prefilled(slow, 100.0 + COLD_S)
    tabled_s = planner_of(policy).planner.prefill_table.at(990)
    assert planner_of(policy)._passes == [20.0, tabled_s]
    runner.prefilled(PrefillSample(warm, 990, 990 * 990, 0, 1, 20.0), 200.0)  # decodes took part: no time of a prompt
    assert planner_of(policy)._passes == [20.0, tabled_s]
    assert (fresh.is_cold(101.0), warm.is_cold(101.0)) == (True, False)
