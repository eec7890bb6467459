"""The graph cache with a recorder of book-keeping: look-up, captures at start and when missed, eviction, ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pla_graphs.cache import GraphCache, alone
from pla_graphs.recorder import CaptureError, MemoryUse
from pla_sglang.policy.pla.graphs.layouts import Bucket, VariableLayout
from pla_sglang.policy.pla.graphs.plan import CaptureKnobs, CapturePlan
from pla_sglang.policy.pla.graphs.reasons import CaptureFailure, CaptureReason, GraphReason

LAYOUT = VariableLayout([16, 32, 64], [1, 4], longest=64)
ONE, FEW, MANY = Bucket(16, 1, 64), Bucket(32, 4, 64), Bucket(64, 4, 64)
EXPECTED = {ONE: 0.5, FEW: 0.3, MANY: 0.1}


@dataclasses.dataclass
class FakeRecording:
    memory: MemoryUse
    closed: bool = False

    def replay(self) -> torch.Tensor:
        assert not self.closed
        return torch.zeros(1)

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True


class FakeDevice:
    """A source of shapes. Captures take a second, and as many bytes of their own as the shape has tokens.

    Args:
        fails: what is raised for a shape: in its preparation, or with ``late`` in its recording.
        scratch: bytes of the pool for each token.
        attention: bytes of the buffers for each number of slots; ``surprise``: when they exist, over what was expected.
    """

    def __init__(
        self,
        fails: Mapping[Bucket, Exception] | Sequence[Bucket] = (),
        slower: float = 1.0,
        *,
        late: bool = True,
        scratch: int = 0,
        attention: Mapping[int, int] | None = None,
        surprise: int = 0,
    ) -> None:
        self.now_s = 0.0
        error = CaptureError(CaptureFailure.CAPTURE, "no such kernel")
        self.fails = dict(fails) if isinstance(fails, Mapping) else dict.fromkeys(fails, error)
        self.slower, self.late, self.scratch = slower, late, scratch
        self._attention, self._surprise = attention or {}, surprise
        self.fails_session: Exception | None = None
        self.open = False
        self.made: list[tuple[Bucket, FakeRecording]] = []
        self.buffers: set[int] = set()  # numbers of slots that have attention buffers
        self.emptied = 0

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        self.open = True
        try:
            yield
        finally:
            self.open = False
        if self.fails_session is not None:
            raise self.fails_session

    def prepare(self, bucket: Bucket) -> Callable[[], Any]:
        assert self.open, "captured outside a session"
        self.buffers.add(bucket.slots)
        self._fail(bucket, late=False)
        return lambda: self.record(bucket)

    def record(self, bucket: Bucket) -> FakeRecording:
        self.now_s += self.slower
        self._fail(bucket, late=True)
        self.made.append((bucket, FakeRecording(MemoryUse(bucket.tokens, self.scratch * bucket.tokens))))
        return self.made[-1][1]

    def _fail(self, bucket: Bucket, *, late: bool) -> None:
        if bucket in self.fails and late == self.late:
            raise self.fails[bucket]

    def fixed_bytes(self) -> int:
        return 0

    def attention_bytes(self, slots: int) -> int:
        return self._attention.get(slots, 0) + self._surprise * (slots in self.buffers)

    def release(self, slots: int) -> None:
        self.buffers.discard(slots)

    def free_unused(self) -> None:
        self.emptied += 1


def cache_on(device: FakeDevice, *, budget_bytes: int = 1000, agree: Any = alone, **knobs: Any) -> GraphCache:
    knobs = {
        "budget_s": 100.0,
        "idle_misses": 2,
        "busy_misses": 5,
        "busy_s_per_minute": 60.0,
        "retry_misses": 8,
    } | knobs
    plan = CapturePlan(EXPECTED, CaptureKnobs(**knobs))
    return GraphCache(LAYOUT, plan, device, budget_bytes=budget_bytes, clock=lambda: device.now_s, agree=agree)


def missed(cache: GraphCache, lengths: list[int], times: int) -> None:
    for _ in range(times):
        assert cache.find(lengths).recording is None


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
        ([7], None, GraphReason.PADDING),
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
    assert cache.capture_idle() is None
    cache.find([17])
    assert cache.capture_busy() is None
    assert cache.capture_idle() == Bucket(32, 1, 64)
    assert cache.find([17]).reason is GraphReason.REPLAYED


def test_a_busy_device_captures_what_is_missed_often() -> None:
    cache = started(FakeDevice())
    for _ in range(5):
        cache.find([17])
    assert cache.capture_busy() == Bucket(32, 1, 64)


def test_the_least_recently_used_makes_room() -> None:
    device = FakeDevice()
    cache = started(device, budget_bytes=16 + 32 + 64)
    cache.find([9])
    cache.find([60, 4])
    for _ in range(2):
        cache.find([17])
    assert cache.capture_idle() == Bucket(32, 1, 64)
    assert cache.captured == [ONE, Bucket(32, 1, 64), MANY]
    assert cache.counts.evictions == 1
    assert [bucket for bucket, recording in device.made if recording.closed] == [FEW]
    cache.check_integrity()
    assert cache.find([5, 6, 7]).reason is GraphReason.NOT_CAPTURED


ERRORS = [
    (CaptureError(CaptureFailure.PLAN, "no plan"), CaptureFailure.PLAN),
    (torch.OutOfMemoryError("out of memory"), CaptureFailure.OUT_OF_MEMORY),
    (MemoryError(), CaptureFailure.OUT_OF_MEMORY),
    (AssertionError("host"), None),
    (KeyError("host"), None),
    (RuntimeError("CUDA error: operation not permitted when stream is capturing"), None),
]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("error", "failure"), ERRORS, ids=lambda value: getattr(value, "value", type(value).__name__))
def test_whatever_fails_refuses_that_graph_alone(error: Exception, failure: CaptureFailure | None, late: bool) -> None:
    device = FakeDevice({FEW: error}, late=late)
    cache = started(device)
    assert cache.captured == [ONE, MANY], "the others are captured"
    reached = failure or (CaptureFailure.CAPTURE if late else CaptureFailure.PREPARE)
    assert cache.counts.failures == {reached: 1}
    assert cache.find([5, 6, 7]).reason is GraphReason.CAPTURE_FAILED
    assert device.emptied == 1, "what the attempt left is given back"
    assert (device.open, device.buffers) == (False, {1, 4})


def test_a_failed_capture_is_tried_again_ever_more_seldom() -> None:
    device = FakeDevice([FEW])
    cache = started(device)
    for needed in (8, 16, 32):
        missed(cache, [5, 6, 7], needed - 1)
        assert cache.capture_idle() is None
        assert cache.capture_busy() is None
        before = cache.counts.failures.total()
        missed(cache, [5, 6, 7], 1)
        assert cache.capture_idle() is None
        assert cache.counts.failures.total() == before + 1, "tried"
    device.fails.clear()
    missed(cache, [5, 6, 7], 64)
    assert cache.capture_idle() == FEW
    assert cache.find([5, 6, 7]).reason is GraphReason.REPLAYED
    cache.check_integrity()


def test_a_session_that_cannot_be_closed_keeps_nothing_that_was_made_in_it() -> None:
    """Collectives register their memory there: its recordings may not be replayed."""
    device = FakeDevice()
    device.fails_session = RuntimeError("no handle")
    cache = started(device)
    assert (cache.captured, cache.stopped_by) == ([], CaptureReason.SESSION_FAILED)
    assert all(recording.closed for _, recording in device.made)
    assert device.buffers == set()
    device.fails_session = None
    missed(cache, [9], 8)
    assert cache.capture_idle() == ONE
    device.fails_session = RuntimeError("no handle")
    missed(cache, [5, 6, 7], 8)
    assert cache.capture_idle() is None
    assert cache.captured == [ONE], "one from an earlier session stays"
    cache.check_integrity()


def test_a_recording_that_cannot_be_replayed_is_dropped() -> None:
    cache = started(FakeDevice())
    cache.discard(FEW, CaptureFailure.PLAN)
    assert cache.find([5, 6, 7]).reason is GraphReason.CAPTURE_FAILED
    cache.check_integrity()


def test_pauses_of_live_passes_stay_in_their_budget() -> None:
    device = FakeDevice()
    cache = started(device, budget_s=0, busy_s_per_minute=1.0)
    missed(cache, [9], 5)
    assert cache.capture_busy() == ONE
    missed(cache, [5, 6, 7], 5)
    assert cache.capture_busy() is None
    assert (cache.counts.busy_refused, cache.counts.busy_capture_s) == (1, 1.0)
    device.now_s += 61
    missed(cache, [5, 6, 7], 5)
    assert cache.capture_busy() == FEW


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_full_budget_evicts_and_what_was_evicted_comes_back() -> None:
    """Own bytes, the pool's scratch and attention buffers in one budget, filled until graphs have to go."""
    device = FakeDevice(scratch=2, attention={1: 10, 4: 20})
    cache = started(device, budget_bytes=16 + 32 + 2 * 32 + 10 + 20)
    assert (cache.captured, cache.stopped_by) == ([ONE, FEW], CaptureReason.MEMORY_BUDGET)
    assert cache.memory_bytes == 16 + 32 + 2 * 32 + 30
    missed(cache, [17], 2)  # 32 tokens in one slot: ONE, the least recently used, and then FEW have to go
    assert cache.capture_idle() == Bucket(32, 1, 64)
    cache.check_integrity()
    gone = next(bucket for bucket in (ONE, FEW) if bucket not in cache.captured)
    lengths = [9] if gone is ONE else [5, 6, 7]
    missed(cache, lengths, 2)
    assert cache.capture_idle() == gone
    assert cache.counts.evictions >= 2
    cache.check_integrity()


