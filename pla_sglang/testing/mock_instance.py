"""Instances without an engine that cost next to nothing, and what they and their clients agree on.

``python -m pla_sglang.testing.mock_instance INSTANCES`` runs several in one process. They answer what routers ask
about, and /generate: *prefill*, *decode* and *unified* send ``max_new_tokens`` events, ``temperature`` seconds apart,
each with the time at which it was sent (CLOCK_MONOTONIC nanoseconds, which all processes of a machine share);
*crowded* has little room; *stateless* says token ids in the streams that a router marks. Events of all streams with one
distance tick together, as those of an engine's batch do.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, cast

import msgspec
import psutil
import uvloop

from pla_sglang.fleet.cluster.ports import free_port
from pla_sglang.testing.server import ServerError

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
PADDING = b"x" * 160  # an event is about as long as one of SGLang's
EDGE_BYTES = 1500  # at which end of a long body the parameters stand, depends on who wrote it last
KV_TOKENS = 1 << 30
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_EVENTS = re.compile(rb'"max_new_tokens":\s*(\d+)')
_GAP = re.compile(rb'"temperature":\s*([0-9.eE+-]+)')
ROOM, SERVICE_S = 4, 0.4  # of a crowded instance
FULL = b"The request queue is full."
FULL_REASON = b'{"type":"abort","status_code":503,"message":"%s"}' % FULL
MALFORMED = b'"temperature": "x"'
SENT_NS = re.compile(rb'"t":(\d+)')  # in an event of a mock
MARK = b'"pla_movable":1'  # in the body of a stream that is to say its token ids
_BOOTSTRAP_PORT = re.compile(rb'"bootstrap_port":(\d+)')
FIRST_ID = 10_000  # of the tokens that a stateless instance says


def request_body(*, events: int, stream: bool, gap_s: float = 0.0, tokens: int = 0, marked: bool = False) -> bytes:
    """A /generate body for so many events. ``tokens``: of the prompt; 0: a short text; ``marked``: as by a router."""
    rng = random.Random(1)
    prompt = {"input_ids": [rng.randrange(1000, 32_000) for _ in range(tokens)]} if tokens else {"text": "hello there"}
    params = {"max_new_tokens": events, "temperature": gap_s}
    body = json.dumps({**prompt, "sampling_params": params, "stream": stream}).encode()
    return b'{"custom_params":{%s},%s' % (MARK, body[1:]) if marked else body


def read_wishes(body: bytes) -> tuple[int, float, bool]:
    """Events, seconds between two, whether as a stream."""
    edges = keep_edges(body)
    events, gap = _EVENTS.search(edges), _GAP.search(edges)
    stream = b'"stream":true' in edges or b'"stream": true' in edges
    return (int(events[1]) if events else 1), (float(gap[1]) if gap else 0.0), stream


def keep_edges(body: bytes) -> bytes:
    """Start and end of a long body; a short one as it is."""
    return body if len(body) <= 2 * EDGE_BYTES else body[:EDGE_BYTES] + body[-EDGE_BYTES:]


def split_head(data: bytes) -> tuple[bytes, bytes, int | None] | None:
    """Head, what follows it, and the body length that it states; None while it is not complete."""
    end = data.find(b"\r\n\r\n") + 4
    if end < 4:
        return None
    stated = _LENGTH.search(data, 0, end)
    return data[:end], data[end:], int(stated[1]) if stated else None


class Ticker:
    """Writes one event to each stream of one distance, again and again while there are any."""

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self.left: dict[Mock, int] = {}  # events that are still to come, by stream

    def add(self, mock: Mock, events: int) -> None:
        if not self.left:
            asyncio.get_running_loop().call_later(self._gap_s, self._tick)
        self.left[mock] = events

    def _tick(self) -> None:
        due_s = time.monotonic() + self._gap_s
        for mock, left in list(self.left.items()):
            mock.write_event(last=left == 1)
            if left == 1:
                self.left.pop(mock, None)
            else:
                self.left[mock] = left - 1
        if self.left:
            asyncio.get_running_loop().call_later(max(0.0, due_s - time.monotonic()), self._tick)


class Mock(asyncio.Protocol):
    def __init__(self, kind: str, port: int, tickers: dict[float, Ticker]) -> None:
        self._kind, self._port, self._tickers = kind, port, tickers
        self._begun = b""  # of a head that is not complete
        self._path = b""
        self._left = 0  # bytes of the present body that are still to come
        self._body = b""
        self._ticker: Ticker | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ticker is not None:
            self._ticker.left.pop(self, None)

    def data_received(self, data: bytes) -> None:
        if self._left:
            self._left -= len(data)
            self._body = self._keep(self._body + self._keep(data))
        else:
            parts = split_head(self._begun + data)
            if parts is None:
                self._begun += data
                return
            head, body, length = parts
            self._path = head[: head.find(b" HTTP/")].partition(b" ")[2]
            self._begun = b""
            # No less than 0: who tries HTTP/2 first sends more than a head, and takes any answer for a no.
            self._left = max(0, (length or 0) - len(body))
            self._body = self._keep(body)
        if not self._left and self._path == b"/generate":
            self._generate()
        elif not self._left:
            self._write_whole(msgspec.json.encode(self._describe()))

    def _keep(self, body: bytes) -> bytes:
        """Keeps what the answer depends on of a body."""
        return keep_edges(body)

    def _generate(self) -> None:
        events, gap_s, stream = read_wishes(self._body)
        if not stream:
            about = b'{"id":"x","finish_reason":{"type":"length"},"prompt_tokens":3}'
            self._write_whole(b'{"text":"hello","meta_info":%s}' % about)
            return
        self._transport.write(STREAM_HEAD)  # as uvicorn does: the head first, on its own
        events = 1 if self._is_prefill() else events
        if gap_s == 0 or events == 1:
            for index in range(events):
                self.write_event(last=index == events - 1)
            return
        self.write_event(last=False)
        self._tick(events - 1, gap_s)

    def _tick(self, events: int, gap_s: float) -> None:
        self._ticker = self._tickers.setdefault(gap_s, Ticker(gap_s))
        self._ticker.add(self, events)

    def _is_prefill(self) -> bool:
        """True if the request is a prefill part."""
        return self._kind == "prefill"

    def write_event(self, *, last: bool) -> None:
        self._write_chunk(self._make_event(), last=last)

    def _make_event(self) -> bytes:
        about = b'"meta_info":{"id":"x","finish_reason":null}'
        return b'data: {"text":"%s","t":%d,%s}\n\n' % (PADDING, time.monotonic_ns(), about)

    def _write_chunk(self, data: bytes, *, last: bool) -> None:
        self._transport.write(b"%x\r\n%s\r\n" % (len(data), data) + (LAST if last else b""))

    def _write_whole(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)

    def _describe(self) -> dict[str, object]:
        """Enough of an instance's description for every router."""
        if self._path.startswith(b"/v1/loads"):
            return {"loads": [{"max_total_num_tokens": KV_TOKENS}]}
        if self._path.startswith(b"/v1/models"):
            return {"object": "list", "data": [{"id": "mock", "object": "model", "owned_by": "mock"}]}
        return {
            "host": "127.0.0.1",
            "port": self._port,
            "disaggregation_mode": self._kind if self._kind in ("prefill", "decode") else "null",
            "disaggregation_bootstrap_port": 8998,
            "max_total_num_tokens": KV_TOKENS,
            "model_path": "mock",
            "served_model_name": "mock",
            "is_generation": True,
            "version": "0.5.17",
            "random_seed": self._port,
            "internal_states": [{}],
        }


