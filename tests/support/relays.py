"""A relay in this process with a control plane that assigns in turn, and a client that sees every byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import h11
from fake_sglang import FakeSglang, Rooms, Script

from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.relay.context import RelayContext
from pla_sglang.fleet.router.relay.server import Relay
from pla_sglang.fleet.router.wire import messages as m
from support.serving import wait_until

SettingT = TypeVar("SettingT", bound="Setting")


LOST = (m.Cause.LOST, m.Cause.BROKEN, m.Cause.ABORTED)


def refuse(ask: m.Ask, code: str, message: str, *, status: int = 503, retry_after_s: float | None = None) -> m.Refuse:
    over = 0 if ask.over is None else ask.over.attempt
    return m.Refuse(ask.rid, status, code, message, retry_after_s, over)


@dataclass
class TurnControl:
    """A control plane (``ControlPort``) with a fixed table. It keeps everything it hears.

    Attributes:
        answer: called for an Ask instead of assigning in turn; None leaves the question open.
        migration: streams are marked, and lost requests go on at the next instance that is not out of question.
        in_turn: else each request gets the first instance that it has not left.
        silent: lost requests get no answer.
        attempts: numbers of the last attempts, by rid.
    """

    workers: tuple[m.WorkerEntry, ...] = ()
    epoch: int = 1
    wants_bodies: bool = False
    answer: Callable[[m.Ask], m.Assign | m.Refuse | None] | None = None
    heard: list[m.FromRelay] = field(default_factory=list)
    ports: dict[int, Any] = field(default_factory=dict)
    rooms: int = 0
    migration: bool = False
    in_turn: bool = True
    silent: bool = False
    attempts: Counter[str] = field(default_factory=Counter)

    async def start(self) -> None:
        """Nothing to begin."""

    async def stop(self) -> None:
        """Nothing to end."""

    def attach_relay(self, relay: int, port: Any) -> None:
        self.ports[relay] = port
        port.on_message(self.table())

    def detach_relay(self, relay: int) -> None:
        del self.ports[relay]

    def table(self) -> m.Table:
        serving = bool(self.workers)
        return m.Table(self.epoch, self.workers, serving, wants_bodies=self.wants_bodies, migration=self.migration)

    def on_message(self, message: m.FromRelay) -> None:
        self.heard.append(message)
        if isinstance(message, m.Ask):
            given = self.reply(message)
            if given is not None:
                self.ports[message.relay].on_message(given)
        elif isinstance(message, m.AdminAsk):
            body = json.dumps({"path": message.path, "method": message.method}).encode()
            self.ports[message.relay].on_message(m.AdminResponse(message.number, 200, "application/json", body))

    def reply(self, ask: m.Ask) -> m.Assign | m.Refuse | None:
        if ask.over is None:
            self.attempts[ask.rid] = 0
        elif ask.over.shown or ask.over.cause in LOST:
            return None if self.silent else self.assign_first(ask)
        if self.answer is not None:
            return self.answer(ask)
        return self.assign(ask) if self.in_turn else self.assign_first(ask)

    def next_attempt(self, rid: str) -> int:
        self.attempts[rid] += 1
        return self.attempts[rid]

    def assign(self, ask: m.Ask) -> m.Assign | m.Refuse:
        self.rooms += 1000
        free = [worker for worker in self.workers if ask.over is None or worker.number not in ask.over.avoid]
        pick: dict[str, m.WorkerEntry] = {}
        for kind in ("unified", "prefill", "decode"):
            of_kind = [worker for worker in free if worker.kind == kind]
            if of_kind:
                pick[kind] = of_kind[self.rooms // 1000 % len(of_kind)]
        if "unified" in pick:
            return m.Assign(ask.rid, self.next_attempt(ask.rid), pick["unified"].number, reason="turn")
        if len(pick) < 2:
            return refuse(ask, "no_instance", "nobody is ready", retry_after_s=0.2)
        return m.Assign(
            *(ask.rid, self.next_attempt(ask.rid), pick["decode"].number, pick["prefill"].number),
            bootstrap_host="10.0.0.9",
            bootstrap_port=8998,
            bootstrap_room=self.rooms,
            reason="turn",
        )

    def assign_first(self, ask: m.Ask) -> m.Assign | m.Refuse:
        over = ask.over
        gone = set() if over is None else {*over.lost_with, *over.refused_by, *over.avoid}
        left = [worker.number for worker in self.workers if worker.number not in gone]
        if not left:
            return refuse(ask, "no_instance", "nobody is left")
        return m.Assign(ask.rid, self.next_attempt(ask.rid), left[0], reason="first")

    @property
    def overs(self) -> list[m.Over]:
        """Attempts that another question was asked for."""
        return [ask.over for ask in self.of(m.Ask) if ask.over is not None]

    @property
    def resumed(self) -> list[m.Progress]:
        """First events of attempts that go on with an answer."""
        return [one for one in self.of(m.Progress) if one.gap_s is not None]

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def events(self) -> list[str]:
        return [part[6:] for part in self.body.decode().split("\n\n") if part.startswith("data: ")]

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


@dataclass
class Setting:
    """Everything under test."""

    relay: Relay
    control: TurnControl
    instances: list[FakeSglang]

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.relay.listener.port)

    async def ask(
        self, body: Any, path: str = "/generate", *, method: str = "POST", headers: dict[str, str] | None = None
    ) -> Answer:
        """One request on a connection of its own, read to its end by h11."""
        reader, writer = await self.connect()
        try:
            writer.write(request_bytes(body, path, method=method, headers=headers))
            return await read_answer(reader, method=method)
        finally:
            writer.close()

    def ended(self) -> list[m.Completed]:
        return self.control.of(m.Completed)

    async def until(self, ask: Callable[[], Any], *, patience_s: float = 20.0) -> Any:
        """The first true answer of ``ask``."""
        return await wait_until(ask, patience_s=patience_s)

    def is_at_rest(self) -> bool:
        """True once every question has its end, and nothing is left anywhere. Ids may be used again."""
        gauges = self.relay.read_gauges()
        left = [gauges[name] for name in ("open_requests", "buffered_bytes", "kept_bytes", "admin_requests")]
        asked = sorted(ask.rid for ask in self.control.of(m.Ask) if ask.over is None)
        return not any(left) and sorted(ended.rid for ended in self.ended()) == asked

    def check_order(self) -> None:
        """No step follows an end."""
        over: set[str] = set()
        for message in self.control.heard:
            if isinstance(message, m.Ask) and message.over is None:
                over.discard(message.rid)
            elif isinstance(message, m.Ask | m.Progress | m.Dropped):
                assert message.rid not in over
            elif isinstance(message, m.Completed):
                over.add(message.rid)


def request_bytes(
    body: Any, path: str = "/generate", *, method: str = "POST", headers: dict[str, str] | None = None
) -> bytes:
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: router", f"Content-Length: {len(raw)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + raw


async def read_answer(reader: asyncio.StreamReader, *, method: str = "POST") -> Answer:
    """Raises h11.RemoteProtocolError where the answer is cut or not HTTP."""
    peer = h11.Connection(h11.CLIENT)
    peer.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
    peer.send(h11.EndOfMessage())
    head, body = None, b""
    async with asyncio.timeout(20):
        while True:
            event = peer.next_event()
            if event is h11.NEED_DATA:
                peer.receive_data(await reader.read(1 << 16))
            elif isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                break
    assert head is not None
    return Answer(head.status_code, {k.decode(): v.decode() for k, v in head.headers}, body)


@contextlib.asynccontextmanager
async def setting(
    *kinds: str,
    scripts: dict[int, Script] | None = None,
    config: RelayConfig | None = None,
    now_s: Callable[[], float] = time.monotonic,
    comes_to_rest: bool = True,
    **control: Any,
) -> AsyncIterator[Setting]:
    """A relay in front of instances of ``kinds``."""
    rooms, scripts = Rooms(), scripts or {}
    instances = [
        FakeSglang("null" if kind == "unified" else kind, number=number, rooms=rooms, script=scripts.get(number))
        for number, kind in enumerate(kinds)
    ]
    async with serving(Setting, instances, control, config, now_s=now_s, comes_to_rest=comes_to_rest) as here:
        yield here


@contextlib.asynccontextmanager
async def serving(
    made: type[SettingT],
    instances: Sequence[FakeSglang],
    control: dict[str, Any],
    config: RelayConfig | None,
    *,
    now_s: Callable[[], float] = time.monotonic,
    comes_to_rest: bool = True,
) -> AsyncIterator[SettingT]:
    """A relay in front of ``instances``, whose clock is ``now_s``. ``comes_to_rest``: at the end of the block."""
    async with contextlib.AsyncExitStack() as stack:
        for one in instances:
            await stack.enter_async_context(one)
        plane = TurnControl(tuple(one.worker() for one in instances), **control)
        listening = replace(config or RelayConfig(), port=0)
        relay = Relay(
            RelayContext(listening, number=0, send_to_control=plane.on_message, rng=random.Random(5), now_s=now_s)
        )
        here = made(relay, plane, [*instances])
        plane.attach_relay(0, relay)
        await relay.start_serving()
        try:
            yield here
            if comes_to_rest:
                await here.until(here.is_at_rest)
            here.check_order()
        finally:
            await relay.stop_serving()


def run(test: Callable[[], Awaitable[None]]) -> None:
    """On the event loop that the router uses."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())
