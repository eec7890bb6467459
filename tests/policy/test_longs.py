"""The long class: order, age bound, overtaking, chunk size."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.views import FLAT, long

from pla_sglang.policy.boundary import StepModel
from pla_sglang.policy.longs import LongKnobs, LongPick, LongQueue, aged_at_s, chunk_tokens
from pla_sglang.policy.types import WaitingView

# Under FLAT a long of 4000 tokens in chunks of 1000 takes 0.4 s: with half of the device it is aged after 9.2 s.
KNOBS = LongKnobs(max_age_s=10.0, share=0.5, chunk_max_tokens=1000)
FCFS = dataclasses.replace(KNOBS, least_remaining=False)


def picks(
    longs: list[WaitingView], chunk: WaitingView | None, now_s: float, knobs: LongKnobs = KNOBS
) -> tuple[LongPick, LongPick | None]:
    by_order, aged = LongQueue(knobs, FLAT).pick(longs, chunk, now_s)
    assert by_order is not None
    return by_order, aged


def test_without_longs_there_is_no_pick() -> None:
    assert LongQueue(KNOBS, FLAT).pick([], None, 0.0) == (None, None)


@pytest.mark.parametrize(
    ("name", "sizes_and_arrivals", "now_s", "knobs", "picked", "aged"),
    [
        ("least work first", [(4000, 0.0), (2000, 1.0), (3000, 2.0)], 3.0, KNOBS, 1, None),
        ("ties by arrival", [(4000, 2.0), (4000, 1.0)], 3.0, KNOBS, 1, None),
        ("first come first served", [(4000, 0.0), (2000, 1.0)], 3.0, FCFS, 0, None),
        ("aged beside less work", [(4000, 0.0), (2000, 5.0)], 9.3, KNOBS, 1, 0),
        ("not aged yet", [(4000, 0.0), (2000, 5.0)], 9.1, KNOBS, 1, None),
        ("among aged the earliest arrival", [(4000, 1.0), (2000, 0.5), (9000, 0.0)], 30.0, KNOBS, 1, 2),
        ("aged under first come first served", [(4000, 1.0), (2000, 0.0)], 30.0, FCFS, 0, 1),
    ],
)
def test_order(
    name: str,
    sizes_and_arrivals: list[tuple[int, float]],
    now_s: float,
    knobs: LongKnobs,
    picked: int,
    aged: int | None,
) -> None:
    longs = [long(arrival, size) for size, arrival in sizes_and_arrivals]
    by_order, oldest = picks(longs, None, now_s, knobs)
    assert by_order == LongPick(longs[picked], running=False, overtakes=False)
    assert (None if oldest is None else oldest.view) is (None if aged is None else longs[aged])


def test_best_priority_first_and_only() -> None:
    longs = [long(0.0, 2000, priority_rank=1), long(5.0, 9000, priority_rank=0)]
    by_order, aged = picks(longs, None, 30.0)
    assert by_order.view is longs[1]  # although the other is older, aged and smaller
    assert aged is not None
    assert aged.view is longs[1]


@pytest.mark.parametrize(
    ("name", "chunk_left", "waiting", "knobs", "overtakes"),
    [
        ("one pass and less work than the chunk", 4000, 900, KNOBS, True),
        ("exactly one pass", 4000, 1000, KNOBS, True),
        ("two passes: the host holds one chunk at a time", 4000, 1001, KNOBS, False),
        ("not less work than the chunk", 800, 900, KNOBS, False),
        ("first come first served never overtakes", 4000, 900, FCFS, False),
        (
            "without chunking everything is one pass",
            4000,
            900,
            dataclasses.replace(KNOBS, chunk_max_tokens=None),
            False,
        ),
    ],
)
def test_overtaking(name: str, chunk_left: int, waiting: int, knobs: LongKnobs, overtakes: bool) -> None:
    chunk, other = long(0.0, chunk_left), long(1.0, waiting)
    by_order, _ = picks([other], chunk, 2.0, knobs)
    assert by_order == LongPick(other if overtakes else chunk, running=not overtakes, overtakes=overtakes)


def test_worse_priority_does_not_overtake() -> None:
    chunk, other = long(0.0, 4000, priority_rank=0), long(1.0, 900, priority_rank=1)
    assert picks([other], chunk, 2.0)[0].running


def test_an_aged_chunk_has_its_own_time_beside_younger_overtakers() -> None:
    chunk, other = long(0.0, 4000), long(9.0, 900)
    by_order, aged = picks([other], chunk, 9.5)
    assert by_order.view is other
    assert aged is not None
    assert aged.running


@pytest.mark.parametrize(("now_s", "aged"), [(9.1, False), (9.3, True)])
def test_a_chunk_becomes_aged(now_s: float, aged: bool) -> None:
    assert (picks([], long(0.0, 4000), now_s)[1] is not None) is aged


def test_a_young_chunk_inherits_the_age_of_who_must_wait_for_it() -> None:
    chunk, older = long(9.0, 4000), long(0.0, 5000)  # five passes: it cannot overtake
    _, aged = picks([older], chunk, 9.5)
    assert aged == LongPick(chunk, running=True, overtakes=False)


# -- age bound ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tokens", "arrival_s", "changes", "expected"),
    [
        ("half of the device for 0.4 s", 4000, 0.0, {}, 9.2),
        ("counts from arrival", 4000, 3.0, {}, 12.2),
        ("whole device", 4000, 0.0, {"share": 1.0}, 9.6),
        ("a quarter of the device", 4000, 0.0, {"share": 0.25}, 8.4),
        ("too long for the bound: aged at once", 100_000, 3.0, {}, 3.0),
        ("without chunking", 4000, 0.0, {"chunk_max_tokens": None}, 9.2),
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
LAUNCH = StepModel(g0_s=0.002, gw_s=0.0, gr_s=0.0, k0_s=0.001, b_s=1e-4, a_s=0.0)
BIG = LongKnobs(chunk_max_tokens=8192)


def size(rate: float, *, longs: int = 1, model: StepModel = LAUNCH, knobs: LongKnobs = BIG, **view: Any) -> int | None:
    return chunk_tokens(
        long(0.0, 20_000, **view),
        longs=longs,
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
    assert size(0.01, knobs=knobs) == int(expected) == 173


@given(slow=st.floats(1e-3, 1e3), factor=st.floats(1, 1e3), longs=st.integers(1, 50))
def test_falls_with_the_rate(slow: float, factor: float, longs: int) -> None:
    rare, frequent = size(slow, longs=longs), size(slow * factor, longs=longs)
    assert rare is not None
    assert frequent is not None
    assert frequent <= rare


@given(rate=st.floats(1e-3, 1e3), few=st.integers(1, 50), more=st.integers(0, 50))
def test_grows_with_the_longs(rate: float, few: int, more: int) -> None:
    one, other = size(rate, longs=few), size(rate, longs=few + more)
    assert one is not None
    assert other is not None
    assert one <= other


@given(
    rate=st.one_of(st.just(0.0), st.floats(0.1, 1e5)),
    longs=st.integers(1, 100),
    history=st.integers(0, 100_000),
    largest=st.integers(1, 10_000),
    k0=st.floats(0, 0.01),
    a=st.floats(0, 1e-8),
)
def test_within_limits_and_overhead_cap(
    rate: float, longs: int, history: int, largest: int, k0: float, a: float
) -> None:
    model = dataclasses.replace(LAUNCH, k0_s=k0, a_s=a, kr_s=1e-8)
    knobs = dataclasses.replace(BIG, chunk_max_tokens=largest)
    got = size(rate, longs=longs, model=model, knobs=knobs, history_tokens=history)
    assert got is not None
    assert 1 <= got <= largest
    token_s = model.b_s + 2 * model.a_s * history
    launch_s = model.k0_s + model.kr_s * history
    if got < largest:
        assert got >= knobs.chunk_min_tokens
        # One token of rounding.
        assert launch_s <= knobs.overhead_max * token_s * (got + 1) * (1 + 1e-9)


def test_never_below_twice_the_ridge() -> None:
    # FLAT has its ridge at 100 tokens: a chunk of 50 would take as long as one of 100.
    assert size(1e6, model=FLAT) == 200


def test_a_model_without_slope_gives_whole_chunks() -> None:
    assert size(100.0, model=StepModel(0.01, 0.0, 0.0, 0.0, 0.0, 0.0)) == 8192


@pytest.mark.parametrize("bad", [{"max_age_s": 0.0}, {"share": 0.0}, {"share": 1.1}, {"chunk_max_tokens": 0}], ids=str)
def test_bad_knobs(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        LongKnobs(**bad)
