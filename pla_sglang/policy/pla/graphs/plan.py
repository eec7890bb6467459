"""Which shape is captured next: at start the most expected ones under a time budget, later those that were missed.

Ranks of one server must capture the same shapes in the same order, because a captured pass holds their collectives.
Everything here is a function of batches, which all ranks see alike, and of times on which the driver lets them agree.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Mapping

from pla_sglang.common.checks import require
from pla_sglang.policy.pla.graphs.layouts import Bucket
from pla_sglang.policy.pla.graphs.reasons import CaptureReason

MINUTE_S = 60.0
MOST_DOUBLINGS = 10  # of the misses before a failed capture is tried again


@dataclasses.dataclass(frozen=True)
class CaptureKnobs:
    """When a shape is worth a capture.

    Attributes:
        budget_s: time for captures at start; 0: none, everything is captured when it is asked for.
        idle_misses: misses after which an idle device captures a shape.
        busy_misses: misses after which a busy one does, at the price of a pause of one capture.
        busy_s_per_minute: time of such pauses in any minute; 0: an idle device captures, a busy one never.
        retry_misses: misses after a failed capture before an idle device tries again; doubles with each failure.

    Raises ConfigError for a value out of range.
    """

    budget_s: float = 30.0
    idle_misses: int = 2
    busy_misses: int = 200
    busy_s_per_minute: float = 0.0
    retry_misses: int = 64

    def __post_init__(self) -> None:
        require("capture budget, seconds", self.budget_s, 0)
        require("misses before an idle capture", self.idle_misses, 1)
        require("misses before a busy capture", self.busy_misses, self.idle_misses)
        require("busy captures, seconds a minute", self.busy_s_per_minute, 0)
        require("misses before another try", self.retry_misses, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class CaptureChoice:
    """A shape to capture now, or None, and why."""

    bucket: Bucket | None
    reason: CaptureReason


class CapturePlan:
    """What to capture next. The driver reports every lookup and every capture."""

    def __init__(self, expected: Mapping[Bucket, float], knobs: CaptureKnobs) -> None:
        """``expected``: share of batches by shape. Ties go to the larger shape, which others can share memory with."""
        self.knobs = knobs
        self.order = sorted(expected, key=lambda bucket: (-expected[bucket], -bucket.tokens, -bucket.slots))
        self._expected = dict(expected)
        self._misses: Counter[Bucket] = Counter()
        self._closed: set[Bucket] = set()  # captured, or given up
        self._failures: Counter[Bucket] = Counter()
        self._pauses: deque[tuple[float, float]] = deque()  # end and length of captures while others waited

    def at_start(self, spent_s: float, slowest_s: float) -> CaptureChoice:
        """Next by expected hits. ``spent_s`` so far; ``slowest_s``: the longest capture; the next may take as long."""
        for bucket in self.order:
            if bucket in self._closed or bucket in self._failures or self._expected[bucket] <= 0:
                continue
            if spent_s + slowest_s >= self.knobs.budget_s:
                return CaptureChoice(None, CaptureReason.TIME_BUDGET)
            return CaptureChoice(bucket, CaptureReason.EXPECTED)
        return CaptureChoice(None, CaptureReason.NOTHING_WANTED)

    def next_idle(self) -> CaptureChoice:
        """The shape with the most misses of those that have enough. Ties go to the smaller shape."""
        bucket = self._most_missed([bucket for bucket in self._misses if self._misses[bucket] >= self._needed(bucket)])
        if bucket is None:
            return CaptureChoice(None, CaptureReason.NOTHING_WANTED)
        return CaptureChoice(
            bucket, CaptureReason.RETRIED_IDLE if bucket in self._failures else CaptureReason.MISSED_IDLE
        )

    def wants_busy(self) -> bool:
        """A shape was missed often enough to pause for it. Then ask ``next_busy``, with a time that ranks agree on."""
        return self._most_missed(self._often_missed()) is not None

    def next_busy(self, now_s: float, slowest_s: float) -> CaptureChoice:
        """Likewise while others wait. A shape for which no time is left is asked for again after as many misses.

        ``slowest_s``: the longest capture so far. A capture that takes longer than each before may exceed the minute's
        budget; it is then paid for before the next.
        """
        bucket = self._most_missed(self._often_missed())
        if bucket is None:
            return CaptureChoice(None, CaptureReason.NOTHING_WANTED)
        while self._pauses and self._pauses[0][0] <= now_s - MINUTE_S:
            self._pauses.popleft()
        spent_s = sum(pause_s for _, pause_s in self._pauses)
        if spent_s + slowest_s > self.knobs.busy_s_per_minute:
            self._misses[bucket] = 0
            return CaptureChoice(None, CaptureReason.BUSY_BUDGET)
        return CaptureChoice(bucket, CaptureReason.MISSED_OFTEN)

    def _often_missed(self) -> list[Bucket]:
        if self.knobs.busy_s_per_minute <= 0:
            return []
        return [
            bucket
            for bucket, count in self._misses.items()
            if count >= self.knobs.busy_misses and bucket not in self._failures
        ]

    def _most_missed(self, wanted: list[Bucket]) -> Bucket | None:
        wanted = [bucket for bucket in wanted if bucket not in self._closed]
        return min(wanted, key=lambda bucket: (-self._misses[bucket], bucket), default=None)

    def _needed(self, bucket: Bucket) -> int:
        failures = self._failures[bucket]
        if not failures:
            return self.knobs.idle_misses
        return self.knobs.retry_misses << min(failures - 1, MOST_DOUBLINGS)

    def on_miss(self, bucket: Bucket) -> None:
        """A batch wanted this shape and it was not there."""
        self._misses[bucket] += 1

    def on_pause(self, end_s: float, pause_s: float) -> None:
        """Serving waited for a capture, whether it went well or not."""
        self._pauses.append((end_s, pause_s))

    def on_captured(self, bucket: Bucket) -> None:
        self._closed.add(bucket)
        self._misses.pop(bucket, None)
        self._failures.pop(bucket, None)

    def on_evicted(self, bucket: Bucket) -> None:
        """It may come back when it is missed again."""
        self._closed.discard(bucket)

    def on_failed(self, bucket: Bucket) -> None:
        """It is left alone until it has been missed often again, each time twice as often."""
        self._failures[bucket] += 1
        self._closed.discard(bucket)
        self._misses.pop(bucket, None)

    def give_up(self, bucket: Bucket) -> None:
        """It cannot fit; it is not tried again."""
        self._closed.add(bucket)
        self._misses.pop(bucket, None)
