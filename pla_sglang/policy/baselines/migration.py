"""Migration by current load, in the manner of Llumnix: no prediction, one pair a tick.

The instance with the least free KV cache per request hands a request to the one with most, if they differ by more than
``threshold`` of a cache. The request is the shortest one (cheapest to move) that narrows the gap.
"""

from __future__ import annotations

import dataclasses

from pla_sglang.policy.checks import require
from pla_sglang.policy.decisions import FleetAction, Hold, Migrate
from pla_sglang.policy.fleet import FleetView, InstanceView
from pla_sglang.policy.reasons import FleetReason


@dataclasses.dataclass(frozen=True)
class LoadMigrationKnobs:
    """``threshold``: least difference of used shares of KV cache; ``full``: a target may be filled up to this share."""

    threshold: float = 0.1
    full: float = 0.95
    interval_s: float = 0.5

    def __post_init__(self) -> None:
        require("migration threshold", self.threshold, 0, 1)
        require("migration full", self.full, 0, 1, above=True)
        require("migration interval_s", self.interval_s, 0, above=True)


def used_share(instance: InstanceView) -> float:
    """KV tokens held or on their way, over capacity."""
    held = max(instance.kv_used_tokens, instance.context_tokens) + instance.waiting_decode_tokens
    return held / instance.kv_capacity_tokens


class LoadMigration:
    """Controller that answers ``Migrate``."""

    def __init__(self, knobs: LoadMigrationKnobs | None = None) -> None:
        self.knobs = knobs or LoadMigrationKnobs()
        self.interval_s = self.knobs.interval_s

    def tick(self, fleet: FleetView, now_s: float) -> list[FleetAction]:
        pool = fleet.decode_capable()
        if len(pool) < 2:
            return [Hold(FleetReason.BALANCED)]
        source, target = max(pool, key=used_share), min(pool, key=used_share)
        gap = used_share(source) - used_share(target)
        if gap <= self.knobs.threshold:
            return [Hold(FleetReason.BALANCED)]
        batch = fleet.decodes(source)
        room = (self.knobs.full - used_share(target)) * target.kv_capacity_tokens
        narrows = gap / (1 / source.kv_capacity_tokens + 1 / target.kv_capacity_tokens)
        best: int | None = None
        for place, tokens in enumerate(batch.tokens):
            if batch.movable[place] and tokens <= room and tokens <= narrows and tokens > 0:
                best = place if best is None or tokens < batch.tokens[best] else best
        if best is None:
            return [Hold(FleetReason.STAR_NO_CANDIDATE)]
        tokens = int(batch.tokens[best])
        return [Migrate(batch.rids[best], source, target, tokens, FleetReason.CURRENT_LOAD, gap)]
