"""The planner's load data: averages over the interval that has ended (DOPD's Resource Monitor)."""

from __future__ import annotations

import dataclasses
import math
from collections import deque

ENOUGH_REQUESTS = 50  # a mean of lengths that vary as much as they are long is then off by 14 %
VARIATION_INTERVALS = 96  # as many as forecasters know (``JudgedKnobs.window``): bursts are few in 200 requests


@dataclasses.dataclass(frozen=True, slots=True)
class LoadSample:
    """One interval.

    Attributes:
        input_tokens, output_tokens: means over arrivals and over finished requests; None where there were none.
        concurrency: requests in the system, averaged over time.
        rate_per_s: arrivals a second.
        arrival_cv2, input_cv2: squared coefficients of variation of gaps and of prompt lengths; 1.0 without data.
    """

    input_tokens: float | None
    output_tokens: float | None
    concurrency: float
    rate_per_s: float
    arrival_cv2: float = 1.0
    input_cv2: float = 1.0

    def times(self, factor: float) -> LoadSample:
        """The same requests, ``factor`` as many."""
        return dataclasses.replace(self, concurrency=self.concurrency * factor, rate_per_s=self.rate_per_s * factor)


class _Moments:
    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.squares = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.squares += value * value

    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def cv2(self) -> float:
        if self.count < 2 or self.total <= 0:
            return 1.0
        mean = self.total / self.count
        return max(0.0, self.squares / self.count - mean * mean) / (mean * mean)


class LoadMeter:
    """Counts arrivals and ends; ``take`` closes an interval.

    After an interval without arrivals the first one has no gap before it. That time is a load of 0, which the rate
    says already. As a gap it would pass for bursts, for which a planner would order instances.

    Args:
        least_requests: mean lengths are over the newest intervals that have so many together; 0: over the last alone,
            as in the paper. Of a few requests a mean says nothing, least of all of those that end while hardly any
            runs: they are the longest. Variations are then means over the last ``VARIATION_INTERVALS``, and no gap
            reaches into the next: that one interval has more of them than another the rate says. An interval counts by
            its arrivals times its rate, as eq. 10's wait grows with both: so all arrivals would wait as long as they do
            by the variation of their own interval. Bursts of a quiet time are not those of the busiest.
    """

    def __init__(self, least_requests: int = 0) -> None:
        self.in_flight = 0
        self._least_requests = least_requests
        self._before: dict[str, deque[tuple[int, float]]] = {"inputs": deque(), "outputs": deque()}  # counts and sums
        self._variations: deque[tuple[float, float, float]] = deque(maxlen=VARIATION_INTERVALS)  # weight; gaps; lengths
        self._start_s: float | None = None
        self._area = 0.0  # request-seconds since the interval began
        self._changed_s = 0.0
        self._arrived_s: float | None = None
        self._inputs, self._outputs, self._gaps = _Moments(), _Moments(), _Moments()

    def arrive(self, input_tokens: int, now_s: float) -> None:
        self._advance(now_s)
        self.in_flight += 1
        self._inputs.add(input_tokens)
        if self._arrived_s is not None:
            self._gaps.add(now_s - self._arrived_s)
        self._arrived_s = now_s

    def finish(self, output_tokens: int, now_s: float) -> None:
        self._advance(now_s)
        self.in_flight = max(0, self.in_flight - 1)
        self._outputs.add(output_tokens)

    def take(self, now_s: float) -> LoadSample | None:
        """Averages since the last call; None if no time has passed."""
        self._advance(now_s)
        assert self._start_s is not None
        span_s = now_s - self._start_s
        if span_s <= 0 or not math.isfinite(span_s):
            return None
        sample = LoadSample(
            self._mean_length("inputs", self._inputs),
            self._mean_length("outputs", self._outputs),
            self._area / span_s,
            self._inputs.count / span_s,
            *self._vary(span_s),
        )
        if not self._inputs.count or self._least_requests:
            self._arrived_s = None
        self._start_s, self._area = now_s, 0.0
        self._inputs, self._outputs, self._gaps = _Moments(), _Moments(), _Moments()
        return sample

    def _mean_length(self, name: str, ended: _Moments) -> float | None:
        """With intervals before the one that has ended, as far as they are needed."""
        if not self._least_requests:
            return ended.mean()
        kept = self._before[name]
        if ended.count:
            kept.append((ended.count, ended.total))
        while len(kept) > 1 and sum(count for count, _ in kept) - kept[0][0] >= self._least_requests:
            kept.popleft()
        count = sum(count for count, _ in kept)
        return sum(total for _, total in kept) / count if count else None

    def _vary(self, span_s: float) -> tuple[float, float]:
        """Squared variations of gaps and of prompt lengths, with intervals before."""
        ended = (self._gaps.cv2(), self._inputs.cv2())
        if not self._least_requests:
            return ended
        if self._gaps.count > 1:
            self._variations.append((self._inputs.count * self._inputs.count / span_s, *ended))
        total = sum(one[0] for one in self._variations)
        if not total:
            return ended
        gaps, inputs = (sum(one[0] * one[place] for one in self._variations) / total for place in (1, 2))
        return gaps, inputs

    def _advance(self, now_s: float) -> None:
        if self._start_s is None:
            self._start_s = self._changed_s = now_s
        self._area += self.in_flight * (now_s - self._changed_s)
        self._changed_s = now_s
