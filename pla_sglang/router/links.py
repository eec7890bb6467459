"""What carries frames between relays and the control plane: a stream socket (``unix://PATH``), or ZMQ (``ipc://PATH``).

Both keep the order of a peer's frames, and drop those for a peer that is not there. ZMQ has a thread of its own between
the event loop and the socket, so each frame wakes two more threads: beside the stream socket a question and its answer
take three times the CPU time and of the time (docs/router.md, "What it costs"). Frames on the stream socket have their
length in front, four bytes, little-endian; the first frame of a connection is the relay's identity.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import zmq

STREAM, ZMQ = "unix://", "ipc://"
RECONNECT_S = 0.05
LENGTH_BYTES = 4
_log = logging.getLogger(__name__)


class Link(Protocol):
    """A relay's end."""

    def start(self, take: Callable[[bytes], None], on_open: Callable[[], None]) -> None:
        """``on_open``: called whenever there is a new connection, by carriers that know."""

    def send(self, frame: bytes) -> None:
        """Never waits: queues are not bounded, as each message belongs to a request that is open."""

    def close(self) -> None: ...


class Hub(Protocol):
    """The control plane's end. Relays are told apart by their identities."""

    async def start(self, take: Callable[[bytes, bytes], None], on_gone: Callable[[bytes], None]) -> None:
        """``take``: identity and frame. ``on_gone``: called when a connection has ended, by carriers that know.

        Raises:
            OSError: the address cannot be bound.
        """

    def send(self, identity: bytes, frame: bytes) -> None: ...

    def close(self) -> None: ...


def link_to(address: str, identity: bytes) -> Link:
    """Raises ValueError for an address of neither kind."""
    if address.startswith(STREAM):
        return _StreamLink(address.removeprefix(STREAM), identity)
    if address.startswith(ZMQ):
        return _ZmqLink(address, identity)
    raise ValueError(f"address {address!r}; allowed: {STREAM}PATH, {ZMQ}PATH")


def hub_at(address: str) -> Hub:
    """Raises ValueError for an address of neither kind."""
    if address.startswith(STREAM):
        return _StreamHub(address.removeprefix(STREAM))
    if address.startswith(ZMQ):
        return _ZmqHub(address)
    raise ValueError(f"address {address!r}; allowed: {STREAM}PATH, {ZMQ}PATH")


# -- stream sockets ----------------------------------------------------------------------------------------------------


class Framed(asyncio.Protocol):
    """Frames on one connection. ``transport`` is None before and after it."""

    def __init__(self, take: Callable[[Framed, bytes], None], on_lost: Callable[[Framed], None]) -> None:
        self.transport: asyncio.Transport | None = None
        self.identity = b""  # of the peer; a hub's concern
        self._take, self._on_lost = take, on_lost
        self._parts: list[bytes] = []  # of a frame that is not complete
        self._have = self._need = 0  # their bytes, and how many there must be to go on

    def send(self, frame: bytes) -> None:
        if self.transport is not None:
            self.transport.write(len(frame).to_bytes(LENGTH_BYTES, "little") + frame)

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
            self._take(self, data[first:stop])


class _StreamLink:
    """Connects again and again, as a control plane may be about to start."""

    def __init__(self, path: str, identity: bytes) -> None:
        self._path, self._identity = path, identity
        self._framed: Framed | None = None
        self._connecting: asyncio.Task[None] | None = None

    def start(self, take: Callable[[bytes], None], on_open: Callable[[], None]) -> None:
        self._take, self._on_open = take, on_open
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def send(self, frame: bytes) -> None:
        if self._framed is not None:
            self._framed.send(frame)

    def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        framed, self._framed = self._framed, None
        if framed is not None and framed.transport is not None:
            framed.transport.close()

    async def _connect(self) -> None:
        loop, take = asyncio.get_running_loop(), self._take
        while True:
            try:
                _, framed = await loop.create_unix_connection(
                    lambda: Framed(lambda _, frame: take(frame), self._lost), self._path
                )
            except OSError:
                await asyncio.sleep(RECONNECT_S)
                continue
            if framed.transport is not None:
                break
        self._framed = framed
        framed.send(self._identity)
        self._on_open()

    def _lost(self, framed: Framed) -> None:
        if framed is self._framed:
            self._framed = None
            self._connecting = asyncio.get_running_loop().create_task(self._connect())


