"""Who gets KV cache next, of requests whose KV comes from elsewhere: by slack (our rule, no paper's).

Slack is the time until a request would be late. Of one that has begun, which its client sees as a stream that stands
still, that is until its next token is due; of a new one, until its first token is. What its prefill still takes
elsewhere is not known here: the prompt may be in a prefix cache there. So only who is late even then is *infeasible*.

1. Requests of a better priority go first (PRIORITY, where that passes one with less slack).
2. Then who is overdue, in a share of the turns, ``SloKnobs.overdue_share`` (OVERDUE).
3. Then the least slack (SLACK). A request without a target is due its bound after its arrival (UNTARGETED).
4. Then infeasible ones, in order of arrival (INFEASIBLE). They are overdue after the bound of ``slo/deadlines.py``.
5. Who has no room is passed by those that need less KV cache (FITS), until ``SloKnobs.passed_share`` of its slack at
   its arrival is over. From then on what becomes free is kept for it.

Where nobody has a target, and while deadlines do not decide, it is first come, first served.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pla_sglang.policy.interface.prefill import ReservationReason, WaitingView
from pla_sglang.policy.slo.deadlines import Deadlines


class Reservation(NamedTuple):
    """One request in the order. ``due_s``: by when it should have its KV cache."""

    view: WaitingView
    reason: ReservationReason
    due_s: float


def reservation_view(
    rid: str, tokens: int, arrival_s: float, *, deadline_s: float | None, begun: bool, handle: object = None
) -> WaitingView:
    """A view of a request that waits for room for ``tokens`` of KV: as if a step for its next token were all to do.

    ``deadline_s``: of its next token. ``begun``: its client has tokens; without a target the next one is due now.
    """
    return WaitingView(rid, 1, tokens - 1, arrival_s, deadline_s=deadline_s, resumed=begun, handle=handle)


class ReservationOrder:
    """Says who is next. Everything it knows is in the views, so all ranks say the same."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._turns = 0  # since one of an overdue request

    @property
    def decides(self) -> bool:
        """False: it is first come, first served, whatever the targets."""
        return self._deadlines.decides

    def sort(self, waiting: Sequence[WaitingView], now_s: float) -> list[Reservation] | None:
        """All in order; None: first come, first served."""
        if not self.decides or all(view.deadline_s is None for view in waiting):
            return None
        ranks = sorted({view.priority_rank for view in waiting})
        turns: list[Reservation] = []
        for rank in reversed(ranks):
            behind_s = min((turn.due_s for turn in turns if turn.reason is not _INFEASIBLE), default=math.inf)
            own = self._sort_rank([view for view in waiting if view.priority_rank == rank], now_s)
            turns = [turn._replace(reason=_PRIORITY) if turn.due_s > behind_s else turn for turn in own] + turns
        return turns

    def _sort_rank(self, waiting: Sequence[WaitingView], now_s: float) -> list[Reservation]:
        deadlines = self._deadlines
        due_s = {id(view): self._find_due_s(view) for view in waiting}
        kept = {id(view) for view in deadlines.keep(waiting, now_s)}
        first = None
        if kept and (self._turns + 1) * deadlines.knobs.overdue_share >= 1:
            overdue = deadlines.list_overdue([view for view in waiting if id(view) not in kept], now_s)
            first = min(overdue, key=lambda view: view.arrival_s, default=None)
        ahead = [] if first is None else [Reservation(first, _OVERDUE, due_s[id(first)])]
        feasible = sorted((view for view in waiting if id(view) in kept), key=lambda view: due_s[id(view)])
        infeasible = sorted(
            (view for view in waiting if id(view) not in kept and view is not first), key=lambda view: view.arrival_s
        )
        by_slack = [
            Reservation(view, _SLACK if view.deadline_s is not None or view.resumed else _UNTARGETED, due_s[id(view)])
            for view in feasible
        ]
        return [*ahead, *by_slack, *(Reservation(view, _INFEASIBLE, due_s[id(view)]) for view in infeasible)]

    def _find_due_s(self, view: WaitingView) -> float:
        latest_s = self._deadlines.latest_start_s(view)
        if view.deadline_s is not None:
            return latest_s
        return view.arrival_s if view.resumed else view.arrival_s + self._deadlines.deferral_s

    def list_passing(self, turns: Sequence[Reservation], now_s: float) -> list[Reservation]:
        """Who may go before the first of ``turns``, which has no room: later ones that may have it, in their order."""
        first, passing = turns[0].view, list[Reservation]()
        for turn in turns:
            if turn.view.priority_rank != first.priority_rank:
                break
            if _count_tokens(turn.view) < _count_tokens(first):
                passing.append(turn._replace(reason=_FITS))
            elif not self._may_be_passed(turn, now_s):
                break  # with as much as the first it has no room either, and some is kept for it
        return passing

    def _may_be_passed(self, turn: Reservation, now_s: float) -> bool:
        if turn.reason in (_OVERDUE, _INFEASIBLE):
            return False
        passed_s = self._deadlines.knobs.passed_share * (turn.due_s - turn.view.arrival_s)
        return now_s - turn.view.arrival_s < passed_s

    def note(self, reason: ReservationReason) -> None:
        """A request has got its room in this turn."""
        self._turns = 0 if reason is _OVERDUE else self._turns + 1


def _count_tokens(view: WaitingView) -> int:
    """The KV tokens that it needs room for."""
    return view.new_tokens + view.history_tokens


# Named once: see ``fast_enum``.
_SLACK, _PRIORITY, _OVERDUE = ReservationReason.SLACK, ReservationReason.PRIORITY, ReservationReason.OVERDUE
_UNTARGETED, _INFEASIBLE, _FITS = (
    ReservationReason.UNTARGETED,
    ReservationReason.INFEASIBLE,
    ReservationReason.FITS,
)
