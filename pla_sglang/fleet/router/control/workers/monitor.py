"""Watches the instances: asks what they are, checks that they are well, takes their reports or the loads that they
publish, polls those that send neither, tells them their pool, and drops requests there. Peers, batching and moves are
told to instances by ``peering``, ``batching`` and ``migration``.

Each worker has at most one check and one poll under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import zmq

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.router.control.workers.abort_order import AbortOrder
from pla_sglang.fleet.router.control.workers.discovery import CLASSES, Description, polled_load
from pla_sglang.fleet.router.control.workers.errors import ControlError, NoResponseError, UnreachableError, WorkerError
from pla_sglang.fleet.router.control.workers.health import Health, ProbeResult
from pla_sglang.fleet.router.control.workers.instance_client import InstanceClient
from pla_sglang.fleet.router.control.workers.published_load import PublishedLoads
from pla_sglang.fleet.router.control.workers.state_file import SavedWorker
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerReason, WorkerState
from pla_sglang.load.instance_load import InstanceLoad, prefill_sample
from pla_sglang.load.report import Report
from pla_sglang.load.sockets import Puller
from pla_sglang.load.tracker import ReportEffect
from pla_sglang.policy.interface.decisions import PrefillSample
from pla_sglang.policy.interface.fleet import InstanceView, Role
from pla_sglang.policy.interface.prefill import PrefillClass

logger = logging.getLogger(__name__)
CHECK_TICK_S = 0.1
QUIET_S = 2.0  # an instance that reports is polled after such a silence; a long pass keeps it from reporting
ABORT_RETRY_S = 0.5
UNTOLD = "does not know its class"
CLASS_RETRY_S = (0.5, 30.0)  # first and longest wait until an instance is told its class again
# An abort that overtakes its request on the way to an instance is lost, so it is said again before it counts.
ABORT_AGAIN_S = 0.3
DRAIN_TICK_S = 0.02  # ZMQ's descriptor tells of new messages only once
Clock = Callable[[], float]


class InstanceMonitor:
    """Checks, polls and orders of all workers. It does nothing before ``start``.

    Args:
        poll_interval_s: of instances without fresh reports.
        on_report: called with a worker whose load is known anew, and the prefill passes that its report tells of.
        on_description: called with what a worker says of itself for the first time, before the table has it. It raises
            ConfigError where such an instance cannot be served.
        on_aborted: called when an instance has confirmed an abort, or is dead; the second argument says which.
    """

    def __init__(
        self,
        health: Health,
        client: InstanceClient,
        *,
        clock: Clock,
        poll_interval_s: float,
        on_report: Callable[[Worker, PrefillSample | None], None],
        on_description: Callable[[Description], None],
        on_aborted: Callable[[AbortOrder, str], None],
    ) -> None:
        self.published = PublishedLoads()
        self.polls = self.reports_of_nobody = 0
        self._health, self._table, self._client, self._clock = health, health.table, client, clock
        self._poll_interval_s = poll_interval_s
        self._on_report, self._on_description, self._on_aborted = on_report, on_description, on_aborted
        self._checked_s: dict[int, float] = {}
        self._verified_s: dict[int, float] = {}
        self._polled_s: dict[int, float] = {}
        self._doubted: set[int] = set()  # workers that have answered 500 since their last verification began
        self._busy: set[tuple[str, int]] = set()
        self._classes: dict[int, PrefillClass | None] = {}  # as the workers were told
        self._refused_aborts: set[tuple[int, int]] = set()  # numbers of workers, and the statuses that were told
        self._puller: Puller | None = None

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self, telemetry: str) -> None:
        """Raises ConfigError where the address of the telemetry cannot be bound."""
        if telemetry:
            try:
                self._puller = Puller(telemetry)
            except zmq.ZMQError as error:
                raise ConfigError(f"--telemetry {telemetry}: {error}") from None
            self._client.spawn(self._drain())
        self._client.spawn(self._take_published())
        self._client.spawn(self._watch())

    def close(self) -> None:
        self.published.close()
        if self._puller is not None:
            self._puller.close()

    async def _watch(self) -> None:
        while True:
            now_s = self._clock()
            self.published.follow(self._table)
            for worker in list(self._table):
                if self._due(self._checked_s, worker, self._health.check_interval_s(worker), now_s):
                    worker.breaker.tick(now_s)
                    if self._health.needs_check(worker, now_s):
                        self._once(self._check, worker)
                self._verify_doubted(worker, now_s)
                is_pushed = bool(worker.load.reports) or self.published.is_heard(worker.number, now_s)
                quiet_s = QUIET_S if is_pushed else 0.0
                fresh = worker.load.is_fresh(now_s, max(quiet_s, 2 * self._poll_interval_s))
                known = worker.state is not WorkerState.STARTING
                if known and not fresh and self._due(self._polled_s, worker, self._poll_interval_s, now_s):
                    self._once(self._poll, worker)
            await asyncio.sleep(min(CHECK_TICK_S, self._poll_interval_s))

    def _due(self, last_s: dict[int, float], worker: Worker, interval_s: float, now_s: float) -> bool:
        if now_s - last_s.get(worker.number, float("-inf")) < interval_s:
            return False
        last_s[worker.number] = now_s
        return True

    def _once(self, work: Callable[[Worker], Coroutine[Any, Any, None]], worker: Worker) -> None:
        """One of a kind at a time for a worker."""
        key = (work.__name__, worker.number)
        if key in self._busy:
            return
        self._busy.add(key)

        async def guarded() -> None:
            try:
                await work(worker)
            finally:
                self._busy.discard(key)

        self._client.spawn(guarded())

    # -- checks ------------------------------------------------------------------------------------------------------

    def check_soon(self, worker: Worker) -> None:
        """A request has failed there: look now, not at the next turn."""
        self._once(self._check, worker)

    def verify_soon(self, worker: Worker) -> None:
        """It has answered a request with 500, which may be the client's own mistake: its health decides. Checked at
        once, but not more often than health is checked anyway, so that such requests cost little."""
        self._doubted.add(worker.number)
        self._verify_doubted(worker, self._clock())

    def _verify_doubted(self, worker: Worker, now_s: float) -> None:
        number = worker.number
        if number not in self._doubted or ("_verify", number) in self._busy:
            return
        if self._due(self._verified_s, worker, self._health.knobs.interval_s, now_s):
            self._doubted.discard(number)
            self._once(self._verify, worker)

    async def _verify(self, worker: Worker) -> None:
        """SGLang's /health generates a token: a scheduler that hangs does not answer."""
        began_s = self._clock()
        probe, detail = await _find_result(self._client.health(worker.address))
        if probe is ProbeResult.OK:
            worker.heard_s = self._clock()
        self._health.on_verified(worker, probe, self._clock(), detail, began_s=began_s)

    async def _check(self, worker: Worker) -> None:
        """One that serves is asked what it is: its scheduler must answer, and no token is generated for it. Before one
        is let in (again), SGLang's /health generates a token there."""
        probe, detail = await _find_result(self._describe(worker))
        if probe is ProbeResult.OK and worker.state in (WorkerState.STARTING, WorkerState.SUSPECT):
            probe, detail = await _find_result(self._client.health(worker.address))
        self._health.on_probe(worker, probe, self._clock(), detail)

    async def _describe(self, worker: Worker) -> None:
        """Asks what it is. Another process than before at the same address is another worker."""
        said = await self._client.describe(worker.address, with_model=worker.description is None)
        if worker.state is WorkerState.DEAD:
            return
        worker.heard_s = self._clock()
        same = self._table.same_process(worker, said.identity)
        if same is not None:  # under another name of its machine, or behind a router: this one
            raise WorkerError(f"the process that answers there is worker {same.number} already ({same.url})", 409)
        worker.legs, worker.fits = said.legs or worker.legs, said.fits
        expected = worker.expected_identity if worker.description is None else worker.description.identity
        if expected and said.identity != expected:
            self.restarted(worker)
        elif worker.description is None:
            self._enter_description(worker, said)

    def _enter_description(self, worker: Worker, said: Description) -> None:
        """Raises WorkerError."""
        try:
            self._on_description(said)
        except ConfigError as error:  # it cannot serve like that, and its detail says why
            logger.error("worker %s: %s", worker.view.name, error)
            raise WorkerError(str(error)) from None
        self._table.describe(worker, said, self._clock())
        self._tell_classes()

    def resume_worker(self, worker: Worker, said: Description, saved: SavedWorker) -> None:
        """It was ready just now, for the former control plane, and the same process has said to this one what it is: it
        gets requests at once, and is checked like all others."""
        if saved.role:
            worker.ordered_role = Role(saved.role)
        length_class = PrefillClass(saved.length_class) if saved.length_class else None
        with contextlib.suppress(WorkerError):
            self._enter_description(worker, dataclasses.replace(said, length_class=length_class))
            worker.view.role_epoch = saved.role_epoch
            self._health.on_probe(worker, ProbeResult.OK, self._clock())

    def restarted(self, worker: Worker) -> None:
        """Another process answers at the worker's address."""
        if worker.state is not WorkerState.DEAD:
            worker.load.restart()
            self._health.replace_worker(worker, WorkerReason.RESTARTED, self._clock())

    # -- load --------------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Takes reports as they come."""
        puller = self._puller
        assert puller is not None
        loop, wake = asyncio.get_running_loop(), asyncio.Event()
        descriptor = int(puller.socket.getsockopt(zmq.FD))
        loop.add_reader(descriptor, wake.set)
        try:
            while True:
                for report in puller.drain():
                    self.take_report(report)
                wake.clear()
                # Not wait_for: where both fall together, it takes a cancellation for a wake-up, and this never ends.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DRAIN_TICK_S):
                        await wake.wait()
        finally:
            loop.remove_reader(descriptor)

    def take_report(self, report: Report) -> None:
        """A server with several data-parallel ranks is one worker here. A report of another process than before, of
        another start time, tells that the instance was restarted."""
        worker, now_s = self._find_reporter(report.instance), self._clock()
        if worker is None:
            self.reports_of_nobody += 1
            return
        effect = worker.load.on_report(report, now_s)
        if effect is ReportEffect.RESTARTED:
            self.restarted(worker)
            return
        if effect is ReportEffect.OUTDATED:
            return
        worker.heard_s = now_s
        worker.legs = report.legs
        if report.requests is not None:
            worker.rows[report.dp_rank] = now_s, report.requests
        if report.role in CLASSES and worker.description is not None and self._table.pools:
            worker.detail = f"says {report.role}" if CLASSES[report.role] is not worker.view.length_class else ""
        starts = worker.state is WorkerState.STARTING
        self._on_report(worker, None if starts else prefill_sample(worker.view, report, self._table.clock))

    def _find_reporter(self, key: str) -> Worker | None:
        """None as well where several sign like that: who took one for the other would see restarts without end."""
        named = [one for one in self._table if one.description is not None and one.description.report_key == key]
        if len(named) > 1:
            for worker in named:
                worker.detail = f"{len(named)} instances report as {key}; give each a name (--pla-instance)"
            return None
        starting = (one for one in self._table if one.state is WorkerState.STARTING and one.view.name == key)
        return named[0] if named else next(starting, None)

    async def _take_published(self) -> None:
        """Takes the loads that stock engines publish, as if they had been polled."""
        while True:
            now_s = self._clock()
            for number, response in self.published.drain(now_s):
                worker = self._table.by_number[number]
                self._take_load(worker, polled_load(response, worker.view.kind))
            await asyncio.sleep(DRAIN_TICK_S if self.published.is_following() else CHECK_TICK_S)

    async def _poll(self, worker: Worker) -> None:
        try:
            load = await self._client.loads(worker)
        except ControlError:
            return  # health checks judge; a load that is not known is corrected by what was sent
        self.polls += 1
        self._take_load(worker, load)

    def _take_load(self, worker: Worker, load: InstanceLoad) -> None:
        if worker.state is not WorkerState.DEAD:
            worker.load.on_load(load, self._clock())
            self._on_report(worker, None)

    # -- orders ------------------------------------------------------------------------------------------------------

    def _tell_classes(self) -> None:
        """Whose class is not the one it was told; a newcomer changes that of an instance that was alone."""
        for worker in self._table:
            known = worker.number in self._classes and self._classes[worker.number] is worker.view.length_class
            if not known:
                self.tell_class(worker.view)

    def tell_class(self, view: InstanceView) -> None:
        """The policy has moved an instance to another pool, or it is new; it is told, which may fail."""
        worker = self._table.of(view)
        said = worker.description
        if said is None or not said.has_role or not self._table.pools:
            return
        self._classes[worker.number] = worker.view.length_class
        self._once(self._post_class, worker)

    async def _post_class(self, worker: Worker) -> None:
        """Until it knows the class that it has then. Whatever comes is served there all the same meanwhile, so the
        pools stay as the policy sees them."""
        wait_s = CLASS_RETRY_S[0]
        while worker.state is not WorkerState.DEAD:
            length_class = worker.view.length_class
            try:
                await self._client.set_class(worker, length_class)
            except ControlError as error:
                worker.detail = f"{UNTOLD}: {error}"
                logger.warning("worker %s: %s", worker.view.name, worker.detail)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, CLASS_RETRY_S[1])
                continue
            if worker.detail.startswith(UNTOLD):
                worker.detail = ""
            if worker.view.length_class is length_class:
                return

    def abort(self, order: AbortOrder) -> None:
        """Drop a request at an instance, and insist: what runs for nobody keeps memory from others."""
        self._client.spawn(self._post_abort(order))

    async def _post_abort(self, order: AbortOrder) -> None:
        while True:
            worker = self._table.by_number.get(order.worker)
            if worker is None or worker.state is WorkerState.DEAD:
                self._on_aborted(order, "dead")
                return
            try:
                for wait_s in (0.0, ABORT_AGAIN_S):
                    await asyncio.sleep(wait_s)
                    for rid in order.rids:
                        await self._client.abort(worker, rid)
            except ControlError as error:
                if isinstance(error, NoResponseError) and error.status:  # else it is ill or gone, as checks will tell
                    self._note_refused_abort(worker, error)
                self.check_soon(worker)
                await asyncio.sleep(ABORT_RETRY_S)
                continue
            self._on_aborted(order, "confirmed")
            return

    def _note_refused_abort(self, worker: Worker, error: NoResponseError) -> None:
        """One line for each instance and status: aborts are repeated, and there may be many."""
        if error.status in (401, 403):
            worker.detail = f"refuses aborts with {error.status}; its --admin-api-key is our --worker-admin-key"
        if (worker.number, error.status) not in self._refused_aborts:
            self._refused_aborts.add((worker.number, error.status))
            logger.warning("worker %d (%s) refuses aborts: %s", worker.number, worker.url, error)


async def _find_result(asked: Coroutine[Any, Any, None]) -> tuple[ProbeResult, str]:
    """How a check has gone, and why it has not gone well."""
    try:
        await asked
    except UnreachableError as error:
        return ProbeResult.REFUSED, str(error)
    except ControlError as error:
        return ProbeResult.FAILED, str(error)
    return ProbeResult.OK, ""
