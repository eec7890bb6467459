"""The time line of a device that works on one thing after the other. No clock: time comes in as ``now_s``."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One piece of work on the line: launched, started, done.

    ``gap_s`` is idle time that its host caused, ``before_s`` what the work costs the device before it starts.
    """

    launch_s: float
    start_s: float
    ready_s: float
    gap_s: float
    before_s: float = 0.0

    @property
    def cost_s(self) -> float:
        return self.ready_s - self.start_s


class Timeline:
    """A device with a queue: work launched while it is busy starts when the earlier work is done."""

    def __init__(self) -> None:
        self.free_s: float | None = None  # when the last work is done; None before the first
        self.busy_s = 0.0
        self.between_s = 0.0
        self.gap_s = 0.0
        self._idle = True

    def launch(self, cost_s: float, now_s: float, before_s: float = 0.0) -> Span:
        """Append work of ``cost_s`` that begins ``before_s`` later than it could; returns at once, as a launch does.

        The time between the end of the last work and ``now_s`` counts as caused by the host, unless the device had
        no work (``rest``) in between.
        """
        free_s = now_s if self.free_s is None else self.free_s
        could_s = max(now_s, free_s)
        gap_s = 0.0 if self._idle else could_s - free_s
        self._idle = False
        start_s = could_s + before_s
        self.free_s = start_s + cost_s
        self.busy_s += cost_s
        self.between_s += before_s
        self.gap_s += gap_s
        return Span(now_s, start_s, self.free_s, gap_s, before_s)

    def rest(self) -> None:
        """The host has no work: the following idle time is not counted as its gap."""
        self._idle = True

    @property
    def overhead_share(self) -> float:
        """Share of the time with work at hand in which the device waited for its host."""
        total_s = self.busy_s + self.between_s + self.gap_s
        return self.gap_s / total_s if total_s > 0 else 0.0
