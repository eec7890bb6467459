"""DOPD's planner, load meter, dispatcher and Algorithm 1 as tables.

Prefill takes 10 ms + 1 ms a token, a decode step 10 ms + 0.1 ms a request + 1 us a token of context.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fleets import LinearSteps, decode, fleet, mixed, predictor, prefill, request
from support.views import pass_view, waiting

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.common import load_meter
from pla_sglang.policy.common.load_meter import ENOUGH_REQUESTS, VARIATION_INTERVALS, LoadMeter, LoadSample
from pla_sglang.policy.common.pools import least_loaded
from pla_sglang.policy.common.tables import DecodeTable, PrefillTable
from pla_sglang.policy.dopd.batching import BatchingKnobs, LengthAwareBatching
from pla_sglang.policy.dopd.dispatch import DopdDispatcher, DopdDispatchKnobs
from pla_sglang.policy.dopd.planner import DopdController, Planner, PlannerKnobs
from pla_sglang.policy.interface.decisions import Hold, PrefillSample, ScaleTo
from pla_sglang.policy.interface.fleet import FleetView, InstanceState, InstanceView, Role
from pla_sglang.policy.interface.prefill import Action, PassReason, PassView
from pla_sglang.policy.interface.reasons import FleetReason as R

KNOBS = PlannerKnobs(ttft_slo_s=4.0, concurrency_max=50, interval_s=10.0)


def planner(**changes: Any) -> Planner:
    tables = PrefillTable.profile(LinearSteps()), DecodeTable.profile(LinearSteps())
    return Planner(dataclasses.replace(KNOBS, **changes), *tables)


LOAD = LoadSample(input_tokens=990.0, output_tokens=100.0, concurrency=100.0, rate_per_s=1.0)


def test_a_plan_by_hand() -> None:
    """100 requests on 2 instances: 50 each, 1,040 tokens each, so a step takes 10 + 5 + 52 = 67 ms.

    R = 50 * 1 s / (67 ms * 100) = 7.46; n_p = ceil(2 * 7.46) = 15.
    """
    plan = planner().plan(LOAD)
    assert (plan.decode, plan.prefill) == (2, 15)
    assert plan.ratio == pytest.approx(50 / 6.7)


def test_waiting_asks_for_more_prefill_than_the_ratio() -> None:
    """3 a second of 1 s each leave, at n instances, rho = 3/n; the wait rho/(1-rho) must be at most 1 s: n = 6."""
    light = dataclasses.replace(LOAD, concurrency=5.0, rate_per_s=3.0)
    assert planner().plan(light).ratio == pytest.approx(5 / (0.010 + 0.0005 + 0.0052) / 100, rel=1e-6)  # 3.18
    assert planner().plan(light).prefill == 6


def test_corrections_reach_the_plan() -> None:
    one = planner(correction_weight=1.0)
    one.correct_prefill(1.0, 2.0)
    assert one.plan(LOAD).prefill == 30
    one.correct_decode(50, 1040.0, 0.134)
    assert one.plan(LOAD).prefill == 15


def test_the_maximum_is_shared_in_proportion() -> None:
    plan = planner(instances_max=8).plan(LOAD)
    assert (plan.prefill, plan.decode) == (7, 1)


def test_the_minimum_is_shared_in_proportion() -> None:
    assert (planner().plan(LOAD).prefill, planner().plan(LOAD).decode) == (15, 2)
    plan = planner(instances_min=34).plan(LOAD)
    assert (plan.prefill, plan.decode) == (30, 4)


def test_equal_bounds_leave_the_ratio_only() -> None:
    for concurrency in (0.0, 10.0, 100.0, 5000.0):
        load = dataclasses.replace(LOAD, concurrency=concurrency)
        plan = planner(instances_min=8, instances_max=8).plan(load)
        assert plan.prefill + plan.decode == 8
        assert min(plan.prefill, plan.decode) >= 1


def test_headroom_multiplies_the_load_and_not_the_lengths() -> None:
    controller = DopdController(planner(headroom=1.5))
    controller.follow(LOAD, FleetView())
    assert controller.last_plan is not None
    more = controller.last_plan.load
    assert (more.concurrency, more.rate_per_s, more.input_tokens) == (150.0, 1.5, 990.0)
    assert controller.last_plan.decode == 3


@pytest.mark.parametrize(
    ("name", "concurrency", "decodes"), [("one below", 50.0, 1), ("one above", 50.1, 2), ("none", 0.0, 1)]
)
def test_line_13(name: str, concurrency: float, decodes: int) -> None:
    assert planner().plan(dataclasses.replace(LOAD, concurrency=concurrency)).decode == decodes


@pytest.mark.parametrize("least_requests", [ENOUGH_REQUESTS // 2, ENOUGH_REQUESTS, 2 * ENOUGH_REQUESTS])
def test_mean_lengths_are_of_enough_requests(least_requests: int) -> None:
    """Lengths that vary as much as they are long, 4 a second, then one a minute: the mean is never far off.

    Of the last interval alone it is off by a factor of three and more. Half and twice as many requests tell the same.
    """
    rng = np.random.default_rng(5)
    enough, last = LoadMeter(least_requests), LoadMeter()
    worst, alone = [], []
    for interval in range(120):
        for _ in range(40 if interval < 60 else 1 if interval % 6 == 0 else 0):
            tokens = int(rng.exponential(200.0)) + 1
            for meter in (enough, last):
                meter.arrive(100, 10.0 * interval + 5)
                meter.finish(tokens, 10.0 * interval + 6)
        for meter, found in ((enough, worst), (last, alone)):
            sample = meter.take(10.0 * (interval + 1))
            if sample is not None and sample.output_tokens is not None:
                found.append(sample.output_tokens / 200.0)
    assert 0.55 < min(worst[3:]) <= max(worst[3:]) < 1.5
    assert max(alone) > 2.0 or min(alone) < 0.3
    assert len(worst) > len(alone), "an interval without requests has the lengths of those before"


def vary(meter: LoadMeter, intervals: int, per_clump: int, seed: int = 5) -> list[tuple[float, float]]:
    """Variations of gaps and lengths after each interval of 10 s. Of these every second has 80 times the arrivals,
    which come in clumps at random times."""
    rng = np.random.default_rng(seed)
    found = []
    meter.take(0.0)
    for interval in range(intervals):
        clumps = (400 if interval % 2 else 5) // per_clump + 1
        for at_s in sorted(rng.uniform(10.0 * interval, 10.0 * (interval + 1), clumps)):
            for _ in range(per_clump):
                meter.arrive(int(rng.exponential(200.0)) + 1, at_s)
        sample = meter.take(10.0 * (interval + 1))
        assert sample is not None
        found.append((sample.arrival_cv2, sample.input_cv2))
    return found


@pytest.mark.parametrize("intervals", [VARIATION_INTERVALS // 2, VARIATION_INTERVALS, 2 * VARIATION_INTERVALS])
def test_variations_are_those_of_many_intervals(intervals: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random arrivals vary as if steady, clumps of 20 as 2 * 20 - 1 by eq. 10; of one interval alone neither shows.

    Half and twice as many intervals tell the same.
    """
    monkeypatch.setattr(load_meter, "VARIATION_INTERVALS", intervals)
    gaps, inputs = zip(*vary(LoadMeter(ENOUGH_REQUESTS), 300, 1)[1:], strict=True)
    assert 0.7 < min(gaps) <= max(gaps) < 1.5
    assert 0.6 < min(inputs) <= max(inputs) < 1.6
    clumps = [one for one, _ in vary(LoadMeter(ENOUGH_REQUESTS), 300, 20)[20:]]
    assert max(clumps) < 1.3 * min(clumps)
    assert 30 < min(clumps) <= max(clumps) < 50
    alone = [one for one, _ in vary(LoadMeter(), 300, 20)[20:]]
    assert max(alone) > 3 * min(alone)


