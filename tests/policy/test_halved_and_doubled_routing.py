"""What half and twice of a constant of the combined policy decide, in fleets that can be worked out by hand.

Prefill takes 10 ms + 1 ms a token, a decode step 10 ms + 0.1 ms a request; targets of 1 s and 50 ms.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.combined import arrow, cost
from support.fleets import CURVE, LinearSteps, decode, fleet, instance, mixed, predictor, prefill, request

from pla_sglang.policy.arrow.policy import ArrowKnobs, ArrowPolicy
from pla_sglang.policy.arrow.role_switches import RoleSwitchGuard, RoleSwitchKnobs
from pla_sglang.policy.combined import cost as cost_module
from pla_sglang.policy.combined.cost import CostKnobs, InstanceCost
from pla_sglang.policy.combined.stall_budget import InPlace, InPlaceKnobs
from pla_sglang.policy.common.eviction import EvictionCost, EvictionKnobs
from pla_sglang.policy.common.pools import PoolEvent
from pla_sglang.policy.common.predictor import PredictorKnobs, TtftPredictor
from pla_sglang.policy.dopd.dispatch import DopdDispatcher, DopdDispatchKnobs
from pla_sglang.policy.interface.decisions import MeasuredPass, PrefillSample, SetRole
from pla_sglang.policy.interface.fleet import Role
from pla_sglang.policy.interface.prefill import PrefillClass
from pla_sglang.policy.interface.reasons import FleetReason as R
from pla_sglang.policy.registry import Setup, build

D = Role.DECODE
S, L = PrefillClass.SHORT, PrefillClass.LONG
ANSWER_TOKENS = 100.0


def choose(view: Any, ask: Any, answer_tokens: float = ANSWER_TOKENS, **knobs: Any) -> str:
    found = cost(**knobs).choose(ask, view, 0.0, answer_tokens)
    assert found is not None
    return found.name


# -- the choice of an instance ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weight", "most_queued"), [(2.0, 1190), (4.0, 1990), (8.0, 3590)])
def test_work_that_a_prefix_saves_is_worth_a_longer_queue(weight: float, most_queued: int) -> None:
    """0.4 s are saved, once for itself and ``work_weight`` times for others: 1.2, 2 and 3.6 s of a queue."""
    for queued, chosen in ((most_queued - 5, "i1"), (most_queued + 5, "i0")):
        view = fleet(mixed(), mixed(queued_tokens=queued))
        assert choose(view, request(500, cached={1: 400}), work_weight=weight, decode_weight=0.0) == chosen


@pytest.mark.parametrize(("weight", "running"), [(0.5, 203), (1.0, 103), (2.0, 53)])
def test_decode_steps_weigh_against_a_first_token(weight: float, running: int) -> None:
    """100 requests take 10 of the 40 ms that a step leaves: as a share as much as 250 ms of the TTFT target. Three
    more are what the queued prompt will take itself."""
    for more, chosen in ((-3, "i1"), (3, "i0")):
        view = fleet(mixed(queued_tokens=240), mixed(running=running + more))
        assert choose(view, request(10), decode_weight=weight) == chosen


@pytest.mark.parametrize(("share", "free"), [(0.45, 440), (0.9, 890), (1.0, 990)])
def test_prompts_wait_for_room_from_this_share_on(share: float, free: int) -> None:
    """A prompt of 10 tokens; a token of room takes a hundredth of a second and more, the other queue a tenth."""
    for used, chosen in ((free, "i0"), (free + 150, "i1")):
        full = mixed(kv_capacity_tokens=1000, kv_used_tokens=used)
        view = fleet(full, mixed(kv_capacity_tokens=1000, queued_tokens=90))
        assert choose(view, request(10), memory_share=share) == chosen


@pytest.mark.parametrize(("share", "running"), [(0.05, 35), (0.1, 60), (0.2, 110)])
def test_on_a_device_that_cannot_keep_the_target_decodes_still_weigh(
    monkeypatch: pytest.MonkeyPatch, share: float, running: int
) -> None:
    """A step takes 110 ms with nobody else there. 5 ms of it are as much as a queue of 1 s, which adds 1 ms itself."""
    monkeypatch.setattr(cost_module, "LEAST_SPARE", share)
    for more, chosen in ((-3, "i1"), (3, "i0")):
        view = fleet(mixed(queued_tokens=990), mixed(running=running + more))
        assert choose(view, request(100_000)) == chosen


@pytest.mark.parametrize(("reuse_s", "queued"), [(60.0, 55), (120.0, 167), (240.0, 284)])
def test_a_prefix_that_was_used_lately_is_worth_a_queue_elsewhere(reuse_s: float, queued: int) -> None:
    """Of what was not used for two minutes 14, 37 or 61 % will be asked for again. 100 tokens of it go."""
    over = arrow()
    eviction = EvictionCost(EvictionKnobs(reuse_s=reuse_s), over.predictor)
    part = InstanceCost(CostKnobs(), over, LinearSteps(), eviction, small_first=False)
    for more, chosen in ((-5, "i1"), (5, "i0")):
        full = mixed(kv_capacity_tokens=1000, kv_cached_tokens=1000, evicted_next_s=-120.0)
        found = part.choose(request(100), fleet(full, mixed(queued_tokens=queued + more)), 0.0, ANSWER_TOKENS)
        assert found is not None
        assert found.name == chosen


# -- predicted first tokens -------------------------------------------------------------------------------------------


def after(passes: list[float], **knobs: float) -> ArrowPolicy:
    """Passes of 990 tokens, which are fitted as 1 s, took so many seconds."""
    found = TtftPredictor({"": CURVE}, PredictorKnobs(own_factor=100.0, **knobs))
    one = instance(0)
    for seconds in passes:
        found.on_prefill(PrefillSample(one, 990, 0, 0, 1, seconds, (MeasuredPass(990, 0, 0, seconds, 1),)))
    return ArrowPolicy(ArrowKnobs(1.0, 0.05, {"": 1000}), found)


def longest_in_time(policy: ArrowPolicy) -> int:
    """Tokens of the longest prompt that Arrow's first line takes."""
    view = fleet(prefill(), decode())
    return max(
        tokens for tokens in range(1, 9000) if policy.dispatch(request(tokens), view, 0.0).reason is R.PREFILL_SLO
    )


