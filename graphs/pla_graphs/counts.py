"""What the graph cache has done, for state and metrics."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from pla_sglang.policy.buckets.layouts import Bucket
from pla_sglang.policy.buckets.reasons import GraphReason


@dataclasses.dataclass
class GraphCounts:
    """Totals since the start.

    Attributes:
        reasons: batches by why they ran, or did not run, in a graph of ours.
        hits: replays by shape.
        real_tokens, padded_tokens: of replayed batches: wanted, and computed beyond that.
        captures, evictions, failures: numbers of graphs.
        capture_s: time spent on captures, failed ones included.
    """

    reasons: Counter[GraphReason] = dataclasses.field(default_factory=Counter)
    hits: Counter[Bucket] = dataclasses.field(default_factory=Counter)
    real_tokens: int = 0
    padded_tokens: int = 0
    captures: int = 0
    evictions: int = 0
    failures: int = 0
    capture_s: float = 0.0

    def on_replay(self, bucket: Bucket, real_tokens: int) -> None:
        self.reasons[GraphReason.REPLAYED] += 1
        self.hits[bucket] += 1
        self.real_tokens += real_tokens
        self.padded_tokens += bucket.tokens - real_tokens

    def to_dict(self) -> dict[str, Any]:
        """With names as keys, as they go over the wire."""
        return {
            "reasons": {reason.value: count for reason, count in self.reasons.items()},
            "hits": {bucket.name: count for bucket, count in sorted(self.hits.items())},
            "real_tokens": self.real_tokens,
            "padded_tokens": self.padded_tokens,
            "captures": self.captures,
            "evictions": self.evictions,
            "failures": self.failures,
            "capture_s": round(self.capture_s, 6),
        }
