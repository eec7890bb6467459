"""How many prefills the decodes of an instance bear, and where one is put.

Prefill takes 10 ms + 1 ms a token, a step of one request 10.1 ms; TPOT target 50 ms, so 0.798 of a token interval is
free. With answers of 8 tokens and shares of one half the bucket is 0.5 * 0.798 * 8 * 50 ms = 159.6 ms deep and drains
0.399 s a second.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.fleets import LinearSteps, instance, predictor, request

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.arrow.policy import ArrowKnobs, ArrowPolicy
from pla_sglang.policy.combined.stall_budget import InPlace, InPlaceKnobs, Share
from pla_sglang.policy.interface.fleet import InstanceView, Role

TARGET_S = 0.05


def in_place(**knobs: Any) -> InPlace:
    arrow = ArrowPolicy(ArrowKnobs(1.0, TARGET_S, {"": 1000}), predictor())
    return InPlace(InPlaceKnobs(usual=Share(0.5, 0.5, 0.05), **knobs), arrow, LinearSteps())


def decoding(**fields: Any) -> InstanceView:
    return instance(0, Role.DECODE, **{"running": 1, **fields})


def test_the_bucket_by_hand() -> None:
    one = in_place()
    rate, depth_s = one.bucket_s(decoding(), one.knobs.usual)
    assert rate == pytest.approx(0.399)
    assert depth_s == pytest.approx(0.1596)


def test_an_empty_instance_takes_one_of_any_length_but_not_two() -> None:
    """The second would stop the decode of the first."""
    one, member = in_place(), decoding(running=0)
    assert one.can_take(request(900), member, 0.0)
    one.take(request(900), member, 0.0)
    member.queued_prefills = 1
    assert not one.can_take(request(900), member, 0.0)


def test_it_fills_and_drains() -> None:
    one, member = in_place(), decoding()
    assert one.can_take(request(149), member, 0.0)  # 159 ms of 159.6
    assert not one.can_take(request(150), member, 0.0)
    one.take(request(149), member, 0.0)
    assert not one.can_take(request(1), member, 0.0)
    assert not one.can_take(request(20), member, 0.07)  # 27.9 ms have drained, 30 are wanted
    assert one.can_take(request(20), member, 0.08)


CAN_TAKE: dict[str, tuple[dict[str, Any], bool]] = {
    "room": ({}, True),
    "nobody there to be stalled": ({"running": 0}, True),
    "above Max Running Tokens": ({"context_tokens": 1001}, False),
    "tokens come too late already": ({"token_interval_s": 0.051}, False),
    "no memory for the prompt": ({"kv_used_tokens": 85, "kv_capacity_tokens": 100}, False),
    "a prefill is stuck": ({"prefill_age_s": 0.17}, False),
    "steps that leave nothing free": ({"running": 401}, False),
}


@pytest.mark.parametrize(("fields", "can"), CAN_TAKE.values(), ids=CAN_TAKE)
def test_can_take(fields: dict[str, Any], can: bool) -> None:
    assert in_place().can_take(request(10), decoding(**fields), 0.0) is can


def test_a_request_that_is_late_elsewhere_may_stall_more() -> None:
    one, member = in_place(), decoding()
    for tokens in [8] * 50 + [80] * 50:
        one.on_answer(tokens)
    assert not one.can_take(request(300), member, 0.0)
    assert one.can_take(request(300), member, 0.0, late=True)  # the middle answer: 0.2 * 0.798 * 80 * 50 ms = 638 ms


def test_depth_follows_the_shortest_answers() -> None:
    one, member = in_place(refresh=10), decoding()
    for tokens in range(10, 20):
        one.on_answer(tokens)
    assert one.bucket_s(member, one.knobs.usual)[1] == pytest.approx(0.1596 * 10 / 8)


def test_soonest_of_those_that_can() -> None:
    full, busy, free = decoding(context_tokens=1001), decoding(queued_tokens=50), decoding(queued_tokens=30)
    for place, member in enumerate((full, busy, free)):
        member.index = place
    assert in_place().soonest(request(10), [full, busy, free], 1.0, 0.0) is free
    assert in_place().soonest(request(10), [full, busy, free], 0.05, 0.0) is None


def test_stalls_are_no_decode_load() -> None:
    """The interval of a window with a prefill in place says nothing; the one after it does."""
    one, member = in_place(), decoding(token_interval_s=0.2)
    assert one.pace_s(member) == 0.2
    one.take(request(10), member, 0.0)
    member.queued_prefills = 1
    for queued, pace_s in ((1, None), (0, None), (0, 0.2)):
        member.queued_prefills = queued
        one.on_report(member)
        assert one.pace_s(member) == pace_s


@pytest.mark.parametrize("seed", range(20))
def test_no_answer_is_late_whatever_comes(seed: int) -> None:
    """The bound of the module's head, in an engine that prefills first: prompts are taken as they fit."""
    rng = random.Random(seed)
    one, member = in_place(), decoding()
    step_s = LinearSteps().decode_s(1, 0)
    starts = [rng.uniform(0.0, 5.0) for _ in range(40)]
    taken, now_s = [], 0.0
    while now_s < 8.0:
        ask = request(rng.randrange(1, 150))
        if one.can_take(ask, member, now_s):
            one.take(ask, member, now_s)
            taken.append((now_s, 0.010 + 0.001 * ask.input_tokens))
        now_s += rng.choice((0.0, 0.001, 0.05))
    for start_s in starts:
        assert _answer_s(start_s, taken, step_s) <= 8 * TARGET_S + step_s


