"""The instances that a router knows, and the state of each: one enum, one transition function, always a reason.

    STARTING ─► READY ◄─► SUSPECT          SUSPECT: unhealthy or failing; gets nothing new until it answers again
        │         │ ▲        │
        │         ▼ │        ▼
        │       DRAINING ◄───┘             DRAINING: an operator's wish; finishes what it has
        ▼         ▼
       DEAD ◄─────┴── (from any)           DEAD: gone or replaced; a process that comes back is a new worker

Where DRAINING is over and the instance has nothing left, all that is shown says DRAINED.

For policies SUSPECT and DRAINING are alike: the instance is not in the lists of the ``FleetView``. A worker's number is
never reused, also over restarts of the router (``state_file.py``); its view's index is its place in the ``FleetView``.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from pla_sglang.common.errors import IllegalMoveError
from pla_sglang.fleet.router.control.workers.breaker import Breaker, BreakerKnobs
from pla_sglang.fleet.router.control.workers.discovery import Address, Description
from pla_sglang.fleet.router.control.workers.errors import WorkerError
from pla_sglang.fleet.router.control.workers.served_names import ServedNames
from pla_sglang.fleet.router.control.workers.state_file import SavedWorker
from pla_sglang.fleet.router.http.bodies import WorkerRow
from pla_sglang.fleet.viewer.history import TtftSums
from pla_sglang.load.legs import LegLoad
from pla_sglang.load.report import Report, RequestRow
from pla_sglang.load.step_times import FittedModels
from pla_sglang.load.tracker import LoadTracker
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.common.joining import join_pools, join_role
from pla_sglang.policy.interface.fleet import FleetView, InstanceKind, InstanceState, InstanceView, Role
from pla_sglang.policy.interface.prefill import PrefillClass


class WorkerState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    DEAD = "dead"


DRAINED = "drained"  # shown of one that is DRAINING and has nothing left
SHOWN_STATES = (*(state.value for state in WorkerState if state is not WorkerState.DEAD), DRAINED)


class WorkerReason(enum.Enum):
    """Why a worker is in its state."""

    ADDED = "added"
    ANSWERS = "answers"  # it described itself and is healthy
    HEALTH = "health"  # health checks were missed
    BREAKER = "breaker"  # requests failed there
    RECOVERED = "recovered"
    OPERATOR = "operator"  # drained, or a drain taken back
    ENDING = "ending"  # it was told to end (SIGTERM), and finishes what it has
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
# Of those whose role is fixed; a stateless one has the role that it is given.
_ROLES = {InstanceKind.UNIFIED: Role.MIXED, InstanceKind.PREFILL: Role.PREFILL, InstanceKind.DECODE: Role.DECODE}


@dataclasses.dataclass(eq=False)
class Worker:
    """One process behind an address. ``view`` and ``load`` are what policies see of it.

    Attributes:
        misses, refused: missed health checks in a row, and refused connections in a row.
        expected_identity: of the process that had its number before the router was restarted; empty: unknown.
        leaves: to be removed once it is drained.
        connected_s: number of a decode instance -> when the first request that it got the KV of from here had its first
            token.
        peers: of a stateless instance, what it says of those that it can get KV cache from, by their numbers; None: it
            has not been told of any yet, nor of its own address.
        legs: of a stateless instance, from its last report, or from its last answer where it sends none.
        fits: its step times, from its last answer; its load reports have newer ones, if it sends any.
        ordered_role: which a planner wants it to have; None: as ``join_role`` says.
        wants_drain: to be drained once it is ready: an operator ordered it before a restart of the router.
        heard_s: when its scheduler last said something: in a load report, or in an answer that it has a part in.
        unasked_s: when nobody last expected it to say anything.
        verified: the last check of its health that a request had given cause for: when it began, and what it found.
        rows: the last rows of running requests of each rank that sends any, and when they came.
    """

    number: int
    address: Address
    view: InstanceView
    load: LoadTracker
    breaker: Breaker
    since_s: float
    state: WorkerState = WorkerState.STARTING
    reason: WorkerReason = WorkerReason.ADDED
    description: Description | None = None
    expected_identity: str = ""
    misses: int = 0
    refused: int = 0
    leaves: bool = False
    ordered_role: Role | None = None
    wants_drain: bool = False
    detail: str = ""
    connected_s: dict[int, float] = dataclasses.field(default_factory=dict)
    peers: dict[int, str] | None = None
    legs: LegLoad | None = None
    fits: FittedModels | None = None
    heard_s: float = 0.0
    unasked_s: float = 0.0
    verified: tuple[float, bool] | None = None
    rows: dict[int, tuple[float, Sequence[RequestRow]]] = dataclasses.field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.address.url

    def is_ready(self) -> bool:
        return self.state is WorkerState.READY

    def is_drained(self) -> bool:
        return self.state is WorkerState.DRAINING and self.load.is_idle()

    @property
    def shown_state(self) -> str:
        """For operators."""
        return DRAINED if self.is_drained() else self.state.value

    def silent_since_s(self) -> float:
        return max(self.heard_s, self.unasked_s)

    def may_come_back(self) -> bool:
        """True if another process at its address would be served, if this one is gone."""
        drained = self.state is WorkerState.DRAINING and self.reason is not WorkerReason.ENDING
        return not (self.leaves or drained or (self.wants_drain and self.expected_identity))

    def takes_rest(self) -> bool:
        """True if it can go on with an answer that another instance has begun."""
        whole = self.view.kind is InstanceKind.UNIFIED or self.view.kind is InstanceKind.STATELESS
        return whole and self.description is not None and self.description.hops

    def to_saved(self) -> SavedWorker:
        """What outlives a restart of the router."""
        identity = self.expected_identity if self.description is None else self.description.identity
        draining = self.wants_drain or self.state is WorkerState.DRAINING
        saved = SavedWorker(self.number, self.url, identity, draining, self.leaves, self.is_ready())
        if self.description is not None and not self.view.fixed_role:
            saved.role, saved.role_epoch = self.view.role.value, self.view.role_epoch
        if self.view.length_class is not None:
            saved.length_class = self.view.length_class.value
        return saved

    def to_row(self, now_s: float, ttft: TtftSums, step_times: str | None = None) -> WorkerRow:
        """For operators. ``ttft``: of the requests that were prefilled there; ``step_times``: see ``WorkerRow``."""
        view, said, legs = self.view, self.description, self.legs
        return WorkerRow(
            number=self.number,
            url=self.url,
            kind=view.kind.value,
            role=view.role.value,
            length_class=None if view.length_class is None else view.length_class.value,
            state=self.shown_state,
            reason=self.reason.value,
            detail=self.detail,
            since_s=round(now_s - self.since_s, 3),
            drained=self.is_drained(),
            full=view.full_until_s > now_s,
            breaker={"state": self.breaker.state.value, "reason": self.breaker.reason.value},
            open_requests=self.load.open_requests(),
            report_age_s=None if self.load.reported_s is None else round(now_s - self.load.reported_s, 3),
            queued_prefills=view.queued_prefills,
            queued_tokens=view.queued_tokens,
            running=view.running,
            waiting_decodes=view.waiting_decodes,
            kv_used_tokens=view.kv_used_tokens,
            kv_capacity_tokens=view.kv_capacity_tokens if said is not None else None,
            model=None if said is None else said.model,
            version=None if said is None else said.version,
            peers=self.peers,
            role_epoch=view.role_epoch,
            first_tokens=ttft.count,
            ttft_s=round(ttft.measured_s, 3),
            predicted_ttft_s=round(ttft.predicted_s, 3),
            ttft_error_s=round(ttft.error_s, 3),
            legs=None if legs is None else {"sending": legs.sending, "receiving": legs.receiving},
            leg_kv_tokens=None if legs is None else legs.kv_tokens,
            quarantined_requests=None if legs is None else legs.quarantined,
            step_times=step_times,
            ranks={rank: _describe_report(report) for rank, report in self.load.reports.items()},
        )

    def errors(self) -> Counter[str]:
        """Requests that ended badly there, by kind, as its reports say."""
        return sum((Counter(report.errors) for report in self.load.reports.values()), Counter())


def _describe_report(report: Report) -> dict[str, Any]:
    """A rank's load report without what the row has in other fields."""
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
        next_number: numbers below this one were given to workers that have gone.
        pools: whether prefill instances are split into a short and a long pool.
        clock: in whose device seconds the views are.
        on_change: told after every change that policies or relays can see.

    Attributes:
        split: roles of the fleet at the start, as the policy wants them; empty until there is a policy.
        models: whether models generate, as workers have said, former ones included; an empty set: none has said it.
        names: of models and adapters, as workers have said.
        least_context_tokens: the shortest context that any worker has said; infinite: none has.
        restricted: who may have to be left out of dispatches: whose breaker is not closed, or who was full. Whoever
            finds that it is over removes them.
    """

    def __init__(
        self,
        breaker: BreakerKnobs,
        *,
        next_number: int = 0,
        pools: bool = False,
        settle_s: float = 0.05,
        clock: DeviceClock | None = None,
        on_change: Callable[[Worker], None] = lambda worker: None,
    ) -> None:
        self.fleet = FleetView()
        self.workers: list[Worker] = []
        self.by_number: dict[int, Worker] = {}
        self.restricted: set[Worker] = set()
        self.models: set[bool] = set()
        self.names = ServedNames()
        self.least_context_tokens = math.inf
        self.pools = pools
        self.split: Sequence[Role] = ()
        self.next_number = next_number
        self._breaker = breaker
        self.clock = clock or DeviceClock()
        self._settle_s = settle_s
        self._on_change = on_change

    def __iter__(self) -> Iterator[Worker]:
        """Those that are not dead."""
        return (worker for worker in self.workers if worker.state is not WorkerState.DEAD)

    def of(self, view: InstanceView) -> Worker:
        return self.workers[view.index]

    def at(self, address: Address) -> Worker | None:
        return next((worker for worker in self if worker.address == address), None)

    def same_process(self, worker: Worker, identity: str) -> Worker | None:
        """Another worker that is the process with this ``identity``."""
        others = (other for other in self if other is not worker and other.description is not None)
        return next((other for other in others if other.description.identity == identity), None)  # type: ignore[union-attr]

    def find(self, name: str) -> Worker:
        """By number or URL. Raises WorkerError, status 404."""
        for worker in self:
            if name in (str(worker.number), worker.url):
                return worker
        raise WorkerError(f"no worker {name!r}", status=404)

    def can_serve(self, excluded: Container[InstanceView] = ()) -> bool:
        """True if a request could be sent somewhere now, other than to those ``excluded``."""
        kinds = {view.kind for view in self.fleet.ready if view not in excluded}
        return bool(kinds & {InstanceKind.UNIFIED, InstanceKind.STATELESS}) or kinds >= {
            InstanceKind.PREFILL,
            InstanceKind.DECODE,
        }

    # -- coming and going --------------------------------------------------------------------------------------------

    def add(self, address: Address, now_s: float, *, number: int | None = None) -> Worker:
        """A new worker, not described yet. ``number``: the one that it had before a restart of the router.

        Raises WorkerError, status 409, for an address or a number that is taken.
        """
        if self.at(address) is not None:
            raise WorkerError(f"worker {address.url} is there already", status=409)
        number = self.next_number if number is None else number
        if number in self.by_number:
            raise WorkerError(f"worker number {number} is taken", status=409)
        self.next_number = max(self.next_number, number + 1)
        index = len(self.workers)
        name = f"{address.host}:{address.port}"
        view = InstanceView(index, name, InstanceKind.UNIFIED, Role.MIXED, InstanceState.STARTING)
        load = LoadTracker(view, settle_s=self._settle_s, clock=self.clock)
        worker = Worker(number, address, view, load, Breaker(self._breaker), now_s, heard_s=now_s)
        self.workers.append(worker)
        self.by_number[number] = worker
        self.fleet.add(view)
        self._on_change(worker)
        return worker

    def describe(self, worker: Worker, description: Description, now_s: float) -> None:
        """Enters its description. Raises IllegalMoveError where it has one: another process is another worker."""
        if worker.description is not None:
            raise IllegalMoveError(f"worker {worker.number} was described before")
        worker.description = description
        self.names.add(description)
        if description.generates is not None:
            self.models.add(description.generates)
        if description.most_input_tokens is not None:
            self.least_context_tokens = min(self.least_context_tokens, description.most_input_tokens)
        view = worker.view
        view.kind, view.kv_capacity_tokens = description.kind, description.kv_capacity_tokens
        view.chunk_max_tokens = description.chunk_max_tokens
        view.tensor_parallel, view.profile = description.tensor_parallel, ""  # one predictor curve for all
        role = _ROLES.get(description.kind)
        view.fixed_role = role is not None
        if role is None:
            others = [other for other in self if other is not worker and other.description is not None]
            role = worker.ordered_role or join_role(self.split, (other.view.role for other in others))
        self.fleet.set_role(view, role, self.clock.device_s(now_s))
        if self.pools and role is not Role.DECODE:
            view.length_class = description.length_class or self._smaller_pool(worker)

    def _smaller_pool(self, newcomer: Worker) -> PrefillClass | None:
        """See ``join_pools``. A lone instance takes both classes, until a second one comes: then the long ones."""
        others = [worker for worker in self if worker is not newcomer and worker.description is not None]
        members = [worker for worker in others if worker.view.role is not Role.DECODE]
        if not members:
            return None
        for member in members:
            if member.view.length_class is None and member.description and member.description.length_class is None:
                member.view.length_class = PrefillClass.LONG
                self._on_change(member)
        return join_pools((member.view.length_class for member in members), 1)[0]

    # -- states ------------------------------------------------------------------------------------------------------

    def move(self, worker: Worker, state: WorkerState, reason: WorkerReason, now_s: float, detail: str = "") -> None:
        """Raises IllegalMoveError for a move that the table at the top does not have."""
        if state not in LEGAL[worker.state]:
            raise IllegalMoveError(f"worker {worker.number}: {worker.state.value} -> {state.value} is not allowed")
        worker.state, worker.reason, worker.since_s, worker.detail = state, reason, now_s, detail
        if worker.view.state is not _VIEW_STATES[state]:
            self.fleet.set_state(worker.view, _VIEW_STATES[state])
        self._on_change(worker)

    def drain(self, worker: Worker, now_s: float, *, then_remove: bool = False) -> None:
        """It gets no new requests. ``then_remove``: it is removed when it has finished, at once while it starts.

        One that starts and was known before a restart of the router is drained as soon as it has answered.

        Raises WorkerError, status 409, for any other worker that is still starting, unless it is to be removed.
        """
        if worker.state is WorkerState.STARTING:
            if not then_remove:
                if not worker.expected_identity:
                    raise WorkerError(f"worker {worker.number} is still starting", status=409)
                worker.wants_drain = True
                self._on_change(worker)
                return
            self.move(worker, WorkerState.DEAD, WorkerReason.REMOVED, now_s)
            return
        worker.leaves = worker.leaves or then_remove
        if worker.state is not WorkerState.DRAINING:
            self.move(worker, WorkerState.DRAINING, WorkerReason.OPERATOR, now_s)
        elif worker.reason is not WorkerReason.OPERATOR:  # it ends, and now it is not to come back either
            worker.reason = WorkerReason.OPERATOR
            self._on_change(worker)

    def undrain(self, worker: Worker, now_s: float) -> None:
        """Raises WorkerError, status 409, unless it drains, or is about to, is healthy and was not told to end."""
        if worker.state is WorkerState.STARTING and worker.wants_drain:
            worker.wants_drain = worker.leaves = False
            self._on_change(worker)
            return
        if worker.state is not WorkerState.DRAINING:
            raise WorkerError(f"worker {worker.number} is {worker.state.value}, not draining", status=409)
        if worker.reason is WorkerReason.ENDING:
            raise WorkerError(f"worker {worker.number} was told to end (SIGTERM)", status=409)
        worker.leaves = False
        self.move(worker, WorkerState.READY, WorkerReason.OPERATOR, now_s)

    def remove_drained(self, now_s: float) -> list[Worker]:
        """Workers that are to be removed and have finished everything become DEAD. Returns them."""
        drained = [worker for worker in self if worker.leaves and worker.is_drained()]
        for worker in drained:
            self.move(worker, WorkerState.DEAD, WorkerReason.REMOVED, now_s)
        return drained

    def check_integrity(self) -> None:
        """Asserts that the views agree with the workers."""
        self.fleet.check_integrity()
        assert [worker.view.index for worker in self.workers] == list(range(len(self.workers)))
        for worker in self.workers:
            assert worker.view.state is _VIEW_STATES[worker.state]
