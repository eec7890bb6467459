"""Migration by current load, similar to Llumnix: no prediction, one pair a tick.

The instance with the least free KV cache per request hands a request to the one with most, if they differ by more than
``THRESHOLD`` of a cache. The request is the shortest one (cheapest to move) that narrows the gap.
Where asked for, only a request whose client gains by the move is moved (``client_gain.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from pla_sglang.policy.common.client_gain import ClientGain, DecodeLoad
from pla_sglang.policy.interface.decisions import FleetAction, Hold, Migrate
from pla_sglang.policy.interface.fleet import DecodeBatch, FleetView, InstanceView
from pla_sglang.policy.interface.reasons import FleetReason

THRESHOLD = 0.1  # least difference of used shares of KV cache
FULL = 0.95  # a target may be filled up to this share
# For the client's gain, where the rest of an answer or the token interval is not known.
UNKNOWN_TOKENS, STEP_S = 1024, 0.02


def used_share(instance: InstanceView) -> float:
    """KV tokens held or on their way, over capacity."""
    held = max(instance.kv_used_tokens, instance.context_tokens) + instance.waiting_decode_tokens
    return held / instance.kv_capacity_tokens


class LoadMigration:
    """Controller that answers ``Migrate``. ``client``: as of ``StarRescheduler``."""

    moves_requests = True

    def __init__(self, interval_s: float = 0.5, client: ClientGain | None = None) -> None:
        self.client = client
        self.interval_s = interval_s

    def tick(self, fleet: FleetView, now_s: float) -> list[FleetAction]:
        pool = fleet.decode_capable()
        if len(pool) < 2:
            return [Hold(FleetReason.BALANCED)]
        source, target = max(pool, key=used_share), min(pool, key=used_share)
        gap = used_share(source) - used_share(target)
        if gap <= THRESHOLD:
            return [Hold(FleetReason.BALANCED)]
        batch = fleet.decodes(source)
        pays = self._pays(source, target, batch)
        room = (FULL - used_share(target)) * target.kv_capacity_tokens
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
        if self.client is None or used_share(source) > FULL:
            return [True] * len(batch.rids)
        return self.client.pays_for_batch(
            DecodeLoad(source.running, source.context_tokens, source.steps),
            DecodeLoad(target.running, target.context_tokens, target.steps),
            batch,
            unknown_tokens=UNKNOWN_TOKENS,
            interval_s=source.token_interval_s or STEP_S,
        )
