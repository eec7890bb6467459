"""Which shape is captured next: at start the most expected ones under a time budget, later those that were missed.

Ranks of one server must capture the same shapes in the same order, because a captured pass holds their collectives.
Everything here is a function of batches, which all ranks see alike; only the time that the start has taken is a
clock's, and the driver passes rank 0's.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from pla_sglang.policy.buckets.layouts import Bucket
from pla_sglang.policy.buckets.reasons import CaptureReason
from pla_sglang.policy.checks import require


@dataclasses.dataclass(frozen=True)
class CaptureKnobs:
    """When a shape is worth a capture.

    Attributes:
        budget_s: time for captures at start; 0: none, everything is captured when it is asked for.
        idle_misses: misses after which an idle device captures a shape.
        busy_misses: misses after which a busy one does, at the price of a pause of one capture.

    Raises ConfigError for a value out of range.
    """

    budget_s: float = 30.0
    idle_misses: int = 2
    busy_misses: int = 200

    def __post_init__(self) -> None:
        require("capture budget, seconds", self.budget_s, 0)
        require("misses before an idle capture", self.idle_misses, 1)
        require("misses before a busy capture", self.busy_misses, self.idle_misses)


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

    def at_start(self, spent_s: float, slowest_s: float) -> CaptureChoice:
        """Next by expected hits. ``spent_s`` so far; ``slowest_s``: the longest capture; the next may take as long."""
        for bucket in self.order:
            if bucket in self._closed or self._expected[bucket] <= 0:
                continue
            if spent_s + slowest_s >= self.knobs.budget_s:
                return CaptureChoice(None, CaptureReason.TIME_BUDGET)
            return CaptureChoice(bucket, CaptureReason.EXPECTED)
        return CaptureChoice(None, CaptureReason.NOTHING_WANTED)

    def next_lazy(self, *, idle: bool) -> CaptureChoice:
        """The shape with the most misses, if they are enough. Ties go to the smaller shape."""
        wanted = [(count, bucket) for bucket, count in self._misses.items() if bucket not in self._closed]
        if not wanted:
            return CaptureChoice(None, CaptureReason.NOTHING_WANTED)
        count, bucket = min(wanted, key=lambda item: (-item[0], item[1]))
        if idle and count >= self.knobs.idle_misses:
            return CaptureChoice(bucket, CaptureReason.MISSED_IDLE)
        if count >= self.knobs.busy_misses:
            return CaptureChoice(bucket, CaptureReason.MISSED_OFTEN)
        return CaptureChoice(None, CaptureReason.NOTHING_WANTED)

    def on_miss(self, bucket: Bucket) -> None:
        """A batch wanted this shape and it was not there."""
        self._misses[bucket] += 1

    def on_captured(self, bucket: Bucket) -> None:
        self._closed.add(bucket)
        self._misses.pop(bucket, None)

    def on_evicted(self, bucket: Bucket) -> None:
        """It may come back when it is missed again."""
        self._closed.discard(bucket)

    def give_up(self, bucket: Bucket) -> None:
        """Capturing it failed; it is not tried again."""
        self.on_captured(bucket)
