"""The captured graphs of one rank: look-up by batch, capture at start and when missed, eviction under a budget.

Ranks must hold the same graphs at every moment, because a captured pass and an uncaptured one do their collectives in
different ways. So each decision here is a function of the batches, alike on all ranks, and of figures that the ranks
have agreed on (``agree``): the time and bytes of a capture count at the largest value of any rank, and one rank's
failure is everybody's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pla_graphs.counts import GraphCounts
from pla_graphs.recorder import CaptureError, Recorder, Recording
from pla_sglang.policy.buckets.keep import Held, victims
from pla_sglang.policy.buckets.layouts import Bucket, Layout
from pla_sglang.policy.buckets.plan import CapturePlan
from pla_sglang.policy.buckets.reasons import CaptureReason, GraphReason

logger = logging.getLogger(__name__)

Agree = Callable[[Sequence[float]], list[float]]  # the largest over all ranks, value by value


def alone(values: Sequence[float]) -> list[float]:
    """``Agree`` of a single rank."""
    return list(values)


class Found(NamedTuple):
    """Answer of a look-up. ``bucket``: the nearest shape, None where there is none; ``recording``: where it is held."""

    bucket: Bucket | None
    recording: Recording | None
    reason: GraphReason


class GraphCache:
    """Owns every recording; whoever replays one does so before the next call that may capture or evict.

    Args:
        record: records a shape; raises CaptureError.
        budget_bytes: for all recordings together.
        clock: seconds, of this rank.
    """

    def __init__(
        self,
        layout: Layout,
        plan: CapturePlan,
        recorder: Recorder,
        record: Callable[[Bucket], Recording],
        *,
        budget_bytes: int,
        clock: Callable[[], float],
        agree: Agree = alone,
    ) -> None:
        self.layout = layout
        self.plan = plan
        self.counts = GraphCounts()
        self.stopped_by: CaptureReason | None = None  # why captures at start ended
        self._recorder = recorder
        self._record = record
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._agree = agree
        self._held: dict[Bucket, Held] = {}
        self._recordings: dict[Bucket, Recording] = {}
        self._failed: set[Bucket] = set()
        self._lookups = 0
        self._largest_bytes = 0  # of any recording so far
        self._bytes_per_token = 0.0  # likewise; both bound what the next one may take

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
            return self._none(bucket, self._why_missing(bucket))
        held = self._held[bucket]
        held.last_use, held.hits = self._lookups, held.hits + 1
        return Found(bucket, recording, GraphReason.REPLAYED)

    def _why_missing(self, bucket: Bucket) -> GraphReason:
        return GraphReason.CAPTURE_FAILED if bucket in self._failed else GraphReason.NOT_CAPTURED

    def _none(self, bucket: Bucket | None, reason: GraphReason) -> Found:
        self.counts.reasons[reason] += 1
        return Found(bucket, None, reason)

    def refuse(self, reason: GraphReason) -> None:
        """A batch was turned away before it was looked up."""
        self.counts.reasons[reason] += 1

    # -- captures --------------------------------------------------------------------------------------------------

    def capture_at_start(self) -> None:
        """The most expected shapes first, until the time or the memory is used up."""
        spent_s = slowest_s = 0.0
        with self._recorder.session():
            while True:
                choice = self.plan.at_start(spent_s, slowest_s)
                if choice.bucket is None:
                    self.stopped_by = choice.reason
                    return
                if self.memory_bytes + self._expected_bytes(choice.bucket) > self._budget_bytes:
                    self.stopped_by = CaptureReason.MEMORY_BUDGET
                    return
                took_s = self._capture(choice.bucket)
                spent_s, slowest_s = spent_s + took_s, max(slowest_s, took_s)

    def capture_missed(self, *, idle: bool) -> Bucket | None:
        """Capture one shape that was missed often enough; None where none was, or it did not work."""
        choice = self.plan.next_lazy(idle=idle)
        if choice.bucket is None:
            return None
        with self._recorder.session():
            took_s = self._capture(choice.bucket)
        logger.info("pla_graphs: captured %s in %.3f s (%s)", choice.bucket.name, took_s, choice.reason.value)
        return choice.bucket if choice.bucket in self._recordings else None

    def _capture(self, bucket: Bucket) -> float:
        """Seconds it took, on the slowest rank."""
        assert bucket not in self._recordings, "a shape is captured once"
        self._make_room(self._expected_bytes(bucket))
        started_s = self._clock()
        recording = None
        try:
            recording = self._record(bucket)
        except CaptureError as error:
            logger.warning("pla_graphs: %s cannot be captured: %s", bucket.name, error)
        mine = (self._clock() - started_s, 0.0 if recording is None else recording.memory_bytes, recording is None)
        took_s, memory_bytes, failed = self._agree([float(value) for value in mine])
        self.counts.capture_s += took_s
        if recording is None or failed:
            self._give_up(bucket, recording)
        else:
            self._keep(bucket, recording, int(memory_bytes))
        return took_s

    def _expected_bytes(self, bucket: Bucket) -> int:
        """At most, by what was seen: graphs cost about the same each, or as much as their tokens."""
        return min(self._largest_bytes, int(self._bytes_per_token * bucket.tokens))

    def _keep(self, bucket: Bucket, recording: Recording, memory_bytes: int) -> None:
        self._largest_bytes = max(self._largest_bytes, memory_bytes)
        self._bytes_per_token = max(self._bytes_per_token, memory_bytes / bucket.tokens)
        if not self._make_room(memory_bytes):
            logger.warning("pla_graphs: %s takes %d bytes, more than the whole budget", bucket.name, memory_bytes)
            self._give_up(bucket, recording)
            return
        self.counts.captures += 1
        self._held[bucket] = Held(bucket, memory_bytes, last_use=self._lookups)
        self._recordings[bucket] = recording
        self.plan.on_captured(bucket)

    def _give_up(self, bucket: Bucket, recording: Recording | None) -> None:
        if recording is not None:
            recording.close()
        self.counts.failures += 1
        self._failed.add(bucket)
        self.plan.give_up(bucket)

    def _make_room(self, needed_bytes: int) -> bool:
        gone = victims(self._held.values(), needed_bytes, self._budget_bytes)
        for bucket in gone or ():
            self._evict(bucket)
        return gone is not None

    def _evict(self, bucket: Bucket) -> None:
        self._recordings.pop(bucket).close()
        del self._held[bucket]
        self.counts.evictions += 1
        self.plan.on_evicted(bucket)

    def close(self) -> None:
        """Drop everything."""
        for bucket in list(self._recordings):
            self._evict(bucket)

    # -- state -----------------------------------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        return sum(held.memory_bytes for held in self._held.values())

    @property
    def captured(self) -> list[Bucket]:
        return sorted(self._recordings)

    def check_integrity(self) -> None:
        """Raises AssertionError where the books disagree."""
        assert self._held.keys() == self._recordings.keys()
        assert self.memory_bytes <= self._budget_bytes, "over budget"
        assert not self._failed & self._recordings.keys()
        assert set(self._recordings) <= set(self.layout.buckets())
        assert self.counts.captures - self.counts.evictions == len(self._recordings)
