"""The instances that a router knows, and the state of each: one enum, one transition function, always a reason.

    STARTING ─► READY ◄─► SUSPECT          SUSPECT: unhealthy or failing; gets nothing new until it answers again
        │         │ ▲        │
        │         ▼ │        ▼
        │       DRAINING ◄───┘             DRAINING: an operator's wish; finishes what it has
        ▼         ▼
       DEAD ◄─────┴── (from any)           DEAD: gone or replaced; a process that comes back is a new worker

For policies SUSPECT and DRAINING are alike: the instance is not in the lists of the ``FleetView``. A worker's number is
never reused, also over restarts of the router (``memory.py``); its view's index is its place in the ``FleetView``.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from pla_sglang.policy.fleet import FleetView, InstanceKind, InstanceState, InstanceView, Role
from pla_sglang.policy.types import PrefillClass
from pla_sglang.router.control.breaker import Breaker, BreakerKnobs
from pla_sglang.router.control.discovery import Address, Description
from pla_sglang.router.control.errors import IllegalMoveError, WorkerError
from pla_sglang.router.control.loads import LoadBook
from pla_sglang.router.control.memory import Remembered
from pla_sglang.telemetry.message import Report


class WorkerState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    DEAD = "dead"


class WorkerReason(enum.Enum):
    """Why a worker is in its state."""

    ADDED = "added"
    ANSWERS = "answers"  # it described itself and is healthy
    HEALTH = "health"  # health checks were missed
    BREAKER = "breaker"  # requests failed there
    RECOVERED = "recovered"
    OPERATOR = "operator"  # drained, or a drain taken back
    RESTARTED = "restarted"  # another process answers at its address
    NO_ANSWER = "no_answer"  # nobody has listened there for a while
    REMOVED = "removed"


LEGAL: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.STARTING: frozenset({WorkerState.READY, WorkerState.DEAD}),
    WorkerState.READY: frozenset({WorkerState.SUSPECT, WorkerState.DRAINING, WorkerState.DEAD}),
    WorkerState.SUSPECT: frozenset({WorkerState.READY, WorkerState.DRAINING, WorkerState.DEAD}),
    WorkerState.DRAINING: frozenset({WorkerState.READY, WorkerState.DEAD}),
    WorkerState.DEAD: frozenset(),
}
_VIEW_STATES = {
    WorkerState.STARTING: InstanceState.STARTING,
    WorkerState.READY: InstanceState.READY,
    WorkerState.SUSPECT: InstanceState.DRAINING,
    WorkerState.DRAINING: InstanceState.DRAINING,
    WorkerState.DEAD: InstanceState.DEAD,
}
_ROLES = {InstanceKind.UNIFIED: Role.MIXED, InstanceKind.PREFILL: Role.PREFILL, InstanceKind.DECODE: Role.DECODE}


@dataclasses.dataclass(eq=False)
class Worker:
    """One process behind an address. ``view`` and ``book`` are what policies see of it.

    Attributes:
        misses: health checks in a row that were not answered; refused: that nobody listened for.
        expected_identity: of the process that had its number before the router was restarted; empty: unknown.
        leaves: to be removed once it is drained.
        wants_drain: to be drained as soon as it is ready: an operator's wish from before a restart of the router.
        reports: the last load report of each rank that sends any.
    """

    number: int
    address: Address
    view: InstanceView
    book: LoadBook
    breaker: Breaker
    since_s: float
    state: WorkerState = WorkerState.STARTING
    reason: WorkerReason = WorkerReason.ADDED
    description: Description | None = None
    expected_identity: str = ""
    misses: int = 0
    refused: int = 0
    leaves: bool = False
    wants_drain: bool = False
    detail: str = ""
    reports: dict[int, Report] = dataclasses.field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.address.url

    def is_ready(self) -> bool:
        return self.state is WorkerState.READY

    def remembered(self) -> Remembered:
        """What outlives a restart of the router."""
        identity = self.expected_identity if self.description is None else self.description.identity
        draining = self.wants_drain or self.state is WorkerState.DRAINING
        return Remembered(self.number, self.url, identity, draining, self.leaves)

    def to_dict(self, now_s: float) -> dict[str, Any]:
        """For operators."""
        view, said = self.view, self.description
        return {
            "number": self.number,
            "url": self.url,
            "kind": view.kind.value,
            "role": view.role.value,
            "length_class": None if view.length_class is None else view.length_class.value,
            "state": self.state.value,
            "reason": self.reason.value,
            "detail": self.detail,
            "since_s": round(now_s - self.since_s, 3),
            "drained": self.state is WorkerState.DRAINING and self.book.is_idle(),
            "breaker": {"state": self.breaker.state.value, "reason": self.breaker.reason.value},
            "open_requests": self.book.open_requests(),
            "report_age_s": None if self.book.reported_s is None else round(now_s - self.book.reported_s, 3),
            "queued_prefills": view.queued_prefills,
            "queued_tokens": view.queued_tokens,
            "running": view.running,
            "waiting_decodes": view.waiting_decodes,
            "kv_used_tokens": view.kv_used_tokens,
            "kv_capacity_tokens": view.kv_capacity_tokens if said is not None else None,
            "model": None if said is None else said.model,
            "version": None if said is None else said.version,
            "ranks": {rank: _told(report) for rank, report in self.reports.items()},
        }

    def errors(self) -> Counter[str]:
        """Requests that ended badly there, by kind, as its reports say."""
        return sum((Counter(report.errors) for report in self.reports.values()), Counter())


def _told(report: Report) -> dict[str, Any]:
    """What of a rank's report does not stand beside it already."""
    return {
        "role": report.role,
        "draining": report.draining,
        "short": {"requests": report.short.reqs, "tokens": report.short.tokens},
        "long": {"requests": report.long.reqs, "tokens": report.long.tokens},
        "boundary_tokens": report.boundary_tokens,
        "decode_step_s": report.decode_step_s,
        "token_interval_s": report.token_interval_s,
        "errors": report.errors,
    }


