"""The book of requests: each is opened once, ends once, and leaves nothing behind on any instance.

A request has one *end*, which is what its client saw, and at each attempt one or two *legs*, which are what instances
hold for it: the prefill and the decode side of a hand-off, or the only side of a unified request. Events come from
several processes and in any order. The first end counts; later ones change nothing. A leg that is still open when its
request ends is ordered to abort, and stays in the book until it is known to be closed, and so does the KV room of the
pair: only then may its number be given again.

Two rules keep work from being done twice or for nobody:

* the decode leg of a request whose prefill leg failed is aborted at once (SGLang itself waits up to 300 s for it);
* a request is sent again only if nothing can have been executed, or the instance that had it is dead, and if its
  client has not seen anything yet.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Callable, Iterable
from random import Random

from pla_sglang.router.control.errors import IllegalMoveError

ROOM_BITS = 63  # SGLang keeps rooms in signed 64-bit integers


class Stage(enum.Enum):
    """Where a request is, as far as the router knows."""

    WAITING = "waiting"  # admitted, at no instance
    PREFILL = "prefill"  # sent, no token yet
    STREAMING = "streaming"  # its client has seen a token
    ENDED = "ended"


class End(enum.Enum):
    """How a request ended. Every request has exactly one."""

    FINISHED = "finished"
    REFUSED = "refused"  # admission: a hard limit
    NO_INSTANCE = "no_instance"  # nobody became ready in time
    CLIENT_GONE = "client_gone"
    TIMEOUT = "timeout"
    UPSTREAM_ERROR = "upstream_error"  # an instance answered with an error
    PREFILL_ABORTED = "prefill_aborted"
    DECODE_ABORTED = "decode_aborted"
    INSTANCE_DEAD = "instance_dead"
    RELAY_LOST = "relay_lost"  # the relay process that held its sockets has gone
    ROUTER_DRAIN = "router_drain"


class Side(enum.Enum):
    """Which part of a request a leg is."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class LegState(enum.Enum):
    OPEN = "open"  # may have been sent, may be executing
    ABORTING = "aborting"  # ordered to abort
    CLOSED = "closed"  # the instance holds nothing for it


_LEGAL_STAGES: dict[Stage, frozenset[Stage]] = {
    Stage.WAITING: frozenset({Stage.PREFILL, Stage.ENDED}),
    Stage.PREFILL: frozenset({Stage.STREAMING, Stage.WAITING, Stage.ENDED}),  # back to WAITING: to be sent again
    Stage.STREAMING: frozenset({Stage.ENDED}),
    Stage.ENDED: frozenset(),
}
_LEGAL_LEGS: dict[LegState, frozenset[LegState]] = {
    LegState.OPEN: frozenset({LegState.ABORTING, LegState.CLOSED}),
    LegState.ABORTING: frozenset({LegState.CLOSED}),
    LegState.CLOSED: frozenset(),
}


@dataclasses.dataclass(slots=True, eq=False)
class Leg:
    """What one instance holds for one attempt of a request.

    ``worker`` is the index of the instance, ``attempt`` counts from 1, ``room`` is shared by the two legs of a hand-off.
    """

    side: Side
    worker: int
    since_s: float
    attempt: int = 1
    room: int | None = None
    state: LegState = LegState.OPEN
    executed: bool = True  # False: the request is known not to have reached the instance

    def move(self, state: LegState, now_s: float) -> None:
        if state not in _LEGAL_LEGS[self.state]:
            raise IllegalMoveError(f"leg {self.side.value}: {self.state.value} -> {state.value} is not allowed")
        self.state, self.since_s = state, now_s


