"""Times without requests: their middle is left out, so that the work of a run follows its events."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from pla_sglang.policy.interface.decisions import FleetAction, Hold

SETTLE_S = 600.0  # of idle time that policies live through: loads that they remember are forgotten by then
PERIOD_S = 60.0  # intervals of controllers divide it: they keep their place beside the arrivals


class IdleTime:
    """When an empty fleet may go on to its next event, and what its controllers would have said until then.

    They see ``SETTLE_S`` of an idle time. If they then answer alike for two periods, and only that nothing is to be
    done, whole periods are left out: no policy sees that time, as if its clock had stood still.

    Attributes:
        left_out_s: so far.
        reasons: of the answers that would have been given meanwhile.
    """

    def __init__(self, intervals_s: Iterable[float]) -> None:
        self.left_out_s = 0.0
        self.reasons: Counter[str] = Counter()
        self._period_s = max([PERIOD_S, *intervals_s])
        self._begun_s: float | None = None  # of the period under way
        self._held: Counter[str] = Counter()  # in it
        self._before: Counter[str] | None = None  # in the one before

    def note_answer(self, actions: Sequence[FleetAction]) -> None:
        """What a controller has answered."""
        if all(isinstance(action, Hold) for action in actions):
            self._held.update(action.reason.value for action in actions)
        else:
            self._begun_s = None

    def leave_out(self, now_s: float, idle_s: float, due_s: float) -> float:
        """How much time to leave out now: idle for ``idle_s`` so far, the next event in ``due_s``."""
        if idle_s < SETTLE_S or self._begun_s is None:
            self._begin(now_s, None)
            return 0.0
        if now_s < self._begun_s + self._period_s:
            return 0.0
        held = self._held
        is_steady = held == self._before
        self._begin(now_s, held)
        if not is_steady or math.isinf(due_s):
            return 0.0
        periods = max(0, math.ceil(due_s / self._period_s) - 1)  # the event stays in the future
        self.reasons.update({reason: count * periods for reason, count in held.items()})
        self.left_out_s += periods * self._period_s
        return periods * self._period_s

    def _begin(self, now_s: float, before: Counter[str] | None) -> None:
        self._begun_s, self._held, self._before = now_s, Counter(), before
