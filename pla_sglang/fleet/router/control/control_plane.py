"""The control plane: puts the parts together, keeps the clock, and talks to relays. One event loop.

relays ──► on_message ──► RequestDispatcher (where to?) ──► PairRunner ──► policy
                     └──► RequestEvents (what became of it)
instances ──► InstanceMonitor (health, telemetry) ──► WorkerTable, LoadTracker ──► FleetView
operators ──► AdminRoutes
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.router.control.admin import AdminRoutes
from pla_sglang.fleet.router.control.booking import Booking
from pla_sglang.fleet.router.control.drains import Drains
from pla_sglang.fleet.router.control.fates import find_fates
from pla_sglang.fleet.router.control.gauges import gauges, state_of
from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.fleet.router.control.late_placement import LatePlacement
from pla_sglang.fleet.router.control.migration import Migration
from pla_sglang.fleet.router.control.observability.series import RouterSeries, Row
from pla_sglang.fleet.router.control.policy_setup import LivePolicy, RouterEffects
from pla_sglang.fleet.router.control.relay_ports import RelayPorts
from pla_sglang.fleet.router.control.request_dispatcher import RequestDispatcher
from pla_sglang.fleet.router.control.request_events import RequestEvents
from pla_sglang.fleet.router.control.requests.ledger import Ledger
from pla_sglang.fleet.router.control.requests.moves import MoveOrders
from pla_sglang.fleet.router.control.requests.prompts import Prompts, load_tokenizer
from pla_sglang.fleet.router.control.requests.running_requests import RunningRequests
from pla_sglang.fleet.router.control.scale_orders import ScaleOrders
from pla_sglang.fleet.router.control.silence import SilenceWatch
from pla_sglang.fleet.router.control.succession import Lease, Preparation, Succession
from pla_sglang.fleet.router.control.watch import FleetWatch, PlanRecorder, describe_fleet, note_move, record_worker
from pla_sglang.fleet.router.control.workers.abort_order import AbortOrder
from pla_sglang.fleet.router.control.workers.batching import BatchingOrders
from pla_sglang.fleet.router.control.workers.discovery import Description, parse_url
from pla_sglang.fleet.router.control.workers.health import Health
from pla_sglang.fleet.router.control.workers.monitor import InstanceMonitor
from pla_sglang.fleet.router.control.workers.peering import Peering
from pla_sglang.fleet.router.control.workers.state_file import StateFile
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerState, WorkerTable
from pla_sglang.fleet.router.control.workers.tasks import Tasks
from pla_sglang.fleet.router.control.workers.worker_file import WorkerFile
from pla_sglang.fleet.router.control.workers.worker_log import NO_WORKERS, LackLog, WorkerLog
from pla_sglang.fleet.router.control.workers.worker_service import WorkerService
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.fleet.router.wire.protocols import RelayPort
from pla_sglang.load.prefix_index import PrefixIndex
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.common.plan_log import count_instances
from pla_sglang.policy.interface.decisions import PrefillSample, SetLengthClass, SetRole
from pla_sglang.policy_packages import find_policy
from pla_sglang.profiles.load import load_profile

if TYPE_CHECKING:
    from pla_sglang.fleet.router.control.observability.tracing import OtlpTracing

logger = logging.getLogger(__name__)
SWEEP_S = 0.25
FILE_S = 1.0
Clock = Callable[[], float]


class ControlPlane:
    """Implements ``pla_sglang.fleet.router.wire.protocols.ControlPort``.

    Args:
        router_key: of this start of the router, by which stateless instances know it; empty: they take legs from
            anybody.
        prepared: None: nothing, and TLS without files of its own.
        lease: by which it leads.
        has_standby: as in ``Succession``.
        clock: monotonic seconds, the relays' clock.
    """

    def __init__(
        self,
        knobs: ControlKnobs,
        *,
        router_key: str = "",
        prepared: Preparation | None = None,
        lease: Lease = Lease(),  # noqa: B008
        has_standby: Callable[[], bool | None] = lambda: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.knobs, self._clock = knobs, clock
        self._life = secrets.randbits(62)  # differs from that of any earlier life, also of another router
        self._prepared = prepared or Preparation(knobs)
        self._tasks, self._client = Tasks(), self._prepared.client
        self._state_file = StateFile(knobs.memory_file)
        self._journal = WorkerLog(lambda worker, since_s: find_fates(worker, self.dispatcher.known_records(), since_s))
        self.series = RouterSeries(self._read_gauges, lambda: self.policy.running.lengths.sums)
        self.series.takeovers.inc(by=lease.epoch - 1)
        device_clock = DeviceClock()  # set when the first instance says what it is
        self.table = self._make_table(device_clock)
        self._lack = LackLog(self.table, knobs.pending_s)
        self.succession = Succession(lease, clock, self.table.can_serve, has_standby)
        self._watch = FleetWatch(self.table, self.series.worker_ttft, self.series.requests.take_recent)
        self._worker_file = None if knobs.worker_file is None else WorkerFile(knobs.worker_file, self.table)
        self._service = self._make_service() if knobs.worker_service else None
        self._relays = RelayPorts(knobs, self.table, lease.epoch, router_key=router_key)
        health = Health(self.table, knobs.health)
        self._monitor = self._make_monitor(health)
        self._peering = Peering(self.table, self._client, self.series.peer_lists.inc, router_key=router_key)
        self._batching = BatchingOrders(self.table, self._client)
        self.scaling = self._make_scaling()
        self._plans = PlanRecorder(self.scaling.log)
        prompts = Prompts(PrefixIndex(), tokenize_bytes=knobs.tokenize_bytes)
        booking = Booking(Ledger(), prompts, self.series, device_clock)
        self.migration = self._make_migration(booking)
        self.policy = self._make_policy(booking)
        self._peering.wanted_rows = self.policy.wanted_rows
        send, abort = self._relays.send_message, self._monitor.abort
        self.dispatcher = RequestDispatcher(knobs, health, self.policy, booking, send_message=send, order_abort=abort)
        self._events = RequestEvents(self.dispatcher, self._monitor, send_message=send)
        self._silence = SilenceWatch(self.dispatcher, send_message=send)
        self._late = LatePlacement(self.dispatcher, self.migration)
        self._drains = Drains(self.dispatcher, self.migration, self._client, clock=clock)
        self._routes = self._make_routes()
        self._handlers = self._message_handlers()

    def _make_table(self, device_clock: DeviceClock) -> WorkerTable:
        return WorkerTable(
            self.knobs.breaker,
            next_number=self._state_file.state.next_number,
            pools=find_policy(self.knobs.policy).pools,
            settle_s=self.knobs.settle_s,
            clock=device_clock,
            on_change=self._on_worker_change,
        )

    def _make_service(self) -> WorkerService:
        """Its client is an optional dependency, loaded where it is wanted. Raises ConfigError without it."""
        return WorkerService(self.knobs.worker_service, self.table, self._state_file, self._clock)

    def _make_monitor(self, health: Health) -> InstanceMonitor:
        return InstanceMonitor(
            health,
            self._client,
            clock=self._clock,
            poll_interval_s=self.knobs.poll_interval_s,
            on_report=self._on_report,
            on_description=self._on_description,
            on_aborted=self._on_aborted,
        )

    def _make_scaling(self) -> ScaleOrders:
        return ScaleOrders(
            self.knobs.scaling,
            self.table,
            self._state_file,
            self._tasks,
            clock=self._clock,
            first_plan=time.time_ns() // 1_000_000,
            on_start=self.series.note_start,
        )

    def _make_migration(self, booking: Booking) -> Migration:
        return Migration(
            booking,
            self._peering,
            self._client,
            send_message=self._relays.send_message,
            order_abort=self._monitor.abort,
            on_over=self._on_move_over,
            clock=self._clock,
        )

    def _make_policy(self, booking: Booking) -> LivePolicy:
        """Its moves are carried out where the operator wants it."""
        knobs, now = self.knobs.moves, self._clock
        orders = MoveOrders(
            knobs.rest_s,
            clock=now,
            device_clock=booking.clock,
            find_worker=self.table.of,
            records=booking.ledger.records,
            move_request=self.migration.move_request if self.knobs.migrates else None,
        )
        return LivePolicy(
            self.knobs,
            self.table.fleet,
            running=RunningRequests(knobs, self.table, orders, clock=now, device_clock=booking.clock),
            effects=RouterEffects(self.table.fleet, self._monitor.tell_class, orders, self.scaling),
            clock=booking.clock,
            is_connected=self._peering.is_connected,
            on_action=self._on_action,
        )

    def _make_routes(self) -> AdminRoutes:
        return AdminRoutes(
            self.dispatcher,
            self._state_file,
            self._worker_file,
            read_state=self.read_state,
            draw_fleet=self.draw_fleet,
            clock=self._clock,
        )

    # -- ControlPort -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises ConfigError if an address cannot be bound, a file cannot be read or written, or a profile or a package
        is missing."""
        knobs = self.knobs
        if knobs.profile != "auto":
            load_profile(knobs.profile)
        keep = self._state_file.state.next_number > 0
        self.policy.open_recording(keep=keep, clock_start_s=time.time() - self._clock())
        if knobs.trace_endpoint:
            self.dispatcher.tracing = load_tracing(knobs, self._prepared.scheme, self._clock)
        try:
            self._add_workers()
            if not self.table.workers and self._service is None:
                logger.warning(NO_WORKERS)
            self._monitor.start(knobs.telemetry)
            self.scaling.start()
            self._resume_workers()
        except ConfigError:
            await self._tasks.close()
            await self._client.close()
            raise
        self._tasks.spawn(self._drains.watch_endings())
        self._call_every(m.HEARTBEAT_INTERVAL_S, self._relays.send_heartbeat)
        self._call_every(SWEEP_S, self._sweep)
        if self._prepared.keys is not None:
            self.dispatcher.limits.set_limits(self._prepared.keys.keys.limits)
        self._call_every(FILE_S, self._follow_files)
        if self._worker_file is not None:
            follow = self._worker_file.reload_if_changed
            self._call_every(FILE_S, lambda: follow(self._clock()))
        if self._service is not None:
            self._tasks.spawn(self._service.follow())

    def _follow_files(self) -> None:
        """Certificates, and the limits of tenants."""
        self._prepared.tls.follow_files(time.time())
        keys = self._prepared.keys
        if keys is not None and keys.follow_file():
            self.dispatcher.limits.set_limits(keys.keys.limits)

    async def stop(self) -> None:
        await self._tasks.close()
        await self._client.close()
        self._monitor.close()
        await self.scaling.close()
        self.policy.close_recording()
        self._save_state()
        if self.dispatcher.tracing is not None:
            await self.dispatcher.tracing.stop()

    def attach_relay(self, relay: int, port: RelayPort) -> None:
        self._relays.attach_relay(relay, port)

    def detach_relay(self, relay: int) -> None:
        self._relays.detach_relay(relay)
        self._events.on_relay_lost(relay, self._clock())

    def on_message(self, message: m.FromRelay) -> None:
        self._handlers[type(message)](message, self._clock())

    def _message_handlers(self) -> dict[type[Any], Callable[[Any, float], None]]:
        """By type of message: called with the message and the time."""
        return {
            m.Ask: self._on_ask,
            m.Progress: self._on_progress,
            m.Dropped: self.migration.on_dropped,
            m.Completed: self._events.on_completed,
            m.Failure: self._events.on_failure,
            m.RelayReport: lambda report, _: self.series.on_relay(report),
            m.AdminAsk: lambda ask, _: self._relays.send_message(ask.relay, self._routes.answer_request(ask)),
            m.Hello: self._on_hello,
        }

    def _on_hello(self, hello: m.Hello, now_s: float) -> None:
        if hello.protocol == m.PROTOCOL:
            if hello.epoch > self.succession.lease.epoch:
                self.succession.end_deposed(hello.epoch)
                return
            self._events.on_hello(hello, now_s)
            self.succession.on_hello(hello.relay)
            return
        logger.error("relay %d speaks version %d, not %d; it is not served", hello.relay, hello.protocol, m.PROTOCOL)
        self._relays.detach_relay(hello.relay)

    def _on_progress(self, progress: m.Progress, now_s: float) -> None:
        if not self.migration.on_progress(progress, now_s):
            self._events.on_progress(progress, now_s)
            self._late.on_progress(progress, now_s)
        record = self.dispatcher.ledger.records.get(progress.rid) if progress.gap_s is not None else None
        if record is not None and record.present.number == progress.attempt:
            note_move(record, now_s, history=self._watch.history, policy=self.policy)

    def _on_ask(self, ask: m.Ask, now_s: float) -> None:
        self.migration.on_ask(ask)
        self.dispatcher.on_ask(ask, now_s)
        self.series.decision_s.observe(self._clock() - now_s)

    # -- for operators -----------------------------------------------------------------------------------------------

    def read_state(self) -> dict[str, Any]:
        """For /pla/state."""
        recorder = self.policy.recorder
        return {
            **state_of(self.dispatcher, self.migration, self._clock()),
            "telemetry": {
                "address": self.knobs.telemetry,
                "polls": self._monitor.polls,
                "published": self._monitor.published.received,
                "published_malformed": self._monitor.published.malformed,
                "reports_of_nobody": self._monitor.reports_of_nobody,
                "reports_lost": sum(worker.load.lost_reports for worker in self.table.workers),
            },
            "worker_service": None if self._service is None else self._service.to_dict(),
            "batching": self._batching.to_dict(),
            "place_decode": self._late.to_dict(),
            "planner": self.scaling.to_dict(self._clock()),
            "profile": self.policy.profile,
            "control": self.succession.to_dict(),
            "recorded_decisions": None if recorder is None else recorder.decisions,
            "record_error": None if recorder is None else recorder.error,
        }

    def draw_fleet(self, since_s: float) -> dict[str, Any]:
        """For /pla/view: the last minutes, of samples those after ``since_s``."""
        now_s = self._clock()
        document = self._watch.history.to_document(now_s, since_s)
        plan = self.scaling.log.to_document() if self.scaling.knobs.plans else None
        return {
            **document,
            "life": str(self._life),
            "clock_start_s": time.time() - now_s,
            "targets": {"ttft_s": self.knobs.slo_ttft_s, "tpot_s": self.knobs.slo_tpot_s},
            "head": describe_fleet(self.dispatcher, self.scaling),
            "plan": plan,
        }

    # -- workers -----------------------------------------------------------------------------------------------------

    def _add_workers(self) -> None:
        """The saved ones first, with their numbers, then the command line's and the file's."""
        now_s, saved = self._clock(), self._state_file.state
        for entry in saved.workers:
            worker = self.table.add(parse_url(entry.url), now_s, number=entry.number)
            worker.expected_identity, worker.wants_drain = entry.identity, entry.draining
            worker.leaves = entry.leaves
        for url in self.knobs.workers:
            if self.table.at(parse_url(url)) is None and url not in saved.removed:
                self.table.add(parse_url(url), now_s)
        if self._worker_file is not None:
            self._worker_file.reload(now_s)

    def _resume_workers(self) -> None:
        """Behind another control plane: instances that it had as ready need not be asked first."""
        for saved in self._state_file.state.workers if self.succession.lease.lost_s is not None else ():
            said, worker = self._prepared.described.get(saved.url), self.table.by_number[saved.number]
            if saved.ready and said is not None and said.identity == saved.identity:
                self._monitor.resume_worker(worker, said, saved)

    def _on_action(self, kind: str, reason: str) -> None:
        self.series.actions.inc(kind, reason)
        if kind in (SetRole.__name__, SetLengthClass.__name__):
            self._state_file.mark_changed()

    def _on_description(self, description: Description) -> None:
        """The first instance says what the policy's predictor starts from, and which tokenizer there is."""
        if self.policy.runner is None:
            runner = self.policy.make(description, instances=len(list(self.table)))
            self.table.split = self.policy.roles
            self.dispatcher.on_policy_made()
            for number, controller in enumerate(runner.policy.controllers):
                interval_s = self.policy.clock.wall_s(controller.interval_s)
                self._call_every(interval_s, functools.partial(self._tick_controller, number))
        if self.dispatcher.prompts.encode is None and not find_policy(self.knobs.policy).length_blind:
            self.dispatcher.prompts.encode = load_tokenizer(self.knobs.tokenizer or description.tokenizer)

    def _on_worker_change(self, worker: Worker) -> None:
        """Something that relays or policies see has changed."""
        now_s = self._clock()
        self.series.worker_changes.inc(worker.state.value, worker.reason.value)
        self._journal.note_change(worker)
        if worker.state is WorkerState.READY and worker.wants_drain:
            worker.wants_drain = False
            self.table.drain(worker, now_s, then_remove=worker.leaves)
            return
        self.scaling.on_worker_change(worker)
        if self.policy.runner is not None:
            record_worker(worker, now_s, self.policy)
            self.policy.runner.record_views(now_s)
        self._state_file.mark_changed()
        self._relays.publish_table()
        self._peering.update_peers()
        self._batching.tell_workers()
        self._late.on_fleet_change()
        if worker.state is WorkerState.DEAD:
            self._events.on_worker_dead(worker, now_s)
        self._drains.empty_drained()
        self.dispatcher.dispatch_pending(now_s)
        self.succession.note_progress()

    def _on_move_over(self, now_s: float) -> None:
        """The next request may leave an instance that drains, and there may be room where one has left."""
        self._drains.empty_drained()
        self.dispatcher.dispatch_pending(now_s)

    def _on_report(self, worker: Worker, sample: PrefillSample | None) -> None:
        """A load is known anew: the policy learns from it, and a request that waits may go now."""
        now_s = self._clock()
        self.dispatcher.index.show_cache(worker.view)
        self.policy.learn_steps(worker)
        self.policy.on_report(worker.view, sample, now_s)
        self.dispatcher.dispatch_pending(now_s)

    def _on_aborted(self, order: AbortOrder, outcome: str) -> None:
        self.series.aborts.inc(outcome)
        self.dispatcher.ledger.confirm_abort(order, self._clock())

    # -- timers ------------------------------------------------------------------------------------------------------

    def _call_every(self, interval_s: float, call: Callable[[], None]) -> None:
        async def repeat() -> None:
            while True:
                await asyncio.sleep(interval_s)
                call()

        self._tasks.spawn(repeat())

    def _sweep(self) -> None:
        now_s = self._clock()
        self._silence.look(now_s)
        self.migration.sweep_moves()
        self._drains.empty_drained()
        self.table.remove_drained(now_s)
        self.scaling.note_fleet(now_s)
        self._plans.record_new(self.policy, now_s)
        self._journal.note_waits(self.table, now_s)
        for worker in self.table:
            worker.load.age_ttft_ratio(now_s)
        self._lack.note_queue(len(self.dispatcher.queue), self.dispatcher.count_unserved(), now_s)
        self.dispatcher.check_waiting(now_s)
        self.dispatcher.dispatch_pending(now_s)
        self._watch.observe_fleet(
            self.policy.runner,
            now_s,
            open_requests=self.dispatcher.ledger.live,
            waiting=len(self.dispatcher.queue),
            lengths=self.policy.running.lengths,
        )
        self._save_state()

    def _tick_controller(self, number: int) -> None:
        runner, now_s = self.policy.runner, self._clock()
        assert runner is not None
        before = count_instances(self.table.fleet)
        actions = runner.tick(number, now_s)
        self.scaling.note_tick(runner.policy.controllers, actions, before, now_s)
        self._batching.order_batching(self.policy.batching)
        self.dispatcher.dispatch_pending(now_s)

    def _read_gauges(self) -> Iterator[Row]:
        yield from self.succession.gauges()
        yield from gauges(self.dispatcher, self.scaling, self._clock())

    def _save_state(self) -> None:
        self._state_file.save_changes(self.table.next_number, (worker.to_saved() for worker in self.table))


def load_tracing(knobs: ControlKnobs, scheme: str, clock: Callable[[], float]) -> OtlpTracing:
    """OpenTelemetry is an optional dependency, loaded where spans are wanted. Raises ConfigError without it."""
    try:
        from pla_sglang.fleet.router.control.observability.tracing import OtlpTracing
    except ImportError as error:
        wanted = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-grpc"
        raise ConfigError(f"--enable-trace needs OpenTelemetry ({error}); install it: pip install {wanted}") from None
    return OtlpTracing(knobs.trace_endpoint, policy=knobs.policy, scheme=scheme, clock=clock)