@dataclasses.dataclass(slots=True, eq=False)
class Entry:
    """One request. ``legs`` are those of all attempts that are not closed, and of the last one."""

    rid: str
    opened_s: float
    tenant: str = ""
    relay: str = ""
    stage: Stage = Stage.WAITING
    end: End | None = None
    ended_s: float | None = None
    legs: list[Leg] = dataclasses.field(default_factory=list)
    attempts: int = 0

    def move(self, stage: Stage) -> None:
        """Raises IllegalMoveError for a move that the table above does not have."""
        if stage not in _LEGAL_STAGES[self.stage]:
            raise IllegalMoveError(f"{self.rid}: {self.stage.value} -> {stage.value} is not allowed")
        self.stage = stage

    def open_legs(self) -> list[Leg]:
        return [leg for leg in self.legs if leg.state is not LegState.CLOSED]

    def rooms(self) -> set[int]:
        """KV rooms that instances may still use for it."""
        return {leg.room for leg in self.open_legs() if leg.room is not None}

    def room(self) -> int | None:
        """KV room of the last attempt."""
        return self.legs[-1].room if self.legs else None


@dataclasses.dataclass(frozen=True, slots=True)
class AbortOrder:
    """Tell instance ``worker`` to drop what attempt ``attempt`` of ``rid`` has there."""

    rid: str
    side: Side
    worker: int
    attempt: int


