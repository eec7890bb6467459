"""The graph cache with a recorder of book-keeping: look-up, captures at start and when missed, eviction, ranks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pla_graphs.cache import GraphCache, alone
from pla_graphs.recorder import CaptureError
from pla_sglang.policy.buckets.layouts import Bucket, VariableLayout
from pla_sglang.policy.buckets.plan import CaptureKnobs, CapturePlan
from pla_sglang.policy.buckets.reasons import CaptureReason, GraphReason

LAYOUT = VariableLayout([16, 32, 64], [1, 4], longest=64)
ONE, FEW, MANY = Bucket(16, 1, 64), Bucket(32, 4, 64), Bucket(64, 4, 64)
EXPECTED = {ONE: 0.5, FEW: 0.3, MANY: 0.1}


@dataclasses.dataclass
class FakeRecording:
    memory_bytes: int
    closed: bool = False

    def replay(self) -> torch.Tensor:
        assert not self.closed
        return torch.zeros(1)

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True


class FakeDevice:
    """Captures take a second and as many bytes as the shape has tokens."""

    def __init__(self, fails: Sequence[Bucket] = (), slower: float = 1.0) -> None:
        self.now_s = 0.0
        self.fails, self.slower = set(fails), slower
        self.open = False
        self.made: list[tuple[Bucket, FakeRecording]] = []

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        self.open = True
        yield
        self.open = False

    def attention(self, backend: Any) -> Any:
        return backend

    def record(self, bucket: Bucket) -> Any:
        assert self.open, "captured outside a session"
        self.now_s += self.slower
        if bucket in self.fails:
            raise CaptureError("no such kernel")
        self.made.append((bucket, FakeRecording(bucket.tokens)))
        return self.made[-1][1]


def cache_on(device: FakeDevice, *, budget_bytes: int = 1000, agree: Any = alone, **knobs: Any) -> GraphCache:
    knobs = {"budget_s": 100.0, "idle_misses": 2, "busy_misses": 5} | knobs
    plan = CapturePlan(EXPECTED, CaptureKnobs(**knobs))
    return GraphCache(
        LAYOUT,
        plan,
        device,  # type: ignore[arg-type]  # records shapes, not forward passes
        device.record,
        budget_bytes=budget_bytes,
        clock=lambda: device.now_s,
        agree=agree,
    )


def started(device: FakeDevice, **options: Any) -> GraphCache:
    cache = cache_on(device, **options)
    cache.capture_at_start()
    cache.check_integrity()
    return cache


def test_start_captures_the_most_expected_first() -> None:
    device = FakeDevice()
    cache = started(device)
    assert [bucket for bucket, _ in device.made] == [ONE, FEW, MANY]
    assert cache.stopped_by is CaptureReason.NOTHING_WANTED
    assert (cache.counts.captures, cache.counts.capture_s, cache.memory_bytes) == (3, 3.0, 16 + 32 + 64)


@pytest.mark.parametrize(
    ("options", "captured", "why"),
    [
        ({"budget_s": 2.5}, [ONE, FEW], CaptureReason.TIME_BUDGET),
        ({"budget_s": 0}, [], CaptureReason.TIME_BUDGET),
        ({"budget_bytes": 60}, [ONE, FEW], CaptureReason.MEMORY_BUDGET),
    ],
)
def test_start_stays_in_its_budgets(options: dict[str, Any], captured: list[Bucket], why: CaptureReason) -> None:
    cache = started(FakeDevice(), **options)
    assert (cache.captured, cache.stopped_by) == (captured, why)


@pytest.mark.parametrize(
    ("lengths", "bucket", "reason"),
    [
        ([16], ONE, GraphReason.REPLAYED),
        ([5, 6, 7], FEW, GraphReason.REPLAYED),
        ([60, 4], MANY, GraphReason.REPLAYED),
        ([17], Bucket(32, 1, 64), GraphReason.NOT_CAPTURED),
        ([65], None, GraphReason.LONG_REQUEST),
        ([60, 60], None, GraphReason.TOO_MANY_TOKENS),
        ([1] * 5, None, GraphReason.TOO_MANY_REQUESTS),
        ([], None, GraphReason.EMPTY),
    ],
)
def test_find(lengths: list[int], bucket: Bucket | None, reason: GraphReason) -> None:
    found = started(FakeDevice()).find(lengths)
    assert (found.bucket, found.reason) == (bucket, reason)
    assert (found.recording is not None) == (reason is GraphReason.REPLAYED)


def test_misses_are_counted_by_reason() -> None:
    cache = started(FakeDevice())
    for lengths in ([17], [17], [65]):
        cache.find(lengths)
    cache.refuse(GraphReason.LORA)
    assert cache.counts.to_dict()["reasons"] == {"not_captured": 2, "long_request": 1, "lora": 1}


def test_a_missed_shape_is_captured_when_idle_and_then_found() -> None:
    cache = started(FakeDevice())
    cache.find([17])
    assert cache.capture_missed(idle=True) is None
    cache.find([17])
    assert cache.capture_missed(idle=False) is None
    assert cache.capture_missed(idle=True) == Bucket(32, 1, 64)
    assert cache.find([17]).reason is GraphReason.REPLAYED


def test_a_busy_device_captures_what_is_missed_often() -> None:
    cache = started(FakeDevice())
    for _ in range(5):
        cache.find([17])
    assert cache.capture_missed(idle=False) == Bucket(32, 1, 64)


def test_the_least_recently_used_makes_room() -> None:
    device = FakeDevice()
    cache = started(device, budget_bytes=16 + 32 + 64)
    cache.find([5])
    cache.find([60, 4])
    for _ in range(2):
        cache.find([17])
    assert cache.capture_missed(idle=True) == Bucket(32, 1, 64)
    assert cache.captured == [ONE, Bucket(32, 1, 64), MANY]
    assert cache.counts.evictions == 1
    assert [bucket for bucket, recording in device.made if recording.closed] == [FEW]
    cache.check_integrity()
    assert cache.find([5, 6, 7]).reason is GraphReason.NOT_CAPTURED


def test_a_failed_capture_is_not_tried_again() -> None:
    device = FakeDevice(fails=[FEW])
    cache = started(device)
    assert cache.captured == [ONE, MANY]
    for _ in range(9):
        assert cache.find([5, 6, 7]).reason is GraphReason.CAPTURE_FAILED
        assert cache.capture_missed(idle=True) is None
    assert cache.counts.failures == 1


def test_a_graph_larger_than_the_budget_is_given_up() -> None:
    device = FakeDevice()
    cache = cache_on(device, budget_bytes=20)
    cache.capture_at_start()
    for _ in range(2):
        cache.find([60, 4])
    assert cache.capture_missed(idle=True) is None
    assert device.made[-1][1].closed
    cache.check_integrity()


def test_close_gives_everything_back() -> None:
    device = FakeDevice()
    cache = started(device)
    cache.close()
    assert cache.memory_bytes == 0
    assert all(recording.closed for _, recording in device.made)


# -- ranks -------------------------------------------------------------------------------------------------------------


class Ranks:
    """Two ranks in turn: the first one's figures wait for the second one's. Run rank by rank, twice."""

    def __init__(self) -> None:
        self.said: list[list[list[float]]] = [[], []]

    def agree(self, rank: int) -> Any:
        calls = iter(range(10_000))

        def agree(values: Sequence[float]) -> list[float]:
            call = next(calls)
            mine, other = self.said[rank], self.said[1 - rank]
            if call == len(mine):
                mine.append(list(values))
            return [max(pair) for pair in zip(values, other[call], strict=True)] if call < len(other) else list(values)

        return agree


def test_ranks_with_other_clocks_and_failures_hold_the_same_graphs() -> None:
    """One rank is three times slower, and one cannot capture a shape: both stop and give up alike."""
    ranks = Ranks()
    captured = []
    for _ in range(4):  # until what each has heard from the other no longer changes
        captured = [
            started(FakeDevice(fails, slower), agree=ranks.agree(rank), budget_s=7.5).captured
            for rank, (fails, slower) in enumerate([((), 1.0), ((FEW,), 3.0)])
        ]
    assert captured[0] == captured[1] == [ONE]


@given(st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=5), max_size=60), st.integers(16, 200))
def test_books_agree_whatever_comes(batches: list[list[int]], budget_bytes: int) -> None:
    device = FakeDevice()
    cache = started(device, budget_bytes=budget_bytes)
    for index, lengths in enumerate(batches):
        found = cache.find(lengths)
        if found.recording is not None:
            found.recording.replay()
        cache.capture_missed(idle=index % 3 == 0)
        cache.check_integrity()
    held = [recording for _, recording in device.made if not recording.closed]
    assert len(held) == len(cache.captured)
