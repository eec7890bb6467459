"""The two planes in different processes: messages in frames, on a Unix stream socket.

What one turn of the event loop says goes out as one frame, a list of messages. Progress and ends of requests, which
nothing waits for, stay up to ``LAZY_S`` for a question that goes out anyway: one frame a request instead of four.

The first frame of a connection is the relay's identity. A relay asks to be attached (with an empty frame) until it is,
and again whenever it has received nothing for ``SILENCE_S``: a control plane that has restarted does not know it,
attaches it, and its table has a new epoch. Messages of a relay that is not attached are dropped; its ``Hello`` repeats
all that matters.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Callable

import msgspec

from pla_sglang.fleet.router.wire.frames import FramedConnection
from pla_sglang.fleet.router.wire.messages import (
    HEARTBEAT_INTERVAL_S,
    PROTOCOL,
    Completed,
    FromControl,
    FromRelay,
    Hello,
    Progress,
    Table,
)
from pla_sglang.fleet.router.wire.protocols import ControlPort

RECONNECT_S = 0.05
SILENCE_S = 6 * HEARTBEAT_INTERVAL_S
ATTACH_S = 0.25
GONE_S = 3.0  # a relay reports every second, the control plane more often
STOPPED_S = 60.0  # how long a relay may stand still while its process lives (SIGSTOP, a debugger, swapping)
STALL_S = 1.0  # between two checks that should be ATTACH_S apart: this process was stopped
# About a pass of an engine, and so about the age of a load report. Each frame wakes the control process, which costs
# more than what it says.
LAZY_S = 0.02
ATTACH = b""
_LAZY = frozenset({Progress, Completed})  # nothing waits for them
_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_from_control = msgspec.msgpack.Decoder(list[FromControl]).decode
_from_relay = msgspec.msgpack.Decoder(list[FromRelay]).decode


class RelayWire:
    """The relay's end. It connects again whenever the connection is lost: a control plane may be about to start.

    Queues are not bounded, as each message belongs to a request that is open.
    """

    def __init__(self, path: str, number: int, *, now_s: Callable[[], float]) -> None:
        self._path, self._number, self._identity = path, number, b"%d/%d" % (number, os.getpid())
        self._epoch = 0  # of the last control plane that was followed
        self._loop = asyncio.get_running_loop()
        self._now_s = now_s
        self._last_frame_s = float("-inf")
        self._heard_s = now_s()  # when the control plane said something last, whatever the connection; first: the start
        self._outgoing: list[FromRelay] = []
        self._soon = self._lazy = False  # whether they will be sent at the end of this turn, or within LAZY_S
        self._timer: asyncio.TimerHandle | None = None
        self._on_message: Callable[[FromControl], None]
        self._on_attached: Callable[[], None]
        self._attaching = False
        self._refused = False  # the other end speaks another version, as the log says
        self._connection: FramedConnection | None = None
        self._connecting: asyncio.Task[None] | None = None

    def start_wire(self, on_message: Callable[[FromControl], None], on_attached: Callable[[], None]) -> None:
        """``on_attached``: called before the first ``Table`` of each membership arrives."""
        self._on_message, self._on_attached = on_message, on_attached
        self._connecting = self._loop.create_task(self._connect())
        self._check_silence()

    def send_message(self, message: FromRelay) -> None:
        """To the control plane. Never waits."""
        self._outgoing.append(message)
        if type(message) in _LAZY:
            if not self._lazy:
                self._lazy = True
                self._loop.call_later(LAZY_S, self._send_lazy)
        elif not self._soon:
            self._soon = True
            self._loop.call_soon(self._send_outgoing)

    def is_silent(self) -> bool:
        """True if the other end is not there, or has said nothing for longer than a living control plane would."""
        return self._connection is None or self._now_s() - self._last_frame_s > GONE_S

    def silent_s(self) -> float:
        """Since the other end was heard last, or since the start."""
        return self._now_s() - self._heard_s

    def close_wire(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._send_outgoing()
        if self._connecting is not None:
            self._connecting.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close_connection()

    def _send_outgoing(self) -> None:
        self._soon = False
        if self._outgoing:
            outgoing, self._outgoing = self._outgoing, []
            if self._connection is not None:
                self._connection.send_frame(_encode(outgoing))

    def _send_lazy(self) -> None:
        self._lazy = False
        self._send_outgoing()

    def _on_frame(self, connection: FramedConnection, frame: bytes) -> None:
        try:
            messages = _from_control(frame)
        except msgspec.DecodeError as error:
            self._refuse_version(str(error))
            return
        self._last_frame_s = self._heard_s = self._now_s()
        for message in messages:
            if isinstance(message, Table) and message.protocol != PROTOCOL:
                self._refuse_version(f"version {message.protocol}, not {PROTOCOL}")
                return
            if isinstance(message, Table):
                if message.epoch < self._epoch:
                    self._refuse_epoch(connection, message.epoch)
                    return
                self._epoch = message.epoch
            if self._attaching:  # a relay that was attached all the time gets a heartbeat first, a new one its table
                self._attaching = False
                if isinstance(message, Table):
                    self._on_attached()
            self._on_message(message)

    def _refuse_version(self, detail: str) -> None:
        """Another version of us: nothing it says can be trusted, so it counts as silent."""
        self._last_frame_s = float("-inf")
        if not self._refused:
            self._refused = True
            _log.error("the control plane speaks what this relay does not know; nothing is served: %s", detail)

    def _refuse_epoch(self, connection: FramedConnection, epoch: int) -> None:
        """It was frozen, say, and another one leads since: it is told so, and nothing else of it is heard."""
        _log.error("a control plane of epoch %d is refused: epoch %d has led", epoch, self._epoch)
        connection.send_frame(_encode([Hello(self._number, PROTOCOL, epoch=self._epoch)]))
        self._last_frame_s = float("-inf")
        connection.close_connection()

    async def _connect(self) -> None:
        while True:
            try:
                _, connection = await self._loop.create_unix_connection(
                    lambda: FramedConnection(self._on_frame, self._on_lost), self._path
                )
            except OSError:
                await asyncio.sleep(RECONNECT_S)
                continue
            if connection.transport is not None:
                break
        self._connection = connection
        connection.send_frame(self._identity)
        self._last_frame_s = float("-inf")  # nobody at the other end of a new connection knows this relay
        self._request_attach()

    def _on_lost(self, connection: FramedConnection) -> None:
        if connection is self._connection:
            self._connection = None
            self._connecting = self._loop.create_task(self._connect())

    def _request_attach(self) -> None:
        self._attaching = True
        if self._connection is not None:
            self._connection.send_frame(ATTACH)

    def _check_silence(self) -> None:
        if self._now_s() - self._last_frame_s > SILENCE_S:
            self._request_attach()
        self._timer = self._loop.call_later(ATTACH_S, self._check_silence)


@dataclasses.dataclass
class _AttachedRelay:
    """A relay as the control process sees it (``RelayPort``)."""

    connection: FramedConnection
    number: int
    last_frame_s: float
    stands_still: bool = False  # it was said to, in the log
    outgoing: list[FromControl] = dataclasses.field(default_factory=list)

    def on_message(self, message: FromControl) -> None:
        if not self.outgoing:
            asyncio.get_running_loop().call_soon(self.send_outgoing)
        self.outgoing.append(message)

    def send_outgoing(self) -> None:
        if self.outgoing:
            outgoing, self.outgoing = self.outgoing, []
            self.connection.send_frame(_encode(outgoing))


class ControlWire:
    """The control plane's end: relays come and go, each is attached while it is heard."""

    def __init__(self, path: str, control: ControlPort, *, now_s: Callable[[], float]) -> None:
        self._path, self._control, self._now_s = path, control, now_s
        self._loop = asyncio.get_running_loop()
        self._connections: dict[bytes, FramedConnection] = {}  # by the relay's identity
        self._relays: dict[bytes, _AttachedRelay] = {}
        self._checked_s = now_s()
        self._timer: asyncio.TimerHandle | None = None
        self._server: asyncio.Server | None = None

    async def start_listening(self) -> None:
        """Raises OSError where the address cannot be bound."""
        self._server = await self._loop.create_unix_server(
            lambda: FramedConnection(self._on_frame, self._on_lost), self._path
        )
        self._check_relays()

    def close_wire(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for relay in self._relays.values():
            relay.send_outgoing()
        if self._server is not None:
            self._server.close()
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close_connection()

    def _on_frame(self, connection: FramedConnection, frame: bytes) -> None:
        relay = self._relays.get(connection.identity or frame)
        if not connection.identity:
            connection.identity = frame
            self._connections[frame] = connection
            if relay is not None:  # it has connected again before the loss of its former connection was seen
                relay.connection = connection
            return
        if frame == ATTACH:
            if relay is None:
                self._attach_relay(connection)
            return
        if relay is None:
            return
        relay.last_frame_s = self._now_s()
        try:
            messages = _from_relay(frame)
        except msgspec.DecodeError as error:  # another version of us; nothing it says can be trusted
            _log.error("relay %d sent what this control plane does not know: %s", relay.number, error)
            self._detach_relay(connection.identity)
            return
        for message in messages:
            self._control.on_message(message)

    def _attach_relay(self, connection: FramedConnection) -> None:
        number = int(connection.identity.partition(b"/")[0])
        for former in [identity for identity, relay in self._relays.items() if relay.number == number]:
            self._detach_relay(former)  # the relay's process was replaced
        relay = self._relays[connection.identity] = _AttachedRelay(connection, number, self._now_s())
        self._control.attach_relay(number, relay)

    def _detach_relay(self, identity: bytes) -> None:
        self._control.detach_relay(self._relays.pop(identity).number)

    def _on_lost(self, connection: FramedConnection) -> None:
        if self._connections.get(connection.identity) is connection:
            del self._connections[connection.identity]
            self._lose_relay(connection.identity)

    def _lose_relay(self, identity: bytes) -> None:
        if identity in self._relays:
            _log.warning("relay %d is gone", self._relays[identity].number)
            self._detach_relay(identity)

    def _check_relays(self) -> None:
        """Relays that are silent for too long are gone; what they held, the control plane frees.

        Not if it was this process that stood still (a stopped machine, say): what they said meanwhile is read next. Nor
        if a relay's process lives: it keeps its clients' connections, and goes on with them where it stood.
        """
        now_s = self._now_s()
        if now_s - self._checked_s > STALL_S:
            for relay in self._relays.values():
                relay.last_frame_s = now_s
        self._checked_s = now_s
        for identity, relay in list(self._relays.items()):
            silent_s = now_s - relay.last_frame_s
            if silent_s > (STOPPED_S if _lives(identity) else GONE_S):
                self._lose_relay(identity)
            elif (silent_s > GONE_S) is not relay.stands_still:
                relay.stands_still = silent_s > GONE_S
                state = "stands still; its streams are kept" if relay.stands_still else "goes on"
                _log.warning("relay %d %s", relay.number, state)
        self._timer = self._loop.call_later(ATTACH_S, self._check_relays)


def _lives(identity: bytes) -> bool:
    """True if the process of a relay of that identity runs or is stopped: the socket between them is this machine's."""
    try:
        os.kill(int(identity.partition(b"/")[2]), 0)
    except OSError:
        return False
    return True
