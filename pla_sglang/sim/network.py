"""KV transfers between instances: every instance sends and receives one at a time, first come first served."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pla_sglang.sim.errors import SimConfigError


@dataclass(frozen=True)
class NetworkKnobs:
    """A non-blocking fabric with one link per instance and direction.

    Attributes:
        bandwidth_bytes_per_s: of one link. 50e9 is a 400 Gbit/s NIC; Arrow's NVLink is 400e9.
        latency_s: of one transfer, on top of bytes over bandwidth.

    Raises:
        SimConfigError: a value is out of range.
    """

    bandwidth_bytes_per_s: float = 50e9
    latency_s: float = 1e-3

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_s > 0:
            raise SimConfigError(
                f"bandwidth_bytes_per_s is {self.bandwidth_bytes_per_s}; allowed: above 0 (infinity for no cost)"
            )
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise SimConfigError(f"latency_s is {self.latency_s}; allowed: finite, 0 and more")


class Network:
    """When transfers end. A transfer holds the sender's way out and the receiver's way in from its start to its end."""

    def __init__(self, knobs: NetworkKnobs) -> None:
        self._knobs = knobs
        self._out_free_s: dict[int, float] = {}
        self._in_free_s: dict[int, float] = {}
        self._down_until_s: dict[tuple[int, int], float] = {}
        self.sent_bytes = 0
        self.transfers = 0

    def send(self, source: int, target: int, size_bytes: int, now_s: float) -> float:
        """Takes the links; returns when the last byte is there."""
        start_s = max(
            now_s,
            self._out_free_s.get(source, 0.0),
            self._in_free_s.get(target, 0.0),
            self._down_until_s.get((source, target), 0.0),
        )
        end_s = start_s + self._knobs.latency_s + size_bytes / self._knobs.bandwidth_bytes_per_s
        self._out_free_s[source] = self._in_free_s[target] = end_s
        self.sent_bytes += size_bytes
        self.transfers += 1
        return end_s

    def cut(self, source: int, target: int, until_s: float) -> None:
        """The way from ``source`` to ``target`` is down; transfers start again when it is back."""
        key = (source, target)
        self._down_until_s[key] = max(until_s, self._down_until_s.get(key, 0.0))