class _StreamHub:
    def __init__(self, path: str) -> None:
        self._path = path
        self._framed: dict[bytes, Framed] = {}  # by identity
        self._server: asyncio.Server | None = None

    async def start(self, take: Callable[[bytes, bytes], None], on_gone: Callable[[bytes], None]) -> None:
        self._take, self._on_gone = take, on_gone
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: Framed(self._on_frame, self._on_lost), self._path)

    def send(self, identity: bytes, frame: bytes) -> None:
        framed = self._framed.get(identity)
        if framed is not None:
            framed.send(frame)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for framed in self._framed.values():
            if framed.transport is not None:
                framed.transport.close()
        self._framed = {}

    def _on_frame(self, framed: Framed, frame: bytes) -> None:
        if framed.identity:
            self._take(framed.identity, frame)
        else:
            framed.identity = frame
            self._framed[frame] = framed

    def _on_lost(self, framed: Framed) -> None:
        if self._framed.get(framed.identity) is framed:
            del self._framed[framed.identity]
            self._on_gone(framed.identity)


# -- ZMQ ---------------------------------------------------------------------------------------------------------------


class _ZmqSocket:
    """A ZMQ socket on an event loop. ``take`` gets the frames of each message.

    Its descriptor is edge-triggered and speaks of both directions, so after each event, and after each send, everything
    that is there is read.
    """

    def __init__(self, kind: int) -> None:
        self._context = zmq.Context()
        self.zmq: Any = self._context.socket(kind)
        self.zmq.setsockopt(zmq.LINGER, 500)
        self.zmq.setsockopt(zmq.SNDHWM, 0)
        self.zmq.setsockopt(zmq.RCVHWM, 0)
        self._loop = asyncio.get_running_loop()
        self._take: Callable[[list[bytes]], None]
        self._again = False

    def begin(self, take: Callable[[list[bytes]], None]) -> None:
        self._take = take
        self._loop.add_reader(self.zmq.getsockopt(zmq.FD), self._drain)
        self._drain()

    def _drain(self) -> None:
        self._again = False
        while self.zmq.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._take(self.zmq.recv_multipart(zmq.NOBLOCK))

    def send(self, frames: Sequence[bytes]) -> None:
        try:
            self.zmq.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            _log.warning("a message to a peer that is gone was dropped")
        if not self._again:  # sending may have swallowed the sign that something came in
            self._again = True
            self._loop.call_soon(self._drain)

    def close(self) -> None:
        self._loop.remove_reader(self.zmq.getsockopt(zmq.FD))
        self.zmq.close()
        self._context.term()


class _ZmqLink:
    """A DEALER. It connects again by itself, and never says so."""

    def __init__(self, address: str, identity: bytes) -> None:
        self._socket = _ZmqSocket(zmq.DEALER)
        self._socket.zmq.setsockopt(zmq.IDENTITY, identity)
        self._socket.zmq.setsockopt(zmq.RECONNECT_IVL, int(RECONNECT_S * 1000))
        self._socket.zmq.connect(address)

    def start(self, take: Callable[[bytes], None], on_open: Callable[[], None]) -> None:
        self._socket.begin(lambda frames: take(frames[0]))

    def send(self, frame: bytes) -> None:
        self._socket.send([frame])

    def close(self) -> None:
        self._socket.close()


class _ZmqHub:
    """A ROUTER; it does not hear of connections that end."""

    def __init__(self, address: str) -> None:
        self._socket = _ZmqSocket(zmq.ROUTER)
        self._address = address

    async def start(self, take: Callable[[bytes, bytes], None], on_gone: Callable[[bytes], None]) -> None:
        self._socket.zmq.bind(self._address)
        self._socket.begin(lambda frames: take(frames[0], frames[1]))

    def send(self, identity: bytes, frame: bytes) -> None:
        self._socket.send([identity, frame])

    def close(self) -> None:
        self._socket.close()
