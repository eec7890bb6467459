"""The book of all requests: each is opened once and ends once."""

from __future__ import annotations

from collections import Counter

from pla_sglang.sim.core.request import ENDS, SimRequest, SimStage


class RequestCounts:
    """Counts requests by how they ended, and keeps those that have not."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.opened = 0
        self.ended: Counter[SimStage] = Counter()
        self.live: dict[str, SimRequest] = {}

    def open(self, request: SimRequest) -> None:
        assert request.rid not in self.live, f"{request.rid} was opened twice"
        self.opened += 1
        self.live[request.rid] = request

    def close(self, request: SimRequest) -> None:
        """``request`` is in one of the end stages; it was open."""
        assert request.stage in ENDS, f"{request} has not ended"
        del self.live[request.rid]
        self.ended[request.stage] += 1

    @property
    def complete(self) -> bool:
        """Every request of the workload has arrived and ended."""
        return self.opened == self.expected and not self.live

    def check_integrity(self) -> None:
        """Asserts that no request is lost or counted twice."""
        assert self.opened <= self.expected
        assert self.opened == len(self.live) + sum(self.ended.values())
        assert not any(request.stage in ENDS for request in self.live.values())
