"""Accepts connections with TLS: each gets its context, new ones the newest, and becomes a client's connection once both
ends have agreed.

A connection that has sent nothing yet costs a socket. All that are not agreed count as connections of clients do, and
each has the time of a request's head. A few are accepted in a turn of the event loop: agreeing costs 0.3 ms of CPU time
with a key on P-256, more with RSA, and those that are served must not wait for a crowd of new ones.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from pla_sglang.fleet.router.http import responses
from pla_sglang.fleet.router.relay.client_connection import TLS_FIRST
from pla_sglang.fleet.router.relay.context import RelayContext
from pla_sglang.fleet.router.tls import TlsContext

BACKLOG = 4096
ACCEPTED_A_TURN = 8
REST_S = 1.0  # where there is no socket left
PLAIN_BYTES = 65_536  # that a client of plain HTTP may have sent, and that are read before the answer
logger = logging.getLogger(__name__)


class TlsAcceptor:
    """Listens on ``sock``, which it owns.

    Args:
        new_connection: makes the protocol of an agreed connection.
        is_full: whether there are too many connections already.
    """

    def __init__(
        self,
        context: RelayContext,
        tls: TlsContext,
        sock: socket.socket,
        new_connection: Callable[[], asyncio.Protocol],
        is_full: Callable[[], bool],
    ) -> None:
        self._context, self._tls, self._sock = context, tls, sock
        self._new_connection, self._is_full = new_connection, is_full
        self._handshakes: set[asyncio.Task[None]] = set()
        sock.listen(BACKLOG)
        context.loop.add_reader(sock, self._accept_some)

    def __len__(self) -> int:
        """Connections that are not agreed."""
        return len(self._handshakes)

    def stop_accepting(self) -> None:
        if self._sock.fileno() >= 0:
            self._context.loop.remove_reader(self._sock)
            self._sock.close()

    def cut_handshakes(self) -> None:
        for task in self._handshakes:
            task.cancel()

    def _accept_some(self) -> None:
        loop = self._context.loop
        for _ in range(ACCEPTED_A_TURN):
            try:
                client, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                logger.error("no connection can be accepted for %g s: %s", REST_S, error.strerror)
                loop.remove_reader(self._sock)
                self._context.call_later(REST_S, self._accept_again)
                return
            if self._is_full():
                self._context.counters.count_event("connections_refused_total")
                client.close()
                continue
            client.setblocking(False)
            task = loop.create_task(self._agree(client))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    def _accept_again(self) -> None:
        if self._sock.fileno() >= 0:
            self._context.loop.add_reader(self._sock, self._accept_some)

    async def _agree(self, client: socket.socket) -> None:
        config, loop = self._context.config, self._context.loop
        try:
            async with asyncio.timeout(config.head_timeout_s):
                await _until_readable(loop, client)
                first = client.recv(1, socket.MSG_PEEK)
                if first and first != TLS_FIRST:
                    self._count_failure("plain_http")
                    _refuse_plain(client)
                    return
                await loop.connect_accepted_socket(
                    self._new_connection,
                    client,
                    ssl=self._tls.context,
                    ssl_handshake_timeout=config.head_timeout_s,
                    ssl_shutdown_timeout=config.write_timeout_s,
                )
        except TimeoutError:
            self._count_failure("timeout")
            client.close()
        except ssl.SSLError as error:
            self._count_failure(_name_reason(error))
        except OSError:
            self._count_failure("closed")
            client.close()
        except asyncio.CancelledError:
            client.close()
            raise

    def _count_failure(self, reason: str) -> None:
        self._context.counters.count_event("tls_failures_total", reason=reason)


async def _until_readable(loop: asyncio.AbstractEventLoop, client: socket.socket) -> None:
    readable = asyncio.Event()
    loop.add_reader(client, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(client)


def _refuse_plain(client: socket.socket) -> None:
    """Plain, as the client would not understand an alert. What it has sent is read first: closing would reset."""
    body = responses.error_body(400, "plain_http", "this port speaks TLS: use https")
    try:
        client.recv(PLAIN_BYTES)
        client.send(responses.whole_response(400, body, content_type=responses.JSON, keep_alive=False))
    except OSError:
        pass  # it is gone
    finally:
        client.close()


def _name_reason(error: ssl.SSLError) -> str:
    """A few words, as each is a series of its own: clients choose what they send."""
    reason = (error.reason or "").lower()
    if "certificate" in reason:
        return "certificate"
    return "protocol" if "protocol" in reason or "version" in reason else "other"
