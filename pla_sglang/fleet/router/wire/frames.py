"""Frames on a Unix stream socket: each has its length in front, four bytes, little-endian."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

LENGTH_BYTES = 4


class FramedConnection(asyncio.Protocol):
    """Frames on one connection. ``transport`` is None before and after it."""

    def __init__(
        self, on_frame: Callable[[FramedConnection, bytes], None], on_lost: Callable[[FramedConnection], None]
    ) -> None:
        self.transport: asyncio.Transport | None = None
        self.identity = b""  # of the peer; set by its user
        self._on_frame, self._on_lost = on_frame, on_lost
        self._parts: list[bytes] = []  # of a frame that is not complete
        self._have = self._need = 0  # their bytes, and how many there must be to go on

    def send_frame(self, frame: bytes) -> None:
        if self.transport is not None:
            self.transport.write(len(frame).to_bytes(LENGTH_BYTES, "little") + frame)

    def close_connection(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's class is not derived from it

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._on_lost(self)

    def data_received(self, data: bytes) -> None:
        if self._parts:
            self._parts.append(data)
            self._have += len(data)
            if self._have < self._need:
                return
            data, self._parts = b"".join(self._parts), []
        start, end = 0, len(data)
        while start < end:
            stop = first = start + LENGTH_BYTES
            if first <= end:
                stop += int.from_bytes(data[start:first], "little")
            if stop > end:
                self._parts, self._have, self._need = [data[start:]], end - start, stop - start
                return
            start = stop
            self._on_frame(self, data[first:stop])
