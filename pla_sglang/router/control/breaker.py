"""Circuit breaker of one instance: stops sending where requests fail, and finds out when that is over.

CLOSED lets everything through. OPEN lets nothing through until a cool-down is over, which doubles with each failure in
a row. HALF_OPEN lets requests through again, after a health check, and the first outcome decides. Every move has a
reason. Pure: time comes in.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque

from pla_sglang.policy.checks import require, require_order


class BreakerState(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


# Named once: CPython 3.11 takes 0.2 us to look a member up in its class, and every request meets these.
_CLOSED, _OPEN, _HALF_OPEN = BreakerState


class BreakerReason(enum.Enum):
    """Why a breaker is as it is."""

    NEW = "new"
    REFUSED = "refused"  # the connection was refused: nobody listens
    CONSECUTIVE = "consecutive"  # that many failures without a success between them
    SHARE = "share"  # too large a share of the window failed
    COOLED = "cooled"  # the cool-down is over, requests may try
    TRIAL_OK = "trial_ok"
    TRIAL_FAILED = "trial_failed"


@dataclasses.dataclass(frozen=True)
class BreakerKnobs:
    """When a breaker opens and for how long.

    Attributes:
        consecutive: failures in a row that open it.
        share, window_s, window_requests: it opens too when this share of the outcomes of the window failed, if there
            were at least that many.
        cool_down_s, cool_down_max_s: from opening to the first trial; doubles with each failed trial.
    """

    consecutive: int = 3
    share: float = 0.5
    window_s: float = 30.0
    window_requests: int = 20
    cool_down_s: float = 2.0
    cool_down_max_s: float = 60.0

    def __post_init__(self) -> None:
        require("breaker consecutive", self.consecutive, 1)
        require("breaker share", self.share, 0, 1, above=True)
        require("breaker window_s", self.window_s, 0, above=True)
        require("breaker window_requests", self.window_requests, 1)
        require("breaker cool_down_s", self.cool_down_s, 0, above=True)
        require_order("breaker cool_down_s", self.cool_down_s, "cool_down_max_s", self.cool_down_max_s)


class Breaker:
    """One instance's breaker."""

    def __init__(self, knobs: BreakerKnobs) -> None:
        self.state = _CLOSED
        self.reason = BreakerReason.NEW
        self.opened = 0  # times it has opened
        self._knobs = knobs
        self._in_a_row = 0
        self._window: deque[tuple[float, bool]] = deque()
        self._failed_in_window = 0
        self._retry_s = 0.0
        self._cool_down_s = knobs.cool_down_s

    def tick(self, now_s: float) -> None:
        """OPEN becomes HALF_OPEN when the cool-down is over."""
        if self.state is _OPEN and now_s >= self._retry_s:
            self.state, self.reason = _HALF_OPEN, BreakerReason.COOLED

    def on_success(self, now_s: float) -> None:
        """A request went well, or the trial did."""
        self._in_a_row = 0
        self._note(now_s, failed=False)
        if self.state is _HALF_OPEN:
            self.state, self.reason = _CLOSED, BreakerReason.TRIAL_OK
            self._cool_down_s = self._knobs.cool_down_s
            self._window.clear()
            self._failed_in_window = 0

    def on_failure(self, now_s: float, *, refused: bool = False) -> None:
        """A request failed at the instance; ``refused``: nobody listened there."""
        self._in_a_row += 1
        self._note(now_s, failed=True)
        if self.state is _HALF_OPEN:
            self._cool_down_s = min(2 * self._cool_down_s, self._knobs.cool_down_max_s)
            self._open(now_s, BreakerReason.TRIAL_FAILED)
        elif self.state is _CLOSED:
            reason = self._why_open(refused)
            if reason is not None:
                self._open(now_s, reason)

    def _why_open(self, refused: bool) -> BreakerReason | None:
        if refused:
            return BreakerReason.REFUSED
        if self._in_a_row >= self._knobs.consecutive:
            return BreakerReason.CONSECUTIVE
        count = len(self._window)
        if count >= self._knobs.window_requests and self._failed_in_window >= self._knobs.share * count:
            return BreakerReason.SHARE
        return None

    def _open(self, now_s: float, reason: BreakerReason) -> None:
        self.state, self.reason = _OPEN, reason
        self.opened += 1
        self._retry_s = now_s + self._cool_down_s

    def _note(self, now_s: float, *, failed: bool) -> None:
        self._window.append((now_s, failed))
        self._failed_in_window += failed
        while self._window and self._window[0][0] < now_s - self._knobs.window_s:
            self._failed_in_window -= self._window.popleft()[1]
