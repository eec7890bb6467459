"""AWD as tables: every reason, both modes, the window, the sign of the gain, lines 12-15 of Algorithm 1.

The step model is FLAT: 10 ms up to 100 tokens, 0.1 ms a token beyond. So one more short of 20 tokens is free until five
are together, which is when waiting for it pays.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.views import FLAT, short

from pla_sglang.policy.interface.prefill import PassReason as R
from pla_sglang.policy.interface.prefill import WaitingView
from pla_sglang.policy.pla.awd import Awd, AwdKnobs, batch_step_s, least_slack_s, take_batch, waiting_gain_s

NOW_S = 10.0
FAST = 1000.0  # arrivals per second: the next one is due within 1 ms, a tenth of a step


def short_prompts(count: int, age_s: float = 0.001, **fields: Any) -> list[WaitingView]:
    return [short(NOW_S - age_s, **fields) for _ in range(count)]


def due_in(seconds: float) -> dict[str, float]:
    return {"deadline_s": NOW_S + seconds}


@dataclasses.dataclass(frozen=True)
class Case:
    queue: list[WaitingView]
    due: bool
    reason: R
    batch: int | None = None  # None: all of the queue
    knobs: AwdKnobs = dataclasses.field(default_factory=lambda: AwdKnobs(depth_max=16))
    rate_per_s: float = FAST
    budget: int = 1000
    slots: int = 100
    alternative_s: float = 0.0
    release_s: float | None = None
    window_s: float = 0.010  # W as learnt so far; it starts at 0


K16 = AwdKnobs(depth_max=16)
CASES = {
    "a fuller batch pays": Case(short_prompts(2), False, R.WAIT_FOR_DEPTH, release_s=NOW_S - 0.001 + 0.010),
    "nobody else expected": Case(short_prompts(2), True, R.NO_GAIN, rate_per_s=0.0),
    "the next one is too far off": Case(short_prompts(2), True, R.NO_GAIN, rate_per_s=20.0),
    "the batch is large enough that one more costs": Case(short_prompts(8, new_tokens=90), True, R.NO_GAIN),
    "a long's chunk would come between": Case(short_prompts(2), True, R.NO_GAIN, alternative_s=0.5),
    "target depth": Case(short_prompts(16), True, R.DEPTH),
    "beyond the target depth the rest stays": Case(short_prompts(17), True, R.TOKENS, batch=16),
    "token budget of the pass": Case(short_prompts(4, new_tokens=40), True, R.TOKENS, batch=2, budget=100),
    "exactly the token budget is not yet full": Case(short_prompts(2), False, R.WAIT_FOR_DEPTH, budget=40),
    "slots": Case(short_prompts(4), True, R.TOKENS, batch=3, slots=3),
    "no slot at all still names a head": Case(short_prompts(2), True, R.TOKENS, batch=1, slots=0),
    "one that exceeds the budget alone goes alone": Case(short_prompts(2, new_tokens=90), True, R.TOKENS, 1, budget=50),
    "window over": Case(short_prompts(2, age_s=0.0101), True, R.WINDOW),
    "window not over": Case(short_prompts(2, age_s=0.0099), False, R.WAIT_FOR_DEPTH),
    "nothing learnt yet: one arrival, 1 ms": Case(short_prompts(2, age_s=0.0011), True, R.WINDOW, window_s=0.0),
    "nothing learnt yet, the next may still come": Case(
        short_prompts(2, age_s=0.0009), False, R.WAIT_FOR_DEPTH, window_s=0.0, release_s=NOW_S + 0.0001
    ),
    "learnt 3 ms, and one arrival": Case(short_prompts(2, age_s=0.0041), True, R.WINDOW, window_s=0.003),
    "one is missing: W_GR is 1 ms from now": Case(
        short_prompts(3, age_s=0.0011), False, R.WAIT_FOR_DEPTH, knobs=AwdKnobs(depth_max=4), release_s=NOW_S + 0.001
    ),
    "W_max 0: never wait": Case(short_prompts(2, age_s=0.0), True, R.WINDOW, knobs=AwdKnobs(wait_max_s=0.0)),
    "W_min holds although nothing is gained": Case(
        short_prompts(1, age_s=0.001),
        False,
        R.WAIT_FOR_DEPTH,
        knobs=AwdKnobs(wait_min_s=0.005, wait_max_s=0.01),
        rate_per_s=0.0,
        release_s=NOW_S - 0.001 + 0.005,
        window_s=0.005,
    ),
    "W_min over, nothing gained": Case(
        short_prompts(1, age_s=0.005),
        True,
        R.NO_GAIN,
        knobs=AwdKnobs(wait_min_s=0.005, wait_max_s=0.01),
        rate_per_s=0.0,
    ),
    "resumed": Case([*short_prompts(1), *short_prompts(1, resumed=True)], True, R.RESUMED),
    "resumed, but not in this batch": Case(
        short_prompts(2) + short_prompts(1, resumed=True), True, R.TOKENS, 2, slots=2
    ),
    # mode (a), deadlines. A batch of two takes 10 ms; sigma and delta are 2 ms.
    "slack below sigma": Case(short_prompts(2, **due_in(0.0119)), True, R.SLACK),
    "deadline passed": Case(short_prompts(2, **due_in(-1.0)), True, R.SLACK),
    "one tight deadline among loose ones": Case([*short_prompts(1), *short_prompts(1, **due_in(0.011))], True, R.SLACK),
    "W_SLA is the tighter window: slack 5 ms - delta 2 ms": Case(
        short_prompts(2, **due_in(0.015)), False, R.WAIT_FOR_DEPTH, release_s=NOW_S + 0.003
    ),
    "W_SLA over: slack at delta": Case(
        short_prompts(2, **due_in(0.0129)), True, R.SLACK, knobs=AwdKnobs(margin_s=0.003)
    ),
    "loose deadline: W_GR counts": Case(
        short_prompts(2, **due_in(5.0)), False, R.WAIT_FOR_DEPTH, release_s=NOW_S + 0.009
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decide(case: Case) -> None:
    awd = Awd(case.knobs)
    awd.window_s = case.window_s
    choice = awd.decide(
        case.queue,
        NOW_S,
        budget_tokens=case.budget,
        slots=case.slots,
        model=FLAT,
        rate_per_s=case.rate_per_s,
        alternative_s=case.alternative_s,
    )
    assert (choice.due, choice.reason) == (case.due, case.reason)
    assert choice.batch == tuple(case.queue[: case.batch])
    assert (choice.release_s is None) == case.due
    if case.release_s is not None:
        assert choice.release_s == pytest.approx(case.release_s)


def test_every_reason_of_awd_is_in_the_table() -> None:
    can_give = {R.DEPTH, R.TOKENS, R.WINDOW, R.SLACK, R.NO_GAIN, R.RESUMED}
    assert {case.reason for case in CASES.values()} == can_give | {R.WAIT_FOR_DEPTH}


def test_what_waiting_for_one_more_saves() -> None:
    # Now: two at 10 ms, the third waits the other 9 ms and runs 10 ms. Waiting: 1 ms for two, then 10 ms for all three.
    saved_s = (2 * 0.010 + 0.009 + 0.010) - (2 * 0.011 + 0.010)
    assert waiting_gain_s(short_prompts(2), FLAT, FAST) == pytest.approx(saved_s)


@pytest.mark.parametrize(
    ("name", "count", "tokens", "rate_per_s", "alternative_s", "positive"),
    [
        ("no rate", 2, 20, 0.0, 0.0, False),
        ("fast arrivals, free tokens", 2, 20, FAST, 0.0, True),
        ("slow arrivals", 2, 20, 50.0, 0.0, False),
        ("compute-bound: no token is free", 2, 200, FAST, 0.0, False),
        ("many wait already", 30, 3, FAST, 0.0, False),
        ("the alternative takes long", 2, 20, FAST, 0.02, False),
    ],
)
def test_sign_of_the_gain(
    name: str, count: int, tokens: int, rate_per_s: float, alternative_s: float, positive: bool
) -> None:
    assert (waiting_gain_s(short_prompts(count, new_tokens=tokens), FLAT, rate_per_s, alternative_s) > 0) is positive


def test_gain_falls_with_the_time_to_the_next_arrival() -> None:
    gains = [waiting_gain_s(short_prompts(2), FLAT, rate) for rate in (2000.0, 500.0, 200.0, 120.0, 50.0)]
    assert gains == sorted(gains, reverse=True)


# -- lines 12-15 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "depth_before", "dispatched", "fill_s", "window_s", "depth"),
    [
        ("reached: W is the fill time, D rises by half", 8, 8, 0.004, 0.004, 12),
        ("reached: D stays within the maximum", 14, 14, 0.004, 0.004, 16),
        ("reached: D rises by one at least", 1, 1, 0.004, 0.004, 2),
        ("more than asked for", 8, 14, 0.004, 0.004, 15),
        ("W clipped from above", 8, 8, 0.5, 0.010, 12),
        ("W clipped from below", 8, 8, 0.0, 0.002, 12),
        ("missed: D is what came", 8, 3, 0.004, 0.002, 3),
        ("missed: D is at least one", 8, 0, 0.004, 0.002, 1),
    ],
)
def test_update(name: str, depth_before: int, dispatched: int, fill_s: float, window_s: float, depth: int) -> None:
    awd = Awd(AwdKnobs(wait_min_s=0.002, wait_max_s=0.010, depth_max=16))
    awd.depth = depth_before
    awd.on_dispatch(dispatched, fill_s)
    assert (awd.window_s, awd.depth) == (pytest.approx(window_s), depth)


def test_a_quiet_minute_does_not_disable_batching_for_good() -> None:
    awd = Awd(K16)
    awd.on_dispatch(1, 0.0)
    assert awd.depth == 1
    for _ in range(8):
        awd.on_dispatch(awd.depth, 0.001)
    assert awd.depth == 16


def test_new_knobs_clip_the_state() -> None:
    awd = Awd(AwdKnobs(wait_max_s=0.050, depth_max=64))
    awd.on_dispatch(64, 0.040)
    awd.set_knobs(AwdKnobs(wait_min_s=0.001, wait_max_s=0.010, depth_max=8))
    assert (awd.window_s, awd.depth) == (0.010, 8)


@pytest.mark.parametrize(
    "bad", [{"wait_min_s": -1.0}, {"wait_min_s": 0.02, "wait_max_s": 0.01}, {"depth_max": 0}], ids=str
)
def test_bad_knobs(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"wait|depth"):
        AwdKnobs(**bad)


# -- small functions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "budget", "slots", "taken", "full"),
    [
        ((10, 10, 10), 100, 8, 3, False),
        ((10, 10, 10), 20, 8, 2, True),
        ((10, 10, 10), 100, 1, 1, True),
        ((10,), 5, 8, 1, False),
        ((10, 90, 1), 20, 8, 1, True),  # a prefix: order is kept although the last would fit
    ],
)
def test_take_batch(tokens: tuple[int, ...], budget: int, slots: int, taken: int, full: bool) -> None:
    queue = [short(new_tokens=size) for size in tokens]
    assert take_batch(queue, budget, slots) == (tuple(queue[:taken]), full)


def test_batch_step() -> None:
    assert batch_step_s(short_prompts(2), FLAT) == pytest.approx(0.010)
    assert batch_step_s(short_prompts(3, new_tokens=100), FLAT) == pytest.approx(0.030)
    assert batch_step_s(short_prompts(3, new_tokens=100), FLAT, extra_tokens=100) == pytest.approx(0.040)


def test_least_slack() -> None:
    assert least_slack_s(short_prompts(2), NOW_S, 0.01) is None
    mixed = [*short_prompts(1), *short_prompts(1, **due_in(0.5)), *short_prompts(1, **due_in(0.3))]
    assert least_slack_s(mixed, NOW_S, 0.01) == pytest.approx(0.29)
