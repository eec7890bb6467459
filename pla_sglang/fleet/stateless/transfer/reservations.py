"""In which order decode parts get KV cache and join the running batch: by slack, from what all ranks know alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from pla_sglang.fleet.stateless.transfer.legs import goes_on
from pla_sglang.plugin.engine.snapshot import make_reservation_view, set_priority_ranks
from pla_sglang.policy.engine_policies import find_reservations
from pla_sglang.policy.interface.prefill import WaitingView
from pla_sglang.policy.slo.reservation import Reservation, ReservationOrder

VIEW_ATTRIBUTE = "pla_view"  # of a request


class Reservations:
    """The order of the engine's policy, for requests of the host. Without one it is first come, first served.

    Attributes:
        reasons: how many got their KV cache for each reason; none is counted while it is first come, first served.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._turns: list[Reservation] = []  # of the call of the host that is under way; none: first come, first served
        self.reasons: Counter[str] = Counter()

    def _find_order(self) -> ReservationOrder | None:
        adapter = getattr(self._scheduler, "pla", None)
        order = None if adapter is None else find_reservations(adapter.policy)
        return order if order is not None and order.decides else None

    def begin(self, entries: Sequence[Any]) -> list[Any]:
        """``entries`` of the receiving queue in order, before the host reserves KV cache for the first of them."""
        turns = self._sort([entry.req for entry in entries])
        self._turns = turns or []
        return list(entries) if turns is None else _in_order(entries, (_view_of(entry.req) for entry in entries), turns)

    def sort_ready(self, reqs: Sequence[Any]) -> list[Any]:
        """Requests whose KV is here, in the order in which they join the running batch."""
        turns = self._sort(reqs) if len(reqs) > 1 else None
        return list(reqs) if turns is None else _in_order(reqs, map(_view_of, reqs), turns)

    def _sort(self, reqs: Sequence[Any]) -> list[Reservation] | None:
        order = self._find_order()
        if order is None:
            return None
        views = [_view_of(req) or self._make_view(req) for req in reqs]
        if self._scheduler.enable_priority_scheduling:
            set_priority_ranks(views, reqs, low_first=self._scheduler.schedule_low_priority_values_first)
        return order.sort(views, self._scheduler.pla.now_s)

    def _make_view(self, req: Any) -> WaitingView:
        """When ``req`` is first seen: in the pass after its broadcast, by the clock that came with that."""
        adapter = self._scheduler.pla
        view = make_reservation_view(req, adapter.now_s, adapter.config, adapter.clock, begun=goes_on(req))
        setattr(req, VIEW_ATTRIBUTE, view)
        return view

    def let_pass(self, left: Sequence[Any]) -> list[Any] | None:
        """``left`` have no room: in another order, some before the first that waits for it. None: nobody may go first.

        Call it after ``begin`` and ``note_started``.
        """
        order = self._find_order()
        if order is None or not self._turns:
            return None
        waiting = {id(_view_of(entry.req)) for entry in left if entry.waiting_for_input}
        turns = [turn for turn in self._turns if id(turn.view) in waiting]
        passing = order.list_passing(turns, self._scheduler.pla.now_s) if turns else []
        if not passing:
            return None
        ahead = {id(turn.view) for turn in passing}
        self._turns = [*passing, *(turn for turn in self._turns if id(turn.view) not in ahead)]
        return _in_order(left, (_view_of(entry.req) for entry in left), self._turns)

    def note_started(self, started: Iterable[Any]) -> None:
        """These have got their KV cache."""
        order = self._find_order()
        if order is None or not self._turns:
            return
        reasons = {id(turn.view): turn.reason for turn in self._turns}
        for entry in started:
            reason = reasons[id(_view_of(entry.req))]
            order.note(reason)
            self.reasons[reason.value] += 1


def _view_of(req: Any) -> WaitingView | None:
    return getattr(req, VIEW_ATTRIBUTE, None)


def _in_order(ones: Sequence[Any], views: Iterable[WaitingView | None], turns: Sequence[Reservation]) -> list[Any]:
    """``ones``, of which these are the views; those without a turn come last, in their order."""
    places = {id(turn.view): place for place, turn in enumerate(turns)}
    keys = [places.get(id(view), len(places)) for view in views]
    return [one for _, _, one in sorted(zip(keys, range(len(keys)), ones, strict=True), key=lambda key: key[:2])]