def test_attention_buffers_without_a_graph_are_freed() -> None:
    device = FakeDevice(attention={1: 10, 4: 500})
    cache = started(device, budget_bytes=700)
    assert device.buffers == {1, 4}
    cache._evict(FEW)
    cache._evict(MANY)
    assert device.buffers == {1}
    assert cache.memory_bytes == 16 + 10


def test_attention_buffers_that_turn_out_too_large_are_given_up() -> None:
    """flashinfer has a workspace for each number of slots; it cannot be known before it is there."""
    device = FakeDevice(attention={1: 10, 4: 20}, surprise=2000)
    cache = started(device, budget_bytes=1000)
    assert cache.captured == []
    assert cache.counts.failures[CaptureFailure.OVER_BUDGET] >= 1
    assert device.buffers == set()
    cache.check_integrity()


def test_a_graph_larger_than_the_budget_is_given_up() -> None:
    device = FakeDevice()
    cache = cache_on(device, budget_bytes=20)
    cache.capture_at_start()
    for _ in range(2):
        cache.find([60, 4])
    assert cache.capture_idle() is None
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
    """Two ranks, each in a thread. A question that the other does not ask, or asks with other figures, breaks both."""

    def __init__(self) -> None:
        self._meeting = threading.Barrier(2, timeout=60)
        self._said: list[list[float]] = [[], []]

    def agree(self, rank: int) -> Any:
        def agree(values: Sequence[float]) -> list[float]:
            self._said[rank] = list(values)
            self._meeting.wait()
            both = [max(pair) for pair in zip(*self._said, strict=True)]
            self._meeting.wait()
            return both

        return agree


