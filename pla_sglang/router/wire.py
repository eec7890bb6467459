"""The two planes in different processes: messages in frames, which ``links.py`` carries.

What one turn of the event loop says goes out as one frame, a list of messages. Stages and ends of requests, which
nobody waits for, stay up to ``LAZY_S`` for a question that goes out anyway: one frame a request instead of four.

A relay knocks (an empty frame) until it is attached, and again whenever it has heard nothing for ``SILENCE_S``: a
control plane that has restarted does not know it, attaches it, and its table has a new epoch. What a relay that is not
attached says is dropped; its ``Hello`` will tell all that matters.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Callable

import msgspec

from pla_sglang.router.links import hub_at, link_to
from pla_sglang.router.messages import BEAT_INTERVAL_S, Ended, FromControl, FromRelay, Stage, Table
from pla_sglang.router.plane import ControlPlane

SILENCE_S = 6 * BEAT_INTERVAL_S
KNOCK_S = 0.25
GONE_S = 3.0  # a relay reports every second
STOOD_S = 1.0  # between two looks that should be KNOCK_S apart
# About a pass of an engine, and so about the age of a load report. Each frame wakes the control process, which costs
# more than what it says.
LAZY_S = 0.02
KNOCK = b""
_LAZY = frozenset({Stage, Ended})  # nobody waits for them
_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_from_control = msgspec.msgpack.Decoder(list[FromControl]).decode
_from_relay = msgspec.msgpack.Decoder(list[FromRelay]).decode


class RelayWire:
    """The relay's end. ``say`` goes to the control plane; ``tell`` gets what it answers."""

    def __init__(self, address: str, number: int, *, now_s: Callable[[], float]) -> None:
        self._loop = asyncio.get_running_loop()
        self._now_s = now_s
        self._heard_s = float("-inf")
        self._outgoing: list[FromRelay] = []
        self._soon = self._lazy = False  # whether a flush will come at the end of this turn, or within LAZY_S
        self._timer: asyncio.TimerHandle | None = None
        self.tell: Callable[[FromControl], None]
        self._on_attached: Callable[[], None]
        self._knocked = False
        self._link = link_to(address, b"%d/%d" % (number, os.getpid()))

    def start(self, tell: Callable[[FromControl], None], on_attached: Callable[[], None] = lambda: None) -> None:
        """``on_attached``: called before the first ``Table`` of each membership is told."""
        self.tell, self._on_attached = tell, on_attached
        self._link.start(self._take, self._opened)
        self._watch()

    def say(self, message: FromRelay) -> None:
        self._outgoing.append(message)
        if type(message) in _LAZY:
            if not self._lazy:
                self._lazy = True
                self._loop.call_later(LAZY_S, self._flush_lazy)
        elif not self._soon:
            self._soon = True
            self._loop.call_soon(self._flush)

    def silent_s(self) -> float:
        """Since the control plane was last heard."""
        return self._now_s() - self._heard_s

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._flush()
        self._link.close()

    def _flush(self) -> None:
        self._soon = False
        if self._outgoing:
            outgoing, self._outgoing = self._outgoing, []
            self._link.send(_encode(outgoing))

    def _flush_lazy(self) -> None:
        self._lazy = False
        self._flush()

    def _take(self, frame: bytes) -> None:
        self._heard_s = self._now_s()
        for message in _from_control(frame):
            if self._knocked:  # who was a member all the time hears a beat first, who is a new one its table
                self._knocked = False
                if isinstance(message, Table):
                    self._on_attached()
            self.tell(message)

    def _opened(self) -> None:
        """Nobody at the other end of a new connection knows this relay."""
        self._heard_s = float("-inf")
        self._knock()

    def _knock(self) -> None:
        self._knocked = True
        self._link.send(KNOCK)

    def _watch(self) -> None:
        if self.silent_s() > SILENCE_S:
            self._knock()
        self._timer = self._loop.call_later(KNOCK_S, self._watch)


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
        self._swept_s = now_s()
        self._timer: asyncio.TimerHandle | None = None
        self._hub = hub_at(address)

    async def start(self) -> None:
        """Raises OSError where the address cannot be bound."""
        await self._hub.start(self._take, self._gone)
        self._sweep()

    def send(self, identity: bytes, frame: bytes) -> None:
        self._hub.send(identity, frame)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for peer in self._peers.values():
            peer.flush()
        self._hub.close()

    def _take(self, identity: bytes, frame: bytes) -> None:
        peer = self._peers.get(identity)
        if frame == KNOCK:
            if peer is None:
                self._attach(identity)
            return
        if peer is None:
            return
        peer.heard_s = self._now_s()
        try:
            messages = _from_relay(frame)
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

    def _gone(self, identity: bytes) -> None:
        peer = self._peers.get(identity)
        if peer is not None:
            self._lose(peer)

    def _lose(self, peer: _Peer) -> None:
        _log.warning("relay %d is gone", peer.number)
        self._forget(peer)

    def _forget(self, peer: _Peer) -> None:
        del self._peers[peer.identity]
        self._control.forget(peer.number)

    def _sweep(self) -> None:
        """Relays that say nothing any more are gone; what they held, the control plane frees.

        Not if it was this process that stood still (a stopped machine, say): what they said meanwhile is read next.
        """
        now_s = self._now_s()
        if now_s - self._swept_s > STOOD_S:
            for peer in self._peers.values():
                peer.heard_s = now_s
        self._swept_s = now_s
        for peer in [peer for peer in self._peers.values() if now_s - peer.heard_s > GONE_S]:
            self._lose(peer)
        self._timer = self.loop.call_later(KNOCK_S, self._sweep)