@pytest.mark.parametrize(
    ("knob", "value", "passes", "tokens"),
    [
        ("prior_s", 1.0, [2.0], 650),  # f = 1.51
        ("prior_s", 2.0, [2.0], 733),  # f = 1.34
        ("prior_s", 4.0, [2.0], 817),  # f = 1.21
        ("memory_s", 10.0, [1.0] * 100 + [2.0] * 10, 595),  # f = 1.65
        ("memory_s", 20.0, [1.0] * 100 + [2.0] * 10, 702),  # f = 1.40
        ("memory_s", 40.0, [1.0] * 100 + [2.0] * 10, 797),  # f = 1.24
        ("factor_max", 4.0, [1000.0] * 100, 240),
        ("factor_max", 8.0, [1000.0] * 100, 115),
        ("factor_max", 16.0, [1000.0] * 100, 52),
        ("factor_min", 0.125, [0.001] * 100, 7990),
        ("factor_min", 0.25, [0.001] * 100, 3990),
        ("factor_min", 0.5, [0.001] * 100, 1990),
    ],
)
def test_how_long_a_prompt_may_be(knob: str, value: float, passes: list[float], tokens: int) -> None:
    assert longest_in_time(after(passes, **{knob: value})) == pytest.approx(tokens, abs=2)


@pytest.mark.parametrize(("own_factor", "most"), [(1.075, 1.05), (1.15, 1.1), (1.3, 1.25)])
def test_an_instance_counts_as_slower_from_this_factor_on(own_factor: float, most: float) -> None:
    """The slower of nine has the shorter queue, by too little."""
    for slower, chosen in ((most, 8), (own_factor + 0.08, 0)):
        found = TtftPredictor({"": CURVE}, PredictorKnobs(own_factor=own_factor))
        members = [instance(index, queued_tokens=96 if index == 8 else 100) for index in range(9)]
        for _ in range(60):
            for one in members:
                seconds = slower if one.index == 8 else 1.0
                found.on_prefill(PrefillSample(one, 990, 0, 0, 1, seconds, (MeasuredPass(990, 0, 0, seconds, 1),)))
        assert found.least_delay(members) is members[chosen]


