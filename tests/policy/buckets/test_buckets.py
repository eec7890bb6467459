"""The choice of graphs: layouts from flags, expected hits, capture order, memory budget, batches that fit."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pla_sglang.errors import ConfigError
from pla_sglang.policy.buckets.batching import LEAST_KEPT, computed_tokens, fitting_prefix, one_fills
from pla_sglang.policy.buckets.choose import LayoutKnobs, build_layout
from pla_sglang.policy.buckets.expect import BatchPrior, expected_hits
from pla_sglang.policy.buckets.keep import Held, victims
from pla_sglang.policy.buckets.layouts import Bucket, GridLayout, VariableLayout
from pla_sglang.policy.buckets.plan import CaptureKnobs, CapturePlan
from pla_sglang.policy.buckets.reasons import CaptureReason as C
from pla_sglang.policy.buckets.reasons import GraphReason as G
from pla_sglang.workload import length_model

LAYOUT = VariableLayout([32, 64, 128, 256], [1, 4, 16], longest=128)
A, B, D = Bucket(32, 1, 128), Bucket(64, 4, 128), Bucket(256, 16, 128)


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


@pytest.mark.parametrize(
    ("misses", "idle", "bucket", "reason"),
    [
        ({}, True, None, C.NOTHING_WANTED),
        ({D: 1}, True, None, C.NOTHING_WANTED),
        ({D: 2}, True, D, C.MISSED_IDLE),
        ({D: 2}, False, None, C.NOTHING_WANTED),
        ({D: 9, B: 5}, False, None, C.NOTHING_WANTED),
        ({D: 10, B: 5}, False, D, C.MISSED_OFTEN),
        ({D: 5, B: 5}, True, B, C.MISSED_IDLE),
    ],
)
def test_lazy_capture(misses: dict[Bucket, int], idle: bool, bucket: Bucket | None, reason: C) -> None:
    one = plan(idle_misses=2, busy_misses=10)
    for missed, count in misses.items():
        for _ in range(count):
            one.on_miss(missed)
    choice = one.next_lazy(idle=idle)
    assert (choice.bucket, choice.reason) == (bucket, reason)


def test_evicted_may_come_back_and_failed_may_not() -> None:
    one = plan(budget_s=10)
    for bucket in (A, B):
        one.on_captured(bucket)
    one.on_evicted(A)
    assert one.at_start(0, 0).bucket == A
    one.give_up(A)
    for _ in range(1000):
        one.on_miss(A)
    assert one.next_lazy(idle=True).reason is C.NOTHING_WANTED


# -- memory budget -----------------------------------------------------------------------------------------------------

HELD = [Held(A, 40, last_use=3), Held(B, 30, last_use=1), Held(D, 20, last_use=1, hits=4)]


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
    assert victims(HELD, needed, budget) == gone


# -- batches that fit --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "kept"),
    [
        ([30, 30, 4], 3),  # 64 of 64
        ([60, 60, 9], 2),  # 129 of 256, or 120 of 128
        ([60, 60, 60], 3),  # cutting one off would take a third of the batch
        ([9], 1),
        ([100, 100, 56, 20], 3),  # 276 fit no shape, 256 fill one
        ([100, 100, 100, 100], 4),  # nothing near fits
    ],
)
def test_a_full_batch_ends_where_a_bucket_ends(lengths: list[int], kept: int) -> None:
    assert fitting_prefix(LAYOUT, lengths) == kept


@given(st.lists(st.integers(1, 128), min_size=1, max_size=20))
def test_what_is_kept_is_never_padded_more(lengths: list[int]) -> None:
    kept = fitting_prefix(LAYOUT, lengths)
    assert 1 <= kept <= len(lengths)
    assert sum(lengths[:kept]) >= LEAST_KEPT * sum(lengths)
    whole, cut = LAYOUT.nearest(lengths), LAYOUT.nearest(lengths[:kept])
    if whole is not None:
        assert cut is not None
        assert cut.tokens / sum(lengths[:kept]) <= whole.tokens / sum(lengths)


@pytest.mark.parametrize(
    ("lengths", "fills"),
    [
        ([8] * 3, True),
        ([10] * 2, False),
        ([10] * 4, False),
        ([20] * 3, False),  # the fourth would need the next token bucket
        ([10] * 15, True),
        ([], False),
    ],
)
def test_one_more_fills_the_slots(lengths: list[int], fills: bool) -> None:
    assert one_fills(LAYOUT, lengths) is fills


def test_computed_tokens() -> None:
    assert computed_tokens(None, [3, 4]) == 7
    assert computed_tokens(LAYOUT, [3, 4]) == 32
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
