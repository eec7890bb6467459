"""The temporal policy over several passes: shares of aged longs, what cannot run, rates, knobs."""

from __future__ import annotations

import dataclasses

import pytest
from support.temporal_scene import AGED_S, KNOBS, NOW_S, RECENT_S, lone_short, owing, policy, run
from support.views import BOUNDARY_TOKENS, FLAT, long, pass_view, short

from pla_sglang.policy.common.step_model import GPU_START
from pla_sglang.policy.interface.prefill import Action, PassReason
from pla_sglang.policy.pla.awd import AwdKnobs
from pla_sglang.policy.pla.boundary import find_boundary
from pla_sglang.policy.pla.temporal import Mixing

# -- age: the share of the device --------------------------------------------------------------------------------------


def test_an_aged_long_and_shorts_alternate_by_time() -> None:
    made = policy()
    view = pass_view([lone_short()], long(AGED_S, 40_000))
    actions = [run(made, view).action for _ in range(200)]
    # A chunk takes 0.1 s (1000 tokens, or less under pressure), a short batch 0.01 s: half of the device for each.
    seconds = {Action.LONG: 0.0, Action.SHORT: 0.0}
    for action in actions:
        seconds[action] += 0.01 if action is Action.SHORT else 0.1
    assert actions[:2] == [Action.SHORT, Action.LONG]
    assert seconds[Action.LONG] == pytest.approx(seconds[Action.SHORT], abs=0.1)


def test_ageing_is_counted_anew_when_it_begins_anew() -> None:
    made = policy()
    aged = pass_view([lone_short()], long(AGED_S))
    assert run(made, aged).action is Action.SHORT  # nobody has had anything yet
    assert run(made, aged).reason is PassReason.AGE
    assert run(made, aged).action is Action.SHORT  # the long has had its share
    assert run(made, pass_view([lone_short()], long(RECENT_S))).action is Action.SHORT
    assert run(made, aged).action is Action.SHORT
    assert run(made, aged).reason is PassReason.AGE


def test_priority_of_shorts_does_not_starve_an_aged_long() -> None:
    view = pass_view([short(RECENT_S, priority_rank=0), long(AGED_S, priority_rank=1)])
    assert owing(policy()).decide(view, NOW_S).reason is PassReason.AGE


# -- nothing running: a class that cannot run lets the other try -------------------------------------------------------


def test_a_short_that_does_not_fit_on_an_idle_device_lets_a_long_try() -> None:
    """The host may refuse for reasons that no figure of the view shows, such as a prompt still being prefetched."""
    made, view = policy(), pass_view([lone_short(), long(RECENT_S)])
    tried = []
    for _ in range(4):
        decision = made.decide(view, NOW_S)
        made.on_pass(decision, view, (), NOW_S)
        tried.append(decision.action)
    assert set(tried) == {Action.SHORT, Action.LONG}


def test_a_class_alone_on_an_idle_device_is_tried_again_and_again() -> None:
    for queue in ([lone_short()], [long(RECENT_S)]):
        made, view = policy(), pass_view(queue)
        for _ in range(3):
            decision = made.decide(view, NOW_S)
            assert decision.action is not Action.HOLD
            made.on_pass(decision, view, (), NOW_S)


# -- memory that running requests have taken from the chunk under way --------------------------------------------------


@pytest.mark.parametrize(("room_tokens", "piece_tokens"), [(5000, 1000), (700, 672), (40, 32), (32, 32)])
def test_the_next_piece_is_no_larger_than_its_room(room_tokens: int, piece_tokens: int) -> None:
    in_pages = dataclasses.replace(KNOBS.long_prompts, grid_tokens=32)
    view = pass_view([], long(RECENT_S), kv_room=room_tokens, running=4)
    assert policy(long_prompts=in_pages).decide(view, NOW_S).chunk_tokens == piece_tokens
    aged = pass_view([lone_short()], long(AGED_S), kv_room=room_tokens, running=4)
    decision = owing(policy(long_prompts=in_pages)).decide(aged, NOW_S)
    assert (decision.reason, decision.chunk_tokens) == (PassReason.AGE, piece_tokens)


def test_less_than_a_page_is_no_room_except_for_the_last_piece() -> None:
    in_pages = dataclasses.replace(KNOBS.long_prompts, grid_tokens=32)
    assert (
        policy(long_prompts=in_pages).decide(pass_view([], long(RECENT_S), kv_room=31), NOW_S).reason
        is PassReason.KV_DRAIN
    )
    last = pass_view([], long(RECENT_S, 16), kv_room=16)
    assert policy(long_prompts=in_pages).decide(last, NOW_S).action is Action.LONG


