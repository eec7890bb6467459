"""Who can still be kept: TTFT targets in the order of prefills (our rule; PLA-Serve uses slack for its windows only).

A request is *lost* when its own prefill, begun now, would end after its deadline. It then gives way to every request
that can still be kept: to keep one that is lost costs the same device time and brings nothing. Once it has done so for
its bound (``LongKnobs.give_way_s``) it is *overdue* and has a share (``overdue.py``); ``LongKnobs.lost_end_s`` after
its arrival it counts as if it were not lost. Without targets nothing is lost, and all answers are as without this rule.

Among those that can be kept, least remaining work goes first, as ever: where work piles up, that keeps the most. Where
it would lose somebody while the order of latest starts loses nobody, that order is taken: its first long is *urgent*.
Both orders are judged over all that wait, by the step model. Where KV cache is short the smallest still go first: what
an order of device time promises, memory would not keep (measured on azure_conv, which memory bounds). Nor is anybody
urgent beside a smaller request that is lost: work piles up, and to bring a larger one forward loses more of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from pla_sglang.policy.interface.prefill import WaitingView
from pla_sglang.policy.pla.awd import batch_step_s
from pla_sglang.policy.pla.boundary import StepModel
from pla_sglang.policy.pla.longs import LongKnobs, by_order

ARRIVING = 2.0  # least work first is judged as if as much work again arrived meanwhile
ROOM = 4  # least work first where KV cache is short: free it must be so many times of what all that wait need
MOST_COMPARED = 64  # waiting requests; with more of them work has piled up


class Deadlines:
    """Splits what waits by whether it can be kept. Remembers the latest start of each request in its view.

    Attributes:
        stamp: changes with knobs and model; views that bear it know their latest start.
    """

    def __init__(self, knobs: LongKnobs, model: StepModel) -> None:
        self.stamp = 0
        self.set(knobs, model)

    def set(self, knobs: LongKnobs, model: StepModel) -> None:
        self._knobs = knobs
        self._model = model
        self.stamp += 1

    def service_s(self, view: WaitingView) -> float:
        """Device time of its prefill, alone."""
        chunk = self._knobs.chunk_max_tokens or view.new_tokens
        if view.new_tokens <= chunk:
            return self._model.step_s(view.new_tokens, view.history_tokens)
        return self._model.chunked_s(view.new_tokens, view.history_tokens, chunk)

    def latest_start_s(self, view: WaitingView) -> float:
        """When its prefill has to begin at the latest; infinite without a target."""
        if view.latest_stamp != self.stamp:
            view.latest_stamp = self.stamp
            view.latest_s = float("inf") if view.deadline_s is None else view.deadline_s - self.service_s(view)
        return view.latest_s

    def is_lost(self, view: WaitingView, now_s: float) -> bool:
        """Whether it cannot be kept and still gives way."""
        self.latest_start_s(view)
        return not self.keep((view,), now_s)

    def find_urgent(
        self,
        longs: Sequence[WaitingView],
        shorts: Sequence[WaitingView],
        now_s: float,
        *,
        kv_free_tokens: int,
        waiting: Sequence[WaitingView],
    ) -> WaitingView | None:
        """The long that the order of latest starts begins with, where that order is to be taken; else None.

        ``waiting``: these, and those that give way to them.
        """
        if not longs or len(longs) + len(shorts) > MOST_COMPARED:
            return None
        if ROOM * sum(view.footprint_tokens for view in (*longs, *shorts)) > kv_free_tokens:
            return None
        each_s = batch_step_s(shorts, self._model) / len(shorts) if shorts else 0.0
        turns = [(view, each_s) for view in shorts]
        turns += [(view, self.service_s(view)) for view in sorted(longs, key=by_order)]
        if not self._loses_any(turns, now_s, ARRIVING):
            return None
        turns.sort(key=lambda turn: self._turn_s(turn[0], now_s))
        first = turns[0][0]
        if self._loses_any(turns, now_s, 1.0) or any(view.priority_rank < first.priority_rank for view, _ in turns):
            return None
        if not any(first is long for long in longs) or self._any_smaller_lost(first, waiting, now_s):
            return None
        return first

    def _any_smaller_lost(self, long: WaitingView, waiting: Sequence[WaitingView], now_s: float) -> bool:
        """Work has piled up: one that costs less than ``long`` was lost already."""
        return any(
            view.new_tokens < long.new_tokens and not view.resumed and self.latest_start_s(view) < now_s
            for view in waiting
        )

    def _turn_s(self, view: WaitingView, now_s: float) -> float:
        """Latest start; who cannot be kept comes last."""
        latest_s = self.latest_start_s(view)
        return latest_s if latest_s >= now_s else float("inf")

    def _loses_any(self, turns: Sequence[tuple[WaitingView, float]], now_s: float, slower: float) -> bool:
        """Whether somebody that can be kept now is late where all are served in this order, each ``slower`` times as
        slowly as the model says."""
        at_s = now_s
        for view, service_s in turns:
            at_s += slower * service_s
            if view.deadline_s is not None and at_s > view.deadline_s and self.latest_start_s(view) >= now_s:
                return True
        return False

    def list_overdue(self, views: Sequence[WaitingView], now_s: float) -> list[WaitingView]:
        """Those that are lost and have given way for their bound, in their order. On the hot path."""
        stamp, arrived_s = self.stamp, now_s - self._knobs.give_way_s
        latest_start_s = self.latest_start_s
        return [
            view
            for view in views
            if view.arrival_s <= arrived_s
            and not view.resumed
            and (view.latest_s if view.latest_stamp == stamp else latest_start_s(view)) < now_s
        ]

    def keep(self, views: Sequence[WaitingView], now_s: float) -> list[WaitingView]:
        """Those that do not give way, in their order. Their latest starts are known (``class_queues.py``)."""
        arrived_s = now_s - self._knobs.lost_end_s
        return [view for view in views if view.latest_s >= now_s or view.arrival_s <= arrived_s or view.resumed]
