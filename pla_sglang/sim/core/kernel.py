"""Event kernel: a heap of calls in virtual time.

Order is (time, priority, sequence), as in simpy: at one instant urgent events first, and events of one priority in the
order in which they were scheduled. Nothing depends on addresses, hashes or the wall clock, so a run is a function of
its inputs.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Callable
from typing import Any

from pla_sglang.sim.core.errors import SimError

LATEST_S = 1e12  # of virtual time; beyond, a millisecond would be lost in the rounding of doubles
Call = Callable[[Any], object]


class Priority(enum.IntEnum):
    """At one instant: what has ended is known before what arrives, and controllers look last."""

    END = 0  # of a step, a transfer, a start-up
    ARRIVAL = 1
    WAKE = 2  # an instance looks for work, after all that this instant has brought
    TICK = 3  # reports and controllers


class Kernel:
    """Virtual time and what is to happen in it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0  # handled so far
        self._sequence = 0
        self._heap: list[tuple[float, int, int, Call, Any]] = []

    def at(self, time_s: float, priority: int, call: Call, argument: Any = None) -> None:
        """Schedules ``call(argument)``. Raises SimError for a time in the past or one that is not a number."""
        if not time_s >= self.now_s:
            raise SimError(f"an event at {time_s} s was scheduled at {self.now_s} s; allowed: now or later")
        self._sequence += 1
        heapq.heappush(self._heap, (time_s, priority, self._sequence, call, argument))

    def run(self) -> None:
        """Handles events until there is none left."""
        heap, pop = self._heap, heapq.heappop
        while heap:
            time_s, _, _, call, argument = pop(heap)
            self.now_s = time_s
            self.events += 1
            call(argument)

    def next_s(self, before: Priority) -> float:
        """When the next event of a priority before this one is due; infinite where there is none."""
        return min((time_s for time_s, priority, *_ in self._heap if priority < before), default=math.inf)

    def hasten(self, before: Priority, by_s: float) -> None:
        """All events of a priority before this one come earlier by so much, which ``next_s`` allows."""
        self._heap[:] = [
            (max(self.now_s, time_s - by_s) if priority < before else time_s, priority, *rest)
            for time_s, priority, *rest in self._heap
        ]
        heapq.heapify(self._heap)

    def quiet(self) -> bool:
        """Nothing else is scheduled for this very instant."""
        return not self._heap or self._heap[0][0] > self.now_s
