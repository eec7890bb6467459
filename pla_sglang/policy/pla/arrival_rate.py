"""Arrival rate over the most recent arrivals."""

from __future__ import annotations

from collections import deque


class ArrivalRate:
    """Arrivals per second (the r-hat of PLA-Serve section 3.2) and the mean size of the arrivals.

    The last ``WINDOW`` arrivals no older than ``HORIZON_S`` count. Fewer than three arrivals give a rate of zero:
    nothing is expected until there is evidence, so a lone request on an idle server never waits. ``usual_per_second``
    keeps the last known rate, for callers that need an expectation.
    """

    WINDOW, HORIZON_S = 64, 30.0
    MIN_ARRIVALS = 3
    HALF_LIFE_S = 300.0  # of a remembered rate

    def __init__(self) -> None:
        self._arrivals: deque[tuple[float, int]] = deque()
        self._tokens = 0  # sum over the arrivals kept
        self._usual = (0.0, 0.0)  # the last rate with evidence, and when
        self._usual_tokens = 0.0

    def observe(self, now_s: float, tokens: int) -> None:
        """One arrival with this many new tokens."""
        arrivals = self._arrivals
        arrivals.append((now_s, tokens))
        self._tokens += tokens
        if len(arrivals) > self.WINDOW:
            self._drop_oldest()
        if rate := self.per_second(now_s):
            self._usual, self._usual_tokens = (rate, now_s), self._tokens / len(arrivals)

    def _drop_oldest(self) -> None:
        self._tokens -= self._arrivals.popleft()[1]

    def per_second(self, now_s: float) -> float:
        arrivals = self._arrivals
        while arrivals and now_s - arrivals[0][0] > self.HORIZON_S:
            self._drop_oldest()
        count = len(arrivals)
        if count < self.MIN_ARRIVALS:
            return 0.0
        span_s = now_s - arrivals[0][0]
        # The oldest arrival opens the interval, so it is not counted in it.
        return (count - 1) / span_s if span_s > 0 else 0.0

    def usual_per_second(self, now_s: float) -> float:
        """The current rate or, without enough arrivals, the last known one, halved every ``HALF_LIFE_S``."""
        if rate := self.per_second(now_s):
            return rate
        rate, at_s = self._usual
        return rate * 0.5 ** ((now_s - at_s) / self.HALF_LIFE_S)

    def tokens_per_second(self, now_s: float) -> float:
        """Tokens of what arrives in a second; zero without evidence."""
        return self.per_second(now_s) * self.mean_tokens(default=0.0)

    def mean_tokens(self, default: float) -> float:
        """Mean of the arrivals that count; without any, of those behind ``usual_per_second``; else ``default``."""
        if not self._arrivals:
            return self._usual_tokens or default
        return self._tokens / len(self._arrivals)
