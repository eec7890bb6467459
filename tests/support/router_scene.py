"""A control plane with fake instances and a fake relay, for tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from fake_sglang import FakeSglang

from pla_sglang.fleet.router.control.control_plane import ControlPlane
from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.fleet.router.control.succession import Preparation
from pla_sglang.fleet.router.control.workers.discovery import Description, parse_url
from pla_sglang.fleet.router.control.workers.health import HealthKnobs
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerReason, WorkerState
from pla_sglang.fleet.router.tls import TlsContext, WorkerTls
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.load.report import Report
from pla_sglang.policy.interface.fleet import InstanceKind
from support.serving import wait_until

QUICK = HealthKnobs(interval_s=0.05, timeout_s=2.0, fresh_s=0.2, misses=2, refused=2)


class FakeRelay:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[m.FromControl] = []

    def on_message(self, message: m.FromControl) -> None:
        self.told.append(message)

    def last(self, kind: type[Any]) -> Any:
        return next(one for one in reversed(self.told) if isinstance(one, kind))


def count_moves(plane: ControlPlane) -> int:
    """Moves of running requests that are under way."""
    return sum(plane.migration.count_leaving(worker) for worker in plane.table)


class Scene:
    """A plane with its fakes, and a relay."""

    def __init__(self, plane: ControlPlane, instances: list[FakeSglang]) -> None:
        self.plane = plane
        self.instances = instances
        self.relay = FakeRelay()
        self._number = 0
        plane.attach_relay(0, self.relay)

    async def until(self, done: Callable[[], Any], limit_s: float = 20.0) -> None:
        await wait_until(done, patience_s=limit_s)

    async def ready(self, count: int) -> None:
        await self.until(lambda: len(self.plane.table.fleet.ready) == count)

    def ask(self, rid: str, body: object = None, *, ago_s: float = 0.0, **fields: Any) -> m.Assign | m.Refuse | None:
        """The answer, if there is one at once. ``ago_s``: how long ago the request arrived."""
        data = msgspec.json.encode(body or {"messages": [{"role": "user", "content": rid * 20}]})
        told = len(self.relay.told)
        values = {"input_tokens": 50, "body": data} | fields
        endpoint, relay = values.pop("endpoint", m.Endpoint.CHAT), values.pop("relay", 0)
        self.plane.on_message(m.Ask(rid, relay, endpoint, True, time.monotonic() - ago_s, len(data), **values))
        answers = [one for one in self.relay.told[told:] if isinstance(one, (m.Assign, m.Refuse))]
        return answers[0] if answers else None

    def assign(self, rid: str, body: object = None, **fields: Any) -> m.Assign:
        """As ``ask``, of a request that is assigned at once."""
        answer = self.ask(rid, body, **fields)
        assert isinstance(answer, m.Assign)
        return answer

    def start(self, rid: str, *milestones: m.Milestone) -> Worker:
        """A request that is assigned at once and gets so far. Its instance, of two that which decodes."""
        assign = self.assign(rid)
        self.reach(rid, *milestones)
        return self.plane.table.by_number[assign.decode]

    def be_refused(self, rid: str, body: object = None, **fields: Any) -> m.Refuse:
        """As ``ask``, of a request that is refused at once."""
        answer = self.ask(rid, body, **fields)
        assert isinstance(answer, m.Refuse)
        return answer

    def ask_again(
        self,
        rid: str,
        attempt: int,
        cause: m.Cause = m.Cause.LOST,
        *,
        tokens: int = 0,
        over: dict[str, Any] | None = None,
        **fields: Any,
    ) -> m.Assign | m.Refuse | None:
        """The attempt is over, and its client has ``tokens`` of the answer. ``over``: further fields of it; ``fields``:
        of the Ask. The answer, if there is one at once."""
        told = {"shown": tokens > 0, "delivered_tokens": tokens} | (over or {})
        return self.ask(rid, over=m.Over(attempt, cause, time.monotonic(), **told), **fields)

    def reach(self, rid: str, *milestones: m.Milestone, attempt: int = 1, **fields: Any) -> None:
        """``fields``: of each ``Progress``."""
        for milestone in milestones:
            self.plane.on_message(m.Progress(rid, milestone, time.monotonic(), attempt=attempt, **fields))

    def ended(self, rid: str, outcome: m.Outcome = m.Outcome.OK, **fields: Any) -> None:
        self.plane.on_message(m.Completed(rid, outcome, 200, time.monotonic(), **({"output_tokens": 5} | fields)))

    async def connected(self) -> None:
        """KV cache can go from each to each."""
        ready = self.plane.table.fleet.ready
        pairs = [(a, b) for a in ready for b in ready if a is not b]
        await self.until(lambda: all(self.plane._peering.is_connected(a, b) for a, b in pairs))

    def open_at(self) -> list[int]:
        """How many requests the load tracker of each instance has."""
        return [worker.load.open_requests() for worker in self.plane.table.workers]

    def describe_planner(self) -> dict[str, Any]:
        state: dict[str, Any] = self.admin("GET", "/pla/state")[1]["planner"]
        return state

    def admin(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        self._number += 1
        data = b"" if body is None else msgspec.json.encode(body)
        self.plane.on_message(m.AdminAsk(self._number, 0, method, path, data))
        answer = self.relay.last(m.AdminResponse)
        assert answer.number == self._number
        parsed = msgspec.json.decode(answer.body) if answer.content_type == "application/json" else answer.body.decode()
        return answer.status, parsed

    async def at_rest(self) -> None:
        """Once all requests have ended, nothing is left of them."""
        await self.until(lambda: not self.plane.dispatcher.ledger.records)
        self.plane.migration.sweep_moves()
        assert count_moves(self.plane) == 0
        self.assert_at_rest()

    def assert_at_rest(self) -> None:
        audit = self.plane.dispatcher.ledger.audit(time.monotonic())
        assert audit.balanced, audit.problems
        assert (self.plane.dispatcher.ledger.records, self.plane.dispatcher.ledger.rooms) == ({}, {})
        assert all(worker.load.open_requests() == 0 for worker in self.plane.table)
        self.plane.table.check_integrity()


def enter_worker(
    plane: ControlPlane, number: int, kind: InstanceKind, now_s: float, *, instances: int, **said: Any
) -> Worker:
    """An instance that is ready without having been called. ``instances``: of all; ``said``: of its description."""
    worker = plane.table.add(parse_url(f"http://127.0.0.1:{number + 1}"), now_s)
    description = Description(
        *(kind, str(number), worker.view.name, 100_000, 1, 1, "m", "t", "v"), bootstrap_port=1, **said
    )
    if plane.policy.runner is None:
        plane.policy.make(description, instances)
        plane.table.split = plane.policy.roles
        plane.dispatcher.on_policy_made()
    plane.table.describe(worker, description, now_s)
    plane.table.move(worker, WorkerState.READY, WorkerReason.ANSWERS, now_s)
    return worker


def hear_report(plane: ControlPlane, report: Report) -> None:
    plane._monitor.take_report(report)


@asynccontextmanager
async def beginning_scene(*instances: FakeSglang, **knobs: Any) -> AsyncIterator[Scene]:
    """A plane that has just begun. ``instances`` need not have started; they stop with it."""
    plane = ControlPlane(ControlKnobs(**{"health": QUICK} | knobs))
    await plane.start()
    try:
        yield Scene(plane, list(instances))
    finally:
        await plane.stop()
        for one in instances:
            await one.stop()


@asynccontextmanager
async def scene(
    modes: Sequence[str | FakeSglang],
    *,
    has_role: bool = False,
    hops: bool = False,
    batches: bool = False,
    worker_tls: WorkerTls | None = None,
    **knobs: Any,
) -> AsyncIterator[Scene]:
    """Instances of these modes, or made already, behind one plane, all ready. ``hops``: of the stateless ones."""
    instances = [
        one if isinstance(one, FakeSglang) else FakeSglang(one, has_role=has_role, batches=batches) for one in modes
    ]
    for one in instances:
        one.hops = hops
        await one.start()
    values = {"health": QUICK, "poll_interval_s": 0.05, "workers": tuple(one.url for one in instances)} | knobs
    prepared = Preparation(ControlKnobs(**values), tls=TlsContext(worker_tls or WorkerTls(), now_s=time.time()))
    plane = ControlPlane(prepared.knobs, prepared=prepared)
    await plane.start()
    try:
        made = Scene(plane, instances)
        await made.ready(len(instances))
        yield made
    finally:
        await plane.stop()
        for one in instances:
            await one.stop()


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))
