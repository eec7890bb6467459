"""Where clients connect: the listening socket, and the connections that are open."""

from __future__ import annotations

import asyncio
import socket

from pla_sglang.fleet.router.relay.client_connection import AcceptRequest, ClientConnection
from pla_sglang.fleet.router.relay.context import RelayContext
from pla_sglang.fleet.router.relay.tls_acceptor import BACKLOG, TlsAcceptor


class ClientListener:
    """``accept_request`` gets the head of each request of every connection.

    Attributes:
        port: where it listens.
    """

    def __init__(self, context: RelayContext, accept_request: AcceptRequest) -> None:
        self._context, self._accept_request = context, accept_request
        self._connections: set[ClientConnection] = set()
        self._server: asyncio.Server | None = None
        self._tls: TlsAcceptor | None = None
        self.port = context.config.port

    def __len__(self) -> int:
        return len(self._connections)

    async def start_listening(self, *, shared: bool) -> None:
        """``shared``: beside the other relays of the router. Raises OSError where the address is taken."""
        config = self._context.config
        sock = listening_socket(config.host, config.port, shared=shared)
        self.port = sock.getsockname()[1]
        if self._context.client_tls is not None:
            self._tls = TlsAcceptor(self._context, self._context.client_tls, sock, self.new_connection, self._is_full)
        else:
            self._server = await self._context.loop.create_server(self.new_connection, sock=sock, backlog=BACKLOG)

    def new_connection(self) -> ClientConnection:
        return ClientConnection(self._context, self._accept_request, self._connections, self._has_room)

    def stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._tls is not None:
            self._tls.stop_accepting()

    def close_idle(self) -> None:
        for connection in list(self._connections):
            connection.close_if_idle()

    def cut_all(self) -> None:
        if self._tls is not None:
            self._tls.cut_handshakes()
        for connection in list(self._connections):
            connection.cut_connection()

    def check_time_limits(self, now_s: float) -> None:
        for connection in list(self._connections):
            connection.check_time_limits(now_s)

    def _has_room(self) -> bool:
        return self._tls is not None or not self._is_full()  # with TLS it was admitted before both ends agreed

    def _is_full(self) -> bool:
        handshakes = 0 if self._tls is None else len(self._tls)
        return len(self._connections) + handshakes >= self._context.config.max_connections


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
    except OSError as error:
        sock.close()
        raise OSError(f"--host {host} --port {port}: {error.strerror}") from None
    return sock