def on_two_ranks(devices: Sequence[FakeDevice], work: Callable[[GraphCache], None], **options: Any) -> list[GraphCache]:
    ranks = Ranks()
    caches = [cache_on(device, agree=ranks.agree(rank), **options) for rank, device in enumerate(devices)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, caches))
    for cache in caches:
        cache.check_integrity()
    return caches


def test_ranks_with_other_clocks_and_failures_hold_the_same_graphs() -> None:
    """One rank is three times slower, and one cannot capture a shape: both stop and give up alike."""
    devices = [FakeDevice(), FakeDevice([FEW], 3.0)]
    caches = on_two_ranks(devices, GraphCache.capture_at_start, budget_s=7.5)
    assert [cache.captured for cache in caches] == [[ONE], [ONE]]
    assert caches[0].counts.failures == {CaptureFailure.OTHER_RANK: 1}
    assert caches[1].counts.failures == {CaptureFailure.CAPTURE: 1}


def test_a_rank_that_fails_before_its_warm_up_keeps_the_other_out_of_it() -> None:
    """The warm-up has collectives: whoever entered it alone would wait for good."""
    devices = [FakeDevice(), FakeDevice([FEW], late=False)]
    caches = on_two_ranks(devices, GraphCache.capture_at_start)
    assert [cache.captured for cache in caches] == [[ONE, MANY], [ONE, MANY]]
    assert FEW not in [bucket for bucket, _ in devices[0].made], "the healthy rank did not begin"


def test_ranks_with_other_clocks_allow_the_same_pauses() -> None:
    devices = [FakeDevice(), FakeDevice()]
    devices[1].now_s = 1e6

    def work(cache: GraphCache) -> None:
        for lengths in ([9], [5, 6, 7]):
            missed(cache, lengths, 5)
            cache.capture_busy()

    caches = on_two_ranks(devices, work, busy_s_per_minute=1.0)
    assert [cache.captured for cache in caches] == [[ONE], [ONE]]
    assert [cache.counts.busy_refused for cache in caches] == [1, 1]


@given(st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=5), max_size=60), st.integers(16, 200))
def test_books_agree_whatever_comes(batches: list[list[int]], budget_bytes: int) -> None:
    device = FakeDevice()
    cache = started(device, budget_bytes=budget_bytes)
    for index, lengths in enumerate(batches):
        found = cache.find(lengths)
        if found.recording is not None:
            found.recording.replay()
        if index % 3 == 0:
            cache.capture_idle()
        else:
            cache.capture_busy()
        cache.check_integrity()
    held = [recording for _, recording in device.made if not recording.closed]
    assert len(held) == len(cache.captured)
