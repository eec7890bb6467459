"""Connections of a relay without sockets: what is written to them is kept."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.http.head import RequestHead
from pla_sglang.fleet.router.relay.client_connection import AcceptedRequest, ClientConnection
from pla_sglang.fleet.router.relay.context import RelayContext
from pla_sglang.fleet.router.relay.response_writer import ResponseWriter


class FakeTransport(asyncio.Transport):
    """Keeps what is written, and knows whether it reads, and whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closing, self.reading = False, True

    def get_extra_info(self, name: str, default: object = None) -> None:
        return None

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing waits here."""

    def write(self, data: Any) -> None:
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.closing = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class LoneConnection:
    """One connection of a client, and the requests that it has read."""

    def __init__(self) -> None:
        self.config = RelayConfig()
        self.context = RelayContext(
            self.config, number=0, send_to_control=lambda message: None, rng=random.Random(1), now_s=lambda: 0.0
        )
        self.requests: list[tuple[RequestHead, bytes]] = []
        self.transport = FakeTransport()
        self.connection = ClientConnection(self.context, self._accept, set(), lambda: True)
        self.connection.connection_made(self.transport)

    def _accept(self, head: RequestHead) -> AcceptedRequest:
        return AcceptedRequest(self.config.max_body_bytes, self._serve)

    def _serve(self, client: ResponseWriter, head: RequestHead, body: bytes) -> None:
        self.requests.append((head, body))
