"""Both ends of the way that reports take. A sender never waits: an absent or slow receiver misses reports."""

from __future__ import annotations

import zmq

from pla_sglang.common.errors import TelemetryError
from pla_sglang.load.report import LARGEST_BYTES, Report, decode, encode

UNSENT_MOST = 64  # reports that a sender holds
UNREAD_MOST = 10_000  # and a receiver
MOST_PER_CALL = 1000  # a flood must not keep the caller from its other work


class Pusher:
    """One PUSH socket that connects to ``address`` and reconnects by itself.

    Raises zmq.ZMQError if ``address`` is malformed.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.dropped = 0
        self._socket = _make_socket(zmq.PUSH, address)
        self._socket.setsockopt(zmq.SNDHWM, UNSENT_MOST)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is kept for a receiver that is not there: it would be stale
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._socket.connect(address)

    def send(self, report: Report) -> bool:
        """False if the message could not be queued at once."""
        try:
            self._socket.send(encode(report), flags=zmq.NOBLOCK)
        except zmq.Again:
            self.dropped += 1
            return False
        return True

    def close(self) -> None:
        self._socket.close()


class Puller:
    """One PULL socket bound to ``address``. ``socket`` may be registered with a poller or wrapped for asyncio.

    Raises zmq.ZMQError if ``address`` cannot be bound.
    """

    def __init__(self, address: str) -> None:
        self.malformed = 0
        self.socket = _make_socket(zmq.PULL, address)
        self.socket.setsockopt(zmq.RCVHWM, UNREAD_MOST)
        self.socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_BYTES)
        self.socket.bind(address)

    def drain(self) -> list[Report]:
        """The received reports in order of arrival. Malformed messages are counted and skipped."""
        reports = []
        for _ in range(MOST_PER_CALL):
            try:
                data = self.socket.recv(flags=zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                reports.append(decode(data))
            except TelemetryError:
                self.malformed += 1
        return reports

    def close(self) -> None:
        self.socket.close()


def _make_socket(kind: int, address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    if address.startswith("tcp://["):
        socket.setsockopt(zmq.IPV6, 1)
    return socket
