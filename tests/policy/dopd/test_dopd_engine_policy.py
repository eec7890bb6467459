"""DOPD's batching in an engine: Algorithm 1, with what an engine that decodes as well needs beside it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.temporal_scene import KNOBS, engine_knobs
from support.views import BOUNDARY_TOKENS, FLAT, long, pass_view, short, waiting

from pla_sglang.plugin.config import DOPD, PlaConfig
from pla_sglang.plugin.temporal_knobs import EngineLimits, temporal_knobs
from pla_sglang.policy.combined.length_batched import LengthBatchedPolicy
from pla_sglang.policy.interface.prefill import Action, PassDecision, PassReason, PassView

TIMED = engine_knobs(KNOBS, batch_timeout_s=0.1)


def policy(**changes: Any) -> LengthBatchedPolicy:
    return LengthBatchedPolicy(dataclasses.replace(TIMED, **changes), FLAT)


def run(made: LengthBatchedPolicy, view: PassView, now_s: float) -> PassDecision:
    decision = made.decide(view, now_s)
    made.on_pass(decision, view, decision.selected, now_s)
    return decision


def test_shorts_gather_to_the_boundary_and_longs_go_alone() -> None:
    short_prompts = [waiting(40, rid=str(index)) for index in range(4)]
    decision = policy().decide(pass_view(short_prompts), 0.0)
    assert (decision.action, decision.reason) == (Action.SHORT, PassReason.TOKENS)
    assert [view.rid for view in decision.selected] == ["0", "1", "2"], f"{BOUNDARY_TOKENS} tokens are reached"
    decision = policy().decide(pass_view([short_prompts[0], long()]), 0.0)
    assert (decision.action, len(decision.selected)) == (Action.LONG, 1)


def test_the_same_question_twice_in_a_pass_has_the_same_answer() -> None:
    made, view = policy(), pass_view([short(), long()])
    assert made.decide(view, 0.0).action is Action.LONG
    first, again = made.decide(view, 0.2), made.decide(view, 0.2)
    assert first == again
    assert first.reason is PassReason.WINDOW
    made.on_pass(first, view, first.selected, 0.2)
    assert made.decide(view, 0.2).action is Action.LONG, "the timer begins anew"


def test_told_knobs_hold_from_the_next_pass_on() -> None:
    made, view = policy(), pass_view([waiting(150), waiting(160)])
    assert run(made, view, 0.0).action is Action.LONG
    made.set_knobs(dataclasses.replace(TIMED, boundary_tokens=400, batch_timeout_s=0.0))
    decision = run(made, view, 0.1)
    assert (decision.action, decision.reason, len(decision.selected)) == (Action.SHORT, PassReason.QUEUE_END, 2)
    mixed = pass_view([waiting(150), waiting(500)])
    assert run(made, mixed, 0.2).reason is PassReason.WINDOW, "a timeout of nothing"


def test_running_requests_get_their_steps() -> None:
    made = policy(decode_gap_s=0.5)
    view = pass_view([long()])
    view.running, view.decode_wait_s = 2, 0.6
    assert made.decide(view, 1.0).reason is PassReason.DECODE_TURN
    view.decode_wait_s = 0.1
    assert made.decide(view, 1.0).action is Action.LONG


@pytest.mark.parametrize(("room", "tokens"), [(0, None), (300, 300), (5000, 1000)])
def test_a_chunk_takes_no_more_than_there_is_room_for(room: int, tokens: int | None) -> None:
    view = pass_view([short()], waiting(4000), budget=2000)
    view.kv_room_tokens = room
    decision = policy().decide(view, 0.0)
    if tokens is None:
        assert (decision.action, decision.reason) == (Action.HOLD, PassReason.KV_DRAIN)
    else:
        assert (decision.action, decision.selected, decision.chunk_tokens) == (Action.LONG, (), tokens)


def test_prompts_are_whole_where_the_engine_does_not_chunk() -> None:
    made = policy(long_prompts=dataclasses.replace(TIMED.long_prompts, chunk_max_tokens=None))
    assert made.decide(pass_view([waiting(4000)]), 0.0).chunk_tokens is None


def test_flags_reach_the_policy_and_the_threshold_fits_one_pass() -> None:
    config = PlaConfig(prefill_disagg=DOPD, boundary_tokens=9000, batch_timeout_ms=30.0)
    knobs = temporal_knobs(config, EngineLimits(pass_tokens=2048, chunk_tokens=2048))
    assert knobs.batch_timeout_s == 0.03
    assert LengthBatchedPolicy(knobs, FLAT)._batching.knobs.i_next_tokens == 2048
