"""The four pools: every event from every role, and the guard of flips."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fleets import d2p, decode, fleet, p2d, predictor, prefill

from pla_sglang.common.errors import ConfigError, IllegalMoveError
from pla_sglang.policy.arrow.role_switches import (
    LoadLevel,
    RoleSwitchGuard,
    RoleSwitchKnobs,
    pick_for_decode,
    pick_for_prefill,
)
from pla_sglang.policy.common.pools import PoolEvent, transition
from pla_sglang.policy.interface.fleet import FleetView, Role

P, D, P2D, D2P = Role.PREFILL, Role.DECODE, Role.PREFILL_TO_DECODE, Role.DECODE_TO_PREFILL
TO_P, TO_D = PoolEvent.TO_PREFILL, PoolEvent.TO_DECODE
# (role, event, has prefills, has decodes) -> role; all that is not here is illegal
LEGAL: dict[tuple[Role, PoolEvent, bool, bool], Role] = {
    (role, PoolEvent.TO_PREFILL, prefills, decodes): D2P if decodes else P
    for role in (D, P2D, Role.MIXED)
    for prefills in (False, True)
    for decodes in (False, True)
}
LEGAL |= {
    (role, PoolEvent.TO_DECODE, prefills, decodes): P2D if prefills else D
    for role in (P, D2P, Role.MIXED)
    for prefills in (False, True)
    for decodes in (False, True)
}
LEGAL |= {(P2D, PoolEvent.SETTLE, False, decodes): D for decodes in (False, True)}
LEGAL |= {(D2P, PoolEvent.SETTLE, prefills, False): P for prefills in (False, True)}
LEGAL |= {
    (role, PoolEvent.UNITE, prefills, decodes): Role.MIXED
    for role in (P, D, P2D, D2P)
    for prefills in (False, True)
    for decodes in (False, True)
}


MOVES = list(itertools.product(Role, PoolEvent, (False, True), (False, True)))


@pytest.mark.parametrize("case", MOVES, ids=str)
def test_every_move(case: tuple[Role, PoolEvent, bool, bool]) -> None:
    role, event, prefills, decodes = case
    if case in LEGAL:
        assert transition(role, event, has_prefills=prefills, has_decodes=decodes) is LEGAL[case]
    else:
        with pytest.raises(IllegalMoveError, match=f"{event.value} from {role.value}"):
            transition(role, event, has_prefills=prefills, has_decodes=decodes)


@pytest.mark.parametrize(
    ("name", "view", "chosen"),
    [
        ("only one left", fleet(prefill(), decode()), None),
        ("one decode and one P->D make two", fleet(decode(), p2d()), "i1"),
        ("P->D before decode, whatever the load", fleet(decode(), decode(), p2d(context_tokens=900)), "i2"),
        ("least running tokens in P->D", fleet(p2d(context_tokens=9), p2d(context_tokens=5), decode()), "i1"),
        ("least running tokens in decode", fleet(decode(context_tokens=9), decode(context_tokens=5)), "i1"),
        ("tokens on their way count", fleet(decode(waiting_decode_tokens=9), decode(context_tokens=5)), "i1"),
    ],
)
def test_algorithm_3(name: str, view: FleetView, chosen: str | None) -> None:
    picked = pick_for_prefill(view)
    assert (picked.name if picked else None) == chosen


@pytest.mark.parametrize(
    ("name", "view", "chosen"),
    [
        ("only one left", fleet(prefill(), decode()), None),
        ("D->P before prefill, whatever the load", fleet(prefill(), d2p(queued_tokens=900)), "i1"),
        ("least delay in D->P", fleet(d2p(queued_tokens=9), d2p(queued_tokens=5), prefill()), "i1"),
        ("least delay in prefill", fleet(prefill(queued_tokens=9), prefill(queued_tokens=5)), "i1"),
    ],
)
def test_algorithm_4(name: str, view: FleetView, chosen: str | None) -> None:
    picked = pick_for_decode(view, predictor())
    assert (picked.name if picked else None) == chosen


KNOBS = RoleSwitchKnobs(cool_down_s=4.0, cool_down_max_s=64.0, regret_s=20.0)


def test_the_same_direction_is_never_held() -> None:
    guard = RoleSwitchGuard(KNOBS)
    for _ in range(5):
        assert guard.may(TO_P, 0.0)
        guard.note(TO_P, 0.0)


def test_the_opposite_direction_waits() -> None:
    guard = RoleSwitchGuard(KNOBS)
    guard.note(TO_P, 0.0)
    assert not guard.may(TO_D, 3.9)
    assert guard.may(TO_D, 4.0)


def test_each_early_reversal_doubles_the_wait() -> None:
    guard = RoleSwitchGuard(KNOBS)
    now_s, direction = 0.0, TO_P
    waits = []
    for _ in range(7):
        guard.note(direction, now_s)
        waits.append(guard.cool_down_s(now_s))
        direction = TO_D if direction is TO_P else TO_P
        now_s += guard.cool_down_s(now_s)
    assert waits == [4.0, 8.0, 16.0, 32.0, 64.0, 64.0, 64.0]


def test_a_late_reversal_halves_it() -> None:
    guard = RoleSwitchGuard(KNOBS)
    guard.note(TO_P, 0.0)
    guard.note(TO_D, 4.0)  # 8
    guard.note(TO_P, 12.0)  # 16
    guard.note(TO_D, 112.0)
    assert guard.cool_down_s(112.0) == 8.0


def test_another_load_ends_the_wait() -> None:
    guard = RoleSwitchGuard(KNOBS)
    for second in range(100):
        guard.load.add(100, float(second))
    guard.note(TO_P, 100.0)
    guard.note(TO_D, 104.0)
    guard.note(TO_P, 112.0)
    assert guard.cool_down_s(112.0) == 16.0
    for step in range(20):  # 1,000 a second, ten times as much as before
        guard.load.add(1000, 112.0 + step)
    assert guard.cool_down_s(132.0) == 4.0


@given(st.lists(st.tuples(st.floats(0.01, 5.0), st.integers(1, 1000)), min_size=1, max_size=50))
def test_load_level_is_the_decayed_sum(arrivals: list[tuple[float, int]]) -> None:
    level, now_s = LoadLevel(10.0), 0.0
    times = []
    for gap_s, tokens in arrivals:
        now_s += gap_s
        level.add(tokens, now_s)
        times.append((now_s, tokens))
    expected = sum(tokens / 10.0 * 2.718281828459045 ** (-(now_s - at_s) / 10.0) for at_s, tokens in times)
    assert level.per_second(now_s) == pytest.approx(expected)


@pytest.mark.parametrize(
    "bad",
    [{"low_load": 0.0}, {"low_load": 1.1}, {"cool_down_s": -1.0}, {"cool_down_max_s": 0.5}, {"load_change": 1.0}],
)
def test_bad_knobs(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        RoleSwitchKnobs(**bad)
