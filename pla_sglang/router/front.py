"""Client connections: HTTP/1.1 read strictly, one request at a time, with limits on sizes and times.

    IDLE ──first byte──► HEAD ──complete──► BODY ──complete──► BUSY ──answered──► IDLE (or the next request's HEAD)

Nothing is believed of a client: a connection that is slow in any of these states is closed by ``tick``, and what it
sends while its request is being answered is kept only up to a limit.
"""

from __future__ import annotations

import asyncio
import enum
import socket
from typing import TYPE_CHECKING, cast

from pla_sglang.router.http import answers
from pla_sglang.router.http.framing import Chunked, Framing, Sized
from pla_sglang.router.http.head import CRLF2, AnswerHead, BadMessage, RequestHead, parse_request
from pla_sglang.router.upstream import no_delay

if TYPE_CHECKING:
    from pla_sglang.router.relay import Relay, Work

PIPELINE_BYTES = 65_536  # what a client may send ahead while its request is being answered
WRITE_HIGH_BYTES = 262_144
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Half-open clients: the kernel asks after 30 s of silence, and gives up on bytes that nobody acknowledges for as long.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 30, 10, 3
USER_TIMEOUT_MS = 30_000
# For a client that is refused in the middle of its body: closing at once would reset the connection, answer included.
LINGER_S = 1.0
# A body has its time limit for every so many bytes: one that comes in drops must not hold its connection for days.
BODY_STEP_BYTES = 16_384


class Phase(enum.Enum):
    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    BUSY = "busy"
    CLOSED = "closed"


# Named once: CPython 3.11 takes 0.2 us to look a member up in its class, and every request meets these.
_IDLE, _HEAD, _BODY, _BUSY, _CLOSED = Phase


