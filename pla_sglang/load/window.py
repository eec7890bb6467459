"""Averages over the last seconds. Time is passed as ``now_s`` and never decreases."""

from __future__ import annotations

from collections import deque

SIGNAL_WINDOW_S = 5.0  # of TTFT over target, and of utilisation: in reports, in the router and in the simulator


class WindowMean:
    """Weighted mean of the values of the last ``window_s`` seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._entries: deque[tuple[float, float, float]] = deque()  # when, weight * value, weight
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float, now_s: float, weight: float = 1.0) -> None:
        self._entries.append((now_s, value * weight, weight))
        self._sum += value * weight
        self._weight += weight

    def mean(self, now_s: float) -> float | None:
        """None without values in the window."""
        entries = self._entries
        while entries and entries[0][0] <= now_s - self._window_s:
            _, part, weight = entries.popleft()
            self._sum -= part
            self._weight -= weight
        if not entries:
            self._sum = self._weight = 0.0  # rounding does not pile up
            return None
        return self._sum / self._weight


class BusyShare:
    """Share of the last ``window_s`` seconds that was covered by reported spans."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._spans: deque[tuple[float, float]] = deque()  # begin and end, rising and disjoint

    def add(self, begin_s: float, end_s: float) -> None:
        """Overlap with the previous span counts once."""
        spans = self._spans
        if not spans or begin_s > spans[-1][1]:
            if end_s > begin_s:
                spans.append((begin_s, end_s))
        elif end_s > spans[-1][1]:
            spans[-1] = (spans[-1][0], end_s)  # without a gap: one span, so that there are few

    def share(self, now_s: float) -> float:
        """In [0, 1]; a span that began before the window counts with its part in the window."""
        start_s, spans = now_s - self._window_s, self._spans
        while spans and spans[0][1] <= start_s:
            spans.popleft()
        covered_s = sum(min(end_s, now_s) - max(begin_s, start_s) for begin_s, end_s in spans)
        return min(1.0, max(0.0, covered_s / self._window_s))
