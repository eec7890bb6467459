"""The plan that keeps the most: against all subsets, and what may go before it."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy.test_properties import EXAMPLES, MODEL
from support.views import long

from pla_sglang.policy.pla.arrival_rate import ArrivalRate
from pla_sglang.policy.pla.awd import batch_step_s
from pla_sglang.policy.pla.long_prompts import LongKnobs
from pla_sglang.policy.slo.deadlines import Deadlines
from pla_sglang.policy.slo.knobs import SloKnobs
from pla_sglang.policy.slo.mixed_batches import START, model_beside
from pla_sglang.policy.slo.plan import DeadlinePlan, Turn, due_of, plan_moore_hodgson, spare_share

NOW_S = 100.0
SLOWER = SloKnobs.slower
JOBS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=7)


def turns_of(jobs: list[tuple[float, float]]) -> list[Turn]:
    """(service, time until it is due) of each."""
    return [Turn(long(), NOW_S + due_s, service_s) for service_s, due_s in jobs]


def is_kept(turns: tuple[Turn, ...]) -> bool:
    at_s = NOW_S
    for turn in sorted(turns, key=lambda one: one.due_s):
        at_s += turn.service_s
        if at_s > turn.due_s:
            return False
    return True


@EXAMPLES
@given(JOBS)
def test_no_subset_that_can_be_kept_is_larger(jobs: list[tuple[int, int]]) -> None:
    turns = turns_of([(float(service_s), float(due_s)) for service_s, due_s in jobs])
    plan = plan_moore_hodgson(turns, NOW_S)
    most = max(
        count
        for count in range(len(turns) + 1)
        if count == 0 or any(is_kept(subset) for subset in itertools.combinations(turns, count))
    )
    assert len(plan.turns) == most
    assert is_kept(tuple(plan.turns))
    assert len(plan.turns) + len(plan.rejected) == len(turns)
    assert all(plan.keeps(turn.view) is (turn in plan.turns) for turn in turns)


@pytest.mark.parametrize(
    ("jobs", "kept"),
    [
        ([(1.0, 3.0), (1.0, 3.0), (1.0, 3.0)], [0, 1, 2]),
        ([(2.0, 3.0), (1.0, 3.0), (1.0, 3.0)], [1, 2]),
        ([(1.0, 9.0), (3.0, 3.0), (1.0, 1.5)], [2, 0]),
        ([(4.0, 3.0)], []),
        ([(4.0, math.inf), (1.0, 1.0)], [1, 0]),
    ],
    ids=["all", "the largest goes", "in the order of their deadlines", "late by itself", "without a target"],
)
def test_who_is_kept(jobs: list[tuple[float, float]], kept: list[int]) -> None:
    turns = turns_of(jobs)
    assert plan_moore_hodgson(turns, NOW_S).turns == [turns[place] for place in kept]


def test_others_that_arrive_may_be_in_the_way() -> None:
    """One of 1.2 s that is due after 4 s, and one of 1.2 s before it: 2.4 s, or 3.4 s with what arrives."""
    turns = turns_of([(1.2, 4.0), (1.2, 9.0)])
    plan = DeadlinePlan(turns, frozenset())
    other = turns[1].view
    assert plan.allows([other], NOW_S, 1.0)
    assert plan.allows([other], NOW_S, 0.7)
    assert plan.allows([], NOW_S, 0.4)
    assert not plan.allows([other], NOW_S, 0.5)
    assert not plan.allows([other], NOW_S + 0.6, 0.7)


@pytest.mark.parametrize("spare", [0.0, 0.5])
def test_who_is_due_at_no_time_is_not_late(spare: float) -> None:
    turns = turns_of([(1.0, 9.0), (1.0, math.inf)])
    assert DeadlinePlan(turns, frozenset()).allows([turns[0].view], NOW_S, spare)


@pytest.mark.parametrize(
    ("name", "gap_s", "expected"),
    [("nothing arrives", None, 1.0), ("some", 1.0, 0.5), ("as much as can be done", 0.5, 0.0), ("more", 0.1, 0.0)],
)
def test_what_arrives_leaves_a_share(name: str, gap_s: float | None, expected: float) -> None:
    """1,000 tokens at a time, that take 0.5 s."""
    rate = ArrivalRate()
    for count in range(0 if gap_s is None else 10, 0, -1):
        rate.observe(NOW_S - (gap_s or 0.0) * (count - 1), 1000)
    assert spare_share(rate, 5e-4, NOW_S) == pytest.approx(expected)


def test_who_is_lost_is_due_at_no_time() -> None:
    view = long(NOW_S - 1.0, deadline_s=NOW_S + 1.0)
    view.latest_s = NOW_S + 0.5
    assert due_of(view, NOW_S) == NOW_S + 1.0
    assert due_of(view, NOW_S + 0.6) == math.inf
    assert due_of(long(), NOW_S) == math.inf


WAITING = st.lists(
    st.tuples(st.integers(100, 5000), st.integers(0, 4000), st.floats(0.01, 40.0)), min_size=1, max_size=9
)


@EXAMPLES
@given(WAITING, WAITING, st.integers(0, 300), st.integers(0, 300_000), st.floats(0.0, 1.0))
def test_where_all_have_time_a_plan_would_change_nothing(
    long_prompts: list[tuple[int, int, float]],
    short_prompts: list[tuple[int, int, float]],
    piggybacked: int,
    context_tokens: int,
    spare: float,
) -> None:
    """Nobody is given up, and anybody may go first; with and without riders, and with several chunks."""
    deadlines = Deadlines(LongKnobs(chunk_max_tokens=1000), SloKnobs(infeasible_age_s=30.0), MODEL)
    queues = [
        [long(NOW_S, new, deadline_s=NOW_S + due_s) for new, _, due_s in of] for of in (long_prompts, short_prompts)
    ]
    for view, (_, history, _) in zip([*queues[0], *queues[1]], [*long_prompts, *short_prompts], strict=True):
        view.history_tokens = history
        deadlines.latest_start_s(view)
    model = model_beside(MODEL, START, piggybacked, context_tokens)
    if not deadlines.have_time(*queues, NOW_S, model, spare=spare):
        return
    each_s = SLOWER * batch_step_s(queues[1], model) / len(queues[1])
    turns = [Turn(view, due_of(view, NOW_S), each_s) for view in queues[1]]
    turns += [Turn(view, due_of(view, NOW_S), SLOWER * deadlines._alone_s(view, model)) for view in queues[0]]
    plan = plan_moore_hodgson(turns, NOW_S)
    assert not plan.rejected
    assert all(plan.allows([turn.view], NOW_S, spare) for turn in turns)
    assert plan.allows(queues[1], NOW_S, spare)


def test_time_is_had_where_targets_are_far_and_never_without_one() -> None:
    deadlines = Deadlines(LongKnobs(chunk_max_tokens=1000), SloKnobs(infeasible_age_s=30.0), MODEL)
    far, near = long(NOW_S, 4000, deadline_s=NOW_S + 60.0), long(NOW_S, 4000, deadline_s=NOW_S + 0.5)
    for view in (far, near):
        deadlines.latest_start_s(view)
    assert deadlines.have_time([far], [], NOW_S, MODEL, spare=1.0)
    assert not deadlines.have_time([far, near], [], NOW_S, MODEL, spare=1.0)
    assert not deadlines.have_time([far, long(NOW_S, 4000)], [], NOW_S, MODEL, spare=1.0)
