"""Whose TTFT targets are met where not all can be: as many as possible (our rule, not a paper's).

Of jobs with deadlines on one machine the fewest are late where they run by their deadlines, and where each time that
one would be late the largest of those up to it is rejected (Moore 1968, with Hodgson's algorithm). A prefill takes more
of the device than it would alone (``SloKnobs.slower``).

The plan says which are kept, not which is next. The usual order (short prompts, then the least work) stays as long as
it makes none late that the plan keeps, not even if others arrive meanwhile and go first: it answers sooner. Otherwise
the first of the plan is next. If prefills arrive that take a share u of the device, what waits has 1 - u of it
(``spare_share``). So with few arrivals the usual order stays, and with as many as the device can do there is no time
for it. Measured: bench/lab/docs/rules.md.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import operator
from collections.abc import Iterable, Sequence

from pla_sglang.policy.interface.prefill import WaitingView
from pla_sglang.policy.pla.arrival_rate import ArrivalRate


@dataclasses.dataclass(slots=True, frozen=True)
class Turn:
    """One request of a plan.

    Attributes:
        due_s: by when its prefill is to end; infinite without a target, or where that is infeasible.
        service_s: what it takes of the device.
    """

    view: WaitingView
    due_s: float
    service_s: float


_DUE_S = operator.attrgetter("due_s")


@dataclasses.dataclass(slots=True, frozen=True)
class DeadlinePlan:
    """Attributes:
    turns: of those that are kept, by their deadlines.
    rejected: the others, by identity.
    """

    turns: Sequence[Turn]
    rejected: frozenset[int]

    def keeps(self, view: WaitingView) -> bool:
        """``view``, which was planned, is kept."""
        return id(view) not in self.rejected

    def allows(self, first: Iterable[WaitingView], now_s: float, spare: float) -> bool:
        """These may go before all others, and still none that is kept is late.

        ``spare``: share of the device that is left to them (``spare_share``).
        """
        ahead = {id(view) for view in first}
        work_s = sum(turn.service_s for turn in self.turns if id(turn.view) in ahead)
        for turn in self.turns:
            if id(turn.view) in ahead:
                continue
            work_s += turn.service_s
            if turn.due_s < math.inf and work_s > spare * (turn.due_s - now_s):
                return False
        return True


def plan_moore_hodgson(turns: Iterable[Turn], now_s: float) -> DeadlinePlan:
    """Moore and Hodgson's plan from ``now_s`` on."""
    ordered = sorted(turns, key=_DUE_S)
    at_s, largest, rejected = now_s, list[tuple[float, int, Turn]](), set[int]()
    for place, turn in enumerate(ordered):
        at_s += turn.service_s
        heapq.heappush(largest, (-turn.service_s, place, turn))
        if at_s > turn.due_s:
            gone = heapq.heappop(largest)[2]
            at_s -= gone.service_s
            rejected.add(id(gone.view))
    return DeadlinePlan([turn for turn in ordered if id(turn.view) not in rejected], frozenset(rejected))


def due_of(view: WaitingView, now_s: float) -> float:
    """Its deadline; infinite where that is infeasible, or there is none. Its latest start is known."""
    return math.inf if view.deadline_s is None or view.latest_s < now_s else view.deadline_s


def spare_share(rate: ArrivalRate, token_s: float, now_s: float) -> float:
    """Share of the device that is left to what waits, if all that arrives goes before it; 0 and more.

    ``token_s``: what a token of a prefill takes, with all that falls between.
    """
    return max(0.0, 1.0 - token_s * rate.tokens_per_second(now_s))