# -- roles ------------------------------------------------------------------------------------------------------------


def late(since_s: float, now_s: float, **knobs: float) -> bool:
    """Decodes have been too slow for so long, as ticks see it: an instance turns to decode."""
    policy = ArrowPolicy(ArrowKnobs(1.0, 0.05, {"": 1000}, **knobs), predictor())  # type: ignore[arg-type]
    view = fleet(prefill(queued_tokens=9), prefill(queued_tokens=9), decode(token_interval_s=0.06, running=1))
    actions = [*policy.tick(view, since_s), *policy.tick(view, now_s)]
    return any(isinstance(action, SetRole) for action in actions)


@pytest.mark.parametrize("window_s", [0.5, 1.0, 2.0])
def test_slow_decodes_get_an_instance_after_this_time(window_s: float) -> None:
    assert not late(0.0, window_s - 0.01, tpot_window_s=window_s)
    assert late(0.0, window_s, tpot_window_s=window_s)


def idle_turns(for_s: float, load: int, **knobs: float) -> bool:
    """A prefill instance has been idle for so long, while decodes hold so many of 1,000 tokens."""
    policy = ArrowPolicy(ArrowKnobs(1.0, 0.05, {"": 1000}, **knobs), predictor())  # type: ignore[arg-type]
    view = fleet(prefill(), prefill(), decode(context_tokens=load))
    return any(isinstance(action, SetRole) for at_s in (0.0, for_s) for action in policy.tick(view, at_s))


@pytest.mark.parametrize("idle_s", [0.5, 1.0, 2.0])
def test_an_idle_instance_turns_to_decode_after_this_time(idle_s: float) -> None:
    assert not idle_turns(idle_s - 0.01, 600, idle_s=idle_s)
    assert idle_turns(idle_s, 600, idle_s=idle_s)


@pytest.mark.parametrize("busy_load", [0.25, 0.5, 1.0])
def test_an_idle_instance_turns_to_decode_above_this_load(busy_load: float) -> None:
    assert not idle_turns(9.0, int(1000 * busy_load), busy_load=busy_load)
    assert idle_turns(9.0, int(1000 * busy_load) + 1, busy_load=busy_load)


@pytest.mark.parametrize(("low_load", "most"), [(0.35, 350), (0.7, 700), (1.0, 1000)])
def test_decode_gives_an_instance_where_the_others_hold_the_rest(low_load: float, most: int) -> None:
    for load, reason in ((most, R.PREFILL_FLIP), (most + 1, R.PREFILL_FALLBACK)):
        policy = ArrowPolicy(ArrowKnobs(1.0, 0.05, {"": 1000}, RoleSwitchKnobs(low_load=low_load)), predictor())
        view = fleet(prefill(queued_tokens=5000), decode(), decode(context_tokens=load))
        assert policy.dispatch(request(30), view, 0.0).reason is reason


TO_P, TO_D = PoolEvent.TO_PREFILL, PoolEvent.TO_DECODE


@pytest.mark.parametrize("cool_down_s", [0.5, 1.0, 2.0])
def test_the_way_back_waits_for_the_cool_down(cool_down_s: float) -> None:
    guard = RoleSwitchGuard(RoleSwitchKnobs(cool_down_s=cool_down_s))
    guard.note(TO_P, 0.0)
    assert not guard.may(TO_D, cool_down_s - 0.01)
    assert guard.may(TO_D, cool_down_s)


