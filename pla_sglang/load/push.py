"""Sends reports. Never waits for a receiver: an absent or slow one misses reports."""

from __future__ import annotations

import zmq

from pla_sglang.load.report import Report, encode

HIGH_WATER_MARK = 64
SCHEMES = ("tcp://", "ipc://")


class Pusher:
    """One PUSH socket that connects to ``address`` and reconnects by itself.

    Raises zmq.ZMQError if ``address`` is malformed.
    """

    def __init__(self, address: str, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        self.address = address
        self.sent = 0
        self.dropped = 0
        self._socket = (context or zmq.Context.instance()).socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is kept for a receiver that is not there: it would be stale
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        if address.startswith("tcp://["):
            self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.connect(address)

    def send(self, report: Report) -> bool:
        """False if the message could not be queued at once."""
        try:
            self._socket.send(encode(report), flags=zmq.NOBLOCK)
        except zmq.Again:
            self.dropped += 1
            return False
        self.sent += 1
        return True

    def close(self) -> None:
        self._socket.close()
