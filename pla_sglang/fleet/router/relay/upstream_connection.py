"""Connections to instances: each carries one request at a time, and is kept for the next one."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol, cast

from pla_sglang.common.connection_errors import describe_connection_error
from pla_sglang.fleet.router.http.framing import Framing, response_framing
from pla_sglang.fleet.router.http.head import CRLF2, BadMessage, ResponseHead, parse_response
from pla_sglang.fleet.router.tls import TlsContext
from pla_sglang.fleet.router.wire.messages import FailureKind, WorkerEntry

MAX_HEAD_BYTES = 65_536
MAX_CONNECTING = 32
# SGLang closes an unused connection after 5 s: kept for longer, a request could meet one that is being closed.
IDLE_S = 3.0
SWITCHING_PROTOCOLS = 101
COPY_BYTES = 16_384  # up to here one piece is cheaper to send than two


class ResponseSink(Protocol):
    """Receiver of an answer. After ``on_done`` or ``on_lost`` nothing more is called.

    ``plain``: whether ``on_body`` gets the content without its framing.
    """

    plain: bool

    def on_head(self, head: ResponseHead) -> None: ...

    def on_body(self, data: bytes) -> None: ...

    def on_done(self) -> None: ...

    def on_lost(self, kind: FailureKind, detail: str) -> None: ...


class UpstreamConnection(asyncio.Protocol):
    """One connection to one instance. Idle, or busy for one sink."""

    __slots__ = ("_buffer", "_framing", "_head", "_method", "_pool", "_sink", "idle_since_s", "transport", "worker")

    def __init__(self, pool: UpstreamPool, worker: WorkerEntry) -> None:
        self.worker = worker
        self.transport: asyncio.Transport | None = None
        self.idle_since_s = 0.0
        self._pool = pool
        self._sink: ResponseSink | None = None
        self._method = ""
        self._head: ResponseHead | None = None
        self._framing: Framing | None = None
        self._buffer = b""

    # -- for its user -----------------------------------------------------------------------------------------------

    def send_request(self, method: str, front: bytes, rest: bytes | memoryview, sink: ResponseSink) -> None:
        """Send one request, in two pieces so that a long one need not be copied; the connection must be idle."""
        assert self._sink is None
        assert self.transport is not None
        self._sink, self._method = sink, method
        if len(rest) > COPY_BYTES:
            self.transport.writelines((front, rest))
        else:
            self.transport.write(b"".join((front, rest)))

    def is_usable(self) -> bool:
        """True if the connection is still open, as far as is known."""
        return self.transport is not None and not self.transport.is_closing()

    def at_boundary(self) -> bool:
        """True if something may be put into the answer behind what the sink has got so far."""
        return self._framing is not None and self._framing.at_boundary()

    def set_paused(self, paused: bool) -> None:
        """Stops reading while the answer's receiver is too slow, or goes on."""
        if self.transport is not None and not self.transport.is_closing():
            if paused:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def is_busy(self) -> bool:
        """True if an answer is under way."""
        return self._sink is not None

    def replace_sink(self, sink: ResponseSink) -> None:
        """Another one gets the rest of the answer that is under way."""
        assert self._sink is not None
        self._sink = sink

    def drop_connection(self) -> None:
        """Close it now, whatever is under way; its sink is not called any more."""
        self._sink = None
        if self.transport is not None:
            self.transport.abort()

    # -- asyncio -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's class is not derived from it
        set_no_delay(self.transport)

    def data_received(self, data: bytes) -> None:
        sink = self._sink
        if sink is None:  # data that was not asked for, such as the 408 of an instance that closes
            self._pool.remove_connection(self)
            self.drop_connection()
            return
        try:
            if self._framing is None:
                self._read_head(data)
            elif sink.plain:
                if content := self._framing.take_whole(data):
                    sink.on_body(content)
                else:
                    self._read_body(data, 0)
            elif (end := self._framing.feed_data(data, 0)) < 0:  # amid an answer, as most pieces of a stream
                sink.on_body(data)
            else:
                self._end_response(data, 0, end)
        except BadMessage as error:
            self._lose_response(FailureKind.BAD_ANSWER, str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._pool.remove_connection(self)
        if self._sink is None:
            return
        if self._head is not None and self._head.length is None and not self._head.chunked and exc is None:
            self._finish_response(reusable=False)
        else:
            kind = FailureKind.LOST if self._head is None else FailureKind.BROKEN
            self._lose_response(kind, "the connection ended before the answer" + (f": {exc}" if exc else ""))

    # -- one answer --------------------------------------------------------------------------------------------------

    def _read_head(self, data: bytes) -> None:
        data = self._buffer + data if self._buffer else data
        while True:
            end = data.find(CRLF2)
            start = end + len(CRLF2)
            if (len(data) if end < 0 else start) > MAX_HEAD_BYTES:
                raise BadMessage("head", f"the head is longer than {MAX_HEAD_BYTES} bytes")
            if end < 0:
                self._buffer = data
                return
            head = parse_response(data[:start])
            if head.status == SWITCHING_PROTOCOLS:
                raise BadMessage("head", "the instance changes the protocol, which nobody has asked for")
            if head.status >= 200:
                break
            data = data[start:]  # an interim answer
        self._buffer = b""
        self._head, self._framing = head, response_framing(head, self._method)
        assert self._sink is not None
        self._sink.on_head(head)
        if self._sink is not None:
            self._read_body(data, start)

    def _read_body(self, data: bytes, start: int) -> None:
        sink, framing = self._sink, self._framing
        assert sink is not None
        assert framing is not None
        if sink.plain:
            payload: list[bytes] = []
            end = framing.feed_data(data, start, payload)
            if payload:
                sink.on_body(b"".join(payload))
            start = end
        else:
            end = framing.feed_data(data, start)
        if end >= 0:
            self._end_response(data, start, end)
        elif 0 <= start < len(data):
            sink.on_body(data[start:] if start else data)

    def _end_response(self, data: bytes, start: int, end: int) -> None:
        """The answer ends at ``data[end]``; its sink has got what lies before ``start``."""
        if end > start and self._sink is not None:
            self._sink.on_body(data[start:end])
        if self._sink is not None:  # it may have dropped this connection
            head = self._head
            assert head is not None
            # Behind an exception an instance may close the connection without having said so.
            self._finish_response(reusable=head.keep_alive and end == len(data) and head.status < 500)

    def _finish_response(self, *, reusable: bool) -> None:
        """Free for the next request before the sink acts on it."""
        sink = self._sink
        self._sink = self._head = self._framing = None
        if reusable:
            self.set_paused(False)  # the last bytes may have filled a slow client's buffers, which no longer matters
            self._pool.give_back(self)
        elif self.transport is not None:
            self.transport.close()
        assert sink is not None
        sink.on_done()

    def _lose_response(self, kind: FailureKind, detail: str) -> None:
        sink = self._sink
        self.drop_connection()
        assert sink is not None
        sink.on_lost(kind, detail)


OnConnection = Callable[["UpstreamConnection | None", str], None]


class UpstreamPool:
    """Connections by instance, the one used last first. ``tls``: of instances with https."""

    def __init__(self, tls: TlsContext, *, connect_timeout_s: float) -> None:
        self._tls, self._connect_timeout_s = tls, connect_timeout_s
        self._idle: dict[int, deque[UpstreamConnection]] = {}
        self._connecting: set[asyncio.Task[None]] = set()
        self._under_way: Counter[int] = Counter()  # of them, by instance
        self._waiting: dict[int, deque[OnConnection]] = {}

    def take_connection(self, worker: WorkerEntry, on_connection: OnConnection) -> None:
        """Calls ``on_connection`` with a connection, at once or later; with None and a reason where it fails."""
        connection = self.take_idle(worker)
        if connection is None:
            self.open_connection(worker, on_connection)
        else:
            on_connection(connection, "")

    def take_idle(self, worker: WorkerEntry) -> UpstreamConnection | None:
        """An open one that is not in use, now the caller's; None where there is none."""
        idle = self._idle.get(worker.number)
        while idle:
            connection = idle.pop()
            if connection.is_usable():
                return connection
        return None

    def open_connection(self, worker: WorkerEntry, on_connection: OnConnection) -> None:
        """As ``take_connection``, always a new one. Each costs memory, so those beyond ``MAX_CONNECTING`` to an
        instance wait."""
        if self._under_way[worker.number] >= MAX_CONNECTING:
            self._waiting.setdefault(worker.number, deque()).append(on_connection)
        else:
            self._start_connecting(worker, on_connection)

    def _start_connecting(self, worker: WorkerEntry, on_connection: OnConnection) -> None:
        self._under_way[worker.number] += 1
        task = asyncio.get_running_loop().create_task(self._connect(worker, on_connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def give_back(self, connection: UpstreamConnection) -> None:
        """Back, unused or after a complete answer."""
        if not connection.is_usable():
            return
        connection.idle_since_s = time.monotonic()
        self._idle.setdefault(connection.worker.number, deque()).append(connection)

    def remove_connection(self, connection: UpstreamConnection) -> None:
        """It is closed or about to be; it need not be idle."""
        idle = self._idle.get(connection.worker.number)
        if idle and connection in idle:
            idle.remove(connection)

    def close_unused(self, now_s: float) -> None:
        """Close what nobody has used for a while."""
        for number, idle in list(self._idle.items()):
            while idle and now_s - idle[0].idle_since_s > IDLE_S:
                idle.popleft().drop_connection()
            if not idle:
                del self._idle[number]

    def count_idle(self) -> int:
        return sum(map(len, self._idle.values()))

    async def close_pool(self) -> None:
        for task in list(self._connecting):
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for idle in self._idle.values():
            while idle:
                idle.pop().drop_connection()

    async def _connect(self, worker: WorkerEntry, on_connection: OnConnection) -> None:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: UpstreamConnection(self, worker),
                    worker.host,
                    worker.port,
                    ssl=self._tls.context if worker.tls else None,
                )
        except TimeoutError:
            self._fail_waiting(worker, on_connection, f"no connection within {self._connect_timeout_s:g} s")
        except OSError as error:
            self._fail_waiting(worker, on_connection, describe_connection_error(error))
        else:
            self._under_way[worker.number] -= 1
            waiting = self._waiting.get(worker.number)
            if waiting:
                self._start_connecting(worker, waiting.popleft())
            on_connection(connection, "")

    def _fail_waiting(self, worker: WorkerEntry, on_connection: OnConnection, why: str) -> None:
        """Those who wait for their turn would not fare better, and must not wait for a time limit each."""
        self._under_way[worker.number] -= 1
        for waiting in (on_connection, *self._waiting.pop(worker.number, ())):
            waiting(None, why)


def set_no_delay(transport: asyncio.Transport) -> None:
    """Send small writes at once: with Nagle's algorithm an event waits up to 40 ms for the peer's delayed ACK.

    Event loops do this only for sockets they know to be TCP by number, so it is not left to them.
    """
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
