"""How far predictions of answers were off, known once the answers have ended, beside the best constant.

Of each running answer one prediction is kept at each doubling of its tokens, from ``FIRST_TOKENS`` on: errors are
looked at by tokens generated, on a logarithmic scale. An answer that the model or its limit has ended is judged by
them; what its client or a fault has cut says nothing of its length.

The constant is the median of what was left at the points judged before: of all constants the one with the least mean
absolute error there (its prediction needs no knowledge of the request). A source that is not better is worth nothing.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from pla_sglang.policy.interface.remaining_length import EndedAnswer, Floats, RemainingPredictor, RunningAnswers

FIRST_TOKENS = 16
DOUBLINGS = 12  # so the last one is at 32,768 tokens
EDGES = (0, 64, 256, 1024, 4096, 16_384)  # lower ones, of what is summed: each second doubling, so that sums stay few
WINDOW = 4096  # points that means are of, as many as ``SurvivalKnobs.window_ends``
# Above what a driver predicts for at a time (the router's ``ROWS_IN_ALL`` is half of it). Answers that are never
# reported to end, such as those of several prompts, go first.
MOST_RUNNING = 16_384
MOST_ENDED = 4096  # whose points can still be looked at


class LengthPoint(NamedTuple):
    """One prediction. ``remaining``: tokens still to come; ``constant``: what the constant says; nan: it is unknown."""

    at_s: float
    generated: float
    remaining: float
    constant: float


@dataclasses.dataclass(slots=True)
class ErrorSums:
    """How many points, and their absolute errors in tokens, summed."""

    count: int = 0
    error_tokens: float = 0.0
    constant_error_tokens: float = 0.0

    def add(self, error_tokens: float, constant_error_tokens: float) -> None:
        self.count += 1
        self.error_tokens += error_tokens
        self.constant_error_tokens += constant_error_tokens

    def joined(self, other: ErrorSums) -> ErrorSums:
        return ErrorSums(
            self.count + other.count,
            self.error_tokens + other.error_tokens,
            self.constant_error_tokens + other.constant_error_tokens,
        )

    @property
    def mae_tokens(self) -> float:
        """nan without a point, as the next one."""
        return self.error_tokens / self.count if self.count else np.nan

    @property
    def mae_constant_tokens(self) -> float:
        return self.constant_error_tokens / self.count if self.count else np.nan

    def to_dict(self) -> dict[str, float | None]:
        """Mean absolute errors, in tokens; None without a point."""
        means = {"mae_tokens": self.mae_tokens, "mae_constant_tokens": self.mae_constant_tokens}
        return {"count": self.count, **{name: round(mean, 1) if self.count else None for name, mean in means.items()}}


NO_ERRORS = ErrorSums()


def lower_edge(tokens: float) -> int:
    """The bucket of ``tokens``, named by its lower edge."""
    return EDGES[bisect.bisect_right(EDGES, tokens) - 1]


class Constant:
    """The running median of the last ``WINDOW`` values."""

    def __init__(self) -> None:
        self._last: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        if len(self._last) == WINDOW:
            del self._sorted[bisect.bisect_left(self._sorted, self._last.popleft())]
        self._last.append(value)
        bisect.insort(self._sorted, value)

    def value(self) -> float:
        """nan before the first one."""
        return self._sorted[len(self._sorted) // 2] if self._sorted else np.nan


class JudgedPredictor(RemainingPredictor):
    """Says what ``inner`` says, and keeps how far that was off. Router and simulator measure with the same object.

    Attributes:
        sums: since the start, by the lower edges of tokens generated and of the answer's length.
        unknown: points at which nothing was predicted, or no constant was known.
    """

    def __init__(self, inner: RemainingPredictor) -> None:
        self.inner = inner
        self.is_blind = inner.is_blind
        self.sums: dict[tuple[int, int], ErrorSums] = {}
        self.unknown = 0
        self._constant = Constant()
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._running: dict[str, list[LengthPoint]] = {}
        self._ended: dict[str, tuple[LengthPoint, ...]] = {}

    def predict(self, answers: RunningAnswers) -> Floats:
        told = self.inner.predict(answers)
        if not self.is_blind:
            self._keep(answers, told)
        return told

    def observe_end(self, answer: EndedAnswer) -> None:
        points = self._running.pop(answer.rid, None)
        if points is not None:
            _put_bounded(self._ended, answer.rid, tuple(points), MOST_ENDED)
            if answer.whole or answer.tokens >= answer.limit_tokens:
                self._judge(answer, points)
        self.inner.observe_end(answer)

    def points_of(self, rid: str) -> list[LengthPoint]:
        """What was predicted of one request, oldest first, while it runs and for some time after its end."""
        return list(self._running.get(rid) or self._ended.get(rid, ()))

    def recent(self) -> ErrorSums:
        """The last ``WINDOW`` points that were judged."""
        found = ErrorSums()
        for error_tokens, constant_error_tokens in self._recent:
            found.add(error_tokens, constant_error_tokens)
        return found

    def to_dict(self) -> dict[str, Any]:
        """What ``inner`` says; ``error``: means of the last points judged, and since the start by bucket. That is left
        out where nothing is ever predicted."""
        if self.is_blind:
            return self.inner.to_dict()
        by_generated, by_length = (_join(self.sums, place) for place in (0, 1))
        return {
            **self.inner.to_dict(),
            "error": {
                **self.recent().to_dict(),
                "unknown": self.unknown,
                "by_generated": {str(edge): sums.to_dict() for edge, sums in by_generated},
                "by_length": {str(edge): sums.to_dict() for edge, sums in by_length},
            },
        }

    def _keep(self, answers: RunningAnswers, told: Floats) -> None:
        """The first prediction at or behind each doubling."""
        constant = self._constant.value()
        # Before FIRST_TOKENS, as at the first look of all, there is one point as well.
        steps = np.clip(np.floor(np.log2(np.maximum(answers.generated, 1) / FIRST_TOKENS)), -1, DOUBLINGS - 1)
        rows = zip(answers.rids, steps.tolist(), answers.generated.tolist(), told.tolist(), strict=True)
        for rid, step, generated, remaining in rows:
            points = self._running.get(rid)
            if points is None:
                points = _put_bounded(self._running, rid, [], MOST_RUNNING)
            elif points[-1].generated >= FIRST_TOKENS * 2**step or step < 0:
                continue
            points.append(LengthPoint(answers.now_s, generated, remaining, constant))

    def _judge(self, answer: EndedAnswer, points: list[LengthPoint]) -> None:
        for point in points:
            rest = answer.tokens - point.generated
            if rest < 0:  # the instance's count was ahead of the relay's
                continue
            error, constant_error = abs(point.remaining - rest), abs(point.constant - rest)
            if np.isnan(error) or np.isnan(constant_error):
                self.unknown += 1
            else:
                cell = lower_edge(point.generated), lower_edge(answer.tokens)
                self.sums.setdefault(cell, ErrorSums()).add(error, constant_error)
                self._recent.append((error, constant_error))
            self._constant.add(rest)


def _put_bounded(kept: dict[str, Any], key: str, value: Any, most: int) -> Any:
    """Enters ``value`` last; the first one leaves where there would be more than ``most``. Returns ``value``."""
    if len(kept) >= most:
        del kept[next(iter(kept))]
    kept[key] = value
    return value


def _join(sums: dict[tuple[int, int], ErrorSums], place: int) -> Iterator[tuple[int, ErrorSums]]:
    """The sums of all cells by one of their two edges, rising."""
    for edge in EDGES:
        joined = NO_ERRORS
        for cell, of_cell in sums.items():
            if cell[place] == edge:
                joined = joined.joined(of_cell)
        if joined.count:
            yield edge, joined
