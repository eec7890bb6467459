"""KV transfers between instances: every instance sends and receives one at a time, first come first served."""

from __future__ import annotations

from dataclasses import dataclass

from pla_sglang.common.checks import Range, check_fields, knob
from pla_sglang.sim.core.kernel import LATEST_S


@dataclass(frozen=True)
class NetworkKnobs:
    """A non-blocking fabric with one link per instance and direction.

    Attributes:
        bandwidth_bytes_per_s: of one link, infinity for no cost. 50e9 is a 400 Gbit/s NIC; Arrow's NVLink is 400e9.
        latency_s: of one transfer, on top of bytes over bandwidth.

    Raises:
        ConfigError: a value is out of range.
    """

    bandwidth_bytes_per_s: float = knob(50e9, allowed=Range(0, above=True))
    latency_s: float = knob(1e-3, allowed=Range(0, LATEST_S))

    def __post_init__(self) -> None:
        check_fields(self, "network")


class Network:
    """When transfers end. A transfer holds the sender's way out and the receiver's way in from its start to its end."""

    def __init__(self, knobs: NetworkKnobs) -> None:
        self._knobs = knobs
        self._out_free_s: dict[int, float] = {}
        self._in_free_s: dict[int, float] = {}
        self.transfers = 0

    def send(self, source: int, target: int, size_bytes: int, now_s: float) -> float:
        """Takes the links; returns when the last byte is there."""
        start_s = max(now_s, self._out_free_s.get(source, 0.0), self._in_free_s.get(target, 0.0))
        end_s = start_s + self._knobs.latency_s + size_bytes / self._knobs.bandwidth_bytes_per_s
        self._out_free_s[source] = self._in_free_s[target] = end_s
        self.transfers += 1
        return end_s
