"""Instances without an engine: ``python -m bench.routing.mock KIND PORT [KIND PORT ...]``, all in one process.

They answer what routers ask about, and /generate as ``wire`` says. Events of all streams with one distance tick
together, as those of an engine's batch do.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from typing import cast

import orjson
import uvloop

from bench.routing.wire import edges, event, wishes

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
KV_TOKENS = 1 << 30


class Ticker:
    """Writes one event to each stream of one distance, again and again while there are any."""

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._left: dict[Mock, int] = {}

    def add(self, mock: Mock, events: int) -> None:
        if not self._left:
            asyncio.get_running_loop().call_later(self._gap_s, self._tick)
        self._left[mock] = events

    def drop(self, mock: Mock) -> None:
        self._left.pop(mock, None)

    def _tick(self) -> None:
        due_s = time.monotonic() + self._gap_s
        for mock, left in list(self._left.items()):
            mock.write_event(last=left == 1)
            if left == 1:
                self._left.pop(mock, None)
            else:
                self._left[mock] = left - 1
        if self._left:
            asyncio.get_running_loop().call_later(max(0.0, due_s - time.monotonic()), self._tick)


class Mock(asyncio.Protocol):
    """One connection to a mock instance."""

    def __init__(self, kind: str, port: int, tickers: dict[float, Ticker]) -> None:
        self._kind, self._port, self._tickers = kind, port, tickers
        self._begun = b""  # of a head that is not complete
        self._path = b""
        self._left = 0  # bytes of the present body that are still to come
        self._edges = b""  # its start and its end; what is between is dropped, as no answer depends on it
        self._ticker: Ticker | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ticker is not None:
            self._ticker.drop(self)

    def data_received(self, data: bytes) -> None:
        if self._left:
            self._left -= len(data)
            self._edges = self._keep(self._edges + self._keep(data))
        else:
            data = self._begun + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._begun = data
                return
            found = _LENGTH.search(data, 0, end + 2)
            self._path = data[: data.find(b" HTTP/")].partition(b" ")[2]
            self._begun = b""
            # No less than 0: who tries HTTP/2 first sends more than a head, and takes any answer for a no.
            self._left = max(0, end + 4 + (int(found[1]) if found else 0) - len(data))
            self._edges = self._keep(data[end + 4 :])
        if not self._left:
            self._answer(self._path, self._edges)

    def _keep(self, body: bytes) -> bytes:
        """Of a body what ``_answer`` needs."""
        return edges(body)

    def _answer(self, path: bytes, body: bytes) -> None:
        if path != b"/generate":
            self._whole(orjson.dumps(self._about(path)))
            return
        events, gap_s, stream = wishes(body)
        if not stream:
            self._whole(b'{"text":"hello","meta_info":{"id":"x","finish_reason":{"type":"length"},"prompt_tokens":3}}')
            return
        self._transport.write(STREAM_HEAD)  # as uvicorn does: the head first, on its own
        events = 1 if self._kind == "prefill" else events
        if gap_s == 0 or events == 1:
            for index in range(events):
                self.write_event(last=index == events - 1)
            return
        self.write_event(last=False)
        self._ticker = self._tickers.setdefault(gap_s, Ticker(gap_s))
        self._ticker.add(self, events - 1)

    def write_event(self, *, last: bool) -> None:
        data = event(time.monotonic_ns())
        self._transport.write(b"%x\r\n%s\r\n" % (len(data), data) + (LAST if last else b""))

    def _whole(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)

    def _about(self, path: bytes) -> dict[str, object]:
        """Enough of an instance's description for every router."""
        if path.startswith(b"/v1/loads"):
            return {"loads": [{"max_total_num_tokens": KV_TOKENS}]}
        if path.startswith(b"/v1/models"):
            return {"object": "list", "data": [{"id": "mock", "object": "model", "owned_by": "mock"}]}
        return {
            "host": "127.0.0.1",
            "port": self._port,
            "disaggregation_mode": "null" if self._kind == "unified" else self._kind,
            "disaggregation_bootstrap_port": 8998,
            "max_total_num_tokens": KV_TOKENS,
            "model_path": "mock",
            "served_model_name": "mock",
            "is_generation": True,
            "version": "0.5.17",
            "random_seed": self._port,
            "internal_states": [{}],
        }


async def serve(instances: list[tuple[str, int]]) -> None:
    loop = asyncio.get_running_loop()
    tickers: dict[float, Ticker] = {}
    for kind, port in instances:
        await loop.create_server(
            lambda kind=kind, port=port: Mock(kind, port, tickers),  # type: ignore[misc]
            "127.0.0.1",
            port,
            backlog=4096,
        )
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve([(arguments[i], int(arguments[i + 1])) for i in range(0, len(arguments), 2)]))
