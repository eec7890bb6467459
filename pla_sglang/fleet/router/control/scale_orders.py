"""Carries out what a planner wants: has instances started by the actuator, and stopped when they are empty.

    ordered ─► starting ─► ready          an order is for one instance; its number is never used twice
        └─────────┴─► failed, expired     what there is of it is stopped

The actuator's list is followed: an instance that it has started, for whatever router, is a worker here too. One that is
to leave drains first (its requests end, or move), leaves the table, and is stopped only then. Of several routers before
one fleet the one with the actuator's lease scales it. While the actuator is away, what is there goes on serving.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from pla_sglang.common.checks import Choice, Range, check_fields, knob
from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.actuators import open_actuator
from pla_sglang.fleet.actuators.interface import Actuator, ActuatorError, StartedInstance
from pla_sglang.fleet.router.control.workers.discovery import Address, parse_url
from pla_sglang.fleet.router.control.workers.errors import WorkerError
from pla_sglang.fleet.router.control.workers.state_file import StateFile
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerState, WorkerTable
from pla_sglang.fleet.router.control.workers.tasks import Tasks
from pla_sglang.policy.common.fleet_policy import NO_PLANNER, PLANNER_NAMES
from pla_sglang.policy.common.plan_log import FleetCount, PlanLog, count_instances, describe_look
from pla_sglang.policy.common.start_times import StartTimes
from pla_sglang.policy.interface.decisions import FleetAction, ScaleTo
from pla_sglang.policy.interface.fleet import InstanceKind, Role
from pla_sglang.policy.runner import Refusal

logger = logging.getLogger(__name__)
FOLLOW_S = 0.5  # between two looks at the actuator's list
COUNT = Range(1)
LOG_S = 600.0  # that ``/pla/view`` shows
SHOWN_STARTS = 10  # in /pla/state
_LIVES = frozenset({"starting", "ready"})  # states of an actuator's instance
_LEAVES = frozenset({WorkerState.DRAINING, WorkerState.DEAD})
_KINDS = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.MIXED: "unified"}  # of instances whose role is fixed


@dataclasses.dataclass(frozen=True)
class ScalingKnobs:
    """The planner of a router, and what may be done for it. Raises ConfigError."""

    planner: str = knob(
        NO_PLANNER,
        f"--planner {{{','.join(PLANNER_NAMES)}}}",
        "plans how many instances there are; none: as many as there are",
        allowed=Choice(PLANNER_NAMES),
        heading="planner",
    )
    actuator: str = knob(
        "",
        "--actuator KIND:WHERE",
        "starts and stops instances; local:STATE_FILE of launch_cluster on this machine, kubernetes:NAMESPACE/FLEET",
    )
    instances_min: int = knob(1, "--instances-min", "that the planner leaves", allowed=COUNT)
    instances_max: int | None = knob(None, "--instances-max N", "needed with --planner", allowed=COUNT)
    interval_s: float = knob(
        60.0, "--plan-interval-s", "between two plans, in device time", allowed=Range(0, unit="s", above=True)
    )
    headroom: float = knob(
        1.0, "--plan-headroom", "the load that is planned for, over the forecast", allowed=Range(0, above=True)
    )
    dry_run: bool = knob(
        False, "--planner-dry-run", "nothing is started or stopped; /pla/state and metrics show what would have been"
    )
    start_timeout_s: float = knob(
        1200.0,
        "--start-timeout-s",
        "for an ordered instance to be ready; then it is stopped",
        allowed=Range(0, unit="s", above=True),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.planner == NO_PLANNER:
            return
        if self.instances_max is None:
            raise ConfigError("--planner needs --instances-max; allowed: the most instances that there may be")
        if self.instances_max < self.instances_min:
            text = f"--instances-max {self.instances_max} is below --instances-min {self.instances_min}"
            raise ConfigError(f"{text}; allowed: at least {self.instances_min}")
        if not self.actuator and not self.dry_run:
            text = "--planner needs --actuator, which starts and stops instances, or --planner-dry-run"
            raise ConfigError(f"{text}; allowed: --actuator local:STATE_FILE")
        if self.actuator:
            open_actuator(self.actuator)

    @property
    def plans(self) -> bool:
        return self.planner != NO_PLANNER


@dataclasses.dataclass(slots=True)
class Order:
    """An instance that was ordered and is not ready yet.

    Attributes:
        name: at the actuator.
        address: None: the actuator does not know it yet.
    """

    plan: int
    role: Role
    ordered_s: float
    name: str
    address: Address | None = None


class ScaleOrders:
    """The planner's hands. Nothing happens before ``start``. ``log``: what was planned, and what came of it.

    Args:
        first_plan: number of the first order, above those of any earlier life of the router: the time in ms, say.
        on_start: called with how a start has ended, ready, failed or expired, and the wall seconds of one that is
            ready.
    """

    def __init__(
        self,
        knobs: ScalingKnobs,
        table: WorkerTable,
        state_file: StateFile,
        tasks: Tasks,
        *,
        clock: Callable[[], float],
        first_plan: int,
        on_start: Callable[[str, float | None], None],
    ) -> None:
        self.knobs = knobs
        self.wanted: dict[Role, int] = {}  # by the last plan; MIXED: of all together
        self.log = PlanLog(LOG_S)
        self.started, self.stopped = Counter[str](), 0  # starts by how they ended; instances that have left
        self._table, self._state_file, self._tasks, self._clock = table, state_file, tasks, clock
        self._on_start = on_start
        self._actuator: Actuator | None = None
        self._times = StartTimes()
        for seconds in state_file.state.starts_s if knobs.plans else ():
            self._times.add(seconds)
        table.fleet.startup_s = self._times.estimate_s()
        self._orders: dict[int, Order] = {}  # by plan
        self._given_up: set[int] = set()  # plans whose instance is to be stopped, and was no worker yet
        self._unstopped: dict[str, str] = {}  # instances that could not be stopped, and why
        self._ordering = 0  # starts that the actuator has not answered yet
        self._listed: dict[Address, StartedInstance] = {}  # what the actuator has, when it was last asked
        self._last_plan = first_plan - 1
        self._leads = False
        self._away = ""  # why the actuator does not answer; empty: it does
        self._gpu_s, self._counted_s = 0.0, None if not knobs.plans else clock()

    def start(self) -> None:
        if self.knobs.plans and self.knobs.actuator and not self.knobs.dry_run:
            self._actuator = open_actuator(self.knobs.actuator)
            self._tasks.spawn(self._follow(self._actuator))

    async def close(self) -> None:
        """Instances go on; another router may take the lease."""
        if self._actuator is not None:
            await self._actuator.close()

    # -- what the planner wants --------------------------------------------------------------------------------------

    def scale(self, action: ScaleTo) -> Refusal | None:
        """Orders what is to start, and drains what is to leave. None: under way."""
        self.wanted[action.role] = action.count
        refusal = self._find_refusal(action)
        if refusal is not None:
            return refusal
        assert self._actuator is not None
        for _ in range(action.start):
            self._last_plan += 1
            self._ordering += 1
            self._tasks.spawn(self._start_one(self._actuator, action.role, self._last_plan))
        for view in action.drain:
            self._drain(self._table.of(view))
        if action.start or action.drain:
            logger.info("planner: %d to start, %d to leave (%s)", action.start, len(action.drain), action.reason.value)
        return None

    def _find_refusal(self, action: ScaleTo) -> Refusal | None:
        if self.knobs.dry_run:
            return Refusal.DRY_RUN
        if self._actuator is None:
            return Refusal.UNSUPPORTED
        if self._away:
            return Refusal.ACTUATOR_AWAY
        if not self._leads:
            return Refusal.NO_LEASE
        if action.start and (self._ordering or any(order.address is None for order in self._orders.values())):
            return Refusal.REPEATED
        strangers = [view for view in action.drain if self._table.of(view).address not in self._listed]
        if strangers:
            return Refusal.UNSUPPORTED
        least, most = self.knobs.instances_min, self.knobs.instances_max
        staying = sum(worker.state not in _LEAVES for worker in self._table) - len(action.drain)
        if (action.drain and staying < least) or (action.start and most is not None and staying + action.start > most):
            return Refusal.OUT_OF_BOUNDS
        return None

    def _drain(self, worker: Worker) -> None:
        if worker.state is not WorkerState.DEAD:
            self._table.drain(worker, self._clock(), then_remove=True)
        self._state_file.mark_changed(removed=worker.url)

    # -- starts ------------------------------------------------------------------------------------------------------

    async def _start_one(self, actuator: Actuator, role: Role, plan: int) -> None:
        ordered_s = self._clock()
        try:
            started = await actuator.start_instance(self._choose_kind(role), plan)
        except ActuatorError as error:
            self._end_start("failed", f"order {plan}: {error}", ordered_s)
            return
        finally:
            self._ordering -= 1
        order = Order(plan, role, ordered_s, started.name)
        self._note_address(order, started)
        if order.address is not None or not started.url:
            self._orders[plan] = order

    def _note_address(self, order: Order, started: StartedInstance) -> None:
        """It has one now, if it can be a worker."""
        worker = self._adopt(started, order.role) if started.url else None
        if worker is not None:
            order.address = worker.address
            self.on_worker_change(worker)  # it may be there already, and ready

    def _choose_kind(self, role: Role) -> str:
        """That of the instances which have the role now; stateless ones take any."""
        kinds = [worker.view.kind for worker in self._table if worker.description is not None]
        if InstanceKind.STATELESS in kinds:
            return InstanceKind.STATELESS.value
        return _KINDS.get(role, role.value)

    def _adopt(self, started: StartedInstance, role: Role | None = None) -> Worker | None:
        """Its worker, a new one where the router has none there. None: it cannot be one."""
        try:
            address = parse_url(started.url)
            worker = self._table.at(address)
            if worker is None:
                self._state_file.mark_changed(added=started.url)
                worker = self._table.add(address, self._clock())
        except WorkerError as error:
            logger.error("planner: %s cannot be a worker: %s", started.name, error)
            return None
        if role is not None and worker.description is None:
            worker.ordered_role = role
            self._table.fleet.set_role(worker.view, role, self._table.clock.device_s(self._clock()))
        return worker

    def on_worker_change(self, worker: Worker) -> None:
        """A start is over at the moment when its worker is ready: the plan may have it drain in the next one."""
        order = next((one for one in self._orders.values() if one.address == worker.address), None)
        if worker.is_ready() and order is not None:
            del self._orders[order.plan]
            self._note_ready(worker, order)

    def _note_ready(self, worker: Worker, order: Order) -> None:
        now_s, device_clock = self._clock(), self._table.clock
        age_s = now_s - order.ordered_s
        self._times.add(device_clock.device_s(age_s))
        self._table.fleet.startup_s = self._times.estimate_s()
        self._state_file.state.starts_s = self._times.to_list()
        self._state_file.mark_changed()
        worker.view.ready_s = device_clock.device_s(now_s)
        self._end_start("ready", f"{order.name} after {age_s:.1f} s", order.ordered_s)

    def _end_start(self, outcome: str, detail: str, ordered_s: float) -> None:
        now_s = self._clock()
        self.started[outcome] += 1
        self.log.note_start(ordered_s, now_s, outcome)
        self._on_start(outcome, now_s - ordered_s if outcome == "ready" else None)
        log = logger.info if outcome == "ready" else logger.error
        log("planner: a start is over: %s (%s)", outcome, detail)

    # -- the actuator's list -----------------------------------------------------------------------------------------

    async def _follow(self, actuator: Actuator) -> None:
        while True:
            try:
                self._leads = actuator.lease.acquire()
                asked = list(self._orders.values())
                rows = await actuator.list_instances()
                listed = {parse_url(one.url): one for one in rows if one.url}
            except (ActuatorError, WorkerError) as error:
                if not self._away:
                    logger.error("planner: nothing is started or stopped until the actuator answers: %s", error)
                self._away = str(error)
            else:
                if self._away:
                    logger.info("planner: the actuator answers again")
                self._away = ""
                coming = [one for one in rows if not one.url]
                self._follow_list(listed, coming, asked)
                for one in self._find_leftovers(coming) if self._leads else ():
                    await self._stop_one(actuator, one)
            await asyncio.sleep(FOLLOW_S)

    def _follow_list(
        self, listed: dict[Address, StartedInstance], coming: list[StartedInstance], asked: list[Order]
    ) -> None:
        """``coming``: those whose address is not known yet. ``asked``: the orders that there were before the list."""
        by_plan = {one.plan: one for one in (*coming, *listed.values()) if one.plan is not None}
        self._last_plan = max([self._last_plan, *by_plan])
        self._given_up &= by_plan.keys()
        for address in self._listed.keys() - listed.keys():
            self._forget_removal(self._listed[address])
        self._listed = listed
        for address, one in listed.items():
            removed = self._state_file.is_removed(one.url) or one.plan in self._given_up
            if one.plan is None or one.state not in _LIVES or removed:
                continue
            order = self._orders.get(one.plan)
            if order is not None and order.address != address:
                self._note_address(order, one)
            elif self._table.at(address) is None:
                self._adopt(one)
        now_s = self._clock()
        for order in asked:
            if order.plan in self._orders and self._judge_start(order, by_plan.get(order.plan), now_s):
                del self._orders[order.plan]

    def _forget_removal(self, gone: StartedInstance) -> None:
        """Nobody needs to remember that an instance was removed which a plan had started, and which is no more."""
        if gone.plan is not None and self._state_file.is_removed(gone.url):
            self._state_file.mark_changed(added=gone.url)

    def _judge_start(self, order: Order, one: StartedInstance | None, now_s: float) -> bool:
        """True if the start has come to nothing."""
        worker = None if order.address is None else self._table.at(order.address)
        age_s = now_s - order.ordered_s
        removed = worker is None and order.address is not None
        if removed or one is None or one.state not in _LIVES:
            self._end_start("failed", f"{order.name} has ended while it was starting, or was removed", order.ordered_s)
        elif age_s > self.knobs.start_timeout_s:
            self._end_start("expired", f"{order.name} is not ready after {age_s:.0f} s", order.ordered_s)
        else:
            return False
        self._given_up.add(order.plan)
        if worker is not None:
            self._drain(worker)
        return True

    def _find_leftovers(self, coming: list[StartedInstance]) -> list[StartedInstance]:
        """What has left the table by the planner's wish, what was given up before it could be in it, and what has ended
        by itself of what a plan had started."""
        gone = {address: one for address, one in self._listed.items() if self._table.at(address) is None}
        return [
            one
            for one in gone.values()
            if (one.state in _LIVES and (self._state_file.is_removed(one.url) or one.plan in self._given_up))
            or (one.state == "dead" and one.plan is not None)
        ] + [one for one in coming if one.plan in self._given_up]

    async def _stop_one(self, actuator: Actuator, one: StartedInstance) -> None:
        try:
            await actuator.stop_instance(one.name)
        except ActuatorError as error:
            if self._unstopped.get(one.name) != str(error):
                logger.error("planner: %s could not be stopped, which is tried again: %s", one.name, error)
            self._unstopped[one.name] = str(error)
            return
        self._unstopped.pop(one.name, None)
        self.stopped += one.state in _LIVES

    # -- what can be seen --------------------------------------------------------------------------------------------

    def count_gpus(self, now_s: float) -> float:
        """GPU-hours of all instances since the start of the planner, by wall time; to be called often. Those that are
        starting are counted as the first one that has said what it is."""
        if self._counted_s is not None:
            known = [worker.view.tensor_parallel for worker in self._table if worker.description is not None]
            like = known[0] if known else 1
            gpus = sum(worker.view.tensor_parallel if worker.description else like for worker in self._table)
            self._gpu_s += gpus * (now_s - self._counted_s)
            self._counted_s = now_s
        return self._gpu_s / 3600

    def note_tick(
        self, controllers: Sequence[object], actions: Sequence[FleetAction], before: FleetCount, now_s: float
    ) -> None:
        """As ``PlanLog.note_tick``."""
        if self.knobs.plans:
            self.log.note_tick(controllers, actions, before, now_s)

    def note_fleet(self, now_s: float) -> None:
        """For the log; to be called often."""
        if self.knobs.plans:
            self.log.note_fleet(count_instances(self._table.fleet), self.count_gpus(now_s), now_s)

    def describe_plan(self) -> str:
        """For the page of the fleet, in a few words."""
        counts = ", ".join(f"{count} {role.value}" for role, count in self.wanted.items())
        way = "dry run" if self.knobs.dry_run else "actuator away" if self._away else f"{len(self._orders)} starting"
        return f"{self.knobs.planner}: {counts or 'no plan yet'}; {way}"

    def to_dict(self, now_s: float) -> dict[str, Any] | None:
        """For /pla/state; None without a planner."""
        knobs = self.knobs
        if not knobs.plans:
            return None
        return {
            "planner": knobs.planner,
            "dry_run": knobs.dry_run,
            "bounds": [knobs.instances_min, knobs.instances_max],
            "wanted": {role.value: count for role, count in self.wanted.items()},
            "leads": self._leads,
            "lease_owner": "" if self._actuator is None else self._actuator.lease.owner,
            "actuator_error": self._away,
            "starting": {order.name: round(now_s - order.ordered_s, 3) for order in self._orders.values()},
            "starts": dict(self.started),
            "last_starts": [
                {
                    "ended_ago_s": round(now_s - one.ended_s, 3),
                    "took_s": round(one.ended_s - one.ordered_s, 3),
                    "outcome": one.outcome,
                }
                for one in list(self.log.starts)[-SHOWN_STARTS:]
            ],
            "load": None if self.log.last_plan is None else describe_look(self.log.last_plan.look),
            "stopped": self.stopped,
            "startup_s": self._table.fleet.startup_s,
            "gpu_hours": self.count_gpus(now_s),
        }