@pytest.mark.parametrize("regret_s", [30.0, 60.0, 120.0])
def test_a_reversal_within_this_time_was_a_mistake(regret_s: float) -> None:
    """The next one waits for twice a 64th of it; after a later one for the cool-down."""
    for at_s, waits_s in ((regret_s - 1.0, regret_s / 32), (regret_s + 1.0, 0.1)):
        guard = RoleSwitchGuard(RoleSwitchKnobs(cool_down_s=0.1, regret_s=regret_s))
        guard.note(TO_P, 0.0)
        guard.note(TO_D, at_s)
        assert not guard.may(TO_P, at_s + waits_s - 0.01)
        assert guard.may(TO_P, at_s + waits_s + 0.01)


@pytest.mark.parametrize("most_s", [1800.0, 3600.0, 7200.0])
def test_no_way_back_waits_for_longer(most_s: float) -> None:
    guard, at_s, turn = RoleSwitchGuard(RoleSwitchKnobs(cool_down_max_s=most_s)), 0.0, TO_P
    for _ in range(20):
        guard.note(turn, at_s)
        turn, last_s, at_s = (TO_D if turn is TO_P else TO_P), at_s, at_s + guard.cool_down_s(at_s)
    assert not guard.may(turn, last_s + most_s - 1.0)
    assert guard.may(turn, last_s + most_s)


def regretted(per_second: int, seconds: int, **knobs: float) -> bool:
    """Two early reversals at 100 tokens a second; then the load is another one for so long. Is the wait over?"""
    guard = RoleSwitchGuard(RoleSwitchKnobs(regret_s=6400.0, **knobs))
    for second in range(300):
        guard.load.add(100, float(second))
    guard.note(TO_P, 299.0)
    guard.note(TO_D, 300.0)
    for second in range(300, 300 + seconds):
        guard.load.add(per_second, float(second))
    return guard.may(TO_P, 299.0 + seconds)


