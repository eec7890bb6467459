"""One request in the ledger: its stage, its end, and its legs at instances, with the moves that are allowed."""

from __future__ import annotations

import dataclasses
import enum

from pla_sglang.router.body import rid_there
from pla_sglang.router.control.errors import IllegalMoveError


class Stage(enum.Enum):
    """Where a request is, as far as the router knows."""

    __hash__ = object.__hash__  # members are singletons; Enum hashes names, in Python, at each look-up

    WAITING = "waiting"  # admitted, at no instance
    PREFILL = "prefill"  # sent, no token yet
    STREAMING = "streaming"  # its client has seen a token
    ENDED = "ended"


class End(enum.Enum):
    """How a request ended. Every request has exactly one."""

    FINISHED = "finished"
    REFUSED = "refused"  # admission: a hard limit
    NO_INSTANCE = "no_instance"  # nobody became ready in time
    FAULT = "fault"  # the router itself has failed on it
    CLIENT_GONE = "client_gone"
    TIMEOUT = "timeout"
    UPSTREAM_ERROR = "upstream_error"  # an instance answered with an error
    PREFILL_ABORTED = "prefill_aborted"
    DECODE_ABORTED = "decode_aborted"
    INSTANCE_DEAD = "instance_dead"
    RELAY_LOST = "relay_lost"  # the relay process that held its sockets has gone
    ROUTER_DRAIN = "router_drain"  # the router stops, and its time for open requests is over


class Side(enum.Enum):
    """Which part of a request a leg is."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class LegState(enum.Enum):
    __hash__ = object.__hash__  # members are singletons; Enum hashes names, in Python, at each look-up

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


# Named once: CPython 3.11 takes 0.2 us to look a member up in its class, and every request meets these.
OPEN, ABORTING, CLOSED = LegState
WAITING, PREFILL, STREAMING, ENDED = Stage


@dataclasses.dataclass(slots=True, eq=False)
class Leg:
    """What one instance holds for one attempt of a request.

    ``worker`` is the number of the instance, ``attempt`` counts from 1, ``room`` is shared by the legs of a hand-off.
    """

    side: Side
    worker: int
    since_s: float
    attempt: int = 1
    room: int | None = None
    state: LegState = LegState.OPEN
    executed: bool = True  # False: it has not reached the instance, or was taken back: nothing can come of it

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
    prompts: int = 1
    reached: int = 0  # attempts that instances got, before the present one
    rids: tuple[str, ...] = ()  # of its prompts, where the client has named each

    def move(self, stage: Stage) -> None:
        """Raises IllegalMoveError for a move that the table above does not have."""
        if stage not in _LEGAL_STAGES[self.stage]:
            raise IllegalMoveError(f"{self.rid}: {self.stage.value} -> {stage.value} is not allowed")
        self.stage = stage

    def open_legs(self) -> list[Leg]:
        return [leg for leg in self.legs if leg.state is not CLOSED]

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
    prompts: int = 1
    reached: int = 0
    named: tuple[str, ...] = ()  # its prompts, by the client

    def rids(self) -> list[str]:
        """Under which ids SGLang knows the prompts of the request."""
        if self.named:
            return [rid_there(one, self.reached) for one in self.named]
        rid = rid_there(self.rid, self.reached)
        return [rid] if self.prompts == 1 else [f"{rid}_{index}" for index in range(self.prompts)]


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
