"""The ledger of requests: each is opened once, ends once, and leaves nothing behind on any instance.

A request has one *end*, which is what its client saw, and at each attempt one or two *legs*, which are what instances
hold for it: the prefill and the decode side of a hand-off, or the only side of a unified request. Events come from
several processes and in any order. The first end counts; later ones change nothing. A leg that is still open when its
request ends is ordered to abort, and stays in the ledger until it is known to be closed, and so does the KV room of the
pair: only then may its number be given again. No order is due where the instance was not sent anything, or was told to
commit: what it answers to that decides.

A request is sent again only if no instance can be executing an attempt of it whose tokens its client might still get:
nothing was sent, the instance has said that its part is over, or is told to abort, and its connection is closed.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections import Counter
from collections.abc import Container, Iterable, Sequence

from pla_sglang.common.errors import IllegalMoveError
from pla_sglang.fleet.router.control.requests.request_record import (
    ABORTING,
    CLOSED,
    ENDED,
    LEAVING,
    OPEN,
    OVER,
    PREFILL,
    STREAMING,
    Attempt,
    LegEntry,
    RequestRecord,
)
from pla_sglang.fleet.router.control.workers.abort_order import AbortOrder
from pla_sglang.fleet.router.wire.messages import Outcome
from pla_sglang.fleet.router.wire.rids import rids_at_instances

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

    def is_named(self, rid: str, rids: Sequence[str]) -> bool:
        """True if instances may know a prompt of a batch by ``rid``, or a request or such a one by one of ``rids``."""
        return rid in self.batch_rids or any(name in self.records or name in self.batch_rids for name in rids)

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
        if record is None or record.state is ENDED:
            self.unknown_events += 1
            return None
        return record

    def assign(self, record: RequestRecord, workers: Sequence[int], now_s: float, *, room: int | None = None) -> None:
        """The present attempt goes to these instances, by number; from now on it may be executing there. A pair gets a
        new room, unless it brings the one it has.

        Raises:
            IllegalMoveError: it is not waiting.
        """
        attempt = record.present
        attempt.move(PREFILL)
        if len(workers) == 1:
            room = None
        elif room is None:
            room = draw_room(self.rooms, record.rid)
        else:
            self.rooms[room] = record.rid
        attempt.legs = [LegEntry(worker, now_s, room) for worker in workers]

    def first_token(self, record: RequestRecord, attempt: Attempt) -> bool:
        """True at the first call for the present attempt of a request that has not ended."""
        if self._is_late(record) or attempt is not record.present or attempt.state is not PREFILL:
            return False
        attempt.move(STREAMING)
        return True

    def finish_leg(self, record: RequestRecord, attempt: Attempt, worker: int, now_s: float) -> None:
        """An instance holds nothing for the attempt any more: done or aborted. Repeats change nothing."""
        for leg in attempt.legs:
            if leg.worker == worker and leg.state is not CLOSED:
                leg.move(CLOSED, now_s)
        self._forget(record)

    def leave(self, record: RequestRecord, now_s: float, *, executed: bool) -> list[AbortOrder]:
        """The present attempt is over, and its request is not: another one is to begin at once. Returns what must be
        aborted. Not ``executed``: it has not reached its instances, or they have said that they hold nothing of it, and
        nobody has seen a byte of what they may have computed."""
        attempt = record.present
        attempt.move(OVER)
        left = attempt.open_legs()
        if executed:
            return order_aborts(record, attempt, left, now_s)
        for leg in attempt.legs:
            leg.executed = False
        self._close(record, left, now_s)
        return []

    def confirm_abort(self, order: AbortOrder, now_s: float) -> None:
        """The instance has carried the order out, or is dead."""
        record = self.records.get(order.rid)
        attempt = None if record is None else record.find_attempt(order.attempt)
        if record is None or attempt is None:
            self.unknown_events += 1
        else:
            self.finish_leg(record, attempt, order.worker, now_s)

    def end(
        self, record: RequestRecord, outcome: Outcome, now_s: float, *, free: Container[int] = ()
    ) -> list[AbortOrder]:
        """The request has ended for its client, and for the workers in ``free``. Returns what must be aborted at
        others; nothing if it had ended before."""
        if self._is_late(record):
            return []
        record.present.move(ENDED)
        self.live -= 1
        self.ended[outcome] += 1
        orders: list[AbortOrder] = []
        if record.candidate is not None:
            over = record.candidate.decode is not None and record.candidate.decode.number in free
            orders += self.drop_candidate(record, now_s, over=over)
        for attempt in record.attempts:
            left = []
            for leg in attempt.open_legs():
                if leg.state is LEAVING:
                    continue
                free_here = attempt is record.present and leg.worker in free
                if free_here or (leg.state is OPEN and not leg.executed):
                    leg.move(CLOSED, now_s)
                else:
                    left.append(leg)
            if left:
                orders += order_aborts(record, attempt, left, now_s)
        self._forget(record)
        return orders

    def worker_dead(self, worker: int, now_s: float) -> list[RequestRecord]:
        """Closes the legs on an instance that is dead. Returns the requests, not ended yet, whose present attempt had
        one open there."""
        hit = []
        for record in list(self.records.values()):
            if record.state is not ENDED and any(leg.worker == worker for leg in record.present.open_legs()):
                hit.append(record)
            self._close(record, [leg for leg in record.open_legs() if leg.worker == worker], now_s)
        return hit

    # -- a request moves ---------------------------------------------------------------------------------------------

    def open_candidate(self, record: RequestRecord, worker: int, now_s: float) -> int:
        """An instance is to take the request over; it has not been sent it yet. Returns the KV room."""
        attempt = record.candidate
        assert attempt is not None
        attempt.move(PREFILL)
        room = draw_room(self.rooms, record.rid)
        attempt.legs = [LegEntry(worker, now_s, room, executed=False)]
        return room

    def send_candidate(self, record: RequestRecord) -> None:
        """From now on it may be executing there."""
        assert record.candidate is not None
        for leg in record.candidate.legs:
            leg.executed = True

    def drop_candidate(self, record: RequestRecord, now_s: float, *, over: bool) -> list[AbortOrder]:
        """Nothing comes of it. Returns what must be aborted; nothing where it was not sent, or is ``over`` there."""
        attempt, record.candidate = record.candidate, None
        assert attempt is not None
        attempt.move(OVER)
        left = attempt.open_legs()
        self._close(record, [leg for leg in left if over or not leg.executed], now_s)
        return order_aborts(record, attempt, left, now_s)

    def join_candidate(self, record: RequestRecord, now_s: float) -> Attempt:
        """It is what the client sees. Returns the attempt that was left; its legs stay until their instance says that
        they are over, or that it does not know: also where the request ends meanwhile."""
        left, record.present, record.candidate = record.present, record.candidate, None  # type: ignore[assignment]
        left.move(OVER)
        for leg in left.legs:
            if leg.state is OPEN:
                leg.move(LEAVING, now_s)
        record.present.move(STREAMING)
        return left

    # -- the state of the ledger -------------------------------------------------------------------------------------

    def audit(self, now_s: float) -> Audit:
        """Counts everything anew and compares."""
        live = Counter(record.state for record in self.records.values() if record.state is not ENDED)
        legs = [(record, leg) for record in self.records.values() for leg in record.open_legs()]
        ended: Counter[str] = Counter()
        for outcome, count in self.ended.items():
            ended[outcome.label] += count
        orphans = [
            f"{record.rid} at {leg.worker} for {now_s - leg.since_s:.1f} s"
            for record, leg in legs
            if leg.state in (LEAVING, ABORTING) and now_s - leg.since_s > ORPHAN_S
        ]
        return Audit(
            opened=self.opened,
            live={state.value: count for state, count in live.items()},
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
            problems += _attempt_problems(record)
            if record.state is ENDED and any(leg.state is OPEN for leg in record.open_legs()):
                problems.append(f"{record.rid} has ended and runs on")
            if record.state is ENDED and not record.open_legs():
                problems.append(f"{record.rid} has ended and is still kept")
        return problems

    # -- parts -------------------------------------------------------------------------------------------------------

    def _is_late(self, record: RequestRecord) -> bool:
        late = record.state is ENDED
        self.late_events += late
        return late

    def _close(self, record: RequestRecord, legs: Iterable[LegEntry], now_s: float) -> None:
        for leg in legs:
            if leg.state is not CLOSED:
                leg.move(CLOSED, now_s)
        self._forget(record)

    def _forget(self, record: RequestRecord) -> None:
        """Rooms that nobody uses are free; a request that is ended and closed everywhere leaves the ledger."""
        legs = record.all_legs()
        left = [leg for leg in legs if leg.state is not CLOSED]
        if len(left) < len(legs):
            held = [leg.room for leg in left]
            for leg in legs:
                if leg.room is not None and leg.room not in held and self.rooms.get(leg.room) == record.rid:
                    del self.rooms[leg.room]
        if not left and record.state is ENDED and self.records.pop(record.rid, None) is not None:
            self.batch_rids.difference_update(record.ask.rids)


def order_aborts(record: RequestRecord, attempt: Attempt, legs: list[LegEntry], now_s: float) -> list[AbortOrder]:
    """Orders for those of ``legs`` that are not closed; they are aborting from here on."""
    left = [leg for leg in legs if leg.state in (OPEN, LEAVING)]
    for leg in left:
        leg.move(ABORTING, now_s)
    ask, rid = record.ask, record.rid
    rids = rids_at_instances(rid, ask.rids, prompts=ask.prompts, attempt=attempt.number)
    return [AbortOrder(rid, leg.worker, attempt.number, rids) for leg in left]


def _attempt_problems(record: RequestRecord) -> list[str]:
    numbers = [attempt.number for attempt in record.attempts]
    going = [attempt for attempt in record.attempts if attempt.state is not OVER]
    problems = []
    if numbers != sorted(set(numbers)):
        problems.append(f"{record.rid} has attempts {numbers}")
    if going != [one for one in (record.present, record.candidate) if one is not None]:
        problems.append(f"{record.rid} has {len(going)} attempts that are not over")
    return problems


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