class StatelessMock(Mock):
    """Takes prefill parts, decode parts and whole requests. Each event of a stream that the router has marked has a
    token id in a comment line in front of it, in the same write (protocol.md). It can reach whatever peer it is
    told."""

    _tokens: int | None = None  # said of the present stream so far; None: it is not marked

    def _generate(self) -> None:
        self._tokens = 0 if MARK in self._body else None
        super()._generate()

    def _is_prefill(self) -> bool:
        port = _BOOTSTRAP_PORT.search(self._body)
        return port is not None and int(port[1]) == self._port

    def _make_event(self) -> bytes:
        event = super()._make_event()
        if self._tokens is None:
            return event
        prompt = b"" if self._tokens else b": pla-prompt 3:9f3ab2c41d0e55aa\n"
        self._tokens += 1
        return b"%s: pla %d c%d.k0\n%s" % (prompt, FIRST_ID + self._tokens, 4 * self._tokens, event)

    def _describe(self) -> dict[str, object]:
        if self._path == b"/pla/peers":
            return {"peers": {peer["name"]: "ready" for peer in msgspec.json.decode(self._body)["peers"]}}
        described = super()._describe()
        if "internal_states" in described:
            # A port of bootstrap servers is only a number here: its own tells legs apart.
            stateless = {"incarnation": str(self._port), "bootstrap_port": self._port, "hops": True}
            described["internal_states"] = [{"pla": {"stateless": stateless}}]
        return described


