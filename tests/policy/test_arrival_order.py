"""How long infeasible requests are deferred, by what they would have waited in the order of their arrival."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy.test_properties import MODEL, engine
from support.temporal_scene import KNOBS, NOW_S, engine_knobs, run
from support.views import FLAT, long, pass_view, short
from support.virtual_engine import Arrival

from pla_sglang.policy.interface.prefill import PassReason, WaitingView
from pla_sglang.policy.pla.awd import AwdKnobs
from pla_sglang.policy.pla.long_prompts import LongKnobs
from pla_sglang.policy.slo.deadlines import Deadlines
from pla_sglang.policy.slo.knobs import EnginePolicyKnobs, SloKnobs
from pla_sglang.policy.slo.policy import SloPolicy
from pla_sglang.policy.slo.turns import ArrivalOrder

TARGET_S, STEP_S = 0.5, MODEL.step_s(900, 0)


@dataclasses.dataclass(frozen=True)
class Step:
    """What happens, and the numbers, in order of arrival, of those whose turn has come with it."""

    arrivals: int = 0
    started: int = 0
    waiting: int = 0
    turns: tuple[int, ...] = ()


@pytest.mark.parametrize(
    "steps",
    [
        [Step(3, started=1, waiting=2, turns=(0,)), Step(started=2, turns=(1, 2))],
        # The first is overtaken by two: as many have started as waited before the third.
        [Step(3, started=2, waiting=1, turns=(0, 1)), Step(1, started=1, waiting=1, turns=(2,))],
        # Two of three have left without a start: who comes next has one before it, not three.
        [Step(3), Step(started=1, waiting=0, turns=(0, 1, 2)), Step(1, started=1, waiting=0, turns=(3,))],
        [Step(5, started=1, waiting=2, turns=(0,)), Step(1, started=3, waiting=0, turns=(1, 2, 3, 4, 5))],
    ],
    ids=["as they came", "overtaken", "some have left", "and others wait"],
)
def test_a_turn_comes_with_as_many_starts_as_waited_before(steps: list[Step]) -> None:
    order, views = ArrivalOrder(), list[WaitingView]()
    for step in steps:
        for _ in range(step.arrivals):
            views.append(short())
            order.on_arrival(views[-1])
        if step.started:
            come = order.on_pass(step.started, step.waiting)
            assert [views.index(one) for one in come] == list(step.turns)


@pytest.mark.parametrize(
    ("times", "deadline_s", "now_s", "overtaken_s"),
    [(3.0, 2.0, 1.0, 6.0), (3.0, 2.0, 5.0, 15.3), (0.0, 2.0, 5.0, math.inf), (3.0, None, 5.0, math.inf)],
    ids=["times its target", "times the wait with its prefill of 0.1 s", "off", "without a target"],
)
def test_the_bound_is_a_multiple_of_the_target_or_of_the_wait_in_order(
    times: float, deadline_s: float | None, now_s: float, overtaken_s: float
) -> None:
    deadlines = Deadlines(LongKnobs(chunk_max_tokens=1000), SloKnobs(30.0, fcfs_times=times), FLAT)
    assert deadlines.overtaken_s(long(0.0, 1000, deadline_s=deadline_s), now_s) == pytest.approx(overtaken_s)


@pytest.mark.parametrize("times", [3.0, 0.0])
def test_who_is_overtaken_goes_first_long_before_its_age_bound(times: float) -> None:
    made = SloPolicy(engine_knobs(KNOBS, slo=SloKnobs(30.0, fcfs_times=times)), FLAT)
    lost, kept = long(NOW_S - 2.0, 900, deadline_s=NOW_S - 1.5), long(NOW_S, 900, deadline_s=NOW_S + 50.0)
    for one in (lost, kept):
        made.on_arrival(one, NOW_S)
    view = pass_view([lost, kept])
    assert run(made, view).selected == (kept,), "in order of arrival it would have had its first token 2.09 s after"
    before_s, after_s = (lost.arrival_s + 3 * (2.0 + FLAT.step_s(900, 0)) + off_s for off_s in (-0.01, 0.01))
    assert made.decide(view, before_s).selected == (kept,)
    decision = made.decide(view, after_s)
    expected = (PassReason.OVERDUE, (lost,)) if times else (PassReason.NO_SHORT, (kept,))
    assert (decision.reason if times else PassReason.NO_SHORT, decision.selected) == expected


def test_the_bound_can_be_set_while_requests_wait() -> None:
    """Who came before has its age bound alone; who comes from then on has this one."""
    off, on = (engine_knobs(KNOBS, slo=SloKnobs(30.0, fcfs_times=times)) for times in (0.0, 3.0))
    made = SloPolicy(off, FLAT)
    lost = [long(NOW_S - 2.0, 900, deadline_s=NOW_S - 1.5) for _ in range(2)]
    kept = long(NOW_S, 900, deadline_s=NOW_S + 50.0)
    made.on_arrival(lost[0], NOW_S)
    made.set_knobs(on)
    for one in (lost[1], kept):
        made.on_arrival(one, NOW_S)
    view = pass_view([*lost, kept])
    assert run(made, view).selected == (kept,)
    assert [math.isinf(one.overtaken_s) for one in lost] == [True, False]
    made.set_knobs(off)
    made.on_arrival(new := long(NOW_S, 900, deadline_s=NOW_S - 1.5), NOW_S)
    made.set_knobs(on)
    run(made, pass_view([lost[0], new]))
    assert math.isinf(new.overtaken_s), "it came while there was no bound"


def overload(load: float, requests: int, times: float) -> tuple[list[float], list[float]]:
    """Waits for first tokens under a steady load: as the policy has it, and in the order of arrival."""
    slo = SloKnobs(infeasible_age_s=1000.0, fcfs_times=times)
    long_prompts = LongKnobs(max_age_s=1.0, chunk_max_tokens=1000)
    made = EnginePolicyKnobs(
        boundary_tokens=100, boundary_cap_tokens=1000, awd=AwdKnobs(depth_max=64), long_prompts=long_prompts, slo=slo
    )
    arrivals = [Arrival(index * STEP_S / load, 900, slo_s=TARGET_S) for index in range(requests)]
    ended = engine(arrivals, made, {}).run()
    waits = [(request.first_token_s or math.inf) - one.at_s for request, one in zip(ended, arrivals, strict=True)]
    in_order = [(index + 1) * STEP_S - one.at_s for index, one in enumerate(arrivals)]
    return waits, in_order


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.floats(1.05, 2.0), st.integers(200, 600), st.sampled_from((2.0, 3.0, 6.0)))
def test_under_any_overload_nobody_waits_longer_and_the_others_keep_their_share(
    load: float, requests: int, times: float
) -> None:
    waits, in_order = overload(load, requests, times)
    bounds = [times * max(TARGET_S, one) for one in in_order]
    assert max(wait / bound for wait, bound in zip(waits, bounds, strict=True)) < 1.1
    in_target = sum(wait <= TARGET_S for wait in waits) / requests
    assert in_target > (1 - 1 / times) / load - 0.1


def test_without_the_bound_more_are_in_target_and_some_wait_longer() -> None:
    bounded, in_order = overload(1.3, 600, 3.0)
    free, _ = overload(1.3, 600, 0.0)
    assert max(free) > max(bounded)
    assert sum(wait <= TARGET_S for wait in free) > sum(wait <= TARGET_S for wait in bounded)
    assert max(in_order) > TARGET_S
