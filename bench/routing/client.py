"""A client that costs little: ``python -m bench.routing.client`` reads one JSON plan a line, writes one result a line.

Plans: ``open`` (Poisson arrivals of streams: TTFT from the scheduled arrival, delay of each event), ``closed`` (each
connection asks again when it is answered), ``held`` (many streams at once, their events counted over a window).
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import uvloop

from bench.routing.wire import request_body, sent_ns

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_END = b"0\r\n\r\n"
GIVE_UP_S = 20.0
TAIL_BYTES = 64


class Connection(asyncio.Protocol):
    """One connection, one request at a time. ``done`` is called with an error text, empty where all went well."""

    def __init__(self, *, quickack: bool) -> None:
        self._quickack = quickack
        self._transport: asyncio.Transport
        self._socket: socket.socket
        self.done: Callable[[Connection, str], None] = lambda connection, error: None
        self.first_ns: int | None = None
        self.delays_ns: list[int] | None = None
        self.started_ns = 0
        self._head = b""
        self._tail = b""
        self._left: int | None = None  # of a sized body; None: a stream, or no head yet
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._socket = transport.get_extra_info("socket")
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: bytes, started_ns: int) -> None:
        self.started_ns, self.first_ns, self._busy = started_ns, None, True
        self._head, self._tail, self._left = b"", b"", None
        self._transport.write(request)
        self._ack()

    def close(self) -> None:
        self._busy = False
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._busy:
            self._end("the connection was closed")

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        self._ack()
        if not self._busy:
            return
        if self._head == b"" or self._head[-4:] != b"\r\n\r\n":
            data = self._begin(data)
        if self._left is not None:
            self._left -= len(data)
            if self._left <= 0:
                self._end("" if self._head.startswith(b"HTTP/1.1 200") else self._head[:40].decode("latin-1"))
            return
        if data:
            if self.first_ns is None and b"data:" in data:
                self.first_ns = now_ns
            if self.delays_ns is not None:
                self.delays_ns += [now_ns - sent for sent in sent_ns(data)]
            self._tail = (self._tail + data)[-TAIL_BYTES:]
            if self._tail.endswith(_END):
                self._end("" if b"[DONE]" in self._tail else "a stream without its end")

    def _begin(self, data: bytes) -> bytes:
        whole = self._head + data
        end = whole.find(b"\r\n\r\n")
        if end < 0:
            self._head = whole
            return b""
        self._head = whole[: end + 4]
        found = _LENGTH.search(self._head)
        self._left = int(found[1]) if found else None
        return whole[end + 4 :]

    def _end(self, error: str) -> None:
        self._busy = False
        self.done(self, error)

    def _ack(self) -> None:
        """Linux goes back to delayed ACKs by itself, so it is asked each time."""
        if self._quickack:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


class Load:
    """One plan against one address."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        body = request_body(
            events=plan["events"], gap_s=plan["gap_s"], stream=plan["stream"], tokens=plan.get("tokens", 0)
        )
        self.request = (
            b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        self.idle: list[Connection] = []
        self.errors: list[str] = []
        self.completed = 0
        self.ttfts_ns: list[int] = []
        self.delays_ns: list[int] = []

    async def connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        quickack = self.plan.get("quickack", False)
        _, connection = await loop.create_connection(
            lambda: Connection(quickack=quickack), "127.0.0.1", self.plan["port"]
        )
        connection.delays_ns = self.delays_ns
        return connection

    async def open(self) -> None:
        """Poisson arrivals at ``rate_per_s`` for ``duration_s``; a slow client does not make a request look fast."""
        plan, rng = self.plan, random.Random(self.plan["seed"])
        self.idle = [await self.connect() for _ in range(plan["connections"])]
        under_way: set[asyncio.Future[None]] = set()
        at_s = start_s = time.monotonic() + 0.05
        while at_s < start_s + plan["duration_s"]:
            wait_s = at_s - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            connection = self.idle.pop() if self.idle else await self.connect()
            ended = asyncio.get_running_loop().create_future()
            under_way.add(ended)
            ended.add_done_callback(under_way.discard)
            connection.done = lambda one, error, ended=ended: self._stream_done(one, error, ended)  # type: ignore[misc]
            connection.ask(self.request, int(at_s * 1e9))
            at_s += rng.expovariate(plan["rate_per_s"])
        if under_way:
            await asyncio.wait(set(under_way), timeout=GIVE_UP_S)
        self.errors += ["not answered"] * len(under_way)
        self.close()

    def _stream_done(self, connection: Connection, error: str, ended: asyncio.Future[None]) -> None:
        if error:
            self.errors.append(error)
        else:
            self.completed += 1
            if connection.first_ns is not None:
                self.ttfts_ns.append(connection.first_ns - connection.started_ns)
            self.idle.append(connection)
        if not ended.done():
            ended.set_result(None)

    async def closed(self) -> None:
        """``connections`` that ask again at once, for ``duration_s``; the requests that end in time count."""
        connections = [await self.connect() for _ in range(self.plan["connections"])]
        end_ns = time.monotonic_ns() + int(self.plan["duration_s"] * 1e9)

        def done(one: Connection, error: str) -> None:
            if error:
                self.errors.append(error)
            elif time.monotonic_ns() < end_ns:
                self.completed += 1
                one.ask(self.request, 0)

        for connection in connections:
            connection.delays_ns, connection.done = None, done
            connection.ask(self.request, 0)
        await asyncio.sleep(self.plan["duration_s"])
        self.idle = connections
        self.close()

    async def held(self) -> None:
        """``connections`` streams that outlast the window; says "open" when all have begun, then counts."""
        connections = [await self.connect() for _ in range(self.plan["connections"])]
        for connection in connections:
            connection.done = lambda one, error: self.errors.append(error or "ended early")
            connection.ask(self.request, time.monotonic_ns())
        deadline_s = time.monotonic() + GIVE_UP_S
        while any(one.first_ns is None for one in connections) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        self.errors += ["never began"] * sum(one.first_ns is None for one in connections)
        self.delays_ns.clear()
        print(json.dumps({"open": len(connections)}), flush=True)
        started_s = time.monotonic()
        await asyncio.sleep(self.plan["duration_s"])
        self.plan["window_s"] = time.monotonic() - started_s
        self.completed = len(self.delays_ns)
        self.idle = connections
        self.close()

    def close(self) -> None:
        for connection in self.idle:
            connection.close()

    def result(self) -> dict[str, Any]:
        return {
            "completed": self.completed,
            "errors": len(self.errors),
            "error": self.errors[0] if self.errors else "",
            "ttfts_ms": [round(value / 1e6, 4) for value in self.ttfts_ns],
            "delay_ms": quantiles(self.delays_ns),
            "window_s": self.plan.get("window_s", self.plan["duration_s"]),
        }


def quantiles(values_ns: list[int]) -> dict[str, float] | None:
    if not values_ns:
        return None
    ordered = sorted(values_ns)
    return {
        name: ordered[min(len(ordered) - 1, int(len(ordered) * q))] / 1e6 for name, q in (("p50", 0.5), ("p99", 0.99))
    }


async def main() -> None:
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        load = Load(json.loads(line))
        await {"open": load.open, "closed": load.closed, "held": load.held}[load.plan["kind"]]()
        print(json.dumps(load.result()), flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
