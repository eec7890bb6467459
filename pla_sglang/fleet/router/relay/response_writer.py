"""The answering half of a client's connection: what the parts of the relay that work on a request write to."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable

from pla_sglang.fleet.router.http import responses
from pla_sglang.fleet.router.http.head import BODILESS, HOP_HEADERS, RequestHead, ResponseHead

# Set by the router, or by the connection between the instance and the router.
_OWN_HEADERS = HOP_HEADERS | {b"x-request-id"}
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 s
_SAY_KEEP_ALIVE = (("connection", "keep-alive"),)


class ClientWork:
    """What answers a client's present request."""

    __slots__ = ()

    def on_disconnect(self, detail: str) -> None:
        """Nobody gets the answer any more."""

    def set_paused(self, paused: bool) -> None:
        """The client's buffers are full, or have room again. Nothing to do for an answer that is written at once."""


class ResponseWriter:
    """Answers of one connection, one after the other.

    Args:
        on_finished: an answer is complete; False where nothing may follow it on the connection.

    Attributes:
        transport: None when the connection is lost or was cut.
        understands_chunks: the present request came with HTTP/1.1.
        close_after: the present answer is the last one.
    """

    __slots__ = ("_bodiless", "_on_finished", "_work", "close_after", "paused", "transport", "understands_chunks")

    def __init__(self, on_finished: Callable[[bool], None]) -> None:
        self._on_finished = on_finished
        self._work: ClientWork | None = None
        self._bodiless = False
        self.transport: asyncio.Transport | None = None
        self.close_after = self.paused = False
        self.understands_chunks = True

    # -- for the connection ------------------------------------------------------------------------------------------

    def expect_response(self, head: RequestHead) -> None:
        """The next answer is to this request. That to a HEAD has no body: the client would take it for the beginning
        of the next answer."""
        self.close_after = not head.keep_alive
        self._bodiless = head.method == "HEAD"
        self.understands_chunks = head.minor == 1

    def set_paused(self, paused: bool) -> None:
        """The client's buffers are full, or have room again."""
        self.paused = paused
        if self._work is not None:
            self._work.set_paused(paused)

    def on_connection_lost(self, detail: str) -> None:
        self.transport = None
        del self._on_finished  # the connection's own: without the cycle, both are freed at once
        self.end_work(detail)

    def end_work(self, detail: str) -> None:
        """The client is gone, or is treated as if it were."""
        work, self._work = self._work, None
        if work is not None:
            work.on_disconnect(detail)

    # -- for the work ------------------------------------------------------------------------------------------------

    def attach_work(self, work: ClientWork) -> None:
        """``work`` answers the present request."""
        self._work = work
        if self.paused:
            work.set_paused(True)

    def write_bytes(self, data: bytes) -> None:
        """Nothing happens on a connection that has just been lost: ``on_disconnect`` is on its way then."""
        transport = self.transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    def forwarded_head(self, head: ResponseHead, rid: str, *, added: bytes = b"") -> bytes:
        """An instance's head as the client gets it: without what is about the other connection, with the rid.

        ``added``: further lines.
        """
        added += f"x-request-id: {rid}\r\n".encode("latin-1", "replace")
        framed = head.length is not None or (head.chunked and self.understands_chunks)
        if not framed and head.status not in BODILESS:
            self.close_after = True
        if self.close_after:
            added += b"connection: close\r\n"
        elif not self.understands_chunks:  # HTTP/1.0: a client that is not told waits for the connection's end
            added += b"connection: keep-alive\r\n"
        if self.understands_chunks and not head.own_hop and head.minor:
            return head.raw[:-2] + added + b"\r\n"
        dropped = self._headers_to_drop(head)
        lines = [b"%s: %s\r\n" % header for header in head.headers if header[0] not in dropped]
        status = responses.STATUS_LINES.get(head.status, b"HTTP/1.1 %d \r\n" % head.status)
        return status + b"".join(lines) + added + b"\r\n"

    def _headers_to_drop(self, head: ResponseHead) -> frozenset[bytes]:
        """The headers of an answer that end at the router (RFC 9110, section 7.6.1; RFC 9112, section 6.1)."""
        dropped = _OWN_HEADERS | head.named_by_connection()
        if head.status in BODILESS:
            return dropped | {b"transfer-encoding"} | ({b"content-length"} if head.status == 204 else frozenset())
        return dropped if self.understands_chunks else dropped | {b"transfer-encoding"}

    def send_response(
        self,
        status: int,
        body: bytes = b"",
        *,
        content_type: str = responses.JSON,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """A whole answer of the router's own."""
        keep = not self.close_after
        if keep and not self.understands_chunks:
            headers = (*headers, *_SAY_KEEP_ALIVE)
        whole = responses.whole_response(status, body, content_type=content_type, keep_alive=keep, headers=headers)
        self.write_bytes(whole[: -len(body)] if body and self._bodiless else whole)
        self.finish_response(reusable=True)

    def send_error(self, status: int, code: str, message: str, *, headers: tuple[tuple[str, str], ...] = ()) -> None:
        """As ``send_response``, in the form of the OpenAI API."""
        self.send_response(status, responses.error_body(status, code, message), headers=headers)

    def finish_response(self, *, reusable: bool) -> None:
        """The answer is complete. ``reusable``: its end is marked, so that another may follow."""
        self._work = None
        if self.transport is not None:
            self._on_finished(reusable and not self.close_after)

    def cut_connection(self) -> None:
        """End in the middle of an answer: with a reset, so that the client cannot take it for complete where its end is
        that of the connection."""
        sock = None if self.transport is None else self.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
        self.close_connection()

    def close_connection(self) -> None:
        """Between two answers, or when the last one had time to arrive."""
        self._work = None
        transport, self.transport = self.transport, None
        if transport is not None:
            transport.abort()