def test_variations_by_hand() -> None:
    """Gaps of 1 s and 3 s vary by 1/4; equal ones by nothing. 3 arrivals in 10 s, 3 in 20 s: 9/10 and 9/20 of each."""
    meter = LoadMeter(ENOUGH_REQUESTS)
    for now_s in (0.0, 1.0, 4.0):
        meter.arrive(100, now_s)
    first = meter.take(10.0)
    for now_s in (10.0, 16.0, 22.0):
        meter.arrive(100, now_s)
    second = meter.take(30.0)
    assert first is not None
    assert second is not None
    assert (first.arrival_cv2, second.arrival_cv2) == (pytest.approx(1 / 4), pytest.approx(1 / 6))
    assert second.input_cv2 == 0.0


def test_load_meter_by_hand() -> None:
    meter = LoadMeter()
    meter.arrive(100, 0.0)
    meter.arrive(300, 2.0)
    meter.finish(40, 6.0)
    sample = meter.take(10.0)
    assert sample is not None
    assert (sample.input_tokens, sample.output_tokens) == (200.0, 40.0)
    assert sample.concurrency == pytest.approx((2 + 4 * 2 + 4) / 10)
    assert sample.rate_per_s == 0.2
    assert sample.input_cv2 == pytest.approx(0.25)
    later = meter.take(20.0)
    assert later == LoadSample(None, None, 1.0, 0.0)
    assert meter.take(20.0) is None


