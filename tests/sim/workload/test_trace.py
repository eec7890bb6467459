"""Trace: checks at construction, windows, scaling, block ids."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from pla_sglang.sim.workload import Trace, TraceError


def trace(times: list[float], **columns: object) -> Trace:
    lengths = {"input_tokens": np.full(len(times), 10), "output_tokens": np.full(len(times), 3)}
    return Trace("t", np.array(times, dtype=float), **{**lengths, **columns})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"input_tokens": np.array([1])}, "input_tokens has 1 rows, arrival_s has 3"),
        ({"input_tokens": np.array([1, 0, 1])}, "input_tokens of row 1 is 0; allowed: 1 and more"),
        ({"output_tokens": np.array([1, 1, -4])}, "output_tokens of row 2 is -4"),
        ({"hash_ids": ((1,),)}, "hash_ids has 1 rows"),
        ({"block_tokens": 0}, "block_tokens is 0"),
        ({"think_s": np.zeros(3)}, "has think_s but no session"),
        ({"session": np.zeros(3, int), "think_s": np.array([0, 1, -1.0])}, "think_s of row 2 is -1.0; allowed: finite"),
    ],
)
def test_bad_columns_are_named(columns: dict[str, object], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        trace([0.0, 1.0, 2.0], **columns)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([0.0, -1.0], "row 1 is -1.0; allowed: finite, 0 and more"),
        ([0.0, math.nan], "row 1 is nan"),
        ([0.0, 2.0, 1.0], "row 2 is 1.0; allowed: not before the row above"),
    ],
)
def test_bad_times_are_named(times: list[float], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        trace(times)


def test_empty_is_legal_until_requests_are_needed() -> None:
    empty = trace([0.0, 1.0]).window(5, 6)
    assert len(empty) == 0
    with pytest.raises(TraceError, match="is empty; allowed: at least one request"):
        empty.require_requests()


def test_window_is_half_open_and_rebased() -> None:
    part = trace([0.0, 1.0, 2.0, 3.0]).window(1.0, 3.0)
    assert part.arrival_s.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("start", "end"), [(2.0, 2.0), (-1.0, 2.0), (3.0, 1.0)])
def test_bad_window(start: float, end: float) -> None:
    with pytest.raises(TraceError, match="allowed: 0 <= start < end"):
        trace([0.0]).window(start, end)


def test_scaling_divides_the_times() -> None:
    original = trace([0.0, 2.0, 4.0])
    assert original.scale_rate(2).arrival_s.tolist() == [0.0, 1.0, 2.0]
    assert original.at_rate(4.0).rate_per_s == pytest.approx(4.0)
    with pytest.raises(TraceError, match="rate factor is 0"):
        original.scale_rate(0)
    with pytest.raises(TraceError, match="no rate of its own"):
        trace([1.0, 1.0]).at_rate(2)


def test_repeated_copies_share_no_session_and_no_prefix() -> None:
    original = trace(
        [1.0, 3.0, 5.0], session=np.array([0, 2, 0]), turn=np.array([0, 0, 1]), hash_ids=((1,), (), (1, 4))
    )
    twice = original.repeat(2)
    assert twice.arrival_s.tolist() == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]  # a mean gap between the copies
    assert twice.rate_per_s == original.rate_per_s
    assert twice.session is not None
    assert twice.turn is not None
    assert (twice.session.tolist(), twice.turn.tolist()) == ([0, 2, 0, 3, 5, 3], [0, 0, 1, 0, 0, 1])
    assert twice.hash_ids == ((1,), (), (1, 4), (6,), (), (6, 9))
    assert twice.input_tokens.tolist() == [10] * 6
    with pytest.raises(TraceError, match="repeated 0 times"):
        original.repeat(0)


def test_take_keeps_every_column() -> None:
    whole = trace([0.0, 1.0, 2.0], session=np.array([7, 8, 7]), hash_ids=((1,), (), (1, 2)))
    part = whole.take([0, 2])
    assert part.session is not None
    assert (part.session.tolist(), part.hash_ids) == ([7, 7], ((1,), (1, 2)))
    assert part.turn is None


def test_session_hashes_are_prefixes_within_a_session_and_disjoint_between() -> None:
    whole = trace([0.0, 1.0, 2.0], session=np.array([0, 1, 0]), input_tokens=np.array([130, 200, 300]))
    ids = whole.with_session_hashes(64).hash_ids
    assert ids is not None
    assert [len(one) for one in ids] == [2, 3, 4]
    assert ids[2][:2] == ids[0]
    assert not set(ids[1]) & set(ids[2])
    answers = dataclasses.replace(whole, output_tokens=np.array([62, 500, 100])).with_session_hashes(64).answer_ids
    assert answers is not None
    assert answers[0] == ids[2][2:3]  # 192 tokens with the answer
    assert not set(answers[1]) & set(ids[2])  # a longer one than the trace has blocks for
    assert len(answers[2]) == 1
    assert not set(answers[2]) & set(ids[1])
    twice = dataclasses.replace(whole, output_tokens=np.array([62, 1, 1])).with_session_hashes(64).repeat(2)
    assert twice.answer_ids is not None
    assert twice.hash_ids is not None
    assert twice.answer_ids[3] == twice.hash_ids[5][2:3]
    assert not set(twice.hash_ids[5]) & set(twice.hash_ids[2])
    with pytest.raises(TraceError, match="no sessions"):
        trace([0.0]).with_session_hashes()


def thinking() -> Trace:
    """Two sessions; the second starts at 10 s, while the first still runs."""
    return trace(
        [0.0, 4.0, 10.0, 12.0, 13.0],
        session=np.array([5, 5, 6, 5, 6]),
        turn=np.array([0, 1, 0, 2, 1]),
        think_s=np.array([0.0, 3.0, 0.0, 7.0, 2.0]),
        hash_ids=((0,), (0,), (1,), (0,), (1,)),
    )


def test_with_think_times_the_rate_is_that_of_the_starts() -> None:
    assert thinking().rate_per_s == pytest.approx(5 / 2 / 10)  # 2.5 requests a session, one session in 10 s
    fast = thinking().scale_rate(5)
    assert fast.arrival_s.tolist() == [0, 2, 4, 5, 12]  # the second at 2 s; within a session all stays
    assert fast.session is not None
    assert fast.think_s is not None
    assert fast.session.tolist() == [5, 6, 5, 6, 5]
    assert fast.think_s.tolist() == [0, 0, 3, 2, 7]
    assert fast.hash_ids == ((0,), (1,), (0,), (1,), (0,))
    assert fast.rate_per_s == pytest.approx(5 * thinking().rate_per_s)
    assert thinking().at_rate(3.0).rate_per_s == pytest.approx(3.0)
    with pytest.raises(TraceError, match="has no rate of its own"):
        thinking().take([0, 1]).at_rate(1.0)  # one session


def test_cut_and_repeated_sessions_keep_their_order_and_rate() -> None:
    head = thinking().head(4)
    assert head.session is not None
    assert head.turn is not None
    assert head.think_s is not None
    for session in set(head.session.tolist()):
        turns = head.turn[head.session == session].tolist()
        assert turns == list(range(len(turns)))
    assert thinking().window(11.0, 20.0).session_starts().tolist() == [0, 1]  # both go on from where they are
    twice = thinking().repeat(2)
    assert twice.session is not None
    assert twice.think_s is not None
    assert len(set(twice.session.tolist())) == 4
    assert twice.arrival_s[twice.session_starts()].tolist() == [0, 10, 20, 30]
    assert sorted(twice.think_s.tolist()) == sorted([*thinking().think_s.tolist()] * 2)  # type: ignore[union-attr]
    assert twice.rate_per_s == pytest.approx(thinking().rate_per_s)
    assert thinking().as_recorded().rate_per_s == pytest.approx(4 / 13)
