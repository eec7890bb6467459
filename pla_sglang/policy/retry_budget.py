"""How many requests may be sent a second time because an instance had no room for them.

Retries help while some instances are full and others are not. Where all are full, each retry is one more request for
nothing, so retries are a share of the requests of a recent window, plus a few that are always allowed: an overload is
multiplied by at most 1 + share (Finagle's retry budget; Beyer et al., "Site Reliability Engineering", chapter 21).
"""

from __future__ import annotations

import dataclasses
from collections import deque

from pla_sglang.common.checks import Range, check_fields, knob

WINDOW_S = 10.0
SLOTS = 20  # steps in which the window moves


@dataclasses.dataclass(frozen=True)
class RetryBudgetKnobs:
    """At most ``least + share * requests`` retries within any ``WINDOW_S``."""

    share: float = knob(
        0.2,
        "--retry-budget",
        "requests refused by full instances: retried at most this share of all, and --retry-budget-min",
        allowed=Range(0, 1),
        heading="retries",
    )
    least: int = knob(
        10, "--retry-budget-min", "such retries within 10 s that are allowed in any case", allowed=Range(0)
    )

    def __post_init__(self) -> None:
        check_fields(self, "retry budget")


@dataclasses.dataclass(slots=True)
class _Slot:
    """Counts of one step of time."""

    number: int
    requests: int = 0
    retries: int = 0


class RetryBudget:
    """Counts requests and retries of a sliding window. Pure: time comes in, and never goes back."""

    def __init__(self, knobs: RetryBudgetKnobs) -> None:
        self._knobs = knobs
        self._slots: deque[_Slot] = deque()
        self._requests = self._retries = 0

    def add_request(self, now_s: float) -> None:
        """A request has come, for the first time."""
        self._present_slot(now_s).requests += 1
        self._requests += 1

    def left(self, now_s: float) -> float:
        """Retries that would be allowed now; below 1: none."""
        self._present_slot(now_s)
        return self._knobs.least + self._knobs.share * self._requests - self._retries

    def take(self, now_s: float) -> bool:
        """A request may be retried; if so, it counts as retried."""
        if self.left(now_s) < 1:
            return False
        self._present_slot(now_s).retries += 1
        self._retries += 1
        return True

    def _present_slot(self, now_s: float) -> _Slot:
        """Slots that have left the window are forgotten."""
        number = int(now_s // (WINDOW_S / SLOTS))
        slots = self._slots
        while slots and slots[0].number <= number - SLOTS:
            old = slots.popleft()
            self._requests -= old.requests
            self._retries -= old.retries
        if not slots or slots[-1].number < number:
            slots.append(_Slot(number))
        return slots[-1]
