"""The ledger of requests: each is opened once, ends once, and leaves nothing behind on any instance.

A request has one *end*, which is what its client saw, and at each attempt one or two *legs*, which are what instances
hold for it: the prefill and the decode side of a hand-off, or the only side of a unified request. Events come from
several processes and in any order. The first end counts; later ones change nothing. A leg that is still open when its
request ends is ordered to abort, and stays in the ledger until it is known to be closed, and so does the KV room of the
pair: only then may its number be given again. No order is due where the instance was not sent anything, or was told to
commit: what it answers to that decides.

Two rules keep work from being done twice or for nobody:

* the decode part of a request whose prefill part failed is aborted at once (SGLang itself waits up to 300 s for it);
* a request is sent again only if its client has not seen anything yet and no instance can be executing it: nothing was
  sent, the instance is dead, or it has said that its part is over.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections import Counter
from collections.abc import Container, Sequence

from pla_sglang.common.errors import IllegalMoveError
from pla_sglang.fleet.router.control.requests.request_record import (
    ABORTING,
    CLOSED,
    ENDED,
    LEAVING,
    OPEN,
    PREFILL,
    STREAMING,
    WAITING,
    LegEntry,
    RequestRecord,
)
from pla_sglang.fleet.router.control.workers.abort_order import AbortOrder
from pla_sglang.fleet.router.wire.messages import Leg, Outcome
from pla_sglang.fleet.router.wire.rids import rids_at_instances

_WHOLE, _, _DECODE = Leg  # named once, as in ``request_record``
ORPHAN_S = 5.0  # an abort or a commit that is not confirmed after this long is shown as an orphan
# SGLang keeps rooms in signed 64-bit integers, gives each prompt of a batch the next one, and takes a room modulo the
# data-parallel size as the rank: rooms of two requests lie further apart than any batch, at places that spread.
ROOM_BITS = 63
SLOT_BITS = 49
ROOM_SPACING = 1 << (ROOM_BITS - SLOT_BITS)
PLACE_BITS = 13  # of a request's first room within its slot


@dataclasses.dataclass(frozen=True, slots=True)
class Audit:
    """The state of the ledger, for an operator and for tests. ``problems`` is empty when it balances."""

    opened: int
    live: dict[str, int]
    ended: dict[str, int]
    legs_open: int
    legs_aborting: int
    rooms: int
    orphans: list[str]
    late_events: int
    unknown_events: int
    problems: list[str]

    @property
    def balanced(self) -> bool:
        return not self.problems


class Ledger:
    """The open requests and legs. Pure but for rooms: time comes in, orders go out."""

    def __init__(self) -> None:
        self.records: dict[str, RequestRecord] = {}  # not ended, or with a leg that is not closed
        self.batch_rids: set[str] = set()  # the clients' own names for the prompts of their batches, of ``records``
        self.rooms: dict[int, str] = {}
        self.opened = 0
        self.live = 0  # opened and not ended
        self.ended: Counter[Outcome] = Counter()
        self.late_events = 0  # after the end: normal where two processes see the same failure
        self.unknown_events = 0

    # -- the life of a request ---------------------------------------------------------------------------------------

    def open(self, record: RequestRecord) -> None:
        """Raises IllegalMoveError for a request id that is in the ledger."""
        if record.rid in self.records:
            raise IllegalMoveError(f"{record.rid} was opened twice")
        self.records[record.rid] = record
        self.batch_rids.update(record.ask.rids)
        self.opened += 1
        self.live += 1

    def find_open(self, rid: str) -> RequestRecord | None:
        """The request, if it has not ended; otherwise the event is counted as unknown."""
        record = self.records.get(rid)
        if record is None or record.stage is ENDED:
            self.unknown_events += 1
            return None
        return record

    def assign(
        self, record: RequestRecord, legs: Sequence[tuple[Leg, int]], now_s: float, *, room: int | None = None
    ) -> None:
        """The request goes to these instances; from now on it may be executing there. A pair gets a new room, unless
        it brings the one it has.

        Raises:
            IllegalMoveError: it is not waiting, or an earlier leg of it may still be executing.
        """
        hop = record.hop
        left = hop.open_legs() if hop.legs else []
        if left and any(leg.executed for leg in left):
            raise IllegalMoveError(f"{record.rid} would be sent twice")
        hop.move(PREFILL)
        hop.attempts += 1
        if legs[0][0] is _WHOLE:
            room = None
        elif room is None:
            room = draw_room(self.rooms, record.rid)
        else:
            self.rooms[room] = record.rid
        hop.room = room
        hop.legs = left + [
            LegEntry(leg, worker, now_s, hop.attempts, room, reached=record.reached) for leg, worker in legs
        ]

    def first_token(self, record: RequestRecord) -> bool:
        """True at the first call for a request that has not ended."""
        if self._is_late(record) or record.stage is not PREFILL:
            return False
        record.hop.move(STREAMING)
        return True

    def finish_leg(self, record: RequestRecord, part: Leg, now_s: float, *, attempt: int | None = None) -> None:
        """An instance holds nothing for the request any more: done or aborted. Repeats change nothing.

        ``attempt`` None means every attempt of the present hop.
        """
        for leg in record.hop.legs if attempt is None else record.all_legs():
            if leg.leg is part and leg.state is not CLOSED and attempt in (None, leg.attempt):
                leg.move(CLOSED, now_s)
        self._forget(record)

    def confirm_abort(self, order: AbortOrder, now_s: float) -> None:
        """The instance has carried the order out, or is dead."""
        record = self.records.get(order.rid)
        if record is None:
            self.unknown_events += 1
        else:
            self.finish_leg(record, order.leg, now_s, attempt=order.attempt)

    def roll_back(self, record: RequestRecord, part: Leg, now_s: float) -> None:
        """The instance has nothing of it, and of what it may have computed nobody has seen a byte: it was not reached,
        or has ended its part with an error."""
        for leg in record.hop.legs:
            if leg.leg is part:
                leg.executed = False
                if leg.state is not CLOSED:
                    leg.move(CLOSED, now_s)
        self._forget(record)

    def end(
        self, record: RequestRecord, outcome: Outcome, now_s: float, *, free: Container[int] = ()
    ) -> list[AbortOrder]:
        """The request has ended for its client, and for the workers in ``free``. Returns what must be aborted at
        others; nothing if it had ended before."""
        if self._is_late(record):
            return []
        record.hop.move(ENDED)
        record.outcome = outcome
        self.live -= 1
        self.ended[outcome] += 1
        left = []
        for leg in record.open_legs():
            if leg.state is LEAVING:  # ``free`` is about the present hop, and the instance may be that one, too
                continue
            if leg.worker in free or (leg.state is OPEN and not leg.executed):
                leg.move(CLOSED, now_s)
            else:
                left.append(leg)
        orders = order_aborts(record, left, now_s) if left else []
        self._forget(record)
        return orders

    def can_retry(self, record: RequestRecord) -> bool:
        """True if it may be sent again: no token was seen, and no leg that is left can be executing or have executed.

        A leg counts as harmless if it was rolled back. A decode part whose prefill part never executed has no KV to
        start from; it only has to be closed first.
        """
        hop = record.hop
        if hop.stage is not PREFILL or any(leg.executed and leg.leg is not _DECODE for leg in hop.legs):
            return False
        return all(leg.leg is _DECODE for leg in hop.open_legs())

    def retry(self, record: RequestRecord, now_s: float) -> list[AbortOrder]:
        """Back to waiting, to be assigned again; what is left of the attempt is aborted.

        Raises:
            IllegalMoveError: ``can_retry`` says no.
        """
        if not self.can_retry(record):
            raise IllegalMoveError(f"{record.rid} may have been executed")
        record.hop.move(WAITING)
        left = record.hop.open_legs()
        orders = order_aborts(record, left, now_s)
        for leg in left:
            leg.executed = False  # without its prefill it can compute nothing
        self._forget(record)
        return orders

    def worker_dead(self, worker: int, now_s: float) -> list[RequestRecord]:
        """Closes the legs on an instance that is dead. Returns the requests, not ended yet, whose present hop had one
        open there."""
        hit = []
        for record in list(self.records.values()):
            present = False
            for leg in record.open_legs():
                if leg.worker == worker:
                    leg.move(CLOSED, now_s)
                    present = present or leg in record.hop.legs
            if present and record.stage is not ENDED:
                hit.append(record)
            self._forget(record)
        return hit

    # -- the state of the ledger -------------------------------------------------------------------------------------

    def audit(self, now_s: float) -> Audit:
        """Counts everything anew and compares."""
        live = Counter(record.stage for record in self.records.values() if record.stage is not ENDED)
        legs = [(record, leg) for record in self.records.values() for leg in record.open_legs()]
        ended: Counter[str] = Counter()
        for outcome, count in self.ended.items():
            ended[outcome.label] += count
        orphans = [
            f"{record.rid} {leg.leg.name.lower()} at {leg.worker} for {now_s - leg.since_s:.1f} s"
            for record, leg in legs
            if leg.state in (LEAVING, ABORTING) and now_s - leg.since_s > ORPHAN_S
        ]
        return Audit(
            opened=self.opened,
            live={stage.value: count for stage, count in live.items()},
            ended=dict(ended),
            legs_open=sum(leg.state in (OPEN, LEAVING) for _, leg in legs),
            legs_aborting=sum(leg.state is ABORTING for _, leg in legs),
            rooms=len(self.rooms),
            orphans=orphans,
            late_events=self.late_events,
            unknown_events=self.unknown_events,
            problems=[*self._problems(sum(live.values())), *orphans],
        )

    def _problems(self, live: int) -> list[str]:
        problems = []
        if live != self.live:
            problems.append(f"{live} requests are live, {self.live} were counted")
        if self.opened != live + sum(self.ended.values()):
            problems.append(f"{self.opened} opened, {live} live and {sum(self.ended.values())} ended")
        held = {
            leg.room: record.rid
            for record in self.records.values()
            for leg in record.open_legs()
            if leg.room is not None
        }
        named = {rid for record in self.records.values() for rid in record.ask.rids}
        if named != self.batch_rids:
            problems.append(f"{len(named)} prompts have names, {len(self.batch_rids)} are kept")
        if held != self.rooms:
            problems.append(f"{len(held)} rooms are held, {len(self.rooms)} are in the book")
        for record in self.records.values():
            if record.stage is ENDED and any(leg.state is OPEN for leg in record.open_legs()):
                problems.append(f"{record.rid} has ended and runs on")
            if record.stage is ENDED and not record.open_legs():
                problems.append(f"{record.rid} has ended and is still kept")
        return problems

    # -- parts -------------------------------------------------------------------------------------------------------

    def _is_late(self, record: RequestRecord) -> bool:
        late = record.stage is ENDED
        self.late_events += late
        return late

    def _forget(self, record: RequestRecord) -> None:
        """Rooms that nobody uses are free; a request that is ended and closed everywhere leaves the ledger."""
        left = record.open_legs()
        free_rooms(self.rooms, record, left)
        if not left and record.stage is ENDED and self.records.pop(record.rid, None) is not None:
            self.batch_rids.difference_update(record.ask.rids)


def order_aborts(record: RequestRecord, legs: list[LegEntry], now_s: float) -> list[AbortOrder]:
    """Orders for those of ``legs`` that are not closed; they are aborting from here on."""
    left = [leg for leg in legs if leg.state in (OPEN, LEAVING)]
    for leg in left:
        leg.move(ABORTING, now_s)
    ask, rid = record.ask, record.rid
    return [
        AbortOrder(
            rid,
            leg.leg,
            leg.worker,
            leg.attempt,
            rids_at_instances(rid, ask.rids, prompts=ask.prompts, reached=leg.reached),
        )
        for leg in left
    ]


def free_rooms(rooms: dict[int, str], record: RequestRecord, left: list[LegEntry]) -> None:
    """Those of its rooms that no leg uses any more. ``left``: its legs that are not closed."""
    legs = record.all_legs()
    if len(left) == len(legs):
        return
    held = [leg.room for leg in left]
    for leg in legs:
        if leg.room is not None and leg.room not in held:
            rooms.pop(leg.room, None)


def draw_room(rooms: dict[int, str], rid: str) -> int:
    """A room that is not in ``rooms``, for ``rid``.

    Two ledgers may not draw the same, whatever their seeds: other routers, and this one before a restart, have rooms at
    the same instances.
    """
    room = -1
    while room < 0 or room in rooms:
        drawn = secrets.randbits(SLOT_BITS + PLACE_BITS)
        room = (drawn >> PLACE_BITS) * ROOM_SPACING + (drawn & ((1 << PLACE_BITS) - 1))
    rooms[room] = rid
    return room


def is_named(ledger: Ledger, rid: str, rids: Sequence[str]) -> bool:
    """True if instances may know a prompt of a batch by ``rid``, or a request or such a prompt by one of ``rids``."""
    return rid in ledger.batch_rids or any(name in ledger.records or name in ledger.batch_rids for name in rids)
