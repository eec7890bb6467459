"""Counters of the graph cache, for state and metrics."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from pla_sglang.policy.pla.graphs.layouts import Bucket
from pla_sglang.policy.pla.graphs.reasons import CaptureFailure, GraphReason


@dataclasses.dataclass
class GraphCounts:
    """Totals since the start.

    Attributes:
        reasons: batches by the reason why one of our graphs was used or not.
        hits: replays by shape.
        real_tokens, padded_tokens: of replayed batches: real tokens, and padding.
        captures, evictions: numbers of graphs.
        failures: captures that failed, by the step at which they did.
        capture_s: time spent on captures, failed ones included.
        busy_capture_s: part of it in which a batch waited.
        busy_refused: captures that would have paused serving for longer than is allowed.
    """

    reasons: Counter[GraphReason] = dataclasses.field(default_factory=Counter)
    hits: Counter[Bucket] = dataclasses.field(default_factory=Counter)
    real_tokens: int = 0
    padded_tokens: int = 0
    captures: int = 0
    evictions: int = 0
    failures: Counter[CaptureFailure] = dataclasses.field(default_factory=Counter)
    capture_s: float = 0.0
    busy_capture_s: float = 0.0
    busy_refused: int = 0

    def on_replay(self, bucket: Bucket, real_tokens: int) -> None:
        self.reasons[GraphReason.REPLAYED] += 1
        self.hits[bucket] += 1
        self.real_tokens += real_tokens
        self.padded_tokens += bucket.tokens - real_tokens

    def to_dict(self) -> dict[str, Any]:
        """With names as keys, as sent in state and metrics."""
        return {
            "reasons": {reason.value: count for reason, count in self.reasons.items()},
            "hits": {bucket.name: count for bucket, count in sorted(self.hits.items())},
            "real_tokens": self.real_tokens,
            "padded_tokens": self.padded_tokens,
            "captures": self.captures,
            "evictions": self.evictions,
            "failures": {failure.value: count for failure, count in self.failures.items()},
            "capture_s": round(self.capture_s, 6),
            "busy_capture_s": round(self.busy_capture_s, 6),
            "busy_refused": self.busy_refused,
        }
