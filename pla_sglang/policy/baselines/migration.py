"""Migration by current load, similar to Llumnix: no prediction, one pair a tick.

The instance with the least free KV cache per request hands a request to the one with most, if they differ by more than
``threshold`` of a cache. The request is the shortest one (cheapest to move) that narrows the gap.
Where asked for, only a request whose client gains by the move is moved (``client_gain.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pla_sglang.common.checks import Range, check_fields, knob
from pla_sglang.policy.common.client_gain import ClientGain, DecodeLoad
from pla_sglang.policy.interface.decisions import FleetAction, Hold, Migrate
from pla_sglang.policy.interface.fleet import DecodeBatch, FleetView, InstanceView
from pla_sglang.policy.interface.reasons import FleetReason


@dataclasses.dataclass(frozen=True)
class LoadMigrationKnobs:
    """Attributes:
    threshold: least difference of used shares of KV cache.
    full: a target may be filled up to this share.
    unknown_tokens, step_s: for the client's gain, where the rest of an answer or the token interval is not known.
    """

    threshold: float = knob(0.1, allowed=Range(0, 1))
    full: float = knob(0.95, allowed=Range(0, 1, above=True))
    interval_s: float = knob(0.5, allowed=Range(0, above=True))
    unknown_tokens: int = knob(1024, allowed=Range(0))
    step_s: float = knob(0.02, allowed=Range(0, above=True))

    def __post_init__(self) -> None:
        check_fields(self, "migration")


def used_share(instance: InstanceView) -> float:
    """KV tokens held or on their way, over capacity."""
    held = max(instance.kv_used_tokens, instance.context_tokens) + instance.waiting_decode_tokens
    return held / instance.kv_capacity_tokens


class LoadMigration:
    """Controller that answers ``Migrate``. ``client``: as of ``StarRescheduler``."""

    moves_requests = True

    def __init__(self, knobs: LoadMigrationKnobs | None = None, client: ClientGain | None = None) -> None:
        self.knobs = knobs or LoadMigrationKnobs()
        self.client = client
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
        pays = self._pays(source, target, batch)
        room = (self.knobs.full - used_share(target)) * target.kv_capacity_tokens
        narrows = gap / (1 / source.kv_capacity_tokens + 1 / target.kv_capacity_tokens)
        best: int | None = None
        for place, tokens in enumerate(batch.tokens):
            if batch.movable[place] and pays[place] and tokens <= room and tokens <= narrows and tokens > 0:
                best = place if best is None or tokens < batch.tokens[best] else best
        if best is None:
            return [Hold(FleetReason.STAR_NO_CANDIDATE)]
        tokens = int(batch.tokens[best])
        return [Migrate(batch.rids[best], source, target, tokens, FleetReason.CURRENT_LOAD, gap)]

    def _pays(self, source: InstanceView, target: InstanceView, batch: DecodeBatch) -> Sequence[bool]:
        """By which moves the clients gain; one for each request of ``batch``."""
        if self.client is None or used_share(source) > self.knobs.full:
            return [True] * len(batch.rids)
        return self.client.pays_for_batch(
            DecodeLoad(source.running, source.context_tokens, source.steps),
            DecodeLoad(target.running, target.context_tokens, target.steps),
            batch,
            unknown_tokens=self.knobs.unknown_tokens,
            interval_s=source.token_interval_s or self.knobs.step_s,
        )
