"""Arrow's Algorithms 1 and 2 and its triggers as tables, and what must hold for any sequence of events.

Prefill takes 10 ms + 1 ms a token; the TTFT target is 1 s, TPOT 50 ms, Max Running Tokens 1,000.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fleets import apply, d2p, decode, fleet, mixed, p2d, predictor, prefill, request

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.arrow.policy import ArrowKnobs, ArrowPolicy
from pla_sglang.policy.interface.decisions import Hold, SetRole
from pla_sglang.policy.interface.fleet import FleetView, InstanceState, RequestView, Role
from pla_sglang.policy.interface.reasons import FleetReason as R

KNOBS = ArrowKnobs(ttft_slo_s=1.0, tpot_slo_s=0.05, max_running_tokens={"": 1000}, tpot_window_s=0.0, idle_s=0.0)
LATE = {"queued_tokens": 950}  # 960 ms of backlog
NAMED = {"waiting_decodes": 9, "waiting_decode_tokens": 9000, "prefilling_decode_tokens": 9000}  # none is prefilled


def policy(**changes: Any) -> ArrowPolicy:
    return ArrowPolicy(dataclasses.replace(KNOBS, **changes), predictor())


@dataclasses.dataclass(frozen=True)
class Case:
    view: FleetView
    chosen: str | None
    reason: R
    held: R | None = None  # reason of the Hold that comes with it
    request: RequestView = dataclasses.field(default_factory=request)
    now_s: float = 0.0


PREFILLS = {
    "t1, least delay": Case(fleet(prefill(queued_tokens=9), prefill(queued_tokens=5), decode()), "i1", R.PREFILL_SLO),
    "exactly on target": Case(fleet(prefill(queued_tokens=880), decode()), "i0", R.PREFILL_SLO),
    "t1 although t2 is idle": Case(fleet(d2p(), prefill(queued_tokens=800), decode()), "i1", R.PREFILL_SLO),
    "t2 when t1 is late": Case(fleet(d2p(), prefill(**LATE), decode()), "i0", R.PREFILL_SLO_MIXED),
    "no prefill pool: t2": Case(fleet(d2p(), decode()), "i0", R.PREFILL_SLO_MIXED),
    "flip": Case(fleet(prefill(**LATE), decode(context_tokens=9), decode(context_tokens=5)), "i2", R.PREFILL_FLIP),
    "P->D is taken back first": Case(fleet(prefill(**LATE), decode(), p2d()), "i2", R.PREFILL_FLIP),
    "last decode stays": Case(fleet(prefill(**LATE), decode()), "i0", R.PREFILL_FALLBACK, R.HOLD_LAST),
    "decode first: 701 tokens on the one that would stay": Case(
        fleet(prefill(**LATE), decode(context_tokens=701), decode()), "i0", R.PREFILL_FALLBACK, R.HOLD_OVERLOAD
    ),
    "700 would be low": Case(fleet(prefill(**LATE), decode(context_tokens=700), decode()), "i2", R.PREFILL_FLIP),
    "decodes of prompts that wait for their prefill are no decode load": Case(
        fleet(prefill(**LATE), decode(**NAMED), decode(**NAMED, context_tokens=700)), "i1", R.PREFILL_FLIP
    ),
    "decodes that arrive are": Case(
        fleet(prefill(**LATE), decode(waiting_decodes=1, waiting_decode_tokens=701), decode()),
        "i0",
        R.PREFILL_FALLBACK,
        R.HOLD_OVERLOAD,
    ),
    "the one that flips is the one with the least to decode, named ones counted": Case(
        fleet(prefill(**LATE), decode(**NAMED), decode(context_tokens=5)), "i2", R.PREFILL_FLIP
    ),
    "decode first: token interval above target": Case(
        fleet(prefill(**LATE), decode(token_interval_s=0.06), decode(token_interval_s=0.05)),
        "i0",
        R.PREFILL_FALLBACK,
        R.HOLD_OVERLOAD,
    ),
    "late anyway: no flip is wasted on it": Case(
        fleet(prefill(), decode(), decode()), "i0", R.PREFILL_FALLBACK, R.HOLD_LATE, request=request(2000)
    ),
    "the fallback is t1, not the idle t2": Case(
        fleet(d2p(**LATE), prefill(queued_tokens=990), decode()), "i1", R.PREFILL_FALLBACK, R.HOLD_LAST
    ),
    "time already waited counts": Case(fleet(prefill(), d2p()), "i0", R.PREFILL_FALLBACK, R.HOLD_LAST, now_s=0.95),
    "target of the request": Case(fleet(prefill(**LATE)), "i0", R.PREFILL_SLO, request=request(ttft_slo_s=2.0)),
    "uncached tokens decide": Case(
        fleet(prefill(queued_tokens=50), prefill(), decode()), "i0", R.PREFILL_SLO, request=request(cached={0: 90})
    ),
    "a cached prefix behind a long queue does not pay": Case(
        fleet(prefill(queued_tokens=100), prefill(), decode()), "i1", R.PREFILL_SLO, request=request(cached={0: 90})
    ),
    "only decodes: the least backlog of all": Case(fleet(decode()), "i0", R.PREFILL_FALLBACK, R.HOLD_LAST),
    "nobody": Case(fleet(), None, R.NO_INSTANCE),
}


@pytest.mark.parametrize("case", PREFILLS.values(), ids=PREFILLS)
def test_algorithm_1(case: Case) -> None:
    answer = policy().dispatch(case.request, case.view, case.now_s)
    assert (answer.prefill.name if answer.prefill else None, answer.reason) == (case.chosen, case.reason)
    assert answer.decode is None
    holds = [action.reason for action in answer.actions if isinstance(action, Hold)]
    assert holds == ([case.held] if case.held else [])
    moves = [action for action in answer.actions if isinstance(action, SetRole)]
    assert [move.instance for move in moves] == ([answer.prefill] if case.reason is R.PREFILL_FLIP else [])
    if answer.prefill:
        assert answer.predicted_ttft_s == pytest.approx(predictor().ttft_s(case.request, answer.prefill))


FULL = {"context_tokens": 1001}
DECODES = {
    "t1, least tokens": Case(fleet(prefill(), decode(context_tokens=9), decode(context_tokens=5)), "i2", R.DECODE_SLO),
    "exactly Max Running Tokens": Case(fleet(prefill(), decode(context_tokens=1000)), "i1", R.DECODE_SLO),
    "named ones count in the choice": Case(
        fleet(prefill(), decode(**NAMED), decode(context_tokens=5)), "i2", R.DECODE_SLO
    ),
    "but are no reason to flip": Case(fleet(prefill(), prefill(), decode(**NAMED)), "i2", R.DECODE_SLO),
    "t2 when t1 is full": Case(fleet(prefill(), decode(**FULL), p2d()), "i2", R.DECODE_SLO_MIXED),
    "t2 when t1 is slow": Case(fleet(prefill(), decode(token_interval_s=0.051), p2d()), "i2", R.DECODE_SLO_MIXED),
    "flip, least prefill delay": Case(fleet(prefill(queued_tokens=9), prefill(), decode(**FULL)), "i1", R.DECODE_FLIP),
    "D->P is taken back first": Case(fleet(prefill(), d2p(queued_tokens=9), decode(**FULL)), "i1", R.DECODE_FLIP),
    "flip whatever the prefill load": Case(
        fleet(prefill(queued_tokens=90_000), prefill(queued_tokens=80_000), decode(**FULL)), "i1", R.DECODE_FLIP
    ),
    "last prefill stays": Case(fleet(prefill(), decode(**FULL)), "i1", R.DECODE_FALLBACK, R.HOLD_LAST),
    "fallback: the smaller of both": Case(
        fleet(prefill(), decode(context_tokens=1500), p2d(context_tokens=1400)), "i2", R.DECODE_FALLBACK, R.HOLD_LAST
    ),
    "fallback: t1 of equals": Case(
        fleet(prefill(), p2d(context_tokens=1500), decode(context_tokens=1500)), "i2", R.DECODE_FALLBACK, R.HOLD_LAST
    ),
    "nobody decodes: stays where it is": Case(fleet(prefill()), "i0", R.DECODE_FALLBACK, R.HOLD_LAST),
    "nobody": Case(fleet(), None, R.NO_INSTANCE),
}


@pytest.mark.parametrize("case", DECODES.values(), ids=DECODES)
def test_algorithm_2(case: Case) -> None:
    done = dataclasses.replace(case.request, prefilled_on=case.view.instances[0] if case.view.instances else None)
    answer = policy().place_decode(done, case.view, case.now_s)
    assert (answer.decode.name if answer.decode else None, answer.reason) == (case.chosen, case.reason)
    holds = [action.reason for action in answer.actions if isinstance(action, Hold)]
    assert holds == ([case.held] if case.held else [])


@pytest.mark.parametrize("role", [decode, p2d, mixed])
def test_a_request_decodes_where_it_was_prefilled_if_that_decodes_now(role: Any) -> None:
    view = fleet(role(**FULL), decode())
    answer = policy().place_decode(request(prefilled_on=view.instances[0]), view, 0.0)
    assert (answer.decode, answer.reason) == (view.instances[0], R.DECODE_IN_PLACE)


def test_not_if_that_is_dead() -> None:
    view = fleet(decode(), decode())
    view.set_state(view.instances[0], InstanceState.DEAD)
    answer = policy().place_decode(request(prefilled_on=view.instances[0]), view, 0.0)
    assert (answer.decode, answer.reason) == (view.instances[1], R.DECODE_SLO)


TICKS: dict[str, tuple[FleetView, str | None, Role | None, R]] = {
    "steady": (fleet(prefill(queued_tokens=1), decode()), None, None, R.STEADY),
    "P->D has settled": (fleet(prefill(), p2d(context_tokens=5)), "i1", Role.DECODE, R.DRAINED),
    "D->P has settled": (fleet(d2p(queued_tokens=5), decode()), "i0", Role.PREFILL, R.DRAINED),
    "D->P with a decode on its way has not": (fleet(d2p(waiting_decodes=1), decode()), None, None, R.STEADY),
    "trigger 2: token interval": (
        fleet(prefill(queued_tokens=9), prefill(queued_tokens=5), decode(token_interval_s=0.051)),
        "i1",
        Role.PREFILL_TO_DECODE,
        R.FLIP_TPOT,
    ),
    "on target": (fleet(prefill(queued_tokens=9), decode(token_interval_s=0.05)), None, None, R.STEADY),
    "trigger 2, last prefill": (
        fleet(prefill(queued_tokens=1), decode(token_interval_s=0.051)),
        None,
        None,
        R.HOLD_LAST,
    ),
    "trigger 3: idle prefill, busy decode": (
        fleet(prefill(queued_tokens=1), prefill(), decode(context_tokens=501)),
        "i1",
        Role.DECODE,
        R.FLIP_IDLE,
    ),
    "decode is not busy": (fleet(prefill(), prefill(), decode(context_tokens=500)), None, None, R.STEADY),
    "trigger 3, decodes are only named": (fleet(prefill(), prefill(), decode(**NAMED)), None, None, R.STEADY),
    "trigger 3, last prefill": (fleet(prefill(), decode(context_tokens=501)), None, None, R.HOLD_LAST),
    "prefill has died": (fleet(decode(), decode(context_tokens=1)), "i0", Role.PREFILL, R.REPAIR),
    "decode has died": (fleet(prefill(), prefill(queued_tokens=1)), "i0", Role.DECODE, R.REPAIR),
    "one instance does all": (fleet(prefill()), None, None, R.STEADY),
}


@pytest.mark.parametrize(("view", "moved", "role", "reason"), TICKS.values(), ids=TICKS)
def test_tick(view: FleetView, moved: str | None, role: Role | None, reason: R) -> None:
    (action,) = policy().tick(view, 0.0)
    assert action.reason is reason
    if moved is None:
        assert isinstance(action, Hold)
    else:
        assert isinstance(action, SetRole)
        assert (action.instance.name, action.role) == (moved, role)


def test_triggers_need_their_time() -> None:
    busy = policy(tpot_window_s=1.0)
    view = fleet(prefill(queued_tokens=9), prefill(queued_tokens=5), decode(token_interval_s=0.06))
    assert [busy.tick(view, now_s)[0].reason for now_s in (0.0, 0.9, 1.0)] == [R.STEADY, R.STEADY, R.FLIP_TPOT]
    idle = policy(idle_s=1.0)
    view = fleet(prefill(queued_tokens=9), prefill(), decode(context_tokens=600))
    assert [idle.tick(view, now_s)[0].reason for now_s in (0.0, 0.9, 1.0)] == [R.STEADY, R.STEADY, R.FLIP_IDLE]


def test_an_interval_on_target_starts_the_window_anew() -> None:
    busy = policy(tpot_window_s=1.0)
    view = fleet(prefill(queued_tokens=9), prefill(queued_tokens=5), decode(token_interval_s=0.06))
    busy.tick(view, 0.0)
    view.instances[2].token_interval_s = 0.04
    busy.tick(view, 0.5)
    view.instances[2].token_interval_s = 0.06
    assert busy.tick(view, 1.0)[0].reason is R.STEADY


def test_a_reversal_is_held_by_the_cool_down() -> None:
    arrow = policy()
    view = fleet(prefill(**LATE), decode(), decode())
    apply(view, arrow.dispatch(request(), view, 0.0).actions, 0.0)
    view.by_role[Role.DECODE][0].context_tokens = 2000
    view.by_role[Role.DECODE][0].running = 1
    done = request(prefilled_on=view.instances[0])
    early, late = arrow.place_decode(done, view, 0.9), arrow.place_decode(done, view, 1.0)
    assert [action.reason for action in early.actions] == [R.HOLD_COOL_DOWN]
    assert late.reason is R.DECODE_FLIP


@pytest.mark.parametrize(
    ("planned", "to_prefill", "to_decode"),
    [
        (None, R.PREFILL_FLIP, R.FLIP_IDLE),
        (1, R.PREFILL_FALLBACK, R.FLIP_IDLE),
        (2, R.PREFILL_FLIP, R.FLIP_IDLE),
        (3, R.PREFILL_FLIP, R.HOLD_PLAN),
    ],
)
def test_flips_leave_a_planned_number_by_one_at_most(planned: int | None, to_prefill: R, to_decode: R) -> None:
    """Of two prefill instances; one that turns to prefill is one of them."""
    arrow = policy()
    arrow.planned = planned
    late = fleet(prefill(**LATE), d2p(**LATE), decode(), decode())
    answer = arrow.dispatch(request(), late, 0.0)
    assert answer.reason is to_prefill
    if answer.reason is R.PREFILL_FALLBACK:
        assert [action.reason for action in answer.actions] == [R.HOLD_PLAN]
    arrow = policy()
    arrow.planned = planned
    idle = fleet(prefill(queued_tokens=1), prefill(), decode(context_tokens=501))
    assert [action.reason for action in arrow.tick(idle, 0.0)] == [to_decode]


def test_a_phase_without_an_instance_is_repaired_whatever_is_planned() -> None:
    for planned, view in ((0, fleet(decode(), decode())), (2, fleet(prefill(), prefill()))):
        arrow = policy()
        arrow.planned = planned
        assert [action.reason for action in arrow.tick(view, 0.0)] == [R.REPAIR]


def test_without_flips_only_requests_are_scheduled() -> None:
    arrow = policy(adaptive=False)
    view = fleet(prefill(**LATE), decode(), decode())
    assert arrow.dispatch(request(), view, 0.0).reason is R.PREFILL_FALLBACK
    assert arrow.tick(fleet(prefill(), prefill(), decode(context_tokens=900)), 0.0)[0].reason is R.HOLD_LAST


@pytest.mark.parametrize(
    "bad", [{"ttft_slo_s": 0.0}, {"tpot_slo_s": -1.0}, {"max_running_tokens": {"": 0}}, {"interval_s": 0.0}]
)
def test_bad_knobs(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        dataclasses.replace(KNOBS, **bad)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "decode", "tick", "load"]),
        st.integers(0, 7),
        st.integers(0, 3000),
        st.floats(0.0, 0.1),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(st.integers(1, 7), st.integers(1, 7), EVENTS)
def test_no_phase_ever_loses_its_last_instance(prefills: int, decodes: int, events: list[Any]) -> None:
    """Whatever is reported: a phase that has instances keeps one, and every move is one of the diagram's."""
    view = fleet(*[prefill()] * prefills, *[decode()] * decodes)
    arrow, now_s = policy(), 0.0
    for kind, which, tokens, seconds in events:
        now_s += seconds * 20
        chosen = view.instances[which % len(view.instances)]
        if kind == "load":
            chosen.queued_tokens = tokens
            chosen.queued_prefills = chosen.running = int(tokens > 500)
            chosen.context_tokens = 2000 - tokens if tokens > 500 else 0
            chosen.token_interval_s = seconds
            continue
        if kind == "arrive":
            ask = request(1 + tokens // 10, now_s)
            arrow.on_arrival(ask, now_s)
            actions = arrow.dispatch(ask, view, now_s).actions
        elif kind == "decode":
            actions = arrow.place_decode(request(prefilled_on=chosen), view, now_s).actions
        else:
            actions = tuple(arrow.tick(view, now_s))
        apply(view, actions, now_s)
        assert view.prefill_capable()
        assert view.decode_capable()
        view.check_integrity()
