"""Arrival rate over the most recent arrivals."""

from __future__ import annotations

from collections import deque


class ArrivalRate:
    """Arrivals per second (the r-hat of PLA-Serve section 3.2) and the mean size of the arrivals.

    The last ``WINDOW`` arrivals no older than ``HORIZON_S`` count. Fewer than three arrivals give a rate of zero:
    nothing is expected until there is evidence, so a lone request on an idle server never waits. ``usual_per_second``
    keeps the last known rate, for callers that need an expectation.
    """

    # The rate of Poisson arrivals is off by 1 / sqrt(WINDOW), 13 %, and a burst is the rate after as many arrivals.
    # Half errs by 18 % and knows after 32, twice errs by 9 % and knows after 128.
    WINDOW = 64
    # A rate below one in ten seconds is no reason to keep memory free: of it three arrivals fit the horizon. With half
    # of it a long starts 15 s after the last short prompts, with twice as much after 60.
    HORIZON_S = 30.0
    MIN_ARRIVALS = 3  # two gaps; a single one says nothing of a rate
    # Of a remembered rate, which a pause of a minute does not disprove. Ten minutes later a sixteenth, a quarter or a
    # half of it is expected with half, this and twice as much, and a long is cut to 485, 243 or 173 tokens.
    HALF_LIFE_S = 300.0

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
        return self.per_second(now_s) * self.mean_tokens()

    def mean_tokens(self) -> float:
        """Mean of the arrivals that count; without any, of those behind ``usual_per_second``; else 0."""
        if not self._arrivals:
            return self._usual_tokens
        return self._tokens / len(self._arrivals)
