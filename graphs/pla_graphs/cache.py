"""The captured graphs of one rank: look-up by batch, capture at start and on a miss, eviction under a budget.

Ranks must hold the same graphs at every moment, because a captured pass and an uncaptured one do their collectives in
different ways. So each decision here is a function of the batches, identical on all ranks, and of values that the ranks
have agreed on (``agree``): the time and bytes of a capture are the largest of any rank, and a failure on one rank
is a failure on all. Ranks agree after the steps without collectives, and again after the recording: one that fails
before its warm-up does not leave the others waiting in theirs.

Nothing that fails in a capture leaves this module: the shape is refused for a while (``CapturePlan.on_failed``), and
the host's own runner serves its batches.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pla_graphs.counts import GraphCounts
from pla_graphs.recorder import CaptureError, MemoryUse, RecordedPass, ShapeSource, capture_step
from pla_sglang.policy.pla.graphs.eviction import CachedGraph, SharedBytes, total_bytes, used_attention_bytes, victims
from pla_sglang.policy.pla.graphs.layouts import Bucket, Layout
from pla_sglang.policy.pla.graphs.plan import CaptureChoice, CapturePlan
from pla_sglang.policy.pla.graphs.reasons import CaptureFailure, CaptureReason, GraphReason

logger = logging.getLogger(__name__)

Agree = Callable[[Sequence[float]], list[float]]  # the largest over all ranks, value by value


def alone(values: Sequence[float]) -> list[float]:
    """``Agree`` of a single rank."""
    return list(values)


class Found(NamedTuple):
    """Answer of a look-up. ``bucket``: the nearest shape or None; ``recording``: its recording, if it is captured."""

    bucket: Bucket | None
    recording: RecordedPass | None
    reason: GraphReason


class GraphCache:
    """Owns every recording; a recording must be replayed before the next call that may capture or evict.

    Args:
        source: makes recordings of shapes.
        budget_bytes: for all recordings and what they share.
        clock: seconds, of this rank.
    """

    def __init__(
        self,
        layout: Layout,
        plan: CapturePlan,
        source: ShapeSource,
        *,
        budget_bytes: int,
        clock: Callable[[], float],
        agree: Agree = alone,
    ) -> None:
        self.layout = layout
        self.plan = plan
        self.counts = GraphCounts()
        self.stopped_by: CaptureReason | None = None  # why captures at start ended
        self._source = source
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._agree = agree
        self._held: dict[Bucket, CachedGraph] = {}
        self._recordings: dict[Bucket, RecordedPass] = {}
        self._shared = SharedBytes()  # agreed; of attention buffers that exist, and expected ones of those asked for
        self._failed: set[Bucket] = set()  # the last attempt at these failed
        self._lookups = 0
        self._slowest_s = 0.0  # capture so far
        # The largest of any recording so far: what the next one may take.
        self._most = MemoryUse(0, 0)
        self._scratch_per_token = self._own_per_token = 0.0

    # -- look-up ---------------------------------------------------------------------------------------------------

    def find(self, lengths: Sequence[int]) -> Found:
        """The graph for a batch with so many new tokens a request. Counts as a use or a miss; see ``replayed``."""
        self._lookups += 1
        bucket = self.layout.nearest(lengths)
        if bucket is None:
            return self._none(None, self.layout.why_not(lengths))
        recording = self._recordings.get(bucket)
        if recording is None:
            self.plan.on_miss(bucket)
            failed = bucket in self._failed
            return self._none(bucket, GraphReason.CAPTURE_FAILED if failed else GraphReason.NOT_CAPTURED)
        held = self._held[bucket]
        held.last_use, held.hits = self._lookups, held.hits + 1
        return Found(bucket, recording, GraphReason.REPLAYED)

    def _none(self, bucket: Bucket | None, reason: GraphReason) -> Found:
        self.counts.reasons[reason] += 1
        return Found(bucket, None, reason)

    def refuse(self, reason: GraphReason) -> None:
        """Count a batch that was rejected before the look-up, or after it by the attention backend."""
        self.counts.reasons[reason] += 1

    # -- captures --------------------------------------------------------------------------------------------------

    def capture_at_start(self, most: int | None = None) -> None:
        """Capture ``most`` shapes by expected use, None: all, until the time or the memory budget is used up."""
        if not self._in_session(lambda: self._capture_expected(most)):
            self.stopped_by = CaptureReason.SESSION_FAILED

    def _capture_expected(self, most: int | None) -> None:
        self._shared.fixed_bytes = self._agreed_bytes(self._source.fixed_bytes())
        spent_s, tried = self.counts.capture_s, 0
        while most is None or tried < most:
            tried += 1
            choice = self.plan.at_start(spent_s, self._slowest_s)
            if choice.bucket is None:
                self.stopped_by = choice.reason
                return
            expected = self._expected(choice.bucket)
            if total_bytes([*self._held.values(), expected], self._shared) > self._budget_bytes:
                self.stopped_by = CaptureReason.MEMORY_BUDGET
                return
            spent_s += self._capture(choice.bucket)

    def capture_idle(self) -> Bucket | None:
        """Capture one shape that was missed often enough; None without such a shape or if the capture failed."""
        return self._capture_choice(self.plan.next_idle())

    def capture_busy(self) -> Bucket | None:
        """Likewise while a batch waits for it, within the time that the plan allows for such pauses."""
        if not self.plan.wants_busy():
            return None
        now_s = self._agree([self._clock()])[0]
        choice = self.plan.next_busy(now_s, self._slowest_s)
        self.counts.busy_refused += choice.reason is CaptureReason.BUSY_BUDGET
        spent_s = self.counts.capture_s
        captured = self._capture_choice(choice)
        if choice.bucket is not None:
            pause_s = self.counts.capture_s - spent_s
            self.plan.on_pause(now_s + pause_s, pause_s)
            self.counts.busy_capture_s += pause_s
        return captured

    def _capture_choice(self, choice: CaptureChoice) -> Bucket | None:
        bucket = choice.bucket
        if bucket is None:
            return None
        if not self._in_session(lambda: self._capture(bucket)) and bucket not in self._failed:
            self._on_failure(bucket, CaptureFailure.SESSION)
        logger.info("pla_graphs: captured %s: %s (%s)", bucket.name, bucket in self._recordings, choice.reason.value)
        return bucket if bucket in self._recordings else None

    def _in_session(self, work: Callable[[], object]) -> bool:
        """True if the host's capture context opened and closed on all ranks; else nothing made in it is kept."""
        before = set(self._recordings)
        step = capture_step(CaptureFailure.SESSION)
        with self._logged("a session of captures") as failures, step, self._source.session():
            work()
        if not self._agree([float(bool(failures))])[0]:
            return True
        for bucket in self._recordings.keys() - before:
            self._drop(bucket)
            self._on_failure(bucket, CaptureFailure.SESSION)
        return False

    @contextlib.contextmanager
    def _logged(self, what: str) -> Iterator[list[CaptureFailure]]:
        """The list holds the failure afterwards, if there was one."""
        failures: list[CaptureFailure] = []
        try:
            yield failures
        except CaptureError as error:
            failures.append(error.failure)
            logger.warning("pla_graphs: %s: %s", what, error, exc_info=True)

    def _capture(self, bucket: Bucket) -> float:
        """Seconds of the attempt on the slowest rank.

        Room is made before, also for an attempt that fails then: the budget holds while a graph is captured, since the
        KV cache has the rest of the memory. What was evicted comes back when it is missed, and a shape that fails is
        tried again only after twice as many misses each time.
        """
        assert bucket not in self._recordings, "a shape is captured once"
        self._make_room(self._expected(bucket))
        started_s = self._clock()
        recording, failure = self._attempt(bucket)
        memory = MemoryUse(0, 0) if recording is None else recording.memory
        mine = (self._clock() - started_s, *memory, self._source.fixed_bytes(), failure is not None)
        took_s, own_bytes, scratch_bytes, fixed_bytes, failed = self._agree([float(value) for value in mine])
        self.counts.capture_s += took_s
        self._slowest_s = max(self._slowest_s, took_s)
        self._shared.fixed_bytes = int(fixed_bytes)
        if recording is not None and not failed:
            self._keep(recording, CachedGraph(bucket, int(own_bytes), int(scratch_bytes), self._lookups))
            return took_s
        if recording is not None:
            recording.close()
        self._on_failure(bucket, failure or CaptureFailure.OTHER_RANK)
        return took_s

    def _attempt(self, bucket: Bucket) -> tuple[RecordedPass | None, CaptureFailure | None]:
        """The recording, or at which step it failed; on this rank, which may be followed by a failure of another."""
        record = recording = None
        with self._logged(bucket.name) as failures, capture_step(CaptureFailure.PREPARE):
            record = self._source.prepare(bucket)
        mine = (float(bool(failures)), float(self._source.attention_bytes(bucket.slots)))
        failed, attention_bytes = self._agree(mine)
        self._shared.attention_bytes[bucket.slots] = int(attention_bytes)
        if failed or record is None:
            return None, failures[0] if failures else CaptureFailure.OTHER_RANK
        with self._logged(bucket.name) as failures, capture_step(CaptureFailure.CAPTURE):
            recording = record()
        return recording, failures[0] if failures else None

    def _expected(self, bucket: Bucket) -> CachedGraph:
        """Upper estimate from earlier captures: as much as the largest, or in proportion to its tokens."""
        if bucket.slots not in self._shared.attention_bytes:
            expected_bytes = self._agreed_bytes(self._source.attention_bytes(bucket.slots))
            self._shared.attention_bytes[bucket.slots] = expected_bytes
        own_bytes = min(self._most.own_bytes, int(self._own_per_token * bucket.tokens))
        scratch_bytes = min(self._most.scratch_bytes, int(self._scratch_per_token * bucket.tokens))
        return CachedGraph(bucket, own_bytes, scratch_bytes, self._lookups)

    def _agreed_bytes(self, own_bytes: int) -> int:
        return int(self._agree([float(own_bytes)])[0])

    def _keep(self, recording: RecordedPass, graph: CachedGraph) -> None:
        bucket, most = graph.bucket, self._most
        self._most = MemoryUse(max(most.own_bytes, graph.own_bytes), max(most.scratch_bytes, graph.scratch_bytes))
        self._own_per_token = max(self._own_per_token, graph.own_bytes / bucket.tokens)
        self._scratch_per_token = max(self._scratch_per_token, graph.scratch_bytes / bucket.tokens)
        if not self._make_room(graph):
            logger.warning("pla_graphs: %s does not fit the memory budget even alone", bucket.name)
            recording.close()
            self._on_failure(bucket, CaptureFailure.OVER_BUDGET)
            return
        self.counts.captures += 1
        self._failed.discard(bucket)
        self._held[bucket] = graph
        self._recordings[bucket] = recording
        self.plan.on_captured(bucket)

    def _on_failure(self, bucket: Bucket, failure: CaptureFailure) -> None:
        self.counts.failures[failure] += 1
        self._failed.add(bucket)
        if failure is CaptureFailure.OVER_BUDGET:
            self.plan.give_up(bucket)
        else:
            self.plan.on_failed(bucket)
        self._release_attention(bucket.slots)
        with self._logged("the allocator"), capture_step(failure):
            self._source.free_unused()

    def discard(self, bucket: Bucket, failure: CaptureFailure) -> None:
        """A recording that cannot be replayed, on any rank; it may be captured again like one that failed."""
        self._drop(bucket)
        self._on_failure(bucket, failure)

    def _release_attention(self, slots: int) -> None:
        """Where no graph uses these buffers; what they take is remembered, as they would take it again."""
        if any(bucket.slots == slots for bucket in self._recordings):
            return
        with self._logged("buffers of a failed capture"), capture_step(CaptureFailure.PREPARE):
            self._source.release(slots)

    def _make_room(self, graph: CachedGraph) -> bool:
        gone = victims(self._held.values(), graph, self._shared, self._budget_bytes)
        for bucket in gone or ():
            self._evict(bucket, keep_slots=graph.bucket.slots)
        return gone is not None

    def _evict(self, bucket: Bucket, keep_slots: int | None = None) -> None:
        self._drop(bucket)
        self.counts.evictions += 1
        self.plan.on_evicted(bucket)
        if bucket.slots != keep_slots:
            self._release_attention(bucket.slots)

    def _drop(self, bucket: Bucket) -> None:
        self._recordings.pop(bucket).close()
        del self._held[bucket]

    def close(self) -> None:
        """Drop all recordings."""
        for bucket in list(self._recordings):
            self._evict(bucket)

    # -- state -----------------------------------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        """Device memory of the recordings and all that they share."""
        return total_bytes(self._held.values(), self._shared)

    @property
    def attention_bytes(self) -> int:
        """Part of it: buffers of the attention backend, one set for each number of slots in use."""
        return used_attention_bytes(self._held.values(), self._shared.attention_bytes)

    @property
    def captured(self) -> list[Bucket]:
        return sorted(self._recordings)

    def recording(self, bucket: Bucket) -> RecordedPass:
        """The recording of a captured shape. Counts as no use."""
        return self._recordings[bucket]

    def check_integrity(self) -> None:
        """Raises AssertionError if the accounts are inconsistent."""
        assert self._held.keys() == self._recordings.keys()
        assert not self._held or self.memory_bytes <= self._budget_bytes, "over budget"
        assert not self._failed & self._recordings.keys()
        assert set(self._recordings) <= set(self.layout.buckets())
        lost = self.counts.failures[CaptureFailure.SESSION] + self.counts.failures[CaptureFailure.PLAN]
        assert 0 <= self.counts.captures - self.counts.evictions - len(self._recordings) <= lost