@pytest.mark.parametrize("gap_s", [600.0, 86_400.0, 7 * 86_400.0])
def test_a_gap_of_days_is_no_burst(gap_s: float) -> None:
    """One request a second before and after: the first interval after the gap is planned as the last before it."""
    meter, samples = LoadMeter(), []
    meter.take(0.0)
    for start_s in (0.0, gap_s):
        for index in range(60):
            meter.arrive(100, start_s + index + 0.5)
        samples.append(meter.take(start_s + 60.0))
        if not start_s:
            assert meter.take(gap_s) == LoadSample(None, None, 60.0, 0.0)
    before, after = samples
    assert before is not None
    assert after is not None
    assert before.arrival_cv2 == pytest.approx(after.arrival_cv2, abs=1e-6)
    assert before.rate_per_s == after.rate_per_s == 1.0


def feed(controller: DopdController, start_s: float, rate_per_s: int, seconds: int = 10) -> None:
    """Requests of 990 tokens that stay for one second; those of the interval before end in this one."""
    for index in range(rate_per_s * seconds):
        now_s = start_s + index / rate_per_s
        controller.on_arrival(request(990), now_s)
        if index >= rate_per_s or start_s > 0:
            controller.on_finish(request(990), 100, now_s)


def counts(view: FleetView) -> tuple[int, int]:
    return len(view.by_role[Role.PREFILL]), len(view.by_role[Role.DECODE])


def apply_scaling(view: FleetView, actions: list[Any]) -> None:
    for action in actions:
        if isinstance(action, ScaleTo):
            for _ in range(action.start):
                view.add(InstanceView(len(view.instances), "new", role=action.role))
            for instance in action.drain:
                view.set_state(instance, InstanceState.DRAINING)
            assert len(view.by_role[action.role]) == action.count


def test_scaling_follows_the_plan_up_at_once_and_down_after_three_intervals() -> None:
    controller = DopdController(planner(concurrency_max=2))
    view = fleet(prefill(), decode())
    assert [action.reason for action in controller.tick(view, 0.0)] == [R.NO_DATA]
    feed(controller, 0.0, rate_per_s=4)
    actions = controller.tick(view, 10.0)
    assert [(type(action), action.reason) for action in actions] == [(ScaleTo, R.DOPD_RATIO)] * 2
    apply_scaling(view, actions)
    high = counts(view)
    for _ in range(4):
        controller.on_finish(request(990), 100, 10.0)
    assert high[0] >= 5
    assert high[1] == 2
    seen = []
    for tick in range(2, 9):
        actions = controller.tick(view, 10.0 * tick)  # nobody comes any more
        apply_scaling(view, actions)
        seen.append(counts(view))
    assert seen[:2] == [high, high]
    assert seen[2][0] < high[0]
    assert min(min(pair) for pair in seen) >= 1


