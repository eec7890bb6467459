"""What hops beyond the first change in the ledger: one is lost, the next is tried, joined, or comes to nothing."""

from __future__ import annotations

from pla_sglang.router.control.hop_changes import drop_pending, join_pending
from pla_sglang.router.control.ledger import AbortOrder, Ledger, draw_room, free_rooms, order_aborts
from pla_sglang.router.control.request_record import CLOSED, ENDED, PREFILL, STREAMING, LegEntry, RequestRecord
from pla_sglang.router.wire.messages import Leg

_WHOLE = Leg.WHOLE


class HopLedger:
    """Of one ledger, which it changes. Pure, as that is."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def lose_hop(self, record: RequestRecord, now_s: float, *, executed: bool) -> list[AbortOrder]:
        """The present hop is over, and its request is not. Returns what must be aborted; nothing where it was not
        ``executed`` anywhere. Another hop is to follow at once (``hop_changes.start_hop``)."""
        hop = record.hop
        hop.move(ENDED)
        left = hop.open_legs()
        if executed:
            return order_aborts(record, left, now_s)
        for leg in left:
            leg.move(CLOSED, now_s)
        free_rooms(self._ledger.rooms, record, record.open_legs())
        return []

    def open_pending(self, record: RequestRecord, worker: int, now_s: float) -> int:
        """An instance is to take the request over; from now on it may be executing there. Returns the KV room."""
        hop = record.pending
        assert hop is not None
        hop.move(PREFILL)
        hop.attempts += 1
        hop.room = draw_room(self._ledger.rooms, self._ledger.rng, record.rid)
        hop.legs = [LegEntry(_WHOLE, worker, now_s, hop.attempts, hop.room, reached=hop.reached)]
        return hop.room

    def drop_pending(self, record: RequestRecord, now_s: float, *, executed: bool) -> list[AbortOrder]:
        """Nothing comes of it. Returns what must be aborted; nothing where it was not ``executed``."""
        hop, orders = record.pending, list[AbortOrder]()
        assert hop is not None
        if executed:
            orders = order_aborts(record, hop.open_legs(), now_s)
        else:
            for leg in hop.open_legs():
                leg.move(CLOSED, now_s)
        room, hop.room = hop.room, None
        drop_pending(record)
        if room is not None and not any(leg.room == room for leg in record.open_legs()):
            self._ledger.rooms.pop(room, None)
        return orders

    def leave_legs(self, record: RequestRecord, legs: list[LegEntry], now_s: float) -> list[AbortOrder]:
        """The request has left them for another instance. Returns what must be aborted."""
        return order_aborts(record, legs, now_s)

    def join_pending(self, record: RequestRecord) -> None:
        """It is what the client sees. The legs of the hop before stay open until their instance says that they are
        over."""
        assert record.pending is not None
        record.hop.move(ENDED)
        record.pending.move(STREAMING)
        join_pending(record)