class CrowdedMock(Mock):
    """Serves ``ROOM`` requests at a time in ``SERVICE_S``, and refuses others as SGLang 0.5.17 with a full queue does.

    A parameter of the wrong type is answered with 500, a stream broken off behind its head, and the connection closed
    without a word, as SGLang's is.
    """

    serving: ClassVar[Counter[int]] = Counter()  # requests by port

    def _generate(self) -> None:
        stream = read_wishes(self._body)[2]
        if MALFORMED in self._body:
            if stream:
                self._transport.write(STREAM_HEAD)
                self._transport.close()
                return
            self._write_error(b"500 Internal Server Error", b"Internal Server Error")
            self._transport.close()
        elif self.serving[self._port] < ROOM:
            self.serving[self._port] += 1
            asyncio.get_running_loop().call_later(SERVICE_S, self._end_service, stream)
        elif stream:
            self._transport.write(STREAM_HEAD)
            self._write_chunk(b'data: {"text":"","meta_info":{"finish_reason":%s}}\n\n' % FULL_REASON, last=True)
        else:
            self._write_error(b"503 Service Unavailable", FULL)

    def _write_error(self, status: bytes, message: bytes) -> None:
        body = b'{"object":"error","message":"%s","code":%s}' % (message, status[:3])
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
        self._transport.write(head + body)

    def _end_service(self, stream: bool) -> None:
        self.serving[self._port] -= 1
        if not self._transport.is_closing():
            self._body = b'{"stream":true}' if stream else b"{}"
            super()._generate()


@dataclass(frozen=True)
class Mocks:
    urls: list[str]
    process: psutil.Process  # of all of them


@contextlib.contextmanager
def running_mocks(*kinds: str) -> Iterator[Mocks]:
    """An instance of each kind, ready. Raises ServerError."""
    ports = tuple(free_port() for _ in kinds)
    settings = json.dumps({"ports": ports, "kinds": kinds})
    command = [sys.executable, "-m", "pla_sglang.testing.mock_instance", settings]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None or process.stdout.readline().strip() != "ready":
                raise ServerError("the mock instances did not start")
            yield Mocks([f"http://127.0.0.1:{port}" for port in ports], psutil.Process(process.pid))
        finally:
            process.kill()


async def serve(kinds: list[str], ports: list[int]) -> None:
    tickers: dict[float, Ticker] = {}
    for kind, port in zip(kinds, ports, strict=True):
        others: dict[str, Callable[..., Mock]] = {"crowded": CrowdedMock, "stateless": StatelessMock}
        factory = functools.partial(others.get(kind, Mock), kind, port, tickers)
        await asyncio.get_running_loop().create_server(factory, "127.0.0.1", port, backlog=4096)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(**json.loads(sys.argv[1])))
