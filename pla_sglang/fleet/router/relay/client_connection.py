"""Client connections: HTTP/1.1 read strictly, one request at a time, with limits on sizes and times.

    IDLE ──first byte──► HEAD ──complete──► BODY ──complete──► BUSY ──answered──► IDLE (or the next request's HEAD)
                           └── refused ──► CLOSED, unless the body is here already: then IDLE

Nothing is believed of a client: a connection that is slow in any of these states is closed by ``check_time_limits``,
what it sends while its request is being answered is kept only up to a limit, and no byte of a body is kept before the
head was found good (key, path, method, size). Answers: ``answer_writer``.
"""

from __future__ import annotations

import asyncio
import enum
import re
import socket
from collections.abc import Callable
from typing import NamedTuple, cast

from pla_sglang.fleet.router.http.framing import Chunked, Framing, Sized
from pla_sglang.fleet.router.http.head import CRLF2, BadMessage, RequestHead, parse_request
from pla_sglang.fleet.router.http.responses import RETRY_SOON
from pla_sglang.fleet.router.relay.context import RelayContext
from pla_sglang.fleet.router.relay.response_writer import ResponseWriter
from pla_sglang.fleet.router.relay.upstream_connection import set_no_delay

# What a client may send ahead while its request is being answered. What comes beyond is dropped, and the connection
# closed behind the answer, or at once where that is exceeded too. Reading goes on, so that a client's end is seen.
PIPELINE_BYTES, DROPPED_BYTES = 65_536, 1 << 20
WRITE_HIGH_BYTES = 262_144
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Half-open clients: the kernel asks after 30 s of silence, and gives up on bytes that nobody acknowledges for as long.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 30, 10, 3
USER_TIMEOUT_MS = 30_000
# For a client that is refused in the middle of its body: closing at once would reset the connection, answer included.
CLOSE_DELAY_S = 1.0
# A body has its time limit for every so many bytes: one that comes in drops must not hold its connection for days.
BODY_STEP_BYTES = 16_384
# Pieces of a body that are shorter are joined: each costs 33 bytes and a place in a list beside its content.
JOIN_BYTES = 2048
TLS_FIRST = b"\x16"  # of a connection with TLS; no request begins with it
_BLANK_LINES = re.compile(rb"(?:\r\n)+").match  # allowed in front of a request (RFC 9112, section 2.2)


class AcceptedRequest(NamedTuple):
    """A request whose head was found good. ``serve`` gets it with its body, at most ``max_body_bytes`` long, and raises
    BadMessage where that is refused."""

    max_body_bytes: int
    serve: Callable[[ResponseWriter, RequestHead, bytes], None]


# Called with a head that is complete. Raises BadMessage where the request is refused whatever its body says.
AcceptRequest = Callable[[RequestHead], AcceptedRequest]


class ConnectionPhase(enum.Enum):
    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    BUSY = "busy"
    CLOSED = "closed"


_IDLE, _HEAD, _BODY, _BUSY, _CLOSED = ConnectionPhase


