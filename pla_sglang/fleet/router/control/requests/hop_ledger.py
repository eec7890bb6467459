"""What hops beyond the first change in the ledger: one is lost, the next is tried, joined, or comes to nothing."""

from __future__ import annotations

from pla_sglang.fleet.router.control.requests.hop_changes import drop_pending, join_pending
from pla_sglang.fleet.router.control.requests.ledger import Ledger, draw_room, free_rooms, order_aborts
from pla_sglang.fleet.router.control.requests.request_record import (
    CLOSED,
    ENDED,
    LEAVING,
    OPEN,
    PREFILL,
    STREAMING,
    LegEntry,
    RequestRecord,
)
from pla_sglang.fleet.router.control.workers.abort_order import AbortOrder
from pla_sglang.fleet.router.wire.messages import Leg

_WHOLE = Leg.WHOLE


class HopLedger:
    """Enters moves into a ledger, which it changes. Pure, as the ledger is."""

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
        """An instance is to take the request over; it has not been sent it yet. Returns the KV room."""
        hop = record.pending
        assert hop is not None
        hop.move(PREFILL)
        hop.attempts += 1
        hop.room = draw_room(self._ledger.rooms, record.rid)
        hop.legs = [LegEntry(_WHOLE, worker, now_s, hop.attempts, hop.room, reached=hop.reached, executed=False)]
        return hop.room

    def send_pending(self, record: RequestRecord) -> None:
        """From now on it may be executing there."""
        assert record.pending is not None
        for leg in record.pending.legs:
            leg.executed = True

    def drop_pending(self, record: RequestRecord, now_s: float, *, over: bool) -> list[AbortOrder]:
        """Nothing comes of it. Returns what must be aborted; nothing where it was not sent, or is ``over`` there."""
        hop = record.pending
        assert hop is not None
        left = hop.open_legs()
        for leg in left:
            if over or not leg.executed:
                leg.move(CLOSED, now_s)
        orders = order_aborts(record, left, now_s)
        room, hop.room = hop.room, None
        drop_pending(record)
        if room is not None and not any(leg.room == room for leg in record.open_legs()):
            self._ledger.rooms.pop(room, None)
        return orders

    def leave_legs(self, record: RequestRecord, legs: list[LegEntry], now_s: float) -> list[AbortOrder]:
        """Their instance has not said that it has let go of the request. Returns what must be aborted."""
        return order_aborts(record, legs, now_s)

    def join_pending(self, record: RequestRecord, now_s: float) -> None:
        """It is what the client sees. The legs of the hop before stay until their instance says that they are over, or
        that it does not know: also where the request ends meanwhile."""
        assert record.pending is not None
        record.hop.move(ENDED)
        for leg in record.hop.legs:
            if leg.state is OPEN:
                leg.move(LEAVING, now_s)
        record.pending.move(STREAMING)
        join_pending(record)
