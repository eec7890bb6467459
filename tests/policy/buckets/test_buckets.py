"""The choice of graphs: layouts from flags, expected hits, capture order, memory budget, batches that fit."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.pla.graphs.batching import computed_tokens
from pla_sglang.policy.pla.graphs.choose import LayoutKnobs, build_layout
from pla_sglang.policy.pla.graphs.eviction import CachedGraph, SharedBytes, total_bytes, victims
from pla_sglang.policy.pla.graphs.expect import BatchPrior, expected_hits
from pla_sglang.policy.pla.graphs.layouts import Bucket, GridLayout, VariableLayout
from pla_sglang.policy.pla.graphs.plan import CaptureChoice, CaptureKnobs, CapturePlan
from pla_sglang.policy.pla.graphs.reasons import CaptureReason as C
from pla_sglang.policy.pla.graphs.reasons import GraphReason as G
from pla_sglang.sim.workload import length_model

LAYOUT = VariableLayout([32, 64, 128, 256], [1, 4, 16], longest=128)
A, B, D, E = Bucket(32, 1, 128), Bucket(64, 4, 128), Bucket(256, 16, 128), Bucket(128, 4, 128)


# -- layouts -----------------------------------------------------------------------------------------------------------


def test_default_layouts() -> None:
    varlen, grid = build_layout(LayoutKnobs("varlen")), build_layout(LayoutKnobs("grid"))
    assert isinstance(varlen, VariableLayout)
    assert (varlen.tokens[0], varlen.tokens[-1], varlen.slots, varlen.longest) == (8, 1024, (1, 4, 16, 64), 256)
    assert all(after / before <= 1.125 or after - before == 8 for before, after in itertools.pairwise(varlen.tokens))
    assert len(grid.buckets()) == 42  # the paper's 6 x 7


def test_a_small_server_gets_small_shapes() -> None:
    varlen = build_layout(LayoutKnobs("varlen", largest_tokens=100, longest_tokens=300, most_requests=6))
    assert isinstance(varlen, VariableLayout)
    assert (varlen.tokens[-1], varlen.slots, varlen.longest) == (100, (1, 4, 6), 100)
    grid = build_layout(LayoutKnobs("grid", longest_tokens=40, most_requests=3))
    assert isinstance(grid, GridLayout)
    assert (grid.lengths, grid.batches) == ((8, 16, 32, 40), (1, 2, 3))


@pytest.mark.parametrize("pass_tokens", [5, 64, 300, 8192])
def test_no_shape_of_the_grid_exceeds_a_pass(pass_tokens: int) -> None:
    grid = build_layout(LayoutKnobs("grid", pass_tokens=pass_tokens))
    assert max(bucket.tokens for bucket in grid.buckets()) <= pass_tokens
    whole = build_layout(LayoutKnobs("grid"))
    for lengths in ([5], [200] * 3, [3] * 60, [250] * 64):
        bucket = whole.nearest(lengths)
        assert bucket is None or grid.nearest(lengths) in (None, bucket) or pass_tokens < 256
    assert build_layout(LayoutKnobs("grid", pass_tokens=8192)).why_not([250] * 64) is G.TOO_MANY_TOKENS


@pytest.mark.parametrize(
    ("lengths", "unlimited_tokens", "fits"),
    [
        ([4], 8, True),
        ([3], 8, False),
        ([250, *[20] * 32], 16_384, False),
        ([17] * 4, 128, True),
        ([17] * 3, 128, False),
    ],
)
def test_padding_is_limited_as_in_the_host_s_own_graphs(lengths: list[int], unlimited_tokens: int, fits: bool) -> None:
    unlimited, grid = GridLayout(max_padding=math.inf).nearest(lengths), GridLayout()
    assert unlimited is not None
    assert unlimited.tokens == unlimited_tokens
    assert grid.nearest(lengths) == (unlimited if fits else None)
    if not fits:
        assert grid.why_not(lengths) is G.PADDING


def test_only_reachable_shapes_are_listed() -> None:
    buckets = LAYOUT.buckets()
    assert Bucket(256, 1, 128) not in buckets  # one request has 128 tokens at most
    assert Bucket(128, 1, 128) in buckets
    assert len(set(buckets)) == len(buckets)


@given(st.lists(st.integers(1, 128), min_size=1, max_size=16))
def test_the_nearest_shape_is_listed(lengths: list[int]) -> None:
    found = LAYOUT.nearest(lengths)
    assert found is None or found in LAYOUT.buckets()


@pytest.mark.parametrize(
    ("lengths", "reason"),
    [
        ([], G.EMPTY),
        ([129], G.LONG_REQUEST),
        ([1] * 17, G.TOO_MANY_REQUESTS),
        ([100] * 3, G.TOO_MANY_TOKENS),
        ([15], G.PADDING),
    ],
)
def test_why_there_is_no_shape(lengths: list[int], reason: G) -> None:
    assert LAYOUT.nearest(lengths) is None
    assert LAYOUT.why_not(lengths) is reason


# -- expected hits -----------------------------------------------------------------------------------------------------


def test_the_prior_is_the_workload_model() -> None:
    model, prior = length_model("lmsys_later_turn_prompt"), BatchPrior()
    assert (model.mus, model.sigmas) == ((prior.mu,), (prior.sigma,))


def test_expected_hits() -> None:
    layout = build_layout(LayoutKnobs("varlen"))
    hits = expected_hits(layout, BatchPrior(), random.Random(3))
    assert set(hits) == set(layout.buckets())
    assert 0.5 < sum(hits.values()) <= 1
    assert hits == expected_hits(layout, BatchPrior(), random.Random(3))
    # P(size) falls as 1/size, so one request in one slot is the most frequent batch.
    by_slots = {slots: sum(share for b, share in hits.items() if b.slots == slots) for slots in (1, 4, 16, 64)}
    assert by_slots[1] == pytest.approx(1 / sum(1 / n for n in range(1, 65)), abs=0.03)


# -- order of captures -------------------------------------------------------------------------------------------------


def plan(**knobs: Any) -> CapturePlan:
    return CapturePlan({A: 0.5, B: 0.3, D: 0.0}, CaptureKnobs(**knobs))


def test_the_most_expected_comes_first_and_the_never_expected_never() -> None:
    one = plan(budget_s=10)
    first = one.at_start(0, 0)
    assert (first.bucket, first.reason) == (A, C.EXPECTED)
    one.on_captured(A)
    assert one.at_start(1, 1).bucket == B
    one.on_captured(B)
    assert one.at_start(2, 1).reason is C.NOTHING_WANTED


@pytest.mark.parametrize(
    ("spent_s", "slowest_s", "reason"),
    [(0, 0, C.EXPECTED), (8.9, 1, C.EXPECTED), (9, 1, C.TIME_BUDGET), (11, 0, C.TIME_BUDGET)],
)
def test_time_budget(spent_s: float, slowest_s: float, reason: C) -> None:
    assert plan(budget_s=10).at_start(spent_s, slowest_s).reason is reason


def test_without_a_budget_nothing_is_captured_at_start() -> None:
    assert plan(budget_s=0).at_start(0, 0).reason is C.TIME_BUDGET


def missed(one: CapturePlan, misses: dict[Bucket, int]) -> None:
    for bucket, count in misses.items():
        for _ in range(count):
            one.on_miss(bucket)


@pytest.mark.parametrize(
    ("misses", "bucket", "reason"),
    [
        ({}, None, C.NOTHING_WANTED),
        ({D: 1}, None, C.NOTHING_WANTED),
        ({D: 2}, D, C.MISSED_IDLE),
        ({D: 5, B: 5}, B, C.MISSED_IDLE),
    ],
)
def test_idle_capture(misses: dict[Bucket, int], bucket: Bucket | None, reason: C) -> None:
    one = plan(idle_misses=2, busy_misses=10)
    missed(one, misses)
    choice = one.next_idle()
    assert (choice.bucket, choice.reason) == (bucket, reason)


@pytest.mark.parametrize(
    ("why", "budget_s", "misses", "pauses", "slowest_s", "bucket", "reason"),
    [
        ("by default never", 0.0, 99, [], 0.0, None, C.NOTHING_WANTED),
        ("not missed often enough", 5.0, 9, [], 1.0, None, C.NOTHING_WANTED),
        ("missed often, and it fits", 5.0, 10, [], 5.0, D, C.MISSED_OFTEN),
        ("one takes longer than the whole budget", 5.0, 10, [], 5.1, None, C.BUSY_BUDGET),
        ("the minute has been used", 5.0, 10, [(95.0, 3.0)], 3.0, None, C.BUSY_BUDGET),
        ("what is over a minute old is forgotten", 5.0, 10, [(40.0, 3.0)], 3.0, D, C.MISSED_OFTEN),
        ("one that took too long is paid for", 5.0, 10, [(95.0, 9.0)], 0.0, None, C.BUSY_BUDGET),
    ],
)
def test_busy_capture(
    why: str,
    budget_s: float,
    misses: int,
    pauses: list[tuple[float, float]],
    slowest_s: float,
    bucket: Bucket | None,
    reason: C,
) -> None:
    one = plan(idle_misses=2, busy_misses=10, busy_s_per_minute=budget_s)
    for pause in pauses:
        one.on_pause(*pause)
    missed(one, {D: misses})
    assert one.wants_busy() == (reason is not C.NOTHING_WANTED), why
    choice = one.next_busy(100.0, slowest_s)
    assert (choice.bucket, choice.reason) == (bucket, reason), why


def test_a_shape_without_time_left_is_asked_for_again_after_as_many_misses() -> None:
    """Ranks agree on a time for each question, so it is not asked with each batch."""
    one = plan(idle_misses=2, busy_misses=10, busy_s_per_minute=1.0)
    missed(one, {D: 10})
    assert one.next_busy(0.0, 2.0).reason is C.BUSY_BUDGET
    assert not one.wants_busy()
    missed(one, {D: 10})
    assert one.wants_busy()


@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0, 3)), max_size=60), st.floats(0.1, 5))
def test_no_minute_has_more_pauses_than_its_budget(attempts: list[tuple[float, float]], budget_s: float) -> None:
    """Each capture takes as long as the longest before said it could."""
    one, now_s, made = plan(idle_misses=1, busy_misses=1, busy_s_per_minute=budget_s), 0.0, []
    for later_s, took_s in attempts:
        now_s += later_s
        missed(one, {D: 1})
        if one.next_busy(now_s, took_s).bucket is not None:
            now_s += took_s
            one.on_pause(now_s, took_s)
            made.append((now_s, took_s))
    for end_s, _ in made:
        assert sum(took_s for at_s, took_s in made if end_s - 60 < at_s <= end_s) <= budget_s + 1e-9


def test_evicted_may_come_back_and_what_cannot_fit_may_not() -> None:
    one = plan(budget_s=10)
    for bucket in (A, B):
        one.on_captured(bucket)
    one.on_evicted(A)
    assert one.at_start(0, 0).bucket == A
    one.give_up(A)
    missed(one, {A: 1000})
    assert one.next_idle().reason is C.NOTHING_WANTED


def test_a_failed_one_is_tried_again_after_twice_as_many_misses_each_time() -> None:
    one = plan(budget_s=10, retry_misses=8, busy_misses=2, busy_s_per_minute=60.0)
    one.on_failed(A)
    assert one.at_start(0, 0).bucket == B, "not again at start"
    for needed in (8, 16, 32):
        missed(one, {A: needed - 1})
        assert one.next_idle().bucket is None
        assert not one.wants_busy(), "never while others wait"
        missed(one, {A: 1})
        assert one.next_idle() == CaptureChoice(A, C.RETRIED_IDLE)
        one.on_failed(A)
    one.on_captured(A)
    one.on_evicted(A)
    missed(one, {A: 2})
    assert one.next_idle().reason is C.MISSED_IDLE, "a success forgets the failures"


# -- memory budget -----------------------------------------------------------------------------------------------------

HELD = [CachedGraph(A, 40, 0, last_use=3), CachedGraph(B, 30, 0, last_use=1), CachedGraph(D, 20, 0, last_use=1, hits=4)]


def new(own_bytes: int, scratch_bytes: int = 0, bucket: Bucket = E) -> CachedGraph:
    return CachedGraph(bucket, own_bytes, scratch_bytes, last_use=9)


@pytest.mark.parametrize(
    ("needed", "budget", "gone"),
    [
        (10, 100, []),
        (11, 100, [B]),
        (41, 100, [B, D]),
        (100, 100, [B, D, A]),
        (101, 100, None),
    ],
)
def test_least_recently_used_goes_first(needed: int, budget: int, gone: list[Bucket] | None) -> None:
    assert victims(HELD, new(needed), SharedBytes(), budget) == gone


def test_the_pool_is_counted_once_at_its_largest() -> None:
    held = [CachedGraph(A, 10, 50, last_use=1), CachedGraph(B, 10, 30, last_use=2)]
    assert total_bytes(held, SharedBytes(fixed_bytes=7)) == 7 + 50 + 20
    assert victims(held, new(10, 40), SharedBytes(fixed_bytes=7), 87) == []
    assert victims(held, new(10, 40), SharedBytes(fixed_bytes=7), 86) == [A], "the largest need goes with A"
    assert victims(held, new(10, 90), SharedBytes(fixed_bytes=7), 106) is None


def test_attention_buffers_count_once_for_each_number_of_slots_in_use() -> None:
    one_slot, four_slots = Bucket(32, 1, 128), Bucket(64, 4, 128)
    shared = SharedBytes(attention_bytes={1: 100, 4: 400, 16: 1600})
    held = [CachedGraph(one_slot, 1, 0, last_use=1), CachedGraph(Bucket(32, 4, 128), 1, 0, last_use=2)]
    assert total_bytes(held, shared) == 100 + 400 + 2
    assert victims(held, new(1, bucket=four_slots), shared, 503) == []
    assert victims(held, new(1, bucket=four_slots), shared, 502) == [one_slot], "its buffers go with it"
    assert victims(held, new(1, bucket=Bucket(256, 16, 128)), shared, 1600) is None


# -- what a batch costs ----------------------------------------------------------------------------------------------


def test_computed_tokens() -> None:
    assert computed_tokens(None, [3, 4]) == 7
    assert computed_tokens(LAYOUT, [13, 14]) == 32
    assert computed_tokens(LAYOUT, [3, 4]) == 7, "padding to 32 is not replayed"
    assert computed_tokens(LAYOUT, [100] * 4) == 400


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayoutKnobs("ring"), "graph layout 'ring'"),
        (lambda: LayoutKnobs("off"), "graph layout 'off'"),
        (lambda: LayoutKnobs("grid", largest_tokens=0), "largest graph"),
        (lambda: CaptureKnobs(budget_s=-1), "capture budget"),
        (lambda: CaptureKnobs(idle_misses=5, busy_misses=4), "busy capture"),
        (lambda: BatchPrior(sigma=-1), "sigma"),
        (lambda: BatchPrior(draws=0), "draws"),
    ],
)
def test_bad_values(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