class ClientConnection(asyncio.Protocol):
    """One connection of a client.

    ``understands_chunks``: the present request came with HTTP/1.1. ``_bodiless``: it is a HEAD, so its answer has no
    body, and whoever sent one would take a body for the beginning of the next answer.
    """

    __slots__ = (
        *("_bodiless", "_buffer", "_close_after", "_deadline_s", "_framing", "_head", "_parts", "_phase"),
        *("_reading_paused", "_received", "_relay", "_renewed", "_transport", "_work", "_write_deadline_s"),
        "understands_chunks",
    )

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._transport: asyncio.Transport | None = None
        self._phase = _IDLE
        self._buffer = b""
        self._head: RequestHead | None = None
        self._framing: Framing | None = None
        self._parts: list[bytes] = []
        self._received = 0  # bytes in _parts, counted by the relay
        self._renewed = 0  # of them, when the body's deadline was set last
        self._work: Work | None = None
        self._close_after = self._bodiless = False
        self.understands_chunks = True
        self._reading_paused = False
        self._deadline_s = 0.0
        self._write_deadline_s: float | None = None

    # -- asyncio -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = stream = cast(asyncio.Transport, transport)  # uvloop's class is not derived from it
        if not self._relay.admit(self):
            self._phase = _CLOSED
            stream.abort()
            return
        no_delay(stream)
        keep_alive(stream)
        stream.set_write_buffer_limits(WRITE_HIGH_BYTES)
        self._deadline_s = self._relay.now_s() + self._relay.config.head_timeout_s

    def data_received(self, data: bytes) -> None:
        if self._phase is _CLOSED:
            return
        if self._phase is _BUSY:
            self._buffer += data
            if len(self._buffer) > PIPELINE_BYTES and self._transport is not None:
                self._transport.pause_reading()
                self._reading_paused = True
            return
        try:
            if self._phase is _BODY:
                self._on_body(data, 0)
            else:
                self._on_head(self._buffer + data if self._buffer else data)
        except BadMessage as error:
            self._refuse(error)

    def eof_received(self) -> None:
        return None  # nothing more comes, and nobody who closes waits for an answer

    def connection_lost(self, exc: Exception | None) -> None:
        self._phase, self._transport = _CLOSED, None
        self._drop_parts()
        self._relay.release(self)
        work, self._work = self._work, None
        if work is not None:
            work.client_gone("the client closed the connection" + (f": {exc}" if exc else ""))

    def pause_writing(self) -> None:
        self._write_deadline_s = self._relay.now_s() + self._relay.config.write_timeout_s
        if self._work is not None:
            self._work.pause()

    def resume_writing(self) -> None:
        self._write_deadline_s = None
        if self._work is not None:
            self._work.resume()

    # -- reading a request -------------------------------------------------------------------------------------------

    def _on_head(self, data: bytes) -> None:
        config = self._relay.config
        while data[:2] == b"\r\n":  # allowed in front of a request (RFC 9112, section 2.2)
            data = data[2:]
        end = data.find(CRLF2)
        size = len(data) if end < 0 else end + len(CRLF2)
        if size > config.max_head_bytes:
            raise BadMessage("head_size", f"the request head is longer than {config.max_head_bytes} bytes", 431)
        if end < 0:
            if self._phase is _IDLE:
                self._phase = _HEAD
                self._deadline_s = self._relay.now_s() + config.head_timeout_s
            self._buffer = data
            return
        self._buffer = b""
        head = parse_request(data[:size], max_headers=config.max_headers)
        if head.length is not None and head.length > config.max_body_bytes:
            raise BadMessage("body_size", f"the body is longer than {config.max_body_bytes} bytes", 413)
        self._head = head
        self._close_after = not head.keep_alive
        self._bodiless = head.method == "HEAD"
        self.understands_chunks = head.minor == 1
        if head.length == len(data) - size:  # the usual case: one segment, one request
            self._complete(data[size:] if head.length else b"", b"")
            return
        self._framing = Chunked() if head.chunked else Sized(head.length or 0)
        self._phase, self._renewed = _BODY, 0
        self._deadline_s = self._relay.now_s() + config.body_timeout_s
        if (head.get(b"expect") or b"").lower() == b"100-continue" and size == len(data) and head.length != 0:
            self.write(CONTINUE)
        self._on_body(data, size)

    def _on_body(self, data: bytes, start: int) -> None:
        framing, config = self._framing, self._relay.config
        assert framing is not None
        before = len(self._parts)
        end = framing.feed(data, start, self._parts)
        got = sum(map(len, self._parts[before:]))
        self._received += got
        if self._received > config.max_body_bytes or (
            isinstance(framing, Chunked) and framing.size > config.max_body_bytes
        ):
            raise BadMessage("body_size", f"the body is longer than {config.max_body_bytes} bytes", 413)
        if not self._relay.buffer(got):
            self._received -= got
            raise BadMessage("buffers_full", "too many request bodies are on their way in", 503)
        if end < 0:
            if self._received >= self._renewed + BODY_STEP_BYTES:
                self._renewed, self._deadline_s = self._received, self._relay.now_s() + config.body_timeout_s
            return
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._complete(body, data[end:])

    def _complete(self, body: bytes, rest: bytes) -> None:
        self._drop_parts()
        self._phase, self._buffer, self._framing = _BUSY, rest, None
        head, self._head = self._head, None
        assert head is not None
        self._relay.serve(self, head, body)

    def _drop_parts(self) -> None:
        if self._received:
            self._relay.buffer(-self._received)
        self._received, self._parts = 0, []

    def _refuse(self, error: BadMessage) -> None:
        self._relay.count("bad_requests_total", reason=error.reason)
        self._turn_away(error.status, error.reason, str(error))

    def _turn_away(self, status: int, code: str, message: str) -> None:
        """What comes next on this connection cannot be told from this request any more, so it ends."""
        self._drop_parts()
        self._close_after = True
        self._phase = _CLOSED
        self.answer(status, answers.error_body(status, code, message))
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()
            self._relay.later(LINGER_S, self.cut)

    # -- answering, for whoever works on the request -----------------------------------------------------------------

    def works(self, work: Work) -> None:
        """``work`` answers the present request."""
        self._work = work
        if self._write_deadline_s is not None:
            work.pause()

    def write(self, data: bytes) -> None:
        """Nothing happens on a connection that has just been lost: ``client_gone`` is on its way then."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    def head_of(self, head: AnswerHead, rid: str) -> bytes:
        """An instance's head as the client gets it: without what is about the other connection, with the rid."""
        own = b"x-request-id: %s\r\n" % rid.encode("latin-1", "replace")
        framed = head.length is not None or (head.chunked and self.understands_chunks)
        if not framed and head.status not in (204, 304):
            self._close_after = True
        if self._close_after:
            own += b"connection: close\r\n"
        if self.understands_chunks and not head.own_hop and head.minor:
            return head.raw[:-2] + own + b"\r\n"
        dropped = {b"connection", b"keep-alive"} | (set() if self.understands_chunks else {b"transfer-encoding"})
        lines = [b"%s: %s\r\n" % (name, value) for name, value in head.headers if name not in dropped]
        status = answers.STATUS_LINES.get(head.status, b"HTTP/1.1 %d \r\n" % head.status)
        return status + b"".join(lines) + own + b"\r\n"

    def answer(
        self,
        status: int,
        body: bytes = b"",
        *,
        content_type: str = answers.JSON,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """A whole answer of the router's own."""
        keep = not self._close_after
        whole = answers.answer(status, body, content_type=content_type, keep_alive=keep, headers=headers)
        self.write(whole[: -len(body)] if body and self._bodiless else whole)
        self.done(reusable=True)

    def done(self, *, reusable: bool) -> None:
        """The answer is complete."""
        self._work = None
        if self._transport is None or self._phase is not _BUSY:
            return
        if self._close_after or not reusable or self._relay.draining:
            self._phase = _CLOSED
            self._transport.close()
            return
        self._phase = _IDLE
        self._deadline_s = self._relay.now_s() + self._relay.config.idle_timeout_s
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
        if self._buffer:
            self._relay.soon(self._next)

    def _next(self) -> None:
        """The request that came while the last one was being answered."""
        if self._phase is _IDLE and self._buffer:
            data, self._buffer = self._buffer, b""
            self.data_received(data)

    def cut(self) -> None:
        """End in the middle of an answer, so that the client cannot take it for complete."""
        self._work = None
        if self._transport is not None:
            self._phase = _CLOSED
            self._transport.abort()

    # -- time limits -------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        if self._write_deadline_s is not None and now_s > self._write_deadline_s:
            self._relay.count("client_timeouts_total", phase="write")
            self._abort_slow("the client read nothing for too long")
        elif self._phase in (_IDLE, _HEAD, _BODY) and now_s > self._deadline_s:
            self._relay.count("client_timeouts_total", phase=self._phase.value)
            if self._phase is _IDLE:
                self.cut()
                return
            self._turn_away(408, "timeout", f"the request's {self._phase.value} did not arrive in time")

    def _abort_slow(self, detail: str) -> None:
        work = self._work
        self.cut()
        if work is not None:
            work.client_gone(detail)

    def close_idle(self) -> None:
        """Called when the relay drains."""
        if self._phase in (_IDLE, _HEAD):
            self.cut()


def keep_alive(transport: asyncio.Transport) -> None:
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
