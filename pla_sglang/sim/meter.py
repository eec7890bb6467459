"""What an instance would report about itself: busy time and token intervals."""

from __future__ import annotations


class Meter:
    """Sums since the start, and since the last report. Times in seconds."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._stepped_s: float | None = None  # when running requests last got a token; None while nothing runs
        self._interval_sum_s = 0.0
        self._intervals = 0
        self._reported = (0.0, 0)
        self._reported_busy = (0.0, 0.0)  # busy time, and when

    def busy(self, seconds: float) -> None:
        self.busy_s += seconds

    def begin(self, now_s: float) -> None:
        """A batch starts from nothing."""
        self._stepped_s = now_s

    def idle(self) -> None:
        """Nothing runs any more."""
        self._stepped_s = None

    def steps(self, steps: int, ended_s: float) -> None:
        """Running requests got ``steps`` tokens each, the last at ``ended_s``; pauses for prefills count."""
        if self._stepped_s is not None:
            self._interval_sum_s += ended_s - self._stepped_s
            self._intervals += steps
        self._stepped_s = ended_s

    def waited_s(self, now_s: float) -> float:
        """Time since the running requests last got a token."""
        return 0.0 if self._stepped_s is None else now_s - self._stepped_s

    def interval_s(self, open_steps: int = 0, open_ended_s: float = 0.0) -> float | None:
        """Mean token interval since the last call; None without tokens.

        ``open_steps`` have ended, the last at ``open_ended_s``, but are not in the sums yet.
        """
        total_s, count = self._interval_sum_s, self._intervals
        if open_steps and self._stepped_s is not None:
            total_s, count = total_s + open_ended_s - self._stepped_s, count + open_steps
        before_s, before = self._reported
        self._reported = (total_s, count)
        return (total_s - before_s) / (count - before) if count > before else None

    def utilisation(self, now_s: float, open_s: float) -> float:
        """Busy share since the last call; ``open_s`` is the busy time that no sum holds yet."""
        busy_s, since_s = self._reported_busy
        self._reported_busy = (self.busy_s + open_s, now_s)
        return min(1.0, (self.busy_s + open_s - busy_s) / (now_s - since_s)) if now_s > since_s else 0.0
