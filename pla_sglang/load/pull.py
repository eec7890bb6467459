"""Receives the reports of any number of instances."""

from __future__ import annotations

import zmq

from pla_sglang.common.errors import TelemetryError
from pla_sglang.load.report import LARGEST_BYTES, Report, decode

HIGH_WATER_MARK = 10_000
MOST_PER_CALL = 1000  # a flood must not keep the caller from its other work


class Puller:
    """One PULL socket bound to ``address``. ``socket`` may be registered with a poller or wrapped for asyncio.

    Raises zmq.ZMQError if ``address`` cannot be bound.
    """

    def __init__(self, address: str, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        self.received = 0
        self.malformed = 0
        self.socket = (context or zmq.Context.instance()).socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_BYTES)
        self.socket.setsockopt(zmq.LINGER, 0)
        if address.startswith("tcp://["):
            self.socket.setsockopt(zmq.IPV6, 1)
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
        self.received += len(reports)
        return reports

    def close(self) -> None:
        self.socket.close()