@pytest.mark.parametrize(("change", "least"), [(1.5, 150), (2.0, 200), (3.0, 300)])
def test_a_load_that_has_changed_by_this_factor_ends_the_wait(change: float, least: int) -> None:
    assert not regretted(93 * least // 100, 150, load_change=change)
    assert regretted(103 * least // 100, 150, load_change=change)


@pytest.mark.parametrize(("window_s", "seconds"), [(10.0, 6), (20.0, 13), (40.0, 26)])
def test_a_load_has_changed_once_it_has_lasted(window_s: float, seconds: int) -> None:
    """Three times as much: half of the change is seen after 0.7 of the window."""
    assert not regretted(300, seconds - 1, load_window_s=window_s)
    assert regretted(300, seconds, load_window_s=window_s)


# -- in place ---------------------------------------------------------------------------------------------------------


def longest_in_place(part: InPlace, *, is_late: bool = False, **fields: Any) -> int:
    """Tokens of the longest prompt that the decodes of an instance bear; 0: none."""
    one = instance(0, **{"running": 1, **fields})
    return max((size for size in range(1, 2000) if part.can_take(request(size), one, 0.0, late=is_late)), default=0)


def in_place(**knobs: Any) -> InPlace:
    return InPlace(InPlaceKnobs(**knobs), arrow(), LinearSteps())


@pytest.mark.parametrize(("tokens", "longest"), [(4, 29), (8, 69), (16, 149)])
def test_before_any_answer_this_length_says_what_decodes_bear(tokens: int, longest: int) -> None:
    """A quarter of the 39.9 ms that each token leaves, less 10 ms of a pass."""
    assert longest_in_place(in_place(first_answer_tokens=tokens)) == longest


@pytest.mark.parametrize(("refresh", "answers"), [(25, 25), (50, 50), (100, 100)])
def test_answers_count_once_there_are_so_many(refresh: int, answers: int) -> None:
    part = in_place(refresh=refresh)
    for _ in range(answers - 1):
        part.on_answer(16)
    assert longest_in_place(part) == 69
    part.on_answer(16)
    assert longest_in_place(part) == 149


@pytest.mark.parametrize(("answers", "short"), [(250, 150), (500, 300), (1000, 550)])
def test_answers_count_until_so_many_have_come_since(answers: int, short: int) -> None:
    """Answers of 80 tokens, then of 8: the middle one changes after half of them, at the next look."""
    part = in_place(answers=answers)
    for _ in range(1000):
        part.on_answer(80)
    before = longest_in_place(part, is_late=True)
    for _ in range(short - 50):
        part.on_answer(8)
    assert longest_in_place(part, is_late=True) == before
    for _ in range(50):
        part.on_answer(8)
    assert longest_in_place(part, is_late=True) < before / 5


@pytest.mark.parametrize(("share", "used"), [(0.45, 440), (0.9, 890), (1.0, 990)])
def test_prompts_in_place_fill_this_share_of_the_cache(share: float, used: int) -> None:
    for more, longest in ((0, 10), (1, 9)):
        part = in_place(memory_share=share)
        assert longest_in_place(part, kv_used_tokens=used + more, kv_capacity_tokens=1000) == longest


# -- DOPD -------------------------------------------------------------------------------------------------------------


def longest_local(**knobs: Any) -> int:
    """Tokens of the longest prompt that DOPD prefills in place; 0: none."""
    part, one = DopdDispatcher(DopdDispatchKnobs(**{"local_max_tokens": 2048, **knobs}), predictor()), instance(0, D)
    return max((size for size in range(1, 5000) if part.runs_in_place(request(size), one)), default=0)


@pytest.mark.parametrize(
    ("knobs", "tokens"),
    [
        ({"transfer_base_s": 0.0125}, 2),
        ({"transfer_base_s": 0.025}, 15),
        ({"transfer_base_s": 0.05}, 40),
        ({"transfer_s_per_token": 2.5e-4}, 6),
        ({"transfer_s_per_token": 5e-4}, 10),
        ({"transfer_s_per_token": 9e-4}, 40),
        ({"local_stall_s": 0.025, "transfer_base_s": 9.0}, 15),
        ({"local_stall_s": 0.05, "transfer_base_s": 9.0}, 40),
        ({"local_stall_s": 0.1, "transfer_base_s": 9.0}, 90),
        ({"local_max_tokens": 1024, "transfer_base_s": 9.0, "local_stall_s": 9.0}, 1024),
        ({"local_max_tokens": 2048, "transfer_base_s": 9.0, "local_stall_s": 9.0}, 2048),
        ({"local_max_tokens": 4096, "transfer_base_s": 9.0, "local_stall_s": 9.0}, 4096),
    ],
    ids=str,
)
def test_what_is_prefilled_in_place_of_a_hand_over(knobs: dict[str, float], tokens: int) -> None:
    assert longest_local(**knobs) == tokens


@pytest.mark.parametrize(("weight", "load"), [(1.0, 500), (2.0, 250), (4.0, 125)])
def test_load_weighs_against_a_cached_prefix(weight: float, load: int) -> None:
    """Half of the prompt is cached there."""
    part = DopdDispatcher(DopdDispatchKnobs(load_weight=weight), predictor())
    for more, chosen in ((-1, "i1"), (1, "i2")):
        holder = decode(context_tokens=load + more, kv_capacity_tokens=1000)
        found = part.dispatch(
            request(1000, cached={1: 500}), fleet(prefill(), holder, decode(kv_capacity_tokens=1000)), 0
        )
        assert found.decode is not None
        assert found.decode.name == chosen


# -- classes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("boundary_tokens", [128, 256, 512])
def test_a_prompt_of_so_many_tokens_goes_to_the_pool_of_long_ones(
    monkeypatch: pytest.MonkeyPatch, boundary_tokens: int
) -> None:
    monkeypatch.setattr("pla_sglang.policy.combined.fleet.BOUNDARY_TOKENS", boundary_tokens)
    setup = Setup(LinearSteps(), 200_000, ttft_slo_s=2.0, tpot_slo_s=0.1, knobs={"combined.comfort_share": 1.0})
    policy = build("combined-roles", setup).dispatcher
    view = fleet(prefill(length_class=L), prefill(length_class=L), prefill(length_class=S), decode())
    for tokens, reason in ((boundary_tokens - 1, R.PLA_SHORT), (boundary_tokens, R.PLA_LONG)):
        assert policy.dispatch(request(tokens), view, 0.0).reason is reason
