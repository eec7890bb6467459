"""KV transfers between instances, on a fabric that does not block: one link an instance and direction.

Every instance sends and receives one at a time, first come first served.
"""

from __future__ import annotations

LATENCY_S = 1e-3  # of a transfer, on top of bytes over bandwidth


class Network:
    """When transfers end. A transfer holds the sender's way out and the receiver's way in from its start to its end."""

    def __init__(self, bandwidth_bytes_per_s: float) -> None:
        self._bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self._out_free_s: dict[int, float] = {}
        self._in_free_s: dict[int, float] = {}
        self.transfers = 0

    def send(self, source: int, target: int, size_bytes: int, now_s: float) -> float:
        """Takes the links; returns when the last byte is there."""
        start_s = max(now_s, self._out_free_s.get(source, 0.0), self._in_free_s.get(target, 0.0))
        end_s = start_s + LATENCY_S + size_bytes / self._bandwidth_bytes_per_s
        self._out_free_s[source] = self._in_free_s[target] = end_s
        self.transfers += 1
        return end_s
