"""Where a request goes while one instance runs both of its phases. Numbers: ``support/combined.py``."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.combined import arrow, combined, cost
from support.fleets import CURVE, LinearSteps, decode, fleet, mixed, names, prefill, request

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.combined.cost import COMPARED, CostKnobs, InstanceCost
from pla_sglang.policy.interface.decisions import MeasuredPass, PrefillSample
from pla_sglang.policy.interface.fleet import FleetView, InstanceView, RequestView
from pla_sglang.policy.measured_steps import MeasuredSteps
from pla_sglang.policy.slo.mixed_batches import MixedBatchModel

ANSWER_TOKENS = 100.0


def choose(part: InstanceCost, ask: RequestView, view: FleetView, answer_tokens: float = ANSWER_TOKENS) -> str:
    found = part.choose(ask, view, 0.0, answer_tokens)
    assert found is not None
    return found.name


CHOICES: list[tuple[str, FleetView, RequestView, str]] = [
    ("the first of equals", fleet(mixed(), mixed()), request(10), "i0"),
    ("the shorter queue", fleet(mixed(queued_tokens=100), mixed()), request(10), "i1"),
    ("the shorter decode step", fleet(mixed(running=50, context_tokens=50), mixed()), request(10), "i1"),
    ("decodes on their way count", fleet(mixed(waiting_decodes=50), mixed()), request(10), "i1"),
    ("of equals the emptiest cache", fleet(mixed(kv_cached_tokens=50), mixed(kv_cached_tokens=40)), request(10), "i1"),
    (
        "by the share that it holds",
        fleet(mixed(kv_cached_tokens=50, kv_capacity_tokens=1000), mixed(kv_cached_tokens=60, kv_capacity_tokens=2000)),
        request(10),
        "i1",
    ),
    # 0.4 s less work counts five times: 2 s
    ("where its prefix is", fleet(mixed(), mixed(queued_tokens=1900)), request(500, cached={1: 400}), "i1"),
    ("not at the price of any queue", fleet(mixed(), mixed(queued_tokens=2000)), request(500, cached={1: 400}), "i0"),
    # 100 requests more: 10 ms of the 40 ms that a step leaves. A cached token: 5 ms of a second, counted five times
    ("decode steps and first tokens", fleet(mixed(running=100), mixed()), request(90, cached={0: 49}), "i1"),
    ("are added as shares of targets", fleet(mixed(running=100), mixed()), request(90, cached={0: 51}), "i0"),
    ("roles are for others", fleet(prefill(), mixed(queued_tokens=500), decode()), request(10), "i1"),
]


@pytest.mark.parametrize("case", CHOICES, ids=lambda case: case[0])
def test_choice(case: tuple[str, FleetView, RequestView, str]) -> None:
    _, view, ask, chosen = case
    assert choose(cost(), ask, view) == chosen


def test_nobody_does_both() -> None:
    assert cost().choose(request(10), fleet(prefill(), decode()), 0.0, ANSWER_TOKENS) is None
    assert cost().choose(request(10), fleet(), 0.0, ANSWER_TOKENS) is None


@pytest.mark.parametrize(("work_weight", "most_queued"), [(0.0, 380), (1.0, 780), (4.0, 1980)])
def test_work_weighs_what_it_is_told_to(work_weight: float, most_queued: int) -> None:
    """0.4 s of work saved are worth so much of a queue, whose prompt has 10 ms beside its tokens."""
    part = cost(work_weight=work_weight, decode_weight=0.0)
    ask = request(500, cached={1: 400})
    for queued_tokens, chosen in ((most_queued, "i1"), (most_queued + 20, "i0")):
        assert choose(part, ask, fleet(mixed(), mixed(queued_tokens=queued_tokens))) == chosen


# -- memory -----------------------------------------------------------------------------------------------------------


def full(kv_used_tokens: int, **fields: Any) -> Any:
    return mixed(kv_capacity_tokens=1000, kv_used_tokens=kv_used_tokens, **fields)


@pytest.mark.parametrize(
    ("name", "other_used", "answer_tokens", "chosen"),
    [
        # i1 uses 850 of 1,000 tokens, holds 400 of 500, and lacks 50 of the 900 that prompts may fill. A step takes
        # 10.6 ms, so it waits 50 / 850 of an answer. Elsewhere 400 tokens are computed: 2 s, as they count five times.
        ("the holder is kept though it is full", 0, 3200.0, "i1"),
        ("but not for ever", 0, 3220.0, "i0"),
        ("elsewhere the prompt needs more room: 300 of 700 tokens", 700, 3220.0, "i1"),
        ("however long the answers", 700, 1e6, "i1"),
        ("half empty, it has room", 400, 3220.0, "i0"),
    ],
)
def test_a_full_instance_costs_the_wait_for_room(name: str, other_used: int, answer_tokens: float, chosen: str) -> None:
    view = fleet(full(other_used), full(850))
    assert choose(cost(), request(500, cached={1: 400}), view, answer_tokens) == chosen


def test_queued_prompts_take_room_too() -> None:
    """Equal but for 200 tokens: in use they leave room for 100 more, with as many queued they do not."""
    part = cost(work_weight=0.0, decode_weight=0.0)
    view = fleet(full(700, queued_tokens=150), full(700, queued_tokens=90), full(700, queued_tokens=200))
    assert choose(part, request(100), view) == "i1"
    ask = request(150, cached={0: 100, 2: 120})
    assert choose(part, ask, fleet(full(500), full(700), full(899))) == "i0"


def test_a_prompt_goes_where_what_it_throws_out_is_oldest() -> None:
    """Both are full of prefixes; ten seconds are less than 300 of them."""
    held = {"kv_capacity_tokens": 1000, "kv_cached_tokens": 1000}
    view = fleet(mixed(**held, evicted_next_s=-10.0), mixed(**held, evicted_next_s=-300.0))
    assert choose(cost(), request(10), view) == "i1"


def test_a_prefix_is_weighed_against_what_it_throws_out() -> None:
    """Computing 100 tokens at i0 throws out as many that are asked for again; of 40 cached at i1 it saves 0.2 s. There
    is room for the rest there."""
    old = {"kv_capacity_tokens": 1000, "kv_cached_tokens": 1000, "evicted_next_s": -1e6}
    new = {**old, "evicted_next_s": 0.0}
    ask = request(100, cached={1: 40})
    assert choose(cost(), ask, fleet(mixed(**old), mixed(**old))) == "i1"
    assert choose(cost(), ask, fleet(mixed(**old), mixed(**new))) == "i0"  # 60 tokens, five times, are 0.3 s


# -- several kinds ----------------------------------------------------------------------------------------------------


class Slow(LinearSteps):
    """A device that takes twice as long."""

    def prefill_s(self, *amounts: Any) -> float:
        return 2 * super().prefill_s(*amounts)

    def decode_s(self, batch: int, context_tokens: float) -> float:
        return 2 * super().decode_s(batch, context_tokens)


SLOW = Slow()


@pytest.mark.parametrize(("queued_tokens", "chosen"), [(90, "i1"), (110, "i0")])
def test_a_second_of_a_slow_device_is_worth_less(queued_tokens: int, chosen: str) -> None:
    """Its 0.22 s are weighed as the 0.11 s that they are elsewhere: they delay who could not be served there faster."""
    part = cost(decode_weight=0.0)
    fast = mixed(queued_tokens=queued_tokens)
    assert choose(part, request(100), fleet(mixed(steps=SLOW), fast, mixed(queued_tokens=999))) == chosen


@pytest.mark.parametrize(("running", "chosen"), [(15, "i1"), (25, "i0")])
def test_decodes_count_by_the_room_that_they_take(running: int, chosen: str) -> None:
    """Of 40 ms that a step leaves 0.1 ms each; an empty slow device takes none, and 50 ms of a second more to begin."""
    part = cost(work_weight=0.0)
    assert choose(part, request(40), fleet(mixed(steps=SLOW), mixed(running=running))) == chosen


def test_a_device_that_cannot_keep_the_target_is_still_compared() -> None:
    """A step takes 60.6 ms and more of 50."""
    slowest = MeasuredSteps(LinearSteps(), None, MixedBatchModel(base_s=0.060, request_s=6e-4, read_s=6e-6))
    busy, idle = mixed(steps=slowest, running=9), mixed(steps=slowest)
    assert choose(cost(), request(10), fleet(busy, idle)) == "i1"


# -- over many requests -----------------------------------------------------------------------------------------------


def send(part: InstanceCost, view: FleetView, sizes: list[int]) -> Counter[str]:
    """Each is served before the next one comes, and leaves its prompt in the cache."""
    sent: Counter[str] = Counter()
    for number, tokens in enumerate(sizes):
        ask = request(tokens, rid=number)
        chosen = part.choose(ask, view, float(number), ANSWER_TOKENS)
        assert chosen is not None
        part.note(ask, chosen, view, float(number))
        chosen.kv_cached_tokens += tokens
        sent[chosen.name] += tokens
    return sent


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_in_a_large_fleet_the_least_loaded_and_the_holders_are_compared(data: st.DataObject) -> None:
    """The choice costs no more than that among all by much: what is left out is more loaded than 64 others."""
    count = 4 * COMPARED
    loads = data.draw(st.lists(st.integers(0, 20_000), min_size=count, max_size=count))
    holder = data.draw(st.integers(0, count - 1))
    view = fleet(*(mixed(queued_tokens=tokens, queued_prefills=1) for tokens in loads))
    ask = request(4_000, cached={holder: 3_900})
    part = cost()
    chosen = part.choose(ask, view, 0.0, ANSWER_TOKENS)
    assert chosen is not None
    assert chosen.index == holder or loads[chosen.index] == min(loads)


def test_an_idle_fleet_fills_all_caches() -> None:
    view = fleet(*[mixed(kv_capacity_tokens=100_000) for _ in range(4)])
    assert send(cost(), view, [100] * 40) == dict.fromkeys(names(view.instances), 1000)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.9, 1.1), st.lists(st.integers(1, 900), min_size=20, max_size=60))
def test_one_that_seems_a_few_percent_faster_does_not_get_all(times: float, sizes: list[int]) -> None:
    """Its passes were such that the curve is off for them. No cache gets more than the emptiest by two prompts."""
    over = arrow()
    view = fleet(*[mixed(kv_capacity_tokens=1_000_000) for _ in range(3)])
    for _ in range(50):
        for one, measured in zip(view.instances, (1.0, times), strict=False):  # the third one was never tried
            over.predictor.on_prefill(sample(one, 500, measured * CURVE.time_s(500)))
    sent = send(cost(over), view, sizes)
    filled = [sent[name] for name in names(view.instances)]
    assert max(filled) - min(filled) <= 2 * max(sizes)


def test_one_that_is_truly_faster_gets_more() -> None:
    over = arrow()
    view = fleet(mixed(kv_cached_tokens=100), mixed())
    for _ in range(50):
        for one, times in zip(view.instances, (0.7, 1.0), strict=True):
            over.predictor.on_prefill(sample(one, 500, times * CURVE.time_s(500)))
    assert choose(cost(over), request(500), view) == "i0"


def sample(view: InstanceView, tokens: int, seconds: float) -> PrefillSample:
    one = MeasuredPass(tokens, tokens * tokens, 0, seconds)
    return PrefillSample(view, tokens, tokens * tokens, 0, 1, seconds, (one,))


def test_predicted_first_tokens_count_neither_weights_nor_room() -> None:
    part = cost()
    [one] = fleet(full(990, queued_tokens=300)).instances
    assert part.predict_ttft_s(request(100), one) == pytest.approx(0.310 + 0.110)


def test_what_a_choice_has_predicted_is_not_worked_out_again() -> None:
    """For its own request, whatever the instances get meanwhile."""
    part, ask, view = cost(), request(100), fleet(mixed(queued_tokens=300), mixed())
    assert choose(part, ask, view) == "i1"
    view.instances[1].queued_tokens, view.instances[1].queued_prefills = 100, 1
    assert [part.predict_ttft_s(ask, one) for one in view.instances] == pytest.approx([0.310 + 0.110, 0.110])
    assert part.predict_ttft_s(request(100), view.instances[1]) == pytest.approx(0.110 + 0.110)


def test_the_answer_says_what_was_predicted() -> None:
    over = arrow()
    policy = combined(cost(over), over)
    answer = policy.dispatch(request(100), fleet(mixed(queued_tokens=300)), 0.0)
    assert answer.predicted_ttft_s == pytest.approx(0.310 + 0.110)


@pytest.mark.parametrize(
    "knobs", [{"work_weight": -1.0}, {"decode_weight": -0.1}, {"memory_share": 0.0}, {"memory_share": 1.1}], ids=str
)
def test_bad_knobs(knobs: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"cost {next(iter(knobs))}"):
        CostKnobs(**knobs)
