"""The plan that keeps the most: against all subsets, and what may go before it."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy.test_properties import EXAMPLES
from support.views import long

from pla_sglang.policy.pla.most_kept import ARRIVING, SLOWER, Plan, Turn, due_of, plan_most_kept

NOW_S = 100.0
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
    plan = plan_most_kept(turns, NOW_S)
    most = max(
        count
        for count in range(len(turns) + 1)
        if count == 0 or any(is_kept(subset) for subset in itertools.combinations(turns, count))
    )
    assert len(plan.turns) == most
    assert is_kept(tuple(plan.turns))
    assert len(plan.turns) + len(plan.given_up) == len(turns)
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
    assert plan_most_kept(turns, NOW_S).turns == [turns[place] for place in kept]


def test_others_that_arrive_may_be_in_the_way() -> None:
    """One of 1.2 s that is due after 4 s, and one of 1.2 s before it: 2.4 s, or 3.4 s with what arrives."""
    turns = turns_of([(SLOWER, 4.0), (SLOWER, 9.0)])
    plan = Plan(turns, frozenset())
    other = turns[1].view
    assert plan.bears([other], NOW_S)
    assert plan.bears([], NOW_S)
    assert not plan.bears([other], NOW_S + 4.0 - 2 * ARRIVING + 0.001)


def test_who_is_lost_is_due_at_no_time() -> None:
    view = long(NOW_S - 1.0, deadline_s=NOW_S + 1.0)
    view.latest_s = NOW_S + 0.5
    assert due_of(view, NOW_S) == NOW_S + 1.0
    assert due_of(view, NOW_S + 0.6) == math.inf
    assert due_of(long(), NOW_S) == math.inf
