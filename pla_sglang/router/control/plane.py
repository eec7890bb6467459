"""The control plane: puts the parts together, keeps the clock, and talks to relays. One event loop.

relays ──► hear ──► Desk (requests) ──► PolicyDriver ──► policy
instances ──► Monitor (health, telemetry) ──► WorkerTable, LoadBook ──► FleetView
operators ──► Routes
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from pla_sglang.errors import ConfigError
from pla_sglang.policy.arrow.curve import profile_curve
from pla_sglang.policy.arrow.predictor import TtftPredictor
from pla_sglang.policy.registry import Setup, build
from pla_sglang.recording.file import RecordWriter
from pla_sglang.recording.setup import header_of, steps_of
from pla_sglang.router import messages as m
from pla_sglang.router.control import memory, worker_file
from pla_sglang.router.control.admin import Routes
from pla_sglang.router.control.adoption import on_hello
from pla_sglang.router.control.desk import Desk
from pla_sglang.router.control.discovery import Address, parse_url
from pla_sglang.router.control.driver import LENGTH_BLIND, PolicyDriver
from pla_sglang.router.control.entries import AbortOrder
from pla_sglang.router.control.gauges import gauges, state_of
from pla_sglang.router.control.health import Health
from pla_sglang.router.control.instances import Instances
from pla_sglang.router.control.intake import Heard
from pla_sglang.router.control.knobs import ControlKnobs
from pla_sglang.router.control.monitor import Monitor, Tasks, Told
from pla_sglang.router.control.prompts import load_tokenizer
from pla_sglang.router.control.recorder import Recorder, open_record
from pla_sglang.router.control.series import Series
from pla_sglang.router.control.spans import Tracing, load_tracing
from pla_sglang.router.control.workers import Worker, WorkerState, WorkerTable
from pla_sglang.router.plane import RelayPort

logger = logging.getLogger(__name__)
SWEEP_S = 0.25
FILE_S = 1.0


class Plane:
    """Implements ``pla_sglang.router.plane.ControlPlane``.

    Args:
        clock: monotonic seconds, the relays' clock.
    """

    def __init__(self, knobs: ControlKnobs, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.knobs = knobs
        self.epoch = time.time_ns()  # another one than any earlier life's
        self.recorder: Recorder | None = None
        self._record: RecordWriter | None = None
        self._tracing: Tracing | None = None
        self.profile = ""
        self._clock = clock
        self._relays: dict[int, RelayPort] = {}
        self._version = 0
        self._tasks = Tasks()
        self._monitor: Monitor | None = None
        self._memory = memory.Memory() if knobs.memory_file is None else memory.load(knobs.memory_file)
        self._memory_dirty = self._memory_fails = False
        self._listed: dict[Address, bool] = {}  # what the worker file said last
        self._file_stamp: tuple[int, int] | None = None
        self._own_predictor = False  # it is not the policy's, so it learns here
        self.series = Series(lambda: gauges(self.desk, self._clock()))
        self.table = WorkerTable(
            knobs.breaker, pools=knobs.policy == "pla", settle_s=knobs.settle_s, on_change=self._changed
        )
        health = Health(self.table, knobs.health)
        self.desk = Desk(
            *(knobs, self.table, health, self.series),
            tell=self._tell,
            abort=self._abort,
            check_soon=self._check_soon,
        )
        self._routes = Routes(self, clock)
        self._told = self._ears()

    # -- ControlPlane ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises ConfigError where an address cannot be bound, a file cannot be read or written, a profile or a package
        is missing."""
        if self.knobs.profile != "auto":
            steps_of(self.knobs.profile, self.knobs.time_scale)
        if self.knobs.record is not None:
            self._record = open_record(self.knobs.record, keep=self._memory.next_number > 0)
        if self.knobs.trace_endpoint:
            self.desk.tracer = self._tracing = load_tracing(self.knobs, self._clock)
        keys = {"api_key": self.knobs.worker_api_key, "admin_key": self.knobs.worker_admin_key}
        instances = Instances(timeout_s=self.knobs.health.timeout_s, **keys)
        self._monitor = Monitor(
            *(self.table, self.desk.health, instances, self._clock),
            Told(self._heard, self._described, self._aborted),
            poll_interval_s=self.knobs.poll_interval_s,
        )
        try:
            self._add_workers()
            self._monitor.start(self.knobs.telemetry)
        except ConfigError:
            await instances.close()
            raise
        self._tasks.spawn(self._every(m.BEAT_INTERVAL_S, self._beat))
        self._tasks.spawn(self._every(SWEEP_S, self._sweep))
        if self.knobs.worker_file is not None:
            self._tasks.spawn(self._every(FILE_S, self._look_at_file))

    async def stop(self) -> None:
        await self._tasks.close()
        if self._monitor is not None:
            await self._monitor.stop()
        if self.recorder is not None:
            self.recorder.close()
        elif self._record is not None:
            self._record.close()
        self._remember()
        if self._tracing is not None:
            await self._tracing.stop()

    def attach(self, relay: int, port: RelayPort) -> None:
        self._relays[relay] = port
        port.tell(self._table_message())

    def forget(self, relay: int) -> None:
        self._relays.pop(relay, None)
        self.desk.forget_relay(relay, self._clock())

    def hear(self, message: m.FromRelay) -> None:
        self._told[type(message)](message, self._clock())

    def _ears(self) -> dict[type[Any], Callable[[Any, float], None]]:
        """By message: who is told of it, and of the time."""
        desk = self.desk
        return {
            m.Ask: self._asked,
            m.Stage: desk.on_stage,
            m.Ended: desk.on_ended,
            m.Failure: desk.on_failure,
            m.RelayReport: lambda message, _: self.series.on_relay(message),
            m.AdminAsk: lambda message, _: self._tell(message.relay, self._routes.answer(message)),
            m.Hello: self._greeted,
        }

    def _greeted(self, hello: m.Hello, now_s: float) -> None:
        if hello.protocol == m.PROTOCOL:
            on_hello(self.desk, hello, now_s)
            return
        logger.error("relay %d speaks version %d, not %d; it is not served", hello.relay, hello.protocol, m.PROTOCOL)
        self._relays.pop(hello.relay, None)

    def _asked(self, ask: m.Ask, now_s: float) -> None:
        self.desk.on_ask(ask, now_s)
        self.series.decision_s.observe(self._clock() - now_s)

    # -- for operators -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        told = state_of(self.desk, self._clock())
        monitor = self._monitor
        told["telemetry"] = {
            "address": self.knobs.telemetry,
            "polls": 0 if monitor is None else monitor.polls,
            "reports_of_nobody": 0 if monitor is None else monitor.intake.unknown,
            "reports_lost": 0 if monitor is None else monitor.intake.lost,
        }
        told["profile"] = self.profile
        told["epoch"] = self.epoch
        told["recorded_decisions"] = None if self.recorder is None else self.recorder.decisions
        told["record_error"] = None if self.recorder is None else self.recorder.error
        return told

    def reload(self) -> dict[str, Any]:
        """Reads the worker file again. Raises ConfigError; nothing changes then."""
        if self.knobs.worker_file is None:
            raise ConfigError("there is no worker file (--worker-file)")
        after = worker_file.read(self.knobs.worker_file)
        plan = worker_file.plan(self._listed, after, [worker.address for worker in self.table])
        now_s = self._clock()
        for address in plan.add:
            self.table.add(address, now_s)
        for address in (*plan.remove, *plan.drain):
            worker = self.table.at(address)
            if worker is not None and address not in plan.remove and worker.state is WorkerState.STARTING:
                worker.wants_drain = True
            elif worker is not None:
                self.table.drain(worker, now_s, then_remove=address in plan.remove)
        for address in plan.undrain:
            worker = self.table.at(address)
            if worker is not None:
                worker.wants_drain = False
                if worker.state is WorkerState.DRAINING:
                    self.table.undrain(worker, now_s)
        self._listed = after
        logger.info("worker file: %d added, %d removed", len(plan.add), len(plan.remove))
        return {"added": [one.url for one in plan.add], "removed": [one.url for one in plan.remove]}

    def wish(self, *, removed: str | None = None) -> None:
        if removed is not None and removed not in self._memory.removed:
            self._memory.removed.append(removed)
        self._memory_dirty = True

    # -- workers -----------------------------------------------------------------------------------------------------

    def _add_workers(self) -> None:
        """Those remembered first, with their numbers, then the command line's and the file's."""
        now_s, known = self._clock(), self._memory
        self.table.reserve_numbers(known.next_number)
        for one in known.workers:
            worker = self.table.add(parse_url(one.url), now_s, number=one.number)
            worker.expected_identity, worker.wants_drain = one.identity, one.draining
            worker.leaves = one.leaves
        for url in self.knobs.workers:
            if self.table.at(parse_url(url)) is None and url not in known.removed:
                self.table.add(parse_url(url), now_s)
        if self.knobs.worker_file is not None:
            self._file_stamp = self._stamp()
            self.reload()

    def _described(self, worker: Worker) -> None:
        """The first instance says what the policy's predictor starts from, and which tokenizer there is."""
        said = worker.description
        assert said is not None
        if self.desk.driver is None:
            self._make_policy(*self.knobs.profile_for(said), said.kv_capacity_tokens)
        if self.desk.prompts.encode is None and self.knobs.policy not in LENGTH_BLIND:
            self.desk.prompts.encode = load_tokenizer(self.knobs.tokenizer or said.tokenizer)

    def _make_policy(self, profile: str, time_scale: float, kv_capacity_tokens: int) -> None:
        knobs = self.knobs
        setup = Setup(
            steps=steps_of(profile, time_scale),
            kv_capacity_tokens=kv_capacity_tokens,
            ttft_slo_s=knobs.slo_ttft_s,
            tpot_slo_s=knobs.slo_tpot_s,
            instances=max(2, len(list(self.table))),
            seed=knobs.seed,
            boundary_tokens=knobs.boundary_tokens,
            pressure_interval_s=knobs.pressure_interval_s,
            pressure_cool_down_s=knobs.pressure_cool_down_s,
            pressure_hysteresis=knobs.pressure_hysteresis,
        )
        self.profile = f"{profile} x {time_scale:g}"
        if self._record is not None:
            header = header_of(knobs.policy, profile, time_scale, setup)
            self.recorder = Recorder(self._record, header, self.table.fleet)
        policy = build(knobs.policy, setup)
        own = getattr(policy.dispatcher, "predictor", None)
        self.desk.predictor = own if isinstance(own, TtftPredictor) else TtftPredictor({"": profile_curve(setup.steps)})
        self._own_predictor = not isinstance(own, TtftPredictor)
        self.desk.driver = PolicyDriver(
            *(policy, self.table.fleet, self._set_class), recorder=self.recorder, on_action=self.series.actions.inc
        )
        for number, interval_s in enumerate(self.desk.driver.intervals_s()):
            self._tasks.spawn(self._every(interval_s, lambda number=number: self._tick(number)))  # type: ignore[misc]

    def _changed(self, worker: Worker) -> None:
        """Something that relays or policies see has changed."""
        now_s = self._clock()
        self.series.moves.inc(worker.state.value, worker.reason.value)
        if worker.state is WorkerState.READY and worker.wants_drain:
            worker.wants_drain = False
            self.table.drain(worker, now_s, then_remove=worker.leaves)
            return
        if self.desk.driver is not None:
            self.desk.driver.listed(now_s)
        self._version += 1
        self._memory_dirty = True
        message = self._table_message()
        for port in self._relays.values():
            port.tell(message)
        if worker.state is WorkerState.DEAD:
            self.desk.on_worker_dead(worker, now_s)
        self.desk.pump(now_s)

    def _set_class(self, view: Any, length_class: Any) -> None:
        assert self._monitor is not None
        self._monitor.set_class(view, length_class)

    def _check_soon(self, worker: Worker) -> None:
        if self._monitor is not None:
            self._monitor.check_soon(worker)

    def _abort(self, order: AbortOrder) -> None:
        if self._monitor is not None:
            self._monitor.abort(order)

    def _aborted(self, order: AbortOrder, outcome: str) -> None:
        self.series.aborts.inc(outcome)
        self.desk.aborted(order, self._clock())

    def _heard(self, heard: Heard) -> None:
        """A report has come: the policy learns from it, and a request that waits may go now."""
        now_s, driver = self._clock(), self.desk.driver
        if driver is not None:
            interval_s = heard.worker.view.token_interval_s
            if interval_s is not None:
                driver.interval(heard.worker.view, interval_s, now_s)
            if heard.sample is not None:
                driver.prefilled(heard.sample, now_s)
                if self._own_predictor and self.desk.predictor is not None:
                    self.desk.predictor.on_prefill(heard.sample)
        self.desk.pump(now_s)

    # -- timers ------------------------------------------------------------------------------------------------------

    async def _every(self, interval_s: float, call: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(interval_s)
            call()

    def _beat(self) -> None:
        beat = m.Beat(self.epoch, self._clock())
        for port in self._relays.values():
            port.tell(beat)

    def _sweep(self) -> None:
        now_s = self._clock()
        self.table.remove_drained(now_s)
        self.desk.age_ratios(now_s)
        self.desk.sweep(now_s)
        self.desk.pump(now_s)
        self._remember()

    def _tick(self, number: int) -> None:
        assert self.desk.driver is not None
        now_s = self._clock()
        self.desk.driver.tick(number, now_s)
        self.desk.pump(now_s)

    def _look_at_file(self) -> None:
        stamp = self._stamp()
        if stamp == self._file_stamp:
            return
        self._file_stamp = stamp
        try:
            self.reload()
        except ConfigError as error:
            logger.error("the worker file is left as it was: %s", error)

    def _stamp(self) -> tuple[int, int] | None:
        assert self.knobs.worker_file is not None
        try:
            found = self.knobs.worker_file.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size

    def _remember(self) -> None:
        if self.knobs.memory_file is None or not self._memory_dirty:
            return
        self._memory.next_number = self.table.next_number
        self._memory.workers = [worker.remembered() for worker in self.table]
        try:
            memory.save(self.knobs.memory_file, self._memory)
        except OSError as error:  # a full disk, say: tried again at the next sweep, which has more to do
            if not self._memory_fails:
                logger.error("the memory file cannot be written; a restart would mix up workers: %s", error)
        else:
            self._memory_dirty = False
        self._memory_fails = self._memory_dirty

    # -- relays ------------------------------------------------------------------------------------------------------

    def _tell(self, relay: int, message: m.FromControl) -> None:
        port = self._relays.get(relay)
        if port is not None:
            port.tell(message)

    def _table_message(self) -> m.Table:
        workers = tuple(
            m.Worker(
                worker.number,
                worker.view.name,
                worker.address.host,
                worker.address.port,
                worker.view.kind.value,
                listed=worker.is_ready(),
                api_key=self.knobs.worker_api_key,
                admin_key=self.knobs.worker_admin_key,
            )
            for worker in self.table
        )
        blind = self.knobs.policy in LENGTH_BLIND
        prompts = m.Prompts.ESTIMATE if blind else m.Prompts.BODY
        share = self.knobs.trace_share if self.knobs.trace_endpoint else None
        return m.Table(self.epoch, self._version, workers, self.table.can_serve(), prompts, share)
