"""A control plane with fake instances and a fake relay, for tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson

from pla_sglang.router import messages as m
from pla_sglang.router.control import ControlKnobs, Plane
from pla_sglang.router.control.health import HealthKnobs
from support.fake_instance import FakeInstance

QUICK = HealthKnobs(interval_s=0.05, timeout_s=2.0, fresh_s=0.2, misses=2, refused=2)


class FakeRelay:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[m.FromControl] = []

    def tell(self, message: m.FromControl) -> None:
        self.told.append(message)

    def last(self, kind: type[Any]) -> Any:
        return next(one for one in reversed(self.told) if isinstance(one, kind))


class Scene:
    """A plane with its fakes, and a relay."""

    def __init__(self, plane: Plane, instances: list[FakeInstance]) -> None:
        self.plane = plane
        self.instances = instances
        self.relay = FakeRelay()
        self._number = 0
        plane.attach(0, self.relay)

    async def until(self, done: Callable[[], Any], limit_s: float = 5.0) -> None:
        end_s = time.monotonic() + limit_s
        while not done():
            assert time.monotonic() < end_s, "it did not come to that"
            await asyncio.sleep(0.01)

    async def ready(self, count: int) -> None:
        await self.until(lambda: len(self.plane.table.fleet.ready) == count)

    def ask(self, rid: str, body: object = None, **fields: Any) -> m.Assign | m.Refuse | None:
        """The answer, if there is one at once."""
        data = orjson.dumps(body or {"messages": [{"role": "user", "content": rid * 20}]})
        told = len(self.relay.told)
        values = {"input_tokens": 50, "body": data} | fields
        self.plane.hear(m.Ask(rid, 0, m.Endpoint.CHAT, True, time.monotonic(), len(data), **values))
        answers = [one for one in self.relay.told[told:] if isinstance(one, (m.Assign, m.Refuse))]
        return answers[0] if answers else None

    def stage(self, rid: str, *steps: m.Step) -> None:
        for step in steps:
            self.plane.hear(m.Stage(rid, step, time.monotonic()))

    def ended(self, rid: str, outcome: m.Outcome = m.Outcome.OK, **fields: Any) -> None:
        self.plane.hear(m.Ended(rid, outcome, 200, time.monotonic(), events=5, **fields))

    def admin(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        self._number += 1
        data = b"" if body is None else orjson.dumps(body)
        self.plane.hear(m.AdminAsk(self._number, 0, method, path, "", data))
        answer = self.relay.last(m.AdminAnswer)
        assert answer.number == self._number
        parsed = orjson.loads(answer.body) if answer.content_type == "application/json" else answer.body.decode()
        return answer.status, parsed

    def assert_at_rest(self) -> None:
        audit = self.plane.desk.ledger.audit(time.monotonic())
        assert audit.balanced, audit.problems
        assert (self.plane.desk.open, self.plane.desk.ledger.entries, self.plane.desk.ledger.rooms) == ({}, {}, {})
        assert all(worker.book.open_requests() == 0 for worker in self.plane.table)
        self.plane.table.check_integrity()


@asynccontextmanager
async def scene(modes: list[str], *, has_role: bool = False, **knobs: Any) -> AsyncIterator[Scene]:
    """Instances of these modes behind one plane, all ready."""
    instances = [await FakeInstance(mode, has_role=has_role).start() for mode in modes]
    values = {"health": QUICK, "poll_interval_s": 0.05, "workers": tuple(one.url for one in instances)} | knobs
    plane = Plane(ControlKnobs(**values))
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
    asyncio.run(asyncio.wait_for(work(), 30))