class ClientConnection(asyncio.Protocol):
    """One connection of a client.

    Args:
        accept_request: judges the head of each request and says what serves it.
        others: the open ones, where it stands while it is open itself.
        has_room: whether there may be one more of them.
    """

    def __init__(
        self,
        context: RelayContext,
        accept_request: AcceptRequest,
        others: set[ClientConnection],
        has_room: Callable[[], bool],
    ) -> None:
        self._context, self._accept_request = context, accept_request
        self._others, self._has_room = others, has_room
        self._transport: asyncio.Transport | None = None
        self._writer = ResponseWriter(self._on_answered)
        self._phase = _IDLE
        self._buffer = b""
        self._blank_bytes = 0  # of blank lines in front of the head that is being read
        self._head: RequestHead | None = None
        self._accepted: AcceptedRequest | None = None
        self._framing: Framing | None = None
        self._parts: list[bytes] = []
        self._received_bytes = 0  # of _parts, counted in the context
        self._renewed_bytes = 0  # of them, when the body's deadline was set last
        self._dropped_bytes = 0  # sent ahead, beyond what is kept
        self._deadline_s = 0.0
        self._write_deadline_s: float | None = None

    # -- asyncio -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's class is not derived from asyncio's
        self._transport = self._writer.transport = stream = cast(asyncio.Transport, transport)
        self._context.counters.count_event("connections_total")
        if not self._has_room():
            self._context.counters.count_event("connections_refused_total")
            self._phase = _CLOSED
            stream.abort()
            return
        self._others.add(self)
        set_no_delay(stream)
        set_keep_alive(stream)
        stream.set_write_buffer_limits(WRITE_HIGH_BYTES)
        self._deadline_s = self._context.now_s() + self._context.config.head_timeout_s

    def data_received(self, data: bytes) -> None:
        if self._phase is _CLOSED:
            return
        if self._phase is _BUSY:
            self._keep_ahead(data)
            return
        try:
            if self._phase is _BODY:
                self._read_body(data, 0)
            else:
                self._read_head(self._buffer + data if self._buffer else data)
        except BadMessage as error:
            self._turn_away(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._phase, self._transport = _CLOSED, None
        self._drop_parts()
        self._others.discard(self)
        self._writer.on_connection_lost("the client closed the connection" + (f": {exc}" if exc else ""))

    def pause_writing(self) -> None:
        self._write_deadline_s = self._context.now_s() + self._context.config.write_timeout_s
        self._writer.set_paused(True)

    def resume_writing(self) -> None:
        self._write_deadline_s = None
        self._writer.set_paused(False)

    # -- reading a request -------------------------------------------------------------------------------------------

    def _read_head(self, data: bytes) -> None:
        config = self._context.config
        if data[:1] == b"\r" and (blank := _BLANK_LINES(data)) is not None:
            self._blank_bytes += blank.end()
            data = data[blank.end() :]
        end = data.find(CRLF2)
        size = len(data) if end < 0 else end + len(CRLF2)
        if size + self._blank_bytes > config.max_head_bytes:
            raise BadMessage("head_size", f"the request head is longer than {config.max_head_bytes} bytes", 431)
        if end < 0:
            if data[:1] == TLS_FIRST:
                raise BadMessage("tls", "this port speaks plain HTTP, not TLS")
            if self._phase is _IDLE:
                self._phase = _HEAD
                self._deadline_s = self._context.now_s() + config.head_timeout_s
            self._buffer = data
            return
        self._buffer, self._blank_bytes = b"", 0
        head = parse_request(data[:size], max_headers=config.max_headers)
        self._writer.expect_response(head)
        if self._context.ending:  # the client's next connection may go to another router
            self._writer.close_after = True
        try:
            accepted = self._accept_request(head)
        except BadMessage as error:
            self._refuse_request(error, head, data[size:])
            return
        self._head, self._accepted = head, accepted
        if head.length is not None and head.length > accepted.max_body_bytes:
            raise _body_too_long(accepted.max_body_bytes)
        if head.length == len(data) - size:  # the usual case: one segment, one request
            self._complete_request(data[size:] if head.length else b"", b"")
            return
        self._framing = Chunked() if head.chunked else Sized(head.length or 0)
        self._phase, self._renewed_bytes = _BODY, 0
        self._deadline_s = self._context.now_s() + config.body_timeout_s
        if size == len(data) and _waits_for_continue(head):
            self._writer.write_bytes(CONTINUE)
        self._read_body(data, size)

    def _read_body(self, data: bytes, start: int) -> None:
        framing, accepted, pieces = self._framing, self._accepted, list[bytes]()
        assert framing is not None
        assert accepted is not None
        end = framing.feed_data(data, start, pieces)
        piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        announced = framing.size if isinstance(framing, Chunked) else 0
        if max(announced, self._received_bytes + len(piece)) > accepted.max_body_bytes:
            raise _body_too_long(accepted.max_body_bytes)
        if not self._context.incoming.try_hold(len(piece)):
            text = "too many request bodies are on their way in"
            raise BadMessage("buffers_full", text, 503, headers=RETRY_SOON)
        self._received_bytes += len(piece)
        if self._parts and len(self._parts[-1]) < JOIN_BYTES:
            self._parts[-1] += piece
        elif piece:
            self._parts.append(piece)
        if end < 0:
            if self._received_bytes >= self._renewed_bytes + BODY_STEP_BYTES:
                self._renewed_bytes = self._received_bytes
                self._deadline_s = self._context.now_s() + self._context.config.body_timeout_s
            return
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._complete_request(body, data[end:])

    def _complete_request(self, body: bytes, rest: bytes) -> None:
        self._drop_parts()
        self._phase, self._buffer, self._framing = _BUSY, b"", None
        head, self._head = self._head, None
        accepted, self._accepted = self._accepted, None
        assert head is not None
        assert accepted is not None
        if rest:
            self._keep_ahead(rest)
        try:
            accepted.serve(self._writer, head, body)
        except BadMessage as error:  # its body was read, so the connection stays
            self._send_refusal(error)

    def _drop_parts(self) -> None:
        if self._received_bytes:
            self._context.incoming.free_bytes(self._received_bytes)
        self._received_bytes, self._parts = 0, []

    # -- what is not served ------------------------------------------------------------------------------------------

    def _refuse_request(self, error: BadMessage, head: RequestHead, rest: bytes) -> None:
        """From its head. The connection stays where the body ends within ``rest``, what has come behind the head."""
        length = head.length or 0
        if head.chunked or length > len(rest):
            self._turn_away(error)
            return
        self._phase = _BUSY
        self._keep_ahead(rest[length:])
        self._send_refusal(error)

    def _turn_away(self, error: BadMessage) -> None:
        """Message boundaries are lost, so the connection closes."""
        self._drop_parts()
        self._phase = _CLOSED
        self._writer.close_after = True
        self._send_refusal(error)
        self._close_behind_response(self._writer.close_connection)

    def _send_refusal(self, error: BadMessage) -> None:
        self._context.counters.count_event("bad_requests_total", reason=error.reason)
        self._writer.send_error(error.status, error.reason, str(error), headers=error.headers)

    def _close_behind_response(self, close: Callable[[], None]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            if self._transport.can_write_eof():  # TLS has no half-closed connections
                self._transport.write_eof()
            self._context.call_later(CLOSE_DELAY_S, close)

    def _keep_ahead(self, data: bytes) -> None:
        """A client sends before its request is answered."""
        if not self._dropped_bytes and len(self._buffer) + len(data) <= PIPELINE_BYTES:
            self._buffer += data
            return
        self._dropped_bytes += len(self._buffer) + len(data)
        self._buffer, self._writer.close_after = b"", True
        if self._dropped_bytes > DROPPED_BYTES:
            self._context.counters.count_event("client_floods_total")
            self._writer.end_work("the client sent too much while its request was being answered")
            self.cut_connection()

    # -- between requests --------------------------------------------------------------------------------------------

    def _on_answered(self, reusable: bool) -> None:
        if self._transport is None or self._phase is not _BUSY:
            return
        if self._dropped_bytes:
            self._phase = _CLOSED
            self._close_behind_response(self._transport.close)
            return
        if not reusable or self._context.draining:
            self._phase = _CLOSED
            self._transport.close()
            return
        self._phase = _IDLE
        self._deadline_s = self._context.now_s() + self._context.config.idle_timeout_s
        if self._buffer:
            self._context.call_soon(self._read_next)

    def _read_next(self) -> None:
        """The request that came while the last one was being answered."""
        if self._phase is _IDLE and self._buffer:
            data, self._buffer = self._buffer, b""
            self.data_received(data)

    # -- time limits -------------------------------------------------------------------------------------------------

    def check_time_limits(self, now_s: float) -> None:
        counters = self._context.counters
        if self._write_deadline_s is not None and now_s > self._write_deadline_s:
            counters.count_event("client_timeouts_total", phase="write")
            self._writer.end_work("the client read nothing for too long")
            self.cut_connection()
        elif self._phase in (_IDLE, _HEAD, _BODY) and now_s > self._deadline_s:
            counters.count_event("client_timeouts_total", phase=self._phase.value)
            if self._phase is _IDLE:
                self.cut_connection()
                return
            self._turn_away(BadMessage("timeout", f"the request's {self._phase.value} did not arrive in time", 408))

    def cut_connection(self) -> None:
        cut = self._writer.cut_connection if self._phase is _BUSY else self._writer.close_connection
        self._phase = _CLOSED
        cut()

    def close_if_idle(self) -> None:
        """Called when the relay drains: no request is complete."""
        if self._phase in (_IDLE, _HEAD):
            self.cut_connection()


def _body_too_long(max_bytes: int) -> BadMessage:
    return BadMessage("body_size", f"the body is longer than {max_bytes} bytes", 413)


def _waits_for_continue(head: RequestHead) -> bool:
    """An HTTP/1.0 client cannot mean it (RFC 9110, section 10.1.1)."""
    return head.minor == 1 and head.length != 0 and (head.get_header(b"expect") or b"").lower() == b"100-continue"


def set_keep_alive(transport: asyncio.Transport) -> None:
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
