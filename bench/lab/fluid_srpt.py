"""The least mean response time of any order on one server: the bound of ``frontier`` without pass boundaries."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from pla_sglang.common.checks import require


def fluid_srpt(arrivals: Sequence[tuple[float, float]]) -> list[float]:
    """Response times, in the order given, of preemptive SRPT on one server; (arrival_s, work_s) sorted by arrival.

    The least mean response time that any order reaches (Schrage 1968), so a bound for the mean TTFT. Raises ConfigError
    for unsorted arrivals or work that is not above 0.
    """
    done_s = [0.0] * len(arrivals)
    heap: list[tuple[float, int]] = []  # (remaining work, position)
    now_s, place = 0.0, 0
    for index, (at_s, work_s) in enumerate(arrivals):
        require("work_s", work_s, 0, above=True)
        require("arrival_s", at_s, arrivals[index - 1][0] if index else 0.0)
    while heap or place < len(arrivals):
        if not heap:
            now_s = max(now_s, arrivals[place][0])
        while place < len(arrivals) and arrivals[place][0] <= now_s:
            heapq.heappush(heap, (arrivals[place][1], place))
            place += 1
        left_s, index = heapq.heappop(heap)
        until_s = arrivals[place][0] if place < len(arrivals) else float("inf")
        if now_s + left_s <= until_s:
            now_s += left_s
            done_s[index] = now_s
        else:
            heapq.heappush(heap, (left_s - (until_s - now_s), index))
            now_s = until_s
    return [done - arrival for done, (arrival, _) in zip(done_s, arrivals, strict=True)]
