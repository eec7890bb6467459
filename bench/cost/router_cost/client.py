"""A client that costs little: a process that reads one JSON plan a line and writes one result a line.

Kinds: ``open`` (Poisson arrivals of streams: TTFT from the scheduled arrival, delay of each event), ``closed`` (each
connection asks again when it is answered), ``held`` (many streams at once, their events counted over a window).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import uvloop

from bench.harness.bench import BenchError
from pla_sglang.testing.mock_instance import SENT_NS, request_body, split_head

_END = b"0\r\n\r\n"
GIVE_UP_S = 20.0
POLL_S = 0.02
TAIL_BYTES = 64
COMMENT = b": pla"  # begins the lines of a stream that say its token ids
RATES_PER_S = (200, 400)
HELD_STREAMS = 500
FOREVER = 1_000_000
STREAM_BODY = {"events": 16, "gap_s": 0.005, "stream": True}
HELD_BODY = {"events": FOREVER, "gap_s": 0.02, "stream": True}  # 25,000 events a second
FLOOD_BODY = {"events": FOREVER, "gap_s": 0.00625, "stream": True}  # 80,000 events a second offered
LONG_BODY = {"events": 1, "stream": True, "tokens": 60_000}
Plan = Mapping[str, Any]


class Connection(asyncio.Protocol):
    """One connection, one request at a time; ``done`` is called with an error text, empty where all went well."""

    def __init__(self, *, quickack: bool, delays_ns: list[int] | None, done: Callable[[Connection, str], None]) -> None:
        self._quickack, self._delays_ns, self._done = quickack, delays_ns, done
        self._transport: asyncio.Transport
        self._socket: socket.socket
        self.started_ns = 0
        self.first_ns: int | None = None  # when the first event came
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
        if not self._head.endswith(b"\r\n\r\n"):
            parts = split_head(self._head + data)
            if parts is None:
                self._head += data
                return
            self._head, data, self._left = parts
        if self._left is not None:
            self._left -= len(data)
            if self._left <= 0:
                self._end("" if self._head.startswith(b"HTTP/1.1 200") else self._head[:40].decode("latin-1"))
            return
        if data:
            if COMMENT in data:  # token ids are for the router alone
                self._end("a comment of the instance's")
                return
            if self.first_ns is None and b"data:" in data:
                self.first_ns = now_ns
            if self._delays_ns is not None:
                self._delays_ns += [now_ns - int(sent_ns) for sent_ns in SENT_NS.findall(data)]
            self._tail = (self._tail + data)[-TAIL_BYTES:]
            if self._tail.endswith(_END):
                self._end("" if b"[DONE]" in self._tail else "a stream without its end")

    def _end(self, error: str) -> None:
        self._busy = False
        self._done(self, error)

    def _ack(self) -> None:
        """Linux goes back to delayed ACKs by itself, so it is asked each time."""
        if self._quickack:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


class Load:
    """One plan against one address; ``send`` says what it came to."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        body = request_body(**plan["body"])
        key = f"authorization: Bearer {plan['key']}\r\n".encode() if plan.get("key") else b""
        self._request = (
            b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n%s"
            b"content-length: %d\r\n\r\n%s" % (key, len(body), body)
        )
        self._tls = ssl.create_default_context(cafile=plan["ca"]) if plan.get("ca") else None
        self._connections: list[Connection] = []
        self._idle: list[Connection] = []
        self._errors: list[str] = []
        self._completed = 0
        self._ttfts_ns: list[int] = []
        self._delays_ns: list[int] = []

    async def send(self) -> dict[str, Any]:
        kinds = {"open": self._send_open, "closed": self._send_closed, "held": self._hold}
        window_s = await kinds[self._plan["kind"]]()
        for connection in self._connections:
            connection.close()
        return {
            "completed": self._completed,
            "errors": len(self._errors),
            "error": self._errors[0] if self._errors else "",
            "ttfts_ms": [round(value / 1e6, 4) for value in self._ttfts_ns],
            "delay_ms": {f"p{q}": quantile(self._delays_ns, q) / 1e6 for q in (50, 99)} if self._delays_ns else None,
            "window_s": window_s,
        }

    async def _connect(self, done: Callable[[Connection, str], None]) -> Connection:
        delays_ns = None if self._plan["kind"] == "closed" else self._delays_ns
        factory = functools.partial(Connection, quickack=self._plan["quickack"], delays_ns=delays_ns, done=done)
        _, connection = await asyncio.get_running_loop().create_connection(
            factory, "127.0.0.1", self._plan["port"], ssl=self._tls
        )
        self._connections.append(connection)
        return connection

    async def _send_open(self) -> float:
        """Poisson arrivals at ``rate_per_s`` for ``duration_s``; a slow client does not make a request look fast."""
        plan, rng, sent = self._plan, random.Random(self._plan["seed"]), 0
        self._idle = [await self._connect(self._end_stream) for _ in range(plan["connections"])]
        at_s = start_s = time.monotonic() + 0.05
        while at_s < start_s + plan["duration_s"]:
            wait_s = at_s - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            connection = self._idle.pop() if self._idle else await self._connect(self._end_stream)
            connection.ask(self._request, int(at_s * 1e9))
            sent += 1
            at_s += rng.expovariate(plan["rate_per_s"])
        await wait_until(lambda: self._completed + len(self._errors) == sent)
        self._errors += ["not answered"] * (sent - self._completed - len(self._errors))
        return float(plan["duration_s"])

    def _end_stream(self, connection: Connection, error: str) -> None:
        if error:
            self._errors.append(error)
            return
        self._completed += 1
        if connection.first_ns is not None:
            self._ttfts_ns.append(connection.first_ns - connection.started_ns)
        self._idle.append(connection)

    async def _send_closed(self) -> float:
        """``connections`` that ask again at once, for ``duration_s``; the requests that end in time count."""
        end_ns = 0

        def ask_again(connection: Connection, error: str) -> None:
            if error:
                self._errors.append(error)
            elif time.monotonic_ns() < end_ns:
                self._completed += 1
                connection.ask(self._request, 0)

        connections = [await self._connect(ask_again) for _ in range(self._plan["connections"])]
        duration_s = float(self._plan["duration_s"])
        end_ns = time.monotonic_ns() + int(duration_s * 1e9)
        for connection in connections:
            connection.ask(self._request, 0)
        await asyncio.sleep(duration_s)
        return duration_s

    async def _hold(self) -> float:
        """``connections`` streams that outlast the window; says "open" when all have begun, then counts."""
        for _ in range(self._plan["connections"]):
            connection = await self._connect(lambda _, error: self._errors.append(error or "ended early"))
            connection.ask(self._request, time.monotonic_ns())
        connections = self._connections
        await wait_until(lambda: all(connection.first_ns is not None for connection in connections))
        self._errors += ["never began"] * sum(connection.first_ns is None for connection in connections)
        self._delays_ns.clear()
        print(json.dumps({"open": len(connections)}), flush=True)
        started_s = time.monotonic()
        await asyncio.sleep(self._plan["duration_s"])
        self._completed = len(self._delays_ns)
        return time.monotonic() - started_s


