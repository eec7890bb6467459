"""Circuit breaker of one instance: stops sending where requests fail, and finds out when that is over.

CLOSED lets everything through. OPEN lets nothing through until a cool-down is over, which doubles with each failed
trial. HALF_OPEN lets one request through, the trial: its first token closes the breaker, as does a good end, and a
failure before opens it. A trial that ends without saying anything about the instance's health (refused for load, client
gone) makes the next request the trial. What requests are refused for
load, or what a client's own mistake does to its request, is not told to the breaker. Every move has a reason. Pure:
time comes in.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque

from pla_sglang.common.checks import Range, check_fields, knob, require_order


class BreakerState(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


# Named once: see ``fast_enum``.
_CLOSED, _OPEN, _HALF_OPEN = BreakerState


class BreakerReason(enum.Enum):
    """Why a breaker is as it is."""

    NEW = "new"
    REFUSED = "refused"  # the connection was refused: nobody listens
    CONSECUTIVE = "consecutive"  # that many failures without a success between them
    SHARE = "share"  # too large a share of the window failed
    COOLED = "cooled"  # the cool-down is over, one request may try
    TRIAL_OK = "trial_ok"
    TRIAL_FAILED = "trial_failed"


@dataclasses.dataclass(frozen=True)
class BreakerKnobs:
    """When a breaker opens and for how long.

    Attributes:
        consecutive: failures in a row that open it; failures are losses, time-outs and failed health checks.
        share, window_s, window_requests: it opens too when this share of the outcomes of the window failed, if there
            were at least that many.
        cool_down_s, cool_down_max_s: from opening to the first trial; doubles with each failed trial.
    """

    consecutive: int = knob(
        3, "--breaker-failures", "losses, time-outs and failed checks in a row, to stop sending there", allowed=Range(1)
    )
    share: float = knob(0.5, allowed=Range(0, 1, above=True))
    window_s: float = knob(30.0, allowed=Range(0, above=True))
    window_requests: int = knob(20, allowed=Range(1))
    cool_down_s: float = knob(2.0, allowed=Range(0, above=True))
    cool_down_max_s: float = 60.0

    def __post_init__(self) -> None:
        check_fields(self, "breaker")
        require_order("breaker cool_down_s", self.cool_down_s, "cool_down_max_s", self.cool_down_max_s)


class Breaker:
    """One instance's breaker. Requests are named by their ids; an empty one stands for no request."""

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
        self._trial = ""  # the request on trial; not empty in HALF_OPEN only

    def admits(self) -> bool:
        """True if a request may be sent now."""
        return self.state is _CLOSED or (self.state is _HALF_OPEN and not self._trial)

    def start_trial(self, rid: str) -> None:
        """The request is sent; in HALF_OPEN it is the trial. Only where ``admits`` says yes."""
        assert self.admits()
        if self.state is _HALF_OPEN:
            self._trial = rid

    def end_trial(self, rid: str) -> None:
        """The request is over there. If it was the trial and has decided nothing, the next one is."""
        if self._trial == rid:
            self._trial = ""

    def tick(self, now_s: float) -> None:
        """OPEN becomes HALF_OPEN when the cool-down is over."""
        if self.state is _OPEN and now_s >= self._retry_s:
            self.state, self.reason = _HALF_OPEN, BreakerReason.COOLED

    def on_success(self, now_s: float, rid: str) -> None:
        """The request went well. In HALF_OPEN only the trial decides."""
        self._in_a_row = 0
        self._note(now_s, failed=False)
        self.pass_trial(rid)

    def pass_trial(self, rid: str) -> bool:
        """The request has got its first token, or its answer. True where it was the trial, and others may go there now.

        A trial with a long answer would keep all others out until its end.
        """
        if self.state is not _HALF_OPEN or rid != self._trial:
            return False
        self.state, self.reason, self._trial = _CLOSED, BreakerReason.TRIAL_OK, ""
        self._cool_down_s, self._in_a_row = self._knobs.cool_down_s, 0
        self._window.clear()
        self._failed_in_window = 0
        return True

    def on_failure(self, now_s: float, rid: str = "", *, refused: bool = False) -> None:
        """The request failed at the instance; without one, a health check did. ``refused``: nobody listened there.

        In HALF_OPEN requests that were sent before decide nothing.
        """
        self._in_a_row += 1
        self._note(now_s, failed=True)
        if self.state is _HALF_OPEN:
            if refused or rid in ("", self._trial):
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
        self.state, self.reason, self._trial = _OPEN, reason, ""
        self.opened += 1
        self._retry_s = now_s + self._cool_down_s

    def _note(self, now_s: float, *, failed: bool) -> None:
        self._window.append((now_s, failed))
        self._failed_in_window += failed
        while self._window and self._window[0][0] < now_s - self._knobs.window_s:
            self._failed_in_window -= self._window.popleft()[1]