def _answer_s(start_s: float, taken: list[tuple[float, float]], step_s: float) -> float:
    """Time of 8 steps from ``start_s`` on, stalled by what was taken since; one step may be under way at a stall."""
    at_s, done = start_s, 0
    waiting = [one for one in taken if one[0] >= start_s]
    while done < 8:
        if waiting and waiting[0][0] <= at_s:
            at_s += waiting.pop(0)[1]
        else:
            at_s += step_s
            done += 1
    return at_s - start_s


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Share(0.6, 0.5, 0.05),
        lambda: Share(-0.1, 0.5, 0.05),
        lambda: Share(0.5, 0.5, 1.5),
        lambda: InPlaceKnobs(answers=0),
        lambda: InPlaceKnobs(first_answer_tokens=0),
        lambda: InPlaceKnobs(refresh=501),
        lambda: InPlaceKnobs(memory_share=2.0),
    ],
)
def test_bad_knobs(bad: Any) -> None:
    with pytest.raises(ConfigError, match="in-place"):
        bad()


@pytest.mark.parametrize(
    ("riding_tokens", "free_s", "share"),
    [(None, 0.05, 1.0), (90, 0.1, 0.0), (90, 0.3, 0.0), (90, 0.025, 0.75), (90, -1.0, 1.0)],
)
def test_prefills_beside_riding_decodes_take_only_what_a_pass_is_longer_than_a_token_may_be(
    riding_tokens: int | None, free_s: float, share: float
) -> None:
    """LinearSteps: a pass of 90 tokens takes 0.1 s."""
    arrow = ArrowPolicy(ArrowKnobs(1.0, 0.05, {"": 100_000}), predictor())
    in_place = InPlace(InPlaceKnobs(), arrow, LinearSteps(), riding_tokens)
    assert in_place.lost_share(free_s) == pytest.approx(share)


def test_an_instance_whose_decodes_ride_takes_prompts_that_would_stall_others() -> None:
    arrow = ArrowPolicy(ArrowKnobs(1.0, 0.05, {"": 100_000}), predictor())
    decodes = instance(0, Role.DECODE, running=4, context_tokens=400)
    allowed = [
        InPlace(InPlaceKnobs(), arrow, LinearSteps(), riding_tokens).can_take(request(400), decodes, 0.0)
        for riding_tokens in (None, 1)
    ]
    assert allowed == [False, True]