# -- ablation, knobs, classes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mixing", "busy", "shares"),
    [
        (Mixing.NEVER, True, False),
        (Mixing.AUTO, False, False),  # the short would wait 90 ms for nobody else's sake
        (Mixing.AUTO, True, True),  # many are expected while the long is worked off
        (Mixing.ALLOW, False, True),
    ],
)
def test_whether_a_chunk_shares_the_pass_of_due_shorts(mixing: Mixing, busy: bool, shares: bool) -> None:
    view = pass_view([lone_short()], long(RECENT_S))
    decision = policy(mixing=mixing, busy=busy).decide(view, NOW_S)
    assert (decision.action, decision.park) == (Action.SHORT, not shares)
    assert decision.chunk_tokens == (1000 if shares else None)
    assert decision.shares_with_chunk is shares


def test_a_chunk_beside_shorts_counts_as_what_they_leave_of_the_pass() -> None:
    made, chunk, first = policy(mixing=Mixing.ALLOW), long(RECENT_S, 40_000), lone_short()
    view = pass_view([first], chunk)
    decision = made.decide(view, NOW_S)
    assert decision.list_parts(chunk) == [(first, first.new_tokens), (chunk, 1000 - first.new_tokens)]
    for admitted in ([first, chunk], [chunk, first]):  # a host adds its chunk first
        assert made.predict_s(decision, view, admitted) == pytest.approx(FLAT.step_s(1000, 0))
    assert made.predict_s(decision, view, [chunk]) == pytest.approx(FLAT.step_s(1000 - first.new_tokens, 0))


def test_a_pass_whose_chunk_alone_ran_has_blocked_its_shorts() -> None:
    made = policy(mixing=Mixing.ALLOW)
    view = pass_view([lone_short()], long(RECENT_S), running=4)
    decision = made.decide(view, NOW_S)
    assert decision.shares_with_chunk
    made.on_pass(decision, view, [view.chunk], NOW_S)
    assert made.decide(view, NOW_S).reason is PassReason.SHORT_BLOCKED


def test_a_chunk_without_room_shares_no_pass() -> None:
    view = pass_view([lone_short()], long(RECENT_S), kv_room=0, running=4)
    decision = policy(mixing=Mixing.ALLOW).decide(view, NOW_S)
    assert (decision.action, decision.park, decision.chunk_tokens) == (Action.SHORT, True, None)


def test_always_mixing_without_a_chunk_changes_nothing() -> None:
    view = pass_view([lone_short(), long(RECENT_S)])
    assert policy(mixing=Mixing.ALLOW).decide(view, NOW_S) == policy().decide(view, NOW_S)


def test_classes_are_by_new_tokens_not_by_prompt() -> None:
    hit = short(RECENT_S, new_tokens=10, history_tokens=50_000)
    short_prompts, long_prompts = policy().classify([hit, long(RECENT_S), short(RECENT_S, BOUNDARY_TOKENS)])
    assert short_prompts == [hit]
    assert len(long_prompts) == 2


def test_fitted_boundary_follows_the_model() -> None:
    made = policy(boundary_tokens=None)
    assert made.boundary.tokens(0) == 91
    made.set_model(GPU_START)
    assert made.boundary.tokens(0) == find_boundary(GPU_START, 0, 4096)


def test_new_knobs_take_effect() -> None:
    made = policy()
    made.set_knobs(dataclasses.replace(KNOBS, boundary_tokens=10, awd=AwdKnobs(depth_max=4)))
    assert made.boundary.tokens(0) == 10
    assert made.awd.depth == 4
    assert made.decide(pass_view([lone_short()]), NOW_S).action is Action.LONG


def test_rates_count_who_would_pass() -> None:
    made = policy()
    for index in range(10):
        made.on_arrival(short(), index / 10)
        made.on_arrival(long(new_tokens=900), index / 10)  # fits one pass, so it passes between chunks too
        made.on_arrival(long(new_tokens=4000), index / 10)
    assert made.short_rate.per_second(1.0) == pytest.approx(9.0)
    assert made.passing_rate.per_second(1.0) == pytest.approx(19.0)


@pytest.mark.parametrize(("new_tokens", "cut"), [(500, False), (900, False), (1000, True), (4000, True)])
def test_a_long_is_cut_only_for_those_much_shorter(new_tokens: int, cut: bool) -> None:
    """Under an overload of equal requests each would be cut for the next, which cannot pass it anyway."""
    made = policy()
    made.set_model(dataclasses.replace(FLAT, k0_s=0.001))
    for index in range(100):
        made.on_arrival(long(index / 1000, new_tokens=500), index / 1000)
    decision = made.decide(pass_view([long(RECENT_S, new_tokens=new_tokens)]), 0.1)
    assert decision.action is Action.LONG
    assert (decision.chunk_tokens is not None and decision.chunk_tokens < min(new_tokens, 1000)) == cut
