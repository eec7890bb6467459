"""What an instance would report about itself: busy time, lateness and token intervals."""

from __future__ import annotations

from pla_sglang.load.window import SIGNAL_WINDOW_S, BusyShare, WindowMean


class EngineMeter:
    """Windows as in an engine's reports, and token intervals since the last report. Times in seconds."""

    def __init__(self) -> None:
        self.busy = BusyShare(SIGNAL_WINDOW_S)  # passes and decode steps that have ended
        self.ttft_ratios = WindowMean(SIGNAL_WINDOW_S)  # TTFT over target
        self._stepped_s: float | None = None  # when running requests last got a token; None while nothing runs
        self._interval_sum_s = 0.0
        self._intervals = 0
        self._reported = (0.0, 0)

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
