"""One relay: what its connections, requests and the control plane share."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from pla_sglang.router import routes
from pla_sglang.router.access import AccessLog
from pla_sglang.router.calls import Call
from pla_sglang.router.config import RelayConfig
from pla_sglang.router.exchange import Exchange
from pla_sglang.router.front import ClientConnection
from pla_sglang.router.http import answers
from pla_sglang.router.http.head import BadMessage, RequestHead
from pla_sglang.router.legs import LegSink
from pla_sglang.router.messages import (
    PROTOCOL,
    Abort,
    AdminAnswer,
    AdminAsk,
    Assign,
    Beat,
    Ended,
    FromControl,
    FromRelay,
    Hello,
    Outcome,
    Prompts,
    Refuse,
    RelayReport,
    Table,
    Worker,
)
from pla_sglang.router.request import Names
from pla_sglang.router.upstream import UpstreamPool

TICK_S = 0.2  # of time limits
REPORT_S = 1.0
BACKLOG = 4096
_BODY = Prompts.BODY  # named once, as in ``states``
# An abort that overtakes its request on the way to an instance is lost (SGLang knows no such rid yet), so it is said
# again. An instance that has ended the request ignores it.
ABORT_AGAIN_S = (0.0, 0.25, 0.7)
ABORT_TIMEOUT_S = 5.0
ABORT_AT_END_S = 1.0  # for aborts to be answered when the relay ends
ENDED = {outcome: f'requests_total{{outcome="{outcome.name.lower()}"}}' for outcome in Outcome}


class Work(Protocol):
    """Whatever answers a client's present request, as its connection sees it."""

    def client_gone(self, detail: str) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Relay:
    """One relay of a router.

    Args:
        number: from 0; named in every message.
        say: takes what goes to the control plane.
        rng: for request and trace ids.
        now_s: CLOCK_MONOTONIC.
    """

    def __init__(
        self,
        config: RelayConfig,
        *,
        number: int,
        say: Callable[[FromRelay], None],
        rng: random.Random,
        now_s: Callable[[], float] = time.monotonic,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.config, self.number, self.say, self.now_s = config, number, say, now_s
        self.loop = loop or asyncio.get_running_loop()
        self.names = Names(rng)
        self.pool = UpstreamPool(self.loop, connect_timeout_s=config.connect_timeout_s, idle_s=config.upstream_idle_s)
        self.table: Table | None = None
        self.port = config.port
        self.draining = False
        self.open: dict[str, Exchange] = {}
        self.lingering: dict[LegSink, float] = {}  # prefill legs of answered requests, and when they must have ended
        self._workers: dict[int, Worker] = {}
        self._turn = 0  # over the workers, for requests that any can answer
        self._clients: set[ClientConnection] = set()
        self._buffered_bytes = 0
        self._kept_bytes = 0
        self._admin: dict[int, tuple[ClientConnection, asyncio.TimerHandle]] = {}
        self._admin_asks = 0
        self._aborting = 0  # aborts that instances have not answered yet
        self._counters: dict[str, float] = {}
        self._server: asyncio.Server | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._report_at_s = 0.0
        self._access = AccessLog(config.access_log)
        self._drained = asyncio.Event()

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self, *, shared: bool = False) -> None:
        """Listen; ``shared``: beside the other relays of the router. Raises OSError where the address is taken."""
        sock = listening_socket(self.config.host, self.config.port, shared=shared)
        self._server = await self.loop.create_server(lambda: ClientConnection(self), sock=sock, backlog=BACKLOG)
        self.port = sock.getsockname()[1]
        self._tick()

    def begin_drain(self) -> None:
        """No new connections and no new requests; what is open goes on."""
        if self.draining:
            return
        self.draining = True
        if self._server is not None:
            self._server.close()
        for client in list(self._clients):
            client.close_idle()
        if not self.open:
            self._drained.set()

    async def drain(self) -> None:
        """As ``begin_drain``, and wait for the end of open requests, no longer than the limit."""
        self.begin_drain()
        try:
            async with asyncio.timeout(self.config.drain_timeout_s):
                await self._drained.wait()
        except TimeoutError:
            for exchange in list(self.open.values()):
                abort = Abort(exchange.ask.rid, 503, "draining", "the router is shutting down")
                exchange.on_abort(abort, Outcome.DRAINED)

    async def stop(self) -> None:
        """Close everything."""
        if self._server is not None:
            self._server.close()
        if self._ticker is not None:
            self._ticker.cancel()
        for client in list(self._clients):
            client.cut()
        await asyncio.sleep(0)  # lets connections report their end
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABORT_AT_END_S):
                while self._aborting:
                    await asyncio.sleep(ABORT_AT_END_S / 100)
        await self.pool.close()
        self._access.close()

    # -- the control plane -------------------------------------------------------------------------------------------

    def tell(self, message: FromControl) -> None:
        """What the control plane says (``RelayPort``)."""
        if isinstance(message, Assign):
            exchange = self.open.get(message.rid)
            if exchange is not None:
                exchange.on_assign(message)
        elif isinstance(message, Refuse):
            exchange = self.open.get(message.rid)
            if exchange is not None:
                exchange.on_refuse(message)
        elif isinstance(message, Abort):
            exchange = self.open.get(message.rid)
            if exchange is not None:
                exchange.on_abort(message)
        elif isinstance(message, Table):
            self._on_table(message)
        elif isinstance(message, AdminAnswer):
            client = self.forget_admin(message.number)
            if client is not None:
                client.answer(message.status, message.body, content_type=message.content_type, headers=message.headers)
        else:
            assert isinstance(message, Beat)

    def on_attached(self) -> None:
        """The control plane takes this relay for new: it is to be told what is open, as after its own restart."""
        self.table = None

    def _on_table(self, table: Table) -> None:
        restarted = self.table is None or table.epoch != self.table.epoch
        self.table = table
        self._workers = {worker.number: worker for worker in table.workers}
        if restarted:
            opened = [one.opened() for one in self.open.values()]
            self.say(Hello(self.number, PROTOCOL, os.getpid(), tuple(one for one in opened if one is not None)))
            for exchange in list(self.open.values()):
                exchange.ask_again_of_new_control()

    def worker(self, number: int) -> Worker | None:
        return self._workers.get(number)

    def any_worker(self) -> Worker | None:
        """One that is listed, in turn."""
        listed = [worker for worker in self._workers.values() if worker.listed]
        if not listed:
            return None
        self._turn += 1
        return listed[self._turn % len(listed)]

    def workers_by_kind(self) -> list[Worker]:
        """One listed worker of each kind there is."""
        return list({worker.kind: worker for worker in self._workers.values() if worker.listed}.values())

    # -- requests ----------------------------------------------------------------------------------------------------

    def serve(self, client: ClientConnection, head: RequestHead, body: bytes) -> None:
        """A complete request; everything else comes from here."""
        try:
            routes.serve(self, client, head, body)
        except BadMessage as error:
            self.count("bad_requests_total", reason=error.reason)
            body_text = answers.error_body(error.status, error.reason, str(error))
            client.answer(error.status, body_text, headers=error.headers)

    def begin(self, exchange: Exchange) -> None:
        self.open[exchange.ask.rid] = exchange

    def close(self, exchange: Exchange, ended: Ended) -> None:
        """The only place where a request leaves the relay."""
        del self.open[exchange.ask.rid]
        self.count(ENDED[ended.outcome])
        self.say(ended)
        self._access.write(exchange.ask, exchange.assign, ended)
        if self.draining and not self.open:
            self._drained.set()

    def ask_admin(self, client: ClientConnection, head: RequestHead, body: bytes) -> None:
        self._admin_asks += 1
        number = self._admin_asks
        late = self.later(self.config.dispatch_timeout_s, lambda: self._admin_late(number))
        self._admin[number] = (client, late)
        client.works(_AdminWait(self, number))
        self.say(AdminAsk(number, self.number, head.method, head.path, head.query, body))

    def _admin_late(self, number: int) -> None:
        client = self.forget_admin(number)
        if client is not None:
            client.answer(503, answers.error_body(503, "no_control", "the control plane does not answer"))

    def forget_admin(self, number: int) -> ClientConnection | None:
        """Who waited for this answer, if anybody still does."""
        found = self._admin.pop(number, None)
        if found is None:
            return None
        found[1].cancel()
        return found[0]

    def abort_upstream(self, number: int, rids: Sequence[str]) -> None:
        """Make an instance free what it holds of a request."""
        for delay_s in ABORT_AGAIN_S:
            if delay_s:
                self.later(delay_s, functools.partial(self.abort_once, number, rids))
            else:
                self.abort_once(number, rids)

    def abort_once(self, number: int, rids: Sequence[str]) -> None:
        """Tell an instance to drop a request."""
        worker = self._workers.get(number)
        if worker is None:
            return

        def done(status: int) -> None:
            self._aborting -= 1
            self.count("upstream_aborts_total", status=str(status))

        self._aborting += len(rids)
        for rid in rids:
            call = Call(self, done, timeout_s=ABORT_TIMEOUT_S)
            call.start(worker, "POST", "/abort_request", msgspec.json.encode({"rid": rid}), admin=True)

    # -- connections -------------------------------------------------------------------------------------------------

    def admit(self, client: ClientConnection) -> bool:
        self.count("connections_total")
        if len(self._clients) >= self.config.max_connections:
            self.count("connections_refused_total")
            return False
        self._clients.add(client)
        return True

    def release(self, client: ClientConnection) -> None:
        self._clients.discard(client)

    def keep(self, count: int) -> bool:
        """Count bytes of bodies that are kept for another attempt; False where the limit stands against it."""
        if count > 0 and self._kept_bytes + count > self.config.max_kept_bytes:
            return False
        self._kept_bytes += count
        return True

    def buffer(self, count: int) -> bool:
        """Count bytes of bodies that are on their way in; False where the limit stands against it."""
        if count > 0 and self._buffered_bytes + count > self.config.max_buffered_bytes:
            return False
        self._buffered_bytes += count
        return True

    # -- time and counters -------------------------------------------------------------------------------------------

    def soon(self, act: Callable[[], None]) -> None:
        self.loop.call_soon(act)

    def later(self, delay_s: float, act: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(delay_s, act)

    def count(self, name: str, **labels: str) -> None:
        if labels:
            inner = ",".join(f'{key}="{value}"' for key, value in labels.items())
            name = f"{name}{{{inner}}}"
        self._counters[name] = self._counters.get(name, 0) + 1

    def _tick(self) -> None:
        now_s = self.now_s()
        for exchange in list(self.open.values()):
            exchange.tick(now_s)
        for leg in [leg for leg, due_s in self.lingering.items() if now_s > due_s]:
            del self.lingering[leg]
            leg.exchange.give_up(leg)
        for client in list(self._clients):
            client.tick(now_s)
        self.pool.sweep(now_s)
        if now_s >= self._report_at_s:
            self._report_at_s = now_s + REPORT_S
            self._counters["access_lines_lost_total"] = self._access.lost
            self.say(RelayReport(self.number, now_s, dict(self._counters), self.gauges()))
            self._access.flush()
        self._ticker = self.loop.call_later(TICK_S, self._tick)

    def gauges(self) -> dict[str, float]:
        """What must be 0 when nothing is under way, and the connections."""
        return {
            "open_requests": len(self.open),
            "buffered_bytes": self._buffered_bytes,
            "kept_bytes": self._kept_bytes,
            "admin_requests": len(self._admin),
            "client_connections": len(self._clients),
            "idle_upstream_connections": self.pool.idle_count(),
        }

    @property
    def wants_bodies(self) -> bool:
        return self.table is not None and self.table.prompts is _BODY

    @property
    def trace_share(self) -> float | None:
        return None if self.table is None else self.table.trace_share


class _AdminWait:
    """A client that waits for content of the control plane."""

    def __init__(self, relay: Relay, number: int) -> None:
        self._relay, self._number = relay, number

    def client_gone(self, detail: str) -> None:
        self._relay.forget_admin(self._number)

    def pause(self) -> None:
        """Nothing is being written."""

    def resume(self) -> None:
        """Nothing is being written."""


def listening_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Bound; ``shared`` with the other relays of the router, and with anybody who asks for that as well (SO_REUSEPORT).

    Raises:
        OSError: the address is taken.
    """
    [(family, kind, _, _, address), *_] = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sock = socket.socket(family, kind, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock
