"""The long class: order, age bound, overtaking, chunk size."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.views import FLAT, long

from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.interface.prefill import WaitingView
from pla_sglang.policy.pla.long_prompts import LongKnobs, LongPick, LongQueue, aged_at_s, chunk_tokens

# Under FLAT a long of 4000 tokens in chunks of 1000 takes 0.4 s: with half of the device it is aged after 9.2 s.
KNOBS = LongKnobs(max_age_s=10.0, share=0.5, chunk_max_tokens=1000, stretch=1000.0)
FCFS = dataclasses.replace(KNOBS, least_remaining=False)


def pick(
    long_prompts: list[WaitingView],
    chunk: WaitingView | None,
    now_s: float,
    knobs: LongKnobs = KNOBS,
    *,
    short_prompts: bool = False,
    budget_tokens: int = 8192,
) -> tuple[LongPick | None, LongPick | None]:
    return LongQueue(knobs, FLAT).pick(
        long_prompts, chunk, now_s, short_prompts=short_prompts, budget_tokens=budget_tokens
    )


def test_without_longs_there_is_no_pick() -> None:
    assert pick([], None, 0.0) == (None, None)


@pytest.mark.parametrize(
    ("name", "sizes_and_arrivals", "now_s", "knobs", "by_order", "aged"),
    [
        ("least work first", [(4000, 0.0), (2000, 1.0), (3000, 2.0)], 3.0, KNOBS, 1, None),
        ("ties by arrival", [(4000, 2.0), (4000, 1.0)], 3.0, KNOBS, 1, None),
        ("first come first served", [(4000, 0.0), (2000, 1.0)], 3.0, FCFS, 0, None),
        ("an aged one beside one with less work", [(4000, 0.0), (2000, 5.0)], 9.3, KNOBS, 1, 0),
        ("not aged yet", [(4000, 0.0), (2000, 5.0)], 9.1, KNOBS, 1, None),
        ("among aged the earliest arrival", [(4000, 1.0), (2000, 0.5), (9000, 0.0)], 30.0, KNOBS, 1, 2),
        ("a little smaller is no reason to be earlier", [(2100, 0.0), (2050, 1.0)], 3.0, KNOBS, 0, None),
        ("of one size nobody is passed", [(2100, 0.0), (2050, 1.0), (2200, 2.0)], 30.0, KNOBS, 0, None),
        ("aged under first come first served", [(4000, 1.0), (2000, 0.0)], 30.0, FCFS, 0, 1),
        ("first come and aged: nobody passes it", [(4000, 0.0), (2000, 1.0)], 30.0, FCFS, 0, None),
    ],
)
def test_order(
    name: str,
    sizes_and_arrivals: list[tuple[int, float]],
    now_s: float,
    knobs: LongKnobs,
    by_order: int,
    aged: int | None,
) -> None:
    long_prompts = [long(arrival, size) for size, arrival in sizes_and_arrivals]
    first, owed = pick(long_prompts, None, now_s, knobs)
    assert first == LongPick(long_prompts[by_order], running=False, overtakes=False)
    assert owed == (None if aged is None else LongPick(long_prompts[aged], running=False, overtakes=False))


def test_shorts_pass_every_aged_long() -> None:
    long_prompts = [long(1.0, 2100), long(0.0, 2200), long(9.0, 2300)]
    assert pick(long_prompts, None, 30.0)[1] is None
    assert pick(long_prompts, None, 30.0, short_prompts=True) == (_new(long_prompts[1]), _new(long_prompts[1]))


def test_under_overload_the_time_set_aside_is_for_the_larger_one() -> None:
    """All are aged, and the larger one came last."""
    long_prompts = [*(long(float(index), 400) for index in range(9)), long(9.0, 4800)]
    assert pick(long_prompts, None, 60.0) == (_new(long_prompts[0]), _new(long_prompts[9]))


def _new(view: WaitingView) -> LongPick:
    return LongPick(view, running=False, overtakes=False)


def test_best_priority_first_and_only() -> None:
    long_prompts = [long(0.0, 2000, priority_rank=1), long(5.0, 9000, priority_rank=0)]
    first, aged = pick(long_prompts, None, 9.5)
    assert first is not None
    assert first.view is long_prompts[1]  # although the other is older and smaller
    assert aged is None  # and aged


@pytest.mark.parametrize(
    ("name", "chunk_left", "waiting", "rank", "knobs", "overtakes"),
    [
        ("one pass and less work than the chunk", 4000, 900, 1, KNOBS, True),
        ("exactly one pass", 4000, 1000, 1, KNOBS, True),
        ("two passes: the host holds one chunk at a time", 4000, 1001, 1, KNOBS, False),
        ("not less work than the chunk", 800, 900, 1, KNOBS, False),
        ("equal work", 900, 900, 1, KNOBS, False),
        ("better priority", 4000, 900, 0, KNOBS, True),
        ("worse priority", 4000, 900, 2, KNOBS, False),
        ("first come first served never overtakes", 4000, 900, 1, FCFS, False),
        ("no chunking: all is one pass", 4000, 900, 1, dataclasses.replace(KNOBS, chunk_max_tokens=None), False),
    ],
)
def test_overtaking(name: str, chunk_left: int, waiting: int, rank: int, knobs: LongKnobs, overtakes: bool) -> None:
    chunk, other = long(0.0, chunk_left, priority_rank=1), long(1.0, waiting, priority_rank=rank)
    first, aged = pick([other], chunk, 2.0, knobs)
    expected = LongPick(other, running=False, overtakes=True) if overtakes else LongPick(chunk, True, False)
    assert (first, aged) == (expected, None)


@pytest.mark.parametrize(
    ("name", "chunk_arrival_s", "waiting", "now_s", "expected"),
    [
        ("nobody is aged", 5.0, (5.0, 4000), 9.3, None),
        ("the chunk", 0.0, (9.0, 900), 9.3, "chunk"),
        ("one that would have to wait for the chunk hands its age on", 5.0, (0.0, 4000), 9.3, "chunk"),
        ("one that can overtake", 5.0, (0.0, 900), 9.9, "other"),
        ("both, the chunk came first", 0.0, (1.0, 900), 30.0, "chunk"),
        ("both, the other came first", 1.0, (0.0, 900), 30.0, "other"),
    ],
)
def test_who_advances_in_the_time_of_the_aged(
    name: str, chunk_arrival_s: float, waiting: tuple[float, int], now_s: float, expected: str | None
) -> None:
    chunk, other = long(chunk_arrival_s, 4000), long(*waiting)
    picks = {
        None: None,
        "chunk": LongPick(chunk, running=True, overtakes=False),
        "other": LongPick(other, running=False, overtakes=True),
    }
    assert pick([other], chunk, now_s, short_prompts=True)[1] == picks[expected]


def test_a_smaller_one_of_one_pass_overtakes_but_is_not_passed() -> None:
    chunk, other = long(1.0, 4000), long(0.0, 900)
    assert pick([other], chunk, 30.0) == (LongPick(other, False, True), LongPick(chunk, True, False))


def test_ages_are_not_remembered_beyond_a_change_of_knobs_or_model() -> None:
    queue, view = LongQueue(KNOBS, FLAT), long(0.0, 4000)
    assert queue.pick([view], None, 9.3, short_prompts=True, budget_tokens=8192)[1] is not None
    queue.set(dataclasses.replace(KNOBS, max_age_s=20.0), FLAT)
    assert queue.pick([view], None, 9.3, short_prompts=True, budget_tokens=8192)[1] is None
    queue.set(KNOBS, FLAT)
    view.set_history(3900)  # a prefix hit: 10 ms of work left
    assert queue.pick([view], None, 9.3, short_prompts=True, budget_tokens=8192)[1] is None


# -- age bound ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tokens", "arrival_s", "changes", "expected"),
    [
        ("half of the device for 0.4 s and the overhead of 3 %", 4000, 0.0, {}, 9.176),
        ("counts from arrival", 4000, 3.0, {}, 12.176),
        ("whole device", 4000, 0.0, {"share": 1.0}, 9.588),
        ("a quarter of the device", 4000, 0.0, {"share": 0.25}, 8.352),
        ("too long for the bound: aged at once", 100_000, 3.0, {}, 3.0),
        ("without chunking", 4000, 0.0, {"chunk_max_tokens": None}, 9.2),
        ("twenty times its own time", 4000, 3.0, {"stretch": 20.0}, 11.0),
        ("the age bound is earlier than that", 6000, 0.0, {"stretch": 20.0}, 8.764),
    ],
)
def test_aged_at(name: str, tokens: int, arrival_s: float, changes: dict[str, Any], expected: float) -> None:
    knobs = dataclasses.replace(KNOBS, **changes)
    assert aged_at_s(long(arrival_s, tokens), FLAT, knobs) == pytest.approx(expected)


def test_progress_makes_younger() -> None:
    ages = [aged_at_s(long(0.0, left), FLAT, KNOBS) for left in (4000, 3000, 1000)]
    assert ages == sorted(ages)


# -- chunk size --------------------------------------------------------------------------------------------------------

# A launch of 1 ms and 0.1 ms a token, floor of 2 ms: ridge at 10 tokens, and 3 % of overhead at 334 tokens.
LAUNCH = StepModel(g0_s=0.002, gw_s=0.0, gr_s=0.0, k0_s=0.001, kr_s=0.0, b_s=1e-4, a_s=0.0)
BIG = LongKnobs(chunk_max_tokens=8192)
LENGTH = 20_000


def size(
    rate: float,
    *,
    rest: int = LENGTH,
    long_prompts: int = 1,
    model: StepModel = LAUNCH,
    knobs: LongKnobs = BIG,
    history_tokens: int = 0,
) -> int | None:
    return chunk_tokens(
        long(0.0, rest, history_tokens=history_tokens),
        long_prompts=long_prompts,
        passing_rate_per_s=rate,
        passing_tokens=20.0,
        model=model,
        knobs=knobs,
    )


def test_whole_chunk_when_nobody_would_pass() -> None:
    assert size(0.0) == 8192


def test_no_chunking_stays_off() -> None:
    assert size(100.0, knobs=dataclasses.replace(BIG, chunk_max_tokens=None)) is None


def test_size_against_the_closed_form() -> None:
    # sqrt(2 * n * g * S_s / (r * t^2 * S_l)) with S_s = 3 ms, S_l = 20,000 * 0.1 ms + 3 launches = 2.003 s
    knobs = dataclasses.replace(BIG, overhead_max=1.0)
    expected = (2 * 0.001 * 0.003 / (0.01 * 1e-8 * 2.003)) ** 0.5
    assert int(expected) == 173  # 20,000 tokens are 115.4 times as much
    assert size(0.01, knobs=knobs) == -(-20_000 // 116)


@pytest.mark.parametrize(("rest", "pieces"), [(240, 1), (250, 2), (410, 2), (420, 3), (1000, 6)])
def test_as_many_pieces_as_cost_least(rest: int, pieces: int) -> None:
    """Sizes off the closed form cost C + best² / C, so 1.42 times the best piece is cheaper in two."""
    best, service_s = 170.0, rest * 1e-4 + 0.001
    rate = 2 * 0.001 * 0.003 / (best * best * 1e-8 * max(service_s, 0.003))
    asked = size(rate, knobs=dataclasses.replace(BIG, chunk_min_tokens=1, overhead_max=10.0), rest=rest)
    assert asked == (8192 if pieces == 1 else -(-rest // pieces))
    assert min(range(1, 12), key=lambda count: rest / count + best * best * count / rest) == pieces


@given(rest=st.integers(1, 50_000), wanted=st.integers(1, 9000), grid=st.sampled_from([1, 16, 64, 200]))
def test_pieces_are_equal_and_none_is_left_over(rest: int, wanted: int, grid: int) -> None:
    """As the host cuts them, asked again before each piece, and never more than the fewest that are affordable."""
    knobs = dataclasses.replace(BIG, chunk_min_tokens=wanted, grid_tokens=grid, overhead_max=10.0)
    cuts: list[int] = []
    while rest > 0:
        asked = size(1e9, knobs=knobs, rest=rest)
        assert asked is not None
        piece = rest if rest <= asked else max(grid, asked // grid * grid)
        cuts.append(min(piece, rest))
        rest -= cuts[-1]
    assert max(cuts) <= 8192
    if 64 * grid < wanted < 4000:
        assert min(cuts) >= min(wanted, sum(cuts)) / 2


def test_a_small_first_piece_would_only_leave_a_small_dear_last_one() -> None:
    """4,800 tokens go in 3 passes of at most 1,638; a first piece of 1,254 needs a fourth pass and costs 26 % more."""
    model = StepModel(g0_s=11e-3, gw_s=0.0, gr_s=1e-6, k0_s=6e-3, kr_s=4.5e-5, b_s=4.5e-5, a_s=1e-8)
    knobs = LongKnobs(chunk_max_tokens=1638, chunk_min_tokens=205)
    assert [
        size(2.0, long_prompts=9, model=model, knobs=knobs, rest=4800 - history, history_tokens=history)
        for history in (0, 1600, 3200)
    ] == [1600, 1600, 1638]


@given(slow=st.floats(1e-3, 1e3), factor=st.floats(1, 1e3), long_prompts=st.integers(1, 50))
def test_falls_with_the_rate(slow: float, factor: float, long_prompts: int) -> None:
    rare, frequent = size(slow, long_prompts=long_prompts), size(slow * factor, long_prompts=long_prompts)
    assert rare is not None
    assert frequent is not None
    assert frequent <= rare


@given(rate=st.floats(1e-3, 1e3), few=st.integers(1, 50), more=st.integers(0, 50))
def test_grows_with_the_longs(rate: float, few: int, more: int) -> None:
    one, other = size(rate, long_prompts=few), size(rate, long_prompts=few + more)
    assert one is not None
    assert other is not None
    assert one <= other


@given(
    rate=st.one_of(st.just(0.0), st.floats(0.1, 1e5)),
    long_prompts=st.integers(1, 100),
    history=st.integers(0, 100_000),
    largest=st.integers(1, 10_000),
    k0=st.floats(0, 0.01),
    a=st.floats(0, 1e-8),
)
def test_within_limits_and_overhead_cap(
    rate: float, long_prompts: int, history: int, largest: int, k0: float, a: float
) -> None:
    model = dataclasses.replace(LAUNCH, k0_s=k0, a_s=a, gr_s=1e-8, kr_s=1e-8)
    knobs = dataclasses.replace(BIG, chunk_max_tokens=largest)
    got = size(rate, long_prompts=long_prompts, model=model, knobs=knobs, history_tokens=history)
    assert got is not None
    assert 1 <= got <= largest
    assert got >= min(knobs.chunk_min_tokens, largest)
    fewest = -(-LENGTH // largest)
    least_s, asked_s = (model.chunked_s(LENGTH, history, -(-LENGTH // count)) for count in (fewest, -(-LENGTH // got)))
    assert asked_s <= (1 + knobs.overhead_max) * least_s * (1 + 1e-9)


def test_never_below_twice_the_ridge() -> None:
    # FLAT has its ridge at 100 tokens: a chunk of 50 would take as long as one of 100.
    assert size(1e6, model=FLAT) == 200


def test_a_model_without_slope_gives_whole_chunks() -> None:
    assert size(100.0, model=StepModel(0.01, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)) == 8192


@pytest.mark.parametrize("bad", [{"max_age_s": 0.0}, {"share": 0.0}, {"share": 1.1}, {"chunk_max_tokens": 0}], ids=str)
def test_bad_knobs(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        LongKnobs(**bad)


def test_who_does_not_fit_the_pass_whole_does_not_overtake() -> None:
    """Piggybacked decodes take of the budget; a second chunk under way is more than the host can hold."""
    chunk, smaller = long(0.0, 3000), long(1.0, 950)
    by_order, _ = pick([smaller], chunk, 2.0, budget_tokens=1000)
    assert by_order is not None
    assert by_order.overtakes
    by_order, aged = pick([smaller], chunk, 30.0, budget_tokens=900)
    assert by_order is not None
    assert by_order.view is chunk
    assert aged is not None
    assert aged.view is chunk


@pytest.mark.parametrize(("overhead_max", "pieces"), [(0.015, 4), (0.03, 6), (0.06, 10)])
def test_half_and_twice_what_cutting_may_cost(overhead_max: float, pieces: int) -> None:
    """24,000 tokens by the step times that an H200 had fitted, where many short prompts come: 3 pieces are the fewest.

    From 0.03 on, half as much lets a short prompt wait 21 ms longer on average, and twice as much 17 ms shorter.
    """
    h200 = StepModel(g0_s=0.0061, gw_s=0.0, gr_s=4.5e-7, k0_s=0.0031, b_s=2.1e-5, a_s=3.2e-10, kr_s=1.9e-7)
    knobs = LongKnobs(overhead_max=overhead_max)
    view = long(0.0, 24_000)
    got = chunk_tokens(view, long_prompts=1, passing_rate_per_s=1000.0, passing_tokens=200.0, model=h200, knobs=knobs)
    assert got is not None
    assert -(-24_000 // got) == pieces