@dataclasses.dataclass(frozen=True, slots=True)
class Audit:
    """The state of the book, for an operator and for tests. ``problems`` is empty when it balances."""

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

    def open(self, rid: str, now_s: float, *, tenant: str = "", relay: str = "") -> Entry:
        """Raises IllegalMoveError for a request id that is in the book."""
        if rid in self.entries:
            raise IllegalMoveError(f"{rid} was opened twice")
        entry = self.entries[rid] = Entry(rid, now_s, tenant, relay)
        self.opened += 1
        self.live += 1
        return entry

    def assign(self, rid: str, workers: Iterable[tuple[Side, int]], now_s: float) -> Entry:
        """The request goes to these instances; from now on it may be executing there. A pair gets a new room.

        Raises:
            IllegalMoveError: it is not waiting, or an earlier leg of it may still be executing.
        """
        entry = self.entries[rid]
        if any(leg.executed for leg in entry.open_legs()):
            raise IllegalMoveError(f"{rid} would be sent twice")
        entry.move(Stage.PREFILL)
        entry.attempts += 1
        placed = list(workers)
        room = self._new_room(rid) if any(side is not Side.BOTH for side, _ in placed) else None
        entry.legs = entry.open_legs()
        entry.legs += [Leg(side, worker, now_s, entry.attempts, room) for side, worker in placed]
        return entry

    def first_token(self, rid: str) -> bool:
        """True at the first call for a request that has not ended."""
        entry = self._find(rid)
        if entry is None or entry.stage is not Stage.PREFILL:
            return False
        entry.move(Stage.STREAMING)
        return True

    def finish_leg(self, rid: str, side: Side, now_s: float, *, attempt: int | None = None) -> None:
        """An instance holds nothing for the request any more: done or aborted. Repeats change nothing.

        ``attempt`` None means every attempt.
        """
        entry = self.entries.get(rid)
        if entry is None:
            self.unknown_events += 1
            return
        for leg in entry.open_legs():
            if leg.side is side and attempt in (None, leg.attempt):
                leg.move(LegState.CLOSED, now_s)
        self._forget(entry)

    def not_sent(self, rid: str, side: Side, now_s: float, *, attempt: int | None = None) -> None:
        """The instance was not reached: nothing can have been executed there."""
        entry = self.entries.get(rid)
        if entry is None:
            self.unknown_events += 1
            return
        for leg in entry.open_legs():
            if leg.side is side and attempt in (None, leg.attempt):
                leg.executed = False
                leg.move(LegState.CLOSED, now_s)
        self._forget(entry)

    def end(self, rid: str, end: End, now_s: float) -> list[AbortOrder]:
        """The request has ended for its client. Returns what must be aborted; nothing if it had ended before."""
        entry = self._find(rid)
        if entry is None:
            return []
        entry.move(Stage.ENDED)
        entry.end, entry.ended_s = end, now_s
        self.live -= 1
        self.ended[end] += 1
        orders = self._abort(entry, entry.open_legs(), now_s)
        self._forget(entry)
        if self._on_end is not None:
            self._on_end(entry, now_s)
        return orders

    def can_retry(self, rid: str, dead: Callable[[int], bool]) -> bool:
        """Whether it may be sent again: no token was seen, and no leg that is left can be executing or have executed.

        A leg counts as harmless if it was never sent or its instance is dead. A decode leg whose prefill leg never
        executed has no KV to start from; it only has to be closed first.
        """
        entry = self.entries.get(rid)
        if entry is None or entry.stage is not Stage.PREFILL:
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
        entry.move(Stage.WAITING)
        for leg in entry.open_legs():
            if dead(leg.worker):
                leg.move(LegState.CLOSED, now_s)
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
                leg.move(LegState.CLOSED, now_s)
            if legs and entry.stage is not Stage.ENDED:
                hit.append(entry.rid)
            self._forget(entry)
        return hit

    def adopt(self, entry: Entry) -> None:
        """A request of an earlier life of this process. Raises IllegalMoveError if it is in the book."""
        if entry.rid in self.entries or entry.stage is Stage.ENDED:
            raise IllegalMoveError(f"{entry.rid} cannot be adopted")
        self.entries[entry.rid] = entry
        self.opened += 1
        self.live += 1
        self.rooms.update(dict.fromkeys(entry.rooms(), entry.rid))

    # -- the state of the book ---------------------------------------------------------------------------------------

    def open_at(self, worker: int) -> int:
        """Legs on an instance that are not closed."""
        return sum(leg.worker == worker for entry in self.entries.values() for leg in entry.open_legs())

    def audit(self, now_s: float) -> Audit:
        """Counts everything anew and compares."""
        live = Counter(entry.stage for entry in self.entries.values() if entry.stage is not Stage.ENDED)
        legs = [(entry, leg) for entry in self.entries.values() for leg in entry.open_legs()]
        orphans = [
            f"{entry.rid} {leg.side.value} at {leg.worker} for {now_s - leg.since_s:.1f} s"
            for entry, leg in legs
            if leg.state is LegState.ABORTING and now_s - leg.since_s > self._orphan_s
        ]
        return Audit(
            opened=self.opened,
            live={stage.value: count for stage, count in live.items()},
            ended={end.value: count for end, count in self.ended.items()},
            legs_open=sum(leg.state is LegState.OPEN for _, leg in legs),
            legs_aborting=sum(leg.state is LegState.ABORTING for _, leg in legs),
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
            if entry.stage is Stage.ENDED and any(leg.state is LegState.OPEN for leg in entry.open_legs()):
                problems.append(f"{entry.rid} has ended and runs on")
            if entry.stage is Stage.ENDED and not entry.open_legs():
                problems.append(f"{entry.rid} has ended and is still kept")
        return problems

    # -- parts -------------------------------------------------------------------------------------------------------

    def _find(self, rid: str) -> Entry | None:
        entry = self.entries.get(rid)
        if entry is None:
            self.unknown_events += 1
        elif entry.stage is Stage.ENDED:
            self.late_events += 1
            return None
        return entry

    def _abort(self, entry: Entry, legs: list[Leg], now_s: float) -> list[AbortOrder]:
        orders = []
        for leg in legs:
            if leg.state is LegState.OPEN:
                leg.move(LegState.ABORTING, now_s)
                orders.append(AbortOrder(entry.rid, leg.side, leg.worker, leg.attempt))
        return orders

    def _forget(self, entry: Entry) -> None:
        """Rooms that nobody uses are free; a request that is ended and closed everywhere leaves the book."""
        held = entry.rooms()
        for leg in entry.legs:
            if leg.room is not None and leg.room not in held:
                self.rooms.pop(leg.room, None)
        if entry.stage is Stage.ENDED and not entry.open_legs():
            self.entries.pop(entry.rid, None)

    def _new_room(self, rid: str) -> int:
        room = self._rng.getrandbits(ROOM_BITS)
        while room in self.rooms:
            room = self._rng.getrandbits(ROOM_BITS)
        self.rooms[room] = rid
        return room
