"""Who gets KV cache next, of requests whose KV comes from elsewhere. FLAT model: a step for a token takes 0.1 ms."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.temporal_scene import KNOBS, NOW_S, engine_knobs, policy
from support.views import FLAT

from pla_sglang.policy.interface.prefill import ReservationReason, WaitingView
from pla_sglang.policy.slo.knobs import SloKnobs
from pla_sglang.policy.slo.policy import SloPolicy
from pla_sglang.policy.slo.reservation import Reservation, ReservationOrder, reservation_view

SLACK, UNTARGETED, FITS, PRIORITY, OVERDUE, INFEASIBLE = ReservationReason
OVERDUE_TURN = round(1 / SloKnobs.overdue_share)  # one turn in so many is an overdue request's
BOUND_S = 10.0  # from when on an infeasible request is overdue


def deciding() -> ReservationOrder:
    made = policy(decide=True)
    assert isinstance(made, SloPolicy)
    return made.reservations


def part(
    rid: str,
    *,
    age_s: float = 0.0,
    due_in_s: float | None = None,
    tokens: int = 100,
    begun: bool = False,
    priority_rank: int = 0,
) -> WaitingView:
    """``due_in_s``: from now on."""
    deadline_s = None if due_in_s is None else NOW_S + due_in_s
    view = reservation_view(rid, tokens, NOW_S - age_s, deadline_s=deadline_s, begun=begun)
    view.priority_rank = priority_rank
    return view


def sort(order: ReservationOrder, waiting: Sequence[WaitingView], now_s: float = NOW_S) -> list[Reservation]:
    turns = order.sort(waiting, now_s)
    assert turns is not None
    return turns


def told(turns: Sequence[Reservation]) -> list[tuple[str, ReservationReason]]:
    return [(turn.view.rid, turn.reason) for turn in turns]


@dataclasses.dataclass(frozen=True)
class Case:
    waiting: tuple[WaitingView, ...]
    order: tuple[tuple[str, ReservationReason], ...]


CASES = {
    "the least slack first, whoever came first": Case(
        (part("a", age_s=1, due_in_s=2), part("b", due_in_s=1)), (("b", SLACK), ("a", SLACK))
    ),
    "equal slack: who came first": Case((part("a", due_in_s=1), part("b", due_in_s=1)), (("a", SLACK), ("b", SLACK))),
    "who cannot be in time goes behind, in order of arrival": Case(
        (part("a", age_s=2, due_in_s=-1), part("b", age_s=3, due_in_s=-2), part("c", due_in_s=4)),
        (("c", SLACK), ("b", INFEASIBLE), ("a", INFEASIBLE)),
    ),
    "a stream that stands still before a first token with slack; it is never infeasible": Case(
        (part("new", due_in_s=0.5), part("begun", due_in_s=0.1, begun=True), part("late", due_in_s=-1, begun=True)),
        (("late", SLACK), ("begun", SLACK), ("new", SLACK)),
    ),
    "and without a target its next token is due since it came": Case(
        (part("new", due_in_s=0.5), part("begun", begun=True)), (("begun", SLACK), ("new", SLACK))
    ),
    "a new one without a target is due its bound after it came": Case(
        (part("none", age_s=5), part("far", due_in_s=20), part("near", due_in_s=4)),
        (("near", SLACK), ("none", UNTARGETED), ("far", SLACK)),
    ),
    "a better priority first, and it says so where that passes less slack": Case(
        (part("low", due_in_s=1, priority_rank=1), part("high", due_in_s=2), part("higher", due_in_s=0.5)),
        (("higher", SLACK), ("high", PRIORITY), ("low", SLACK)),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_order(case: Case) -> None:
    assert told(sort(deciding(), case.waiting)) == list(case.order)


def test_without_targets_it_is_first_come_first_served() -> None:
    waiting = [part("a", age_s=1), part("b", begun=True), part("c", priority_rank=1)]
    assert deciding().sort(waiting, NOW_S) is None
    advising = SloPolicy(engine_knobs(KNOBS), FLAT)
    assert advising.reservations.sort([part("a", due_in_s=2), part("b", due_in_s=1)], NOW_S) is None
    assert not advising.reservations.decides


def test_an_overdue_request_has_every_so_many_turns() -> None:
    order = deciding()
    waiting = [
        part("kept", due_in_s=1),
        part("older", age_s=BOUND_S + 2, due_in_s=-1),
        part("old", age_s=BOUND_S + 1, due_in_s=-2),
    ]
    for _ in range(2):
        for _ in range(OVERDUE_TURN - 1):
            first = sort(order, waiting)[0]
            assert told([first]) == [("kept", SLACK)]
            order.note(first.reason)
        first = sort(order, waiting)[0]
        assert told([first]) == [("older", OVERDUE)]
        order.note(first.reason)


def test_nobody_is_deferred_for_ever() -> None:
    """Twenty bounds after its arrival an infeasible request counts as feasible (``SloKnobs.infeasible_times``)."""
    waiting = [part("kept", due_in_s=1), part("late", age_s=20 * BOUND_S, due_in_s=-500)]
    assert told(sort(deciding(), waiting)) == [("late", SLACK), ("kept", SLACK)]


@pytest.mark.parametrize(
    ("age_s", "passing"),
    [
        (0.0, ["small", "less"]),  # all of its 4 s are left
        (0.9, ["small", "less"]),
        (1.1, []),  # more than a quarter is over: what becomes free is kept for it
    ],
)
def test_who_has_no_room_is_passed_for_a_quarter_of_its_slack(age_s: float, passing: list[str]) -> None:
    order = deciding()
    waiting = [
        part("large", age_s=age_s, due_in_s=4 - age_s, tokens=1000),
        part("larger", due_in_s=5, tokens=1200),
        part("small", due_in_s=6, tokens=10),
        part("less", due_in_s=7, tokens=999),
    ]
    assert told(order.list_passing(sort(order, waiting), NOW_S)) == [(rid, FITS) for rid in passing]


@pytest.mark.parametrize(
    "second",
    [
        part("kept room", age_s=9, due_in_s=5, tokens=1200),  # as much as the first, and not to be passed any more
        part("other priority", due_in_s=5, tokens=10, priority_rank=1),
    ],
    ids=lambda view: view.rid,
)
def test_what_may_not_be_passed(second: WaitingView) -> None:
    order = deciding()
    last = part("small", due_in_s=6, tokens=10, priority_rank=second.priority_rank)
    turns = sort(order, [part("large", due_in_s=4, tokens=1000), second, last])
    assert order.list_passing(turns, NOW_S) == []


parts = st.lists(
    st.builds(
        part,
        st.just("x"),
        age_s=st.floats(0, 700),
        due_in_s=st.none() | st.floats(-60, 60),
        tokens=st.integers(1, 1000),
        begun=st.booleans(),
        priority_rank=st.integers(0, 2),
    ),
    max_size=12,
)


def slack_s(view: WaitingView) -> float:
    """Of one that has begun, without a target: its next token is due since it came."""
    if view.deadline_s is None:
        return view.arrival_s - NOW_S if view.resumed else math.inf
    return view.deadline_s - NOW_S


@given(waiting=parts, free_tokens=st.integers(0, 3000), turns=st.integers(0, OVERDUE_TURN))
def test_nobody_passes_less_slack_without_a_reason(waiting: list[WaitingView], free_tokens: int, turns: int) -> None:
    """As both drivers reserve: the first in order, or one that may pass it, until none fits."""
    order = deciding()
    for _ in range(turns):
        order.note(SLACK)
    left = list(waiting)
    while left and (sorted_turns := order.sort(left, NOW_S)) is not None:
        assert sorted(map(id, left)) == sorted(id(turn.view) for turn in sorted_turns)
        turn = sorted_turns[0]
        if turn.view.new_tokens + turn.view.history_tokens > free_tokens:
            passing = order.list_passing(sorted_turns, NOW_S)
            if not passing or passing[0].view.new_tokens + passing[0].view.history_tokens > free_tokens:
                break
            turn = passing[0]
        passed = [one for one in left if slack_s(one) < slack_s(turn.view) and slack_s(one) > 0.001]
        if passed:
            assert turn.reason in (UNTARGETED, FITS, PRIORITY, OVERDUE), (turn, passed)
        order.note(turn.reason)
        free_tokens -= turn.view.new_tokens + turn.view.history_tokens
        left = [one for one in left if one is not turn.view]


@given(waiting=parts)
def test_two_ranks_decide_alike(waiting: list[WaitingView]) -> None:
    """They have views of their own, made of the same data."""
    first, second = deciding(), deciding()
    others = [dataclasses.replace(view) for view in waiting]
    own, theirs = first.sort(waiting, NOW_S), second.sort(others, NOW_S)
    assert (own is None) == (theirs is None)
    if own is not None and theirs is not None:
        places = [next(at for at, one in enumerate(waiting) if one is turn.view) for turn in own]
        assert places == [next(at for at, one in enumerate(others) if one is turn.view) for turn in theirs]
        assert [turn.reason for turn in own] == [turn.reason for turn in theirs]