def test_a_starting_instance_counts() -> None:
    controller = DopdController(planner(concurrency_max=2))
    view = fleet(prefill(), decode())
    for _ in range(20):
        view.add(InstanceView(len(view.instances), "p", role=Role.PREFILL, state=InstanceState.STARTING))
    controller.tick(view, 0.0)
    feed(controller, 0.0, rate_per_s=4)
    first, _ = controller.tick(view, 10.0)
    assert isinstance(first, Hold)  # 21 are more than the plan; starting ones are not called back


def test_constant_load_settles() -> None:
    """At most one change an hour after settling, for several loads that lie on or near the border of two counts."""
    for rate in (2, 3, 4, 5):
        controller = DopdController(planner(concurrency_max=2))
        view = fleet(prefill(), decode())
        changes = []
        for tick in range(72):
            actions = controller.tick(view, 10.0 * tick)
            apply_scaling(view, actions)
            changes.append(sum(isinstance(action, ScaleTo) for action in actions))
            feed(controller, 10.0 * tick, rate)
        assert sum(changes[12:]) <= 1, rate


def test_observations_correct_the_tables() -> None:
    controller = DopdController(planner(correction_weight=1.0))
    view = fleet(prefill(), decode(running=50, context_tokens=50 * 1040, token_interval_s=0.134))
    controller.tick(view, 0.0)
    feed(controller, 0.0, 1)
    controller.on_prefill(PrefillSample(view.instances[0], 990, 990 * 990, 0, 1, 2.0), 5.0)
    controller.on_prefill(PrefillSample(view.instances[0], 9900, 0, 0, 10, 99.0), 5.0)  # a batch: not in the table
    after_others = PrefillSample(view.instances[0], 990, 990 * (990 + 2 * 20_000), 20_000, 1, 9.0)
    controller.on_prefill(after_others, 5.0)  # nor is a chunk that reads 20,000 tokens
    controller.tick(view, 10.0)
    assert controller.planner.prefill_factor == pytest.approx(2.0)
    assert controller.planner.decode_factor == pytest.approx(2.0, rel=1e-3)


def test_who_is_drained() -> None:
    view = fleet(decode(context_tokens=5), decode(), decode(), decode(queued_tokens=1))
    assert [instance.name for instance in least_loaded(view.instances, 3)] == ["i2", "i1", "i3"]


DISPATCH: list[tuple[str, FleetView, Any, str, str | None, R]] = [
    ("remote", fleet(prefill(), decode()), request(300), "i0", "i1", R.DOPD_REMOTE),
    ("least backlog", fleet(prefill(queued_tokens=9), prefill(), decode()), request(300), "i1", "i2", R.DOPD_REMOTE),
    (
        "least decode load",
        fleet(prefill(), decode(context_tokens=9), decode()),
        request(300),
        "i0",
        "i2",
        R.DOPD_REMOTE,
    ),
    (
        "cached prefix beats a small difference in load",
        fleet(prefill(), decode(context_tokens=900, kv_capacity_tokens=10_000), decode(kv_capacity_tokens=10_000)),
        request(300, cached={1: 297}),
        "i1",
        "i1",
        R.DOPD_LOCAL,
    ),
    ("5 tokens: 15 ms in place, hand-over 15.03 ms", fleet(prefill(), decode()), request(5), "i1", "i1", R.DOPD_LOCAL),
    ("6 tokens: 16 ms in place", fleet(prefill(), decode()), request(6), "i0", "i1", R.DOPD_REMOTE),
    ("one instance does both", fleet(mixed()), request(300), "i0", "i0", R.DOPD_LOCAL),
    ("no prefill instance", fleet(decode()), request(300), "i0", "i0", R.DOPD_REMOTE),
]


@pytest.mark.parametrize("case", DISPATCH, ids=[case[0] for case in DISPATCH])
def test_dispatch(case: tuple[str, FleetView, Any, str, str | None, R]) -> None:
    _, view, ask, prefilled, decoded, reason = case
    answer = DopdDispatcher(DopdDispatchKnobs(), predictor()).dispatch(ask, view, 0.0)
    assert (answer.prefill and answer.prefill.name, answer.decode and answer.decode.name) == (prefilled, decoded)
    assert answer.reason is reason