class WorkerTable:
    """All workers in order of their view's index; the dead ones stay, as indices are never reused.

    Args:
        pools: whether prefill instances are split into a short and a long pool.
        on_change: told after every change that policies or relays can see.
    """

    def __init__(
        self,
        breaker: BreakerKnobs,
        *,
        pools: bool = False,
        settle_s: float = 0.05,
        on_change: Callable[[Worker], None] | None = None,
    ) -> None:
        self.fleet = FleetView()
        self.workers: list[Worker] = []
        self.by_number: dict[int, Worker] = {}
        self.pools = pools
        self._breaker = breaker
        self._settle_s = settle_s
        self._on_change = on_change
        self._next_number = 0

    def __iter__(self) -> Iterator[Worker]:
        """Those that are not dead."""
        return (worker for worker in self.workers if worker.state is not WorkerState.DEAD)

    def of(self, view: InstanceView) -> Worker:
        return self.workers[view.index]

    def at(self, address: Address) -> Worker | None:
        return next((worker for worker in self if worker.address == address), None)

    def find(self, name: str) -> Worker:
        """By number or URL. Raises WorkerError, status 404."""
        for worker in self:
            if name in (str(worker.number), worker.url):
                return worker
        raise WorkerError(f"no worker {name!r}", status=404)

    def can_serve(self) -> bool:
        """Whether a request could be sent somewhere now."""
        kinds = {view.kind for view in self.fleet.ready}
        return bool(kinds & {InstanceKind.UNIFIED, InstanceKind.STATELESS}) or kinds >= {
            InstanceKind.PREFILL,
            InstanceKind.DECODE,
        }

    # -- coming and going --------------------------------------------------------------------------------------------

    def add(self, address: Address, now_s: float, *, number: int | None = None) -> Worker:
        """A worker that has still to be asked what it is. ``number``: one it had before.

        Raises WorkerError, status 409, for an address or a number that is there.
        """
        if self.at(address) is not None:
            raise WorkerError(f"worker {address.url} is there already", status=409)
        number = self._next_number if number is None else number
        if number in self.by_number:
            raise WorkerError(f"worker number {number} is taken", status=409)
        self._next_number = max(self._next_number, number + 1)
        index = len(self.workers)
        name = f"{address.host}:{address.port}"
        view = InstanceView(index, name, InstanceKind.UNIFIED, Role.MIXED, InstanceState.STARTING, since_s=now_s)
        book = LoadBook(view, settle_s=self._settle_s)
        worker = Worker(number, address, view, book, Breaker(self._breaker), now_s)
        self.workers.append(worker)
        self.by_number[number] = worker
        self.fleet.add(view)
        self._tell(worker)
        return worker

    def reserve_numbers(self, below: int) -> None:
        """Numbers below this one were given to workers that have gone."""
        self._next_number = max(self._next_number, below)

    @property
    def next_number(self) -> int:
        return self._next_number

    def describe(self, worker: Worker, description: Description, now_s: float) -> None:
        """It has said what it is. Raises IllegalMoveError once it is described: another process is another worker."""
        if worker.description is not None:
            raise IllegalMoveError(f"worker {worker.number} was described before")
        worker.description = description
        view = worker.view
        view.kind, view.kv_capacity_tokens = description.kind, description.kv_capacity_tokens
        view.tensor_parallel, view.profile = description.tensor_parallel, ""  # one predictor curve for all
        self.fleet.set_role(view, _ROLES[description.kind], now_s)
        if self.pools and description.kind is not InstanceKind.DECODE:
            view.length_class = description.length_class or self._smaller_pool(worker)

    def _smaller_pool(self, newcomer: Worker) -> PrefillClass | None:
        """The pool with fewer members, the long one of equals (as the registry starts). A lone instance takes both
        classes, until a second one comes: then it takes the long ones."""
        others = [one for one in self if one is not newcomer and one.description is not None]
        members = [one for one in others if one.view.kind is not InstanceKind.DECODE]
        if not members:
            return None
        for one in members:
            if one.view.length_class is None and one.description and one.description.length_class is None:
                one.view.length_class = PrefillClass.LONG
                self._tell(one)
        longs = sum(one.view.length_class is PrefillClass.LONG for one in members)
        shorts = sum(one.view.length_class is PrefillClass.SHORT for one in members)
        return PrefillClass.SHORT if shorts < longs else PrefillClass.LONG

    # -- states ------------------------------------------------------------------------------------------------------

    def move(self, worker: Worker, state: WorkerState, reason: WorkerReason, now_s: float, detail: str = "") -> None:
        """Raises IllegalMoveError for a move that the table at the top does not have."""
        if state not in LEGAL[worker.state]:
            raise IllegalMoveError(f"worker {worker.number}: {worker.state.value} -> {state.value} is not allowed")
        worker.state, worker.reason, worker.since_s, worker.detail = state, reason, now_s, detail
        if worker.view.state is not _VIEW_STATES[state]:
            self.fleet.set_state(worker.view, _VIEW_STATES[state])
        self._tell(worker)

    def drain(self, worker: Worker, now_s: float, *, then_remove: bool = False) -> None:
        """It gets nothing new. One that has not started yet has nothing to finish, and goes if it was to go.

        Raises WorkerError, status 409, for one that is still starting and should stay.
        """
        if worker.state is WorkerState.STARTING:
            if not then_remove:
                raise WorkerError(f"worker {worker.number} is still starting", status=409)
            self.move(worker, WorkerState.DEAD, WorkerReason.REMOVED, now_s)
            return
        worker.leaves = worker.leaves or then_remove
        if worker.state is not WorkerState.DRAINING:
            self.move(worker, WorkerState.DRAINING, WorkerReason.OPERATOR, now_s)

    def undrain(self, worker: Worker, now_s: float) -> None:
        """Raises WorkerError, status 409, unless it drains and is healthy."""
        if worker.state is not WorkerState.DRAINING:
            raise WorkerError(f"worker {worker.number} is {worker.state.value}, not draining", status=409)
        worker.leaves = False
        self.move(worker, WorkerState.READY, WorkerReason.OPERATOR, now_s)

    def remove_drained(self, now_s: float) -> list[Worker]:
        """Those that were to leave and have finished everything are dead now."""
        gone = [one for one in self if one.leaves and one.state is WorkerState.DRAINING and one.book.is_idle()]
        for worker in gone:
            self.move(worker, WorkerState.DEAD, WorkerReason.REMOVED, now_s)
        return gone

    def _tell(self, worker: Worker) -> None:
        if self._on_change is not None:
            self._on_change(worker)

    def check_integrity(self) -> None:
        """Asserts that the views agree with the workers."""
        self.fleet.check_integrity()
        assert [one.view.index for one in self.workers] == list(range(len(self.workers)))
        for worker in self.workers:
            assert worker.view.state is _VIEW_STATES[worker.state]
