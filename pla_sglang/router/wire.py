"""The two planes in different processes: messages over ZMQ on a Unix socket.

A relay connects a DEALER to the control plane's ROUTER. What one turn of the event loop says goes out as one frame, a
list of messages. A relay knocks (an empty frame) until it is attached, and again whenever it has heard nothing for
``SILENCE_S``: a control plane that has restarted does not know it, attaches it, and its table has a new epoch. What a
relay that is not attached says is dropped; its ``Hello`` will tell all that matters.

ZMQ's descriptor is edge-triggered and speaks of both directions, so after each event, and after each send, everything
that is there is read.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from pla_sglang.router.messages import BEAT_INTERVAL_S, FromControl, FromRelay, Table
from pla_sglang.router.plane import ControlPlane

SILENCE_S = 6 * BEAT_INTERVAL_S
KNOCK_S = 0.25
GONE_S = 3.0  # a relay reports every second
KNOCK = b""
_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_from_control = msgspec.msgpack.Decoder(list[FromControl]).decode
_from_relay = msgspec.msgpack.Decoder(list[FromRelay]).decode


class _Socket:
    """A ZMQ socket on an event loop. ``take`` gets the frames of each message."""

    def __init__(self, kind: int, loop: asyncio.AbstractEventLoop, take: Callable[[list[bytes]], None]) -> None:
        self._context = zmq.Context()
        self.zmq: Any = self._context.socket(kind)
        self.zmq.setsockopt(zmq.LINGER, 500)
        self.zmq.setsockopt(zmq.SNDHWM, 0)
        self.zmq.setsockopt(zmq.RCVHWM, 0)
        self._loop, self._take = loop, take
        self._again = False

    def begin(self) -> None:
        self._loop.add_reader(self.zmq.getsockopt(zmq.FD), self.drain)
        self.drain()

    def drain(self) -> None:
        self._again = False
        while self.zmq.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._take(self.zmq.recv_multipart(zmq.NOBLOCK))

    def send(self, frames: Sequence[bytes]) -> None:
        """Never waits: queues are not bounded, as each message belongs to a request that is open."""
        try:
            self.zmq.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            _log.warning("a message to a peer that is gone was dropped")
        if not self._again:  # sending may have swallowed the sign that something came in
            self._again = True
            self._loop.call_soon(self.drain)

    def close(self) -> None:
        self._loop.remove_reader(self.zmq.getsockopt(zmq.FD))
        self.zmq.close()
        self._context.term()


class RelayWire:
    """The relay's end. ``say`` goes to the control plane; ``tell`` gets what it answers."""

    def __init__(self, address: str, number: int, *, now_s: Callable[[], float]) -> None:
        self._loop = asyncio.get_running_loop()
        self._now_s = now_s
        self._heard_s = float("-inf")
        self._outgoing: list[FromRelay] = []
        self._timer: asyncio.TimerHandle | None = None
        self.tell: Callable[[FromControl], None]
        self._on_attached: Callable[[], None]
        self._knocked = False
        self._socket = _Socket(zmq.DEALER, self._loop, self._take)
        self._socket.zmq.setsockopt(zmq.IDENTITY, b"%d/%d" % (number, os.getpid()))
        self._socket.zmq.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.zmq.connect(address)

    def start(self, tell: Callable[[FromControl], None], on_attached: Callable[[], None] = lambda: None) -> None:
        """``on_attached``: called before the first ``Table`` of each membership is told."""
        self.tell, self._on_attached = tell, on_attached
        self._socket.begin()
        self._knock()

    def say(self, message: FromRelay) -> None:
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(message)

    def silent_s(self) -> float:
        """Since the control plane was last heard."""
        return self._now_s() - self._heard_s

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._flush()
        self._socket.close()

    def _flush(self) -> None:
        if self._outgoing:
            outgoing, self._outgoing = self._outgoing, []
            self._socket.send([_encode(outgoing)])

    def _take(self, frames: list[bytes]) -> None:
        self._heard_s = self._now_s()
        for message in _from_control(frames[0]):
            if self._knocked:  # who was a member all the time hears a beat first, who is a new one its table
                self._knocked = False
                if isinstance(message, Table):
                    self._on_attached()
            self.tell(message)

    def _knock(self) -> None:
        if self.silent_s() > SILENCE_S:
            self._knocked = True
            self._socket.send([KNOCK])
        self._timer = self._loop.call_later(KNOCK_S, self._knock)


@dataclasses.dataclass
class _Peer:
    """A relay as the control process sees it (``RelayPort``)."""

    wire: ControlWire
    identity: bytes
    number: int
    heard_s: float
    outgoing: list[FromControl] = dataclasses.field(default_factory=list)

    def tell(self, message: FromControl) -> None:
        if not self.outgoing:
            self.wire.loop.call_soon(self.flush)
        self.outgoing.append(message)

    def flush(self) -> None:
        if self.outgoing:
            outgoing, self.outgoing = self.outgoing, []
            self.wire.send(self.identity, _encode(outgoing))


class ControlWire:
    """The control plane's end: relays come and go, each is attached while it is heard."""

    def __init__(self, address: str, control: ControlPlane, *, now_s: Callable[[], float]) -> None:
        self.loop = asyncio.get_running_loop()
        self._control, self._now_s = control, now_s
        self._peers: dict[bytes, _Peer] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._socket = _Socket(zmq.ROUTER, self.loop, self._take)
        self._socket.zmq.bind(address)

    def start(self) -> None:
        self._socket.begin()
        self._sweep()

    def send(self, identity: bytes, frame: bytes) -> None:
        self._socket.send([identity, frame])

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for peer in self._peers.values():
            peer.flush()
        self._socket.close()

    def _take(self, frames: list[bytes]) -> None:
        identity, content = frames
        peer = self._peers.get(identity)
        if content == KNOCK:
            if peer is None:
                self._attach(identity)
            return
        if peer is None:
            return
        peer.heard_s = self._now_s()
        try:
            messages = _from_relay(content)
        except msgspec.DecodeError as error:  # another version of us; nothing it says can be trusted
            _log.error("relay %d sent what this control plane does not know: %s", peer.number, error)
            self._forget(peer)
            return
        for message in messages:
            self._control.hear(message)

    def _attach(self, identity: bytes) -> None:
        number = int(identity.partition(b"/")[0])
        for former in [peer for peer in self._peers.values() if peer.number == number]:
            self._forget(former)  # the relay's process was replaced
        peer = _Peer(self, identity, number, self._now_s())
        self._peers[identity] = peer
        self._control.attach(number, peer)

    def _forget(self, peer: _Peer) -> None:
        del self._peers[peer.identity]
        self._control.forget(peer.number)

    def _sweep(self) -> None:
        """Relays that say nothing any more are gone; what they held, the control plane frees."""
        now_s = self._now_s()
        for peer in [peer for peer in self._peers.values() if now_s - peer.heard_s > GONE_S]:
            _log.warning("relay %d is gone", peer.number)
            self._forget(peer)
        self._timer = self.loop.call_later(KNOCK_S, self._sweep)
