"""The book of requests: each is opened once, ends once, and leaves nothing behind on any instance.

A request has one *end*, which is what its client saw, and at each attempt one or two *legs*, which are what instances
hold for it: the prefill and the decode side of a hand-off, or the only side of a unified request. Events come from
several processes and in any order. The first end counts; later ones change nothing. A leg that is still open when its
request ends is ordered to abort, and stays in the book until it is known to be closed, and so does the KV room of the
pair: only then may its number be given again.

Two rules keep work from being done twice or for nobody:

* the decode leg of a request whose prefill leg failed is aborted at once (SGLang itself waits up to 300 s for it);
* a request is sent again only if its client has not seen anything yet and no instance can be executing it: nothing was
  sent, the instance is dead, or it has said that its part is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable
from random import Random

from pla_sglang.router.control.entries import (
    ABORTING,
    CLOSED,
    ENDED,
    OPEN,
    PREFILL,
    STREAMING,
    WAITING,
    AbortOrder,
    Audit,
    End,
    Entry,
    Leg,
    Side,
)
from pla_sglang.router.control.errors import IllegalMoveError

_BOTH = Side.BOTH  # named once, as in ``entries``
# SGLang keeps rooms in signed 64-bit integers, gives each prompt of a batch the next one, and takes a room modulo the
# data-parallel size as the rank: rooms of two requests lie further apart than any batch, at places that spread.
ROOM_BITS = 63
SLOT_BITS = 49
ROOM_SPACING = 1 << (ROOM_BITS - SLOT_BITS)
PLACE_BITS = 13  # of a request's first room within its slot
LARGEST_BATCH = ROOM_SPACING - (1 << PLACE_BITS)


class Ledger:
    """See the module. Pure: time comes in, orders go out.

    Args:
        rng: gives rooms.
        orphan_s: an abort that is not confirmed after this long is shown as an orphan.
        on_end: called once a request, when it ends.
    """

    def __init__(
        self, rng: Random, *, orphan_s: float = 5.0, on_end: Callable[[Entry, float], None] | None = None
    ) -> None:
        self.entries: dict[str, Entry] = {}  # not ended, or with a leg that is not closed
        self.rooms: dict[int, str] = {}
        self.opened = 0
        self.live = 0  # opened and not ended
        self.ended: Counter[End] = Counter()
        self.late_events = 0  # after the end: normal where two processes see the same failure
        self.unknown_events = 0
        self._rng = rng
        self._orphan_s = orphan_s
        self._on_end = on_end

    def get(self, rid: str) -> Entry | None:
        return self.entries.get(rid)

    # -- the life of a request ---------------------------------------------------------------------------------------

    def open(  # what is known of it, each from another place
        self,
        rid: str,
        now_s: float,
        *,
        tenant: str = "",
        relay: str = "",
        prompts: int = 1,
        rids: tuple[str, ...] = (),
    ) -> Entry:
        """Raises IllegalMoveError for a request id that is in the book."""
        if rid in self.entries:
            raise IllegalMoveError(f"{rid} was opened twice")
        entry = self.entries[rid] = Entry(rid, now_s, tenant, relay, prompts=prompts, rids=rids)
        self.opened += 1
        self.live += 1
        return entry

    def assign(self, rid: str, workers: Iterable[tuple[Side, int]], now_s: float, *, room: int | None = None) -> Entry:
        """The request goes to these instances; from now on it may be executing there. A pair gets a new room, unless
        it brings the one it has.

        Raises:
            IllegalMoveError: it is not waiting, or an earlier leg of it may still be executing.
        """
        entry = self.entries[rid]
        left = entry.open_legs() if entry.legs else []
        if left and any(leg.executed for leg in left):
            raise IllegalMoveError(f"{rid} would be sent twice")
        entry.move(PREFILL)
        entry.attempts += 1
        placed = list(workers)
        if placed[0][0] is _BOTH:
            room = None
        elif room is None:
            room = self._new_room(rid)
        else:
            self.rooms[room] = rid
        entry.legs = left + [Leg(side, worker, now_s, entry.attempts, room) for side, worker in placed]
        return entry

    def first_token(self, rid: str) -> bool:
        """True at the first call for a request that has not ended."""
        entry = self._find(rid)
        if entry is None or entry.stage is not PREFILL:
            return False
        entry.move(STREAMING)
        return True

    def finish_leg(self, rid: str, side: Side, now_s: float, *, attempt: int | None = None) -> None:
        """An instance holds nothing for the request any more: done or aborted. Repeats change nothing.

        ``attempt`` None means every attempt.
        """
        entry = self.entries.get(rid)
        if entry is None:
            self.unknown_events += 1
            return
        for leg in entry.legs:
            if leg.side is side and leg.state is not CLOSED and attempt in (None, leg.attempt):
                leg.move(CLOSED, now_s)
        self._forget(entry)

    def take_back(self, rid: str, side: Side, now_s: float, *, attempt: int | None = None) -> None:
        """The instance has nothing of it, and of what it may have computed nobody has seen a byte: it was not reached,
        or has ended its part with an error."""
        entry = self.entries.get(rid)
        if entry is None:
            self.unknown_events += 1
            return
        for leg in entry.legs:
            if leg.side is side and attempt in (None, leg.attempt):
                leg.executed = False
                if leg.state is not CLOSED:
                    leg.move(CLOSED, now_s)
        self._forget(entry)

    def end(self, rid: str, end: End, now_s: float, *, free: Container[int] = ()) -> list[AbortOrder]:
        """The request has ended for its client, and for the workers in ``free``. Returns what must be aborted at
        others; nothing if it had ended before."""
        entry = self._find(rid)
        if entry is None:
            return []
        entry.move(ENDED)
        entry.end, entry.ended_s = end, now_s
        self.live -= 1
        self.ended[end] += 1
        left = []
        for leg in entry.legs:
            if leg.state is CLOSED:
                continue
            if leg.worker in free:
                leg.move(CLOSED, now_s)
            else:
                left.append(leg)
        orders = self._abort(entry, left, now_s) if left else []
        self._forget(entry)
        if self._on_end is not None:
            self._on_end(entry, now_s)
        return orders

    def can_retry(self, rid: str, dead: Callable[[int], bool]) -> bool:
        """Whether it may be sent again: no token was seen, and no leg that is left can be executing or have executed.

        A leg counts as harmless if it was taken back or its instance is dead. A decode leg whose prefill leg never
        executed has no KV to start from; it only has to be closed first.
        """
        entry = self.entries.get(rid)
        if entry is None or entry.stage is not PREFILL:
            return False
        starters = [leg for leg in entry.legs if leg.side is not Side.DECODE]
        starting = any(leg.executed and not dead(leg.worker) for leg in starters)
        return not starting and all(leg.side is Side.DECODE or dead(leg.worker) for leg in entry.open_legs())

    def retry(self, rid: str, dead: Callable[[int], bool], now_s: float) -> list[AbortOrder]:
        """Back to waiting, to be assigned again; what is left of the attempt is aborted.

        Raises:
            IllegalMoveError: ``can_retry`` says no.
        """
        if not self.can_retry(rid, dead):
            raise IllegalMoveError(f"{rid} may have been executed")
        entry = self.entries[rid]
        entry.move(WAITING)
        for leg in entry.open_legs():
            if dead(leg.worker):
                leg.move(CLOSED, now_s)
        left = entry.open_legs()
        orders = self._abort(entry, left, now_s)
        for leg in left:
            leg.executed = False  # without its prefill it can compute nothing
        self._forget(entry)
        return orders

    def worker_dead(self, worker: int, now_s: float) -> list[str]:
        """Closes the legs on an instance that is dead. Returns the requests, not ended yet, that had one open there."""
        hit = []
        for entry in list(self.entries.values()):
            legs = [leg for leg in entry.open_legs() if leg.worker == worker]
            for leg in legs:
                leg.move(CLOSED, now_s)
            if legs and entry.stage is not ENDED:
                hit.append(entry.rid)
            self._forget(entry)
        return hit

    # -- the state of the book ---------------------------------------------------------------------------------------

    def open_at(self, worker: int) -> int:
        """Legs on an instance that are not closed."""
        return sum(leg.worker == worker for entry in self.entries.values() for leg in entry.open_legs())

    def audit(self, now_s: float) -> Audit:
        """Counts everything anew and compares."""
        live = Counter(entry.stage for entry in self.entries.values() if entry.stage is not ENDED)
        legs = [(entry, leg) for entry in self.entries.values() for leg in entry.open_legs()]
        orphans = [
            f"{entry.rid} {leg.side.value} at {leg.worker} for {now_s - leg.since_s:.1f} s"
            for entry, leg in legs
            if leg.state is ABORTING and now_s - leg.since_s > self._orphan_s
        ]
        return Audit(
            opened=self.opened,
            live={stage.value: count for stage, count in live.items()},
            ended={end.value: count for end, count in self.ended.items()},
            legs_open=sum(leg.state is OPEN for _, leg in legs),
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
        held = {room: entry.rid for entry in self.entries.values() for room in entry.rooms()}
        if held != self.rooms:
            problems.append(f"{len(held)} rooms are held, {len(self.rooms)} are in the book")
        for entry in self.entries.values():
            if entry.stage is ENDED and any(leg.state is OPEN for leg in entry.open_legs()):
                problems.append(f"{entry.rid} has ended and runs on")
            if entry.stage is ENDED and not entry.open_legs():
                problems.append(f"{entry.rid} has ended and is still kept")
        return problems

    # -- parts -------------------------------------------------------------------------------------------------------

    def _find(self, rid: str) -> Entry | None:
        entry = self.entries.get(rid)
        if entry is None:
            self.unknown_events += 1
        elif entry.stage is ENDED:
            self.late_events += 1
            return None
        return entry

    def _abort(self, entry: Entry, legs: list[Leg], now_s: float) -> list[AbortOrder]:
        orders = []
        for leg in legs:
            if leg.state is OPEN:
                leg.move(ABORTING, now_s)
                known_as = (entry.prompts, entry.reached, entry.rids)
                orders.append(AbortOrder(entry.rid, leg.side, leg.worker, leg.attempt, *known_as))
        return orders

    def _forget(self, entry: Entry) -> None:
        """Rooms that nobody uses are free; a request that is ended and closed everywhere leaves the book."""
        left = entry.open_legs()
        if len(left) < len(entry.legs):
            held = [leg.room for leg in left]
            for leg in entry.legs:
                if leg.room is not None and leg.room not in held:
                    self.rooms.pop(leg.room, None)
        if not left and entry.stage is ENDED:
            self.entries.pop(entry.rid, None)

    def _new_room(self, rid: str) -> int:
        room = -1
        while room < 0 or room in self.rooms:
            drawn = self._rng.getrandbits(SLOT_BITS + PLACE_BITS)
            room = (drawn >> PLACE_BITS) * ROOM_SPACING + (drawn & ((1 << PLACE_BITS) - 1))
        self.rooms[room] = rid
        return room