def test_dispatch_to_nobody_and_a_second_choice() -> None:
    router = DopdDispatcher(DopdDispatchKnobs(), predictor())
    assert router.dispatch(request(), fleet(), 0.0).reason is R.NO_INSTANCE
    assert router.place_decode(request(), fleet(), 0.0).reason is R.NO_INSTANCE
    view = fleet(prefill())
    assert router.place_decode(request(), view, 0.0).decode is view.instances[0]


def lengths(*tokens: int) -> list[Any]:
    return [waiting(count, rid=f"{index}:{count}") for index, count in enumerate(tokens)]


BATCHING: list[tuple[str, PassView, float, Action, PassReason, list[int]]] = [
    ("empty", pass_view(), 0.0, Action.HOLD, PassReason.EMPTY, []),
    ("a long goes at once, alone", pass_view(lengths(500, 10)), 0.0, Action.LONG, PassReason.ORDER, [500]),
    ("exactly i_next is long", pass_view(lengths(400, 10)), 0.0, Action.LONG, PassReason.ORDER, [400]),
    (
        "shorts gather to i_next",
        pass_view(lengths(150, 150, 150, 150)),
        0.0,
        Action.SHORT,
        PassReason.TOKENS,
        [150] * 3,
    ),
    ("exactly i_next is full", pass_view(lengths(200, 200, 9)), 0.0, Action.SHORT, PassReason.TOKENS, [200, 200]),
    ("queue at its end", pass_view(lengths(150, 150)), 0.0, Action.SHORT, PassReason.QUEUE_END, [150, 150]),
    ("a long met while gathering goes first", pass_view(lengths(9, 500, 9)), 0.0, Action.LONG, PassReason.ORDER, [500]),
    ("unless the timer is over", pass_view(lengths(9, 500, 9)), 0.1, Action.SHORT, PassReason.WINDOW, [9]),
    ("slots", pass_view(lengths(9, 9, 9), slots=2), 0.0, Action.SHORT, PassReason.TOKENS, [9, 9]),
    ("no slots", pass_view(lengths(9), slots=0), 0.0, Action.HOLD, PassReason.BLOCKED, []),
    ("pass budget", pass_view(lengths(60, 60), budget=100), 0.0, Action.SHORT, PassReason.TOKENS, [60]),
    ("a chunk goes on", pass_view(lengths(9), chunk=waiting(700)), 0.0, Action.LONG, PassReason.ORDER, []),
]


@pytest.mark.parametrize("case", BATCHING, ids=[case[0] for case in BATCHING])
def test_algorithm_1(case: tuple[str, PassView, float, Action, PassReason, list[int]]) -> None:
    _, view, later_s, action, reason, taken = case
    policy = LengthAwareBatching(BatchingKnobs(i_next_tokens=400, timeout_s=0.1))
    answer = policy.decide(view, 0.0)
    if later_s:
        answer = policy.decide(view, later_s)
    assert (answer.action, answer.reason) == (action, reason)
    assert [chosen.new_tokens for chosen in answer.selected] == taken


@given(st.lists(st.integers(1, 900), max_size=30), st.integers(1, 1000))
def test_every_request_runs_once_and_shorts_keep_their_order(tokens: list[int], i_next: int) -> None:
    policy = LengthAwareBatching(BatchingKnobs(i_next_tokens=i_next, timeout_s=0.5))
    queue, ran, now_s = lengths(*tokens), [], 0.0
    while queue:
        answer = policy.decide(pass_view(queue, budget=10_000), now_s)
        assert answer.selected
        queue = [view for view in queue if view not in answer.selected]
        ran += [view.rid for view in answer.selected]
        now_s += 0.1
    short_prompts = [rid for rid in ran if int(rid.split(":")[1]) < i_next]
    assert short_prompts == sorted(short_prompts, key=lambda rid: int(rid.split(":")[0]))
    assert len(ran) == len(set(ran)) == len(tokens)


@pytest.mark.parametrize(
    "bad", [{"ttft_slo_s": 0.0}, {"concurrency_max": 0}, {"instances_max": 1}, {"wait_share": 1.5}, {"down_margin": -1}]
)
def test_bad_knobs(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        dataclasses.replace(KNOBS, **bad)