async def wait_until(is_reached: Callable[[], bool]) -> None:
    """Returns after GIVE_UP_S in any case."""
    end_s = time.monotonic() + GIVE_UP_S
    while not is_reached() and time.monotonic() < end_s:
        await asyncio.sleep(POLL_S)


def quantile(values: Sequence[float], q: float) -> float:
    """One of the values: that below which ``q`` percent are. There must be one."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q / 100))]


async def serve_plans() -> None:
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await Load(json.loads(line)).send()), flush=True)


def make_probes(
    port: int, *, duration_s: float, seed: int, quickack: bool, ca: str = "", key: str = ""
) -> dict[str, Plan]:
    """The plans for one arm, by name.

    Args:
        quickack: whether the client asks for immediate ACKs.
        ca: file of the authority of a router with TLS; empty: plain HTTP.
        key: that the client sends; empty: none.
    """
    common = {"port": port, "duration_s": duration_s, "seed": seed, "quickack": quickack, "ca": ca, "key": key}
    plans: dict[str, Plan] = {
        f"stream_{rate}": {"kind": "open", "connections": 64, "rate_per_s": rate, "body": STREAM_BODY}
        for rate in RATES_PER_S
    }
    if not quickack:
        plans |= {
            "closed": {"kind": "closed", "connections": 32, "body": {"events": 1, "stream": False}},
            "long": {"kind": "closed", "connections": 8, "body": LONG_BODY},
            "held": {"kind": "held", "connections": HELD_STREAMS, "body": HELD_BODY},
            "flood": {"kind": "held", "connections": HELD_STREAMS, "body": FLOOD_BODY},
        }
    return {name: {**common, **plan} for name, plan in plans.items()}


class Client:
    """The client's process; one plan at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pid, self._process = process.pid, process

    def begin(self, plan: Plan) -> None:
        print(json.dumps(plan), file=self._process.stdin, flush=True)

    def read_line(self) -> dict[str, Any]:
        """Raises BenchError where the client has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"the client ended with {self._process.wait()}")
        result: dict[str, Any] = json.loads(line)
        return result


@contextlib.contextmanager
def running_client() -> Iterator[Client]:
    command = [sys.executable, "-m", "bench.cost.router_cost.client"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Client(process)
        finally:
            process.kill()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_plans())
