"""What the client of a request that moved has gained by it, known once its answer has ended or has moved again.

    gain_s = tokens_after * interval_before_s - (pause_s + time_after_s)

That is the time which the rest of the answer would have taken at the token interval of before, less what it took, its
pause included. It is no comparison with what would have happened: the instance that was left may have become faster.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from pla_sglang.fleet.router.control.requests.request_record import Attempt, RequestRecord


class MoveGain(NamedTuple):
    """One move. ``attempt``: the one that it led to; the other fields as in the module; tokens are of the answer."""

    attempt: Attempt
    pause_s: float
    interval_before_s: float
    tokens_after: int
    time_after_s: float

    @property
    def expected_s(self) -> float:
        return self.tokens_after * self.interval_before_s

    @property
    def measured_s(self) -> float:
        return self.pause_s + self.time_after_s

    def to_dict(self) -> dict[str, Any]:
        """For /pla/explain. ``predicted_gain`` is in the policy's own unit (STAR: tokens squared)."""
        return {
            "attempt": self.attempt.number,
            "reason": self.attempt.cause,
            "predicted_gain": self.attempt.predicted_gain,
            "pause_s": self.pause_s,
            "interval_before_s": self.interval_before_s,
            "interval_after_s": self.time_after_s / (self.tokens_after - 1) if self.tokens_after > 1 else None,
            "tokens_after": self.tokens_after,
            "gain_s": self.expected_s - self.measured_s,
        }


def measure_moves(record: RequestRecord) -> list[MoveGain]:
    """Its moves, oldest first. Left out are those before which there was no interval, or after which no token came."""
    if len(record.attempts) == 1:  # as of nearly all
        return []
    shown = [one for one in record.attempts if one.first_token_s is not None]
    afters = [*shown[2:], None]
    pairs = zip(itertools.pairwise(shown), afters, strict=False)  # one attempt alone has no pair
    found = (_measure(left, came, _end_of(came, after, record)) for (left, came), after in pairs)
    return [move for move in found if move is not None]


def _end_of(attempt: Attempt, after: Attempt | None, record: RequestRecord) -> tuple[float, int] | None:
    """When its last token came, and how many the answer had then; None: it still runs."""
    if after is not None:
        return _left_s(after), after.delivered_tokens
    if record.end is None or attempt.ended_s is None:
        return None
    return attempt.ended_s, record.end.output_tokens or 0


def _left_s(came: Attempt) -> float:
    """When the client had the last token of the attempt before."""
    assert came.first_token_s is not None
    return came.first_token_s - (came.gap_s or 0.0)


def _measure(left: Attempt, came: Attempt, end: tuple[float, int] | None) -> MoveGain | None:
    tokens_before = came.delivered_tokens - left.delivered_tokens
    if came.how is None or end is None or tokens_before < 2 or end[1] <= came.delivered_tokens:
        return None
    assert left.first_token_s is not None
    assert came.first_token_s is not None
    interval_s = max(0.0, _left_s(came) - left.first_token_s) / (tokens_before - 1)
    time_after_s = max(0.0, end[0] - came.first_token_s)
    return MoveGain(came, came.gap_s or 0.0, interval_s, end[1] - came.delivered_tokens, time_after_s)


class MoveGains:
    """Sums by reason of the moves of requests that have ended; two that only rise, as their difference may fall."""

    def __init__(self) -> None:
        self.by_reason: dict[str, tuple[int, float, float]] = {}  # moves, expected and measured seconds

    def add_request(self, record: RequestRecord) -> None:
        """It has ended."""
        for move in measure_moves(record):
            count, expected_s, measured_s = self.by_reason.get(move.attempt.cause, (0, 0.0, 0.0))
            sums = count + 1, expected_s + move.expected_s, measured_s + move.measured_s
            self.by_reason[move.attempt.cause] = sums

    def to_dict(self) -> dict[str, dict[str, float]]:
        """For /pla/state, by reason; ``gain_s`` is the mean of a move."""
        return {
            reason: {"moves": count, "gain_s": round((expected_s - measured_s) / count, 4)}
            for reason, (count, expected_s, measured_s) in self.by_reason.items()
        }
