"""Engine orders as tables, and the SRPT bound against theory and brute force."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.views import FLAT, pass_view, waiting

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.baselines.orders import ENGINE_ORDERS, Fcfs, Hrrn, PassSrpt, ShortestPrefillFirst
from pla_sglang.policy.interface.prefill import Action, PassReason, PassView, WaitingView


def lengths(*tokens: int, arrival_s: float = 0.0) -> list[WaitingView]:
    return [waiting(count, arrival_s) for count in tokens]


CHUNK = waiting(2000, rid="chunk")
Expected = tuple[Action, list[int], int | None, bool]  # action, new tokens of selected, chunk_tokens, park
CASES: dict[str, tuple[Any, PassView, Expected]] = {
    "fcfs: order": (Fcfs(), pass_view(lengths(500, 200, 100)), (Action.SHORT, [500, 200, 100], None, False)),
    "fcfs: the last is cut": (Fcfs(), pass_view(lengths(500, 900, 9)), (Action.LONG, [500, 900], 1000, False)),
    "fcfs: one long": (Fcfs(), pass_view(lengths(5000, 9)), (Action.LONG, [5000], 1000, False)),
    "fcfs: chunk first": (Fcfs(), pass_view(lengths(9), CHUNK), (Action.LONG, [], 1000, False)),
    "fcfs: the end of a chunk leaves room": (
        Fcfs(),
        pass_view(lengths(600, 9), waiting(300)),
        (Action.SHORT, [600, 9], 1000, False),
    ),
    "fcfs: slots": (Fcfs(), pass_view(lengths(9, 9, 9), slots=2), (Action.SHORT, [9, 9], None, False)),
    "spf: shortest first": (
        ShortestPrefillFirst(),
        pass_view(lengths(90, 9, 50)),
        (Action.SHORT, [9, 50, 90], None, False),
    ),
    "spf: the chunk keeps a page": (
        ShortestPrefillFirst(page_tokens=1),
        pass_view(lengths(500, 499), CHUNK),
        (Action.SHORT, [499, 500], 1000, False),
    ),
    "spf: a short as large as the budget locks all out": (
        ShortestPrefillFirst(),
        pass_view(lengths(1000, 1000), CHUNK),
        (Action.LONG, [], 1000, False),
    ),
    "spf: reservation stops at the first that does not fit": (
        ShortestPrefillFirst(),
        pass_view(lengths(600, 9, 400), CHUNK),
        (Action.SHORT, [9, 400], 1000, False),
    ),
    "spf: those longer than the rest of the chunk wait": (
        ShortestPrefillFirst(),
        pass_view(lengths(500), waiting(400)),
        (Action.LONG, [], 1000, False),
    ),
    "hrrn: long waits weigh by service": (
        Hrrn(FLAT),
        pass_view([*lengths(1000), *lengths(100, arrival_s=9.9)]),  # at 10 s: 1 + 10/0.1 and 1 + 0.1/0.01
        (Action.SHORT, [1000], None, False),
    ),
    "hrrn: a short overtakes": (
        Hrrn(FLAT),
        pass_view([*lengths(2000), *lengths(100, arrival_s=9.0)]),
        (Action.LONG, [100, 2000], 1000, False),
    ),
    "hrrn: host order above the cap": (
        Hrrn(FLAT, cap=1),
        pass_view([*lengths(2000), *lengths(100, arrival_s=9.0)]),
        (Action.LONG, [2000], 1000, False),
    ),
    "srpt: parks the chunk": (PassSrpt(), pass_view(lengths(90, 9), CHUNK), (Action.SHORT, [9, 90], None, True)),
    "srpt: unless it is shorter": (PassSrpt(), pass_view(lengths(90), waiting(50)), (Action.SHORT, [90], 1000, False)),
    "srpt: or nothing fits whole": (PassSrpt(), pass_view(lengths(1500), CHUNK), (Action.LONG, [], 1000, False)),
}


@pytest.mark.parametrize(("policy", "view", "expected"), CASES.values(), ids=CASES)
def test_orders(policy: Any, view: PassView, expected: Expected) -> None:
    answer = policy.decide(view, 10.0)
    found = (answer.action, [chosen.new_tokens for chosen in answer.selected], answer.chunk_tokens, answer.park)
    assert found == expected
    assert answer.reason is PassReason.ORDER


@pytest.mark.parametrize("name", ENGINE_ORDERS)
def test_nothing_to_do(name: str) -> None:
    policy = ENGINE_ORDERS[name](FLAT)
    assert policy.decide(pass_view(), 0.0).reason is PassReason.EMPTY
    assert policy.decide(pass_view(lengths(9), slots=0), 0.0).reason is PassReason.BLOCKED


@given(
    st.sampled_from(sorted(ENGINE_ORDERS)),
    st.lists(st.integers(1, 3000), max_size=20),
    st.none() | st.integers(1, 3000),
    st.integers(0, 8),
)
def test_a_pass_never_exceeds_budget_or_slots(name: str, tokens: list[int], chunk: int | None, slots: int) -> None:
    view = pass_view(lengths(*tokens), None if chunk is None else waiting(chunk), slots=slots)
    answer = ENGINE_ORDERS[name](FLAT).decide(view, 1.0)
    assert len(answer.selected) <= slots
    whole = [chosen.new_tokens for chosen in answer.selected]
    if answer.action is Action.LONG:
        assert sum(whole[:-1]) < view.pass_budget_tokens  # the last one may be cut
    if answer.action is Action.SHORT:
        assert sum(whole) <= view.pass_budget_tokens


@pytest.mark.parametrize(
    ("make", "message"), [(lambda: ShortestPrefillFirst(0), "page_tokens"), (lambda: Hrrn(FLAT, cap=0), "cap")]
)
def test_bad_values(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
