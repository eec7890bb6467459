"""Feasible requests first: TTFT targets in the order of prefills (our rule; PLA-Serve uses slack for its windows only).

A request is *infeasible* when its own prefill, begun now, would end after its deadline. It is then deferred behind all
that are feasible: serving it costs the same device time and meets no target. Once it was deferred for its bound
(``SloKnobs.deferral_s``) it is *overdue* and has a share (``overdue.py``); ``SloKnobs.infeasible_end_s`` after its
arrival it counts as feasible. Without targets nothing is infeasible, and all decisions are as without this rule.

Each feasible request could meet its target alone. Where not all of them can, ``plan.py`` plans which to reject for the
sake of the others, and gives the order in which those meet theirs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.interface.prefill import WaitingView
from pla_sglang.policy.pla.awd import batch_step_s
from pla_sglang.policy.pla.boundary import Boundary
from pla_sglang.policy.pla.class_queues import ClassQueues
from pla_sglang.policy.pla.long_prompts import LongKnobs, LongQueue, aged_at_s
from pla_sglang.policy.slo.knobs import SloKnobs
from pla_sglang.policy.slo.plan import DeadlinePlan, Turn, due_of, plan_moore_hodgson

_LATEST_S = operator.attrgetter("latest_s")
_OVERTAKEN_S = operator.attrgetter("overtaken_s")


class Deadlines:
    """Splits what waits into feasible and infeasible. Remembers the latest start of each request in its view.

    Attributes:
        stamp: changes with knobs and model; views that bear it know their latest start.
    """

    def __init__(self, long_prompts: LongKnobs, knobs: SloKnobs, model: StepModel) -> None:
        self.stamp = 0
        self.set(long_prompts, knobs, model)

    def set(self, long_prompts: LongKnobs, knobs: SloKnobs, model: StepModel) -> None:
        self._long_prompts = long_prompts
        self._knobs = knobs
        self._model = model
        self.stamp += 1

    @property
    def knobs(self) -> SloKnobs:
        return self._knobs

    @property
    def decides(self) -> bool:
        """Deadlines decide; else they are only known."""
        return self._knobs.infeasible_age_s is not None

    @property
    def bounds_deferral(self) -> bool:
        """Deferrals end by the order of arrival (``turns.py``)."""
        return self.decides and self._knobs.fcfs_times > 0

    @property
    def deferral_s(self) -> float:
        """As ``SloKnobs.deferral_s``."""
        return self._knobs.deferral_s(self._long_prompts)

    def service_s(self, view: WaitingView) -> float:
        """Device time of its prefill, alone."""
        return self._alone_s(view, self._model)

    def _alone_s(self, view: WaitingView, model: StepModel) -> float:
        chunk = self._long_prompts.chunk_max_tokens or view.new_tokens
        if view.new_tokens <= chunk:
            return model.step_s(view.new_tokens, view.history_tokens)
        return model.chunked_s(view.new_tokens, view.history_tokens, chunk)

    def latest_start_s(self, view: WaitingView) -> float:
        """When its prefill has to begin at the latest; infinite without a target."""
        if view.latest_stamp != self.stamp:
            view.latest_stamp = self.stamp
            view.latest_s = float("inf") if view.deadline_s is None else view.deadline_s - self.service_s(view)
        return view.latest_s

    def is_infeasible(self, view: WaitingView, now_s: float) -> bool:
        """It cannot meet its target and is still deferred."""
        self.latest_start_s(view)
        return not self.keep((view,), now_s)

    def plan(
        self,
        long_prompts: Sequence[WaitingView],
        short_prompts: Sequence[WaitingView],
        now_s: float,
        model: StepModel,
        *,
        spare: float,
    ) -> DeadlinePlan | None:
        """Which of those that are not deferred meet their targets (``plan.py``); None where the usual order counts.

        That is so where all have time, where too many wait for a plan, where priorities differ, and where somebody
        would come last in it who must not wait for all others: a short one without a feasible target, or a long one
        that was retracted, whose user already sees a stream. (Other long ones without a target have their share once
        they are aged.)

        Args:
            model: step times of a pass, with what decodes add to it.
            spare: share of the device that is left to them (``plan.py``).
        """
        waiting = len(long_prompts) + len(short_prompts)
        if not waiting or waiting > self._knobs.most_planned:
            return None
        if self.have_time(long_prompts, short_prompts, now_s, model, spare=spare):
            return None
        slower, rank = self._knobs.slower, (*long_prompts, *short_prompts)[0].priority_rank
        if any(view.priority_rank != rank for view in long_prompts) or any(
            view.priority_rank != rank for view in short_prompts
        ):
            return None
        tokens = sum(view.new_tokens for view in short_prompts)
        token_s = slower * batch_step_s(short_prompts, model) / tokens if short_prompts else 0.0
        turns = [Turn(view, due_of(view, now_s), token_s * view.new_tokens) for view in short_prompts]
        if any(turn.due_s == math.inf for turn in turns):
            return None
        turns += [Turn(view, due_of(view, now_s), slower * self._alone_s(view, model)) for view in long_prompts]
        if any(turn.due_s == math.inf and turn.view.resumed for turn in turns):
            return None
        return plan_moore_hodgson(turns, now_s)

    def have_time(
        self,
        long_prompts: Sequence[WaitingView],
        short_prompts: Sequence[WaitingView],
        now_s: float,
        model: StepModel,
        *,
        spare: float,
    ) -> bool:
        """All are in time in any order, so that a plan changes nothing; False where somebody has no target.

        On the hot path: by the times alone, which are known, and by what ``model`` adds to a pass at most.
        """
        chunk = self._long_prompts.chunk_max_tokens
        alone_s, passes, first_due_s = 0.0, 0, math.inf
        for view in (*long_prompts, *short_prompts):
            due_s = view.deadline_s
            if due_s is None:
                return False
            alone_s += due_s - view.latest_s
            passes += 1 if chunk is None else 1 + view.new_tokens // chunk
            first_due_s = min(first_due_s, due_s)
        added_s = model.g0_s - self._model.g0_s + model.k0_s - self._model.k0_s
        return self._knobs.slower * (alone_s + added_s * passes) <= spare * (first_due_s - now_s)

    def list_overdue(self, views: Sequence[WaitingView], now_s: float) -> list[WaitingView]:
        """Infeasible requests that were deferred for one of their bounds, in their order. On the hot path."""
        stamp, arrived_s = self.stamp, now_s - self._knobs.deferral_s(self._long_prompts)
        latest_start_s = self.latest_start_s
        return [
            view
            for view in views
            if (view.arrival_s <= arrived_s or view.overtaken_s <= now_s)
            and not view.resumed
            and (view.latest_s if view.latest_stamp == stamp else latest_start_s(view)) < now_s
        ]

    def overtaken_s(self, view: WaitingView, now_s: float) -> float:
        """Until when it may be deferred, where in the order of arrival it would start now."""
        if not self.bounds_deferral or view.deadline_s is None:
            return math.inf
        first_token_s = max(view.deadline_s, now_s + self.service_s(view))
        return view.arrival_s + self._knobs.fcfs_times * (first_token_s - view.arrival_s)

    def keep(self, views: Sequence[WaitingView], now_s: float) -> list[WaitingView]:
        """Those that are not deferred, in their order. Their latest starts are known (``DeadlineQueues``)."""
        arrived_s = now_s - self._knobs.infeasible_end_s(self._long_prompts)
        return [view for view in views if view.latest_s >= now_s or view.arrival_s <= arrived_s or view.resumed]


class DeadlineQueues(ClassQueues):
    """The two classes of the queue, of which the latest start of each request is known.

    Invariants, once ``follow(waiting)`` has returned: the latest start in each view is that of now; none is before
    ``_first_latest_s``, and nobody is overtaken before ``_first_overtaken_s``.
    """

    def __init__(self, boundary: Boundary, deadlines: Deadlines) -> None:
        super().__init__(boundary)
        self._deadlines = deadlines
        self._stamp = deadlines.stamp  # under which the latest starts hold
        self._first_latest_s = self._first_overtaken_s = math.inf

    def follow(self, waiting: Sequence[WaitingView]) -> tuple[list[WaitingView], list[WaitingView]]:
        if self._stamp == self._deadlines.stamp:
            return super().follow(waiting)
        self._stamp = self._deadlines.stamp
        self._divide(waiting)
        return self._short_prompts, self._long_prompts

    def any_is_late(self, now_s: float) -> bool:
        """The latest start of somebody has passed."""
        if self._first_latest_s >= now_s:
            return False
        if any(view.latest_s < now_s for view in self._order):
            return True
        self._first_latest_s = min(map(_LATEST_S, self._order), default=math.inf)
        return False

    def note_overtaken(self, overtaken_s: float) -> None:
        """From then on somebody is."""
        self._first_overtaken_s = min(self._first_overtaken_s, overtaken_s)

    def any_is_overtaken(self, now_s: float) -> bool:
        """Somebody has been deferred for long enough, or was not deferred for as long."""
        if self._first_overtaken_s > now_s:
            return False
        self._first_overtaken_s = min(map(_OVERTAKEN_S, self._order), default=math.inf)
        return self._first_overtaken_s <= now_s

    def _note(self, view: WaitingView) -> None:
        super()._note(view)
        self._first_latest_s = min(self._first_latest_s, self._deadlines.latest_start_s(view))

    def _divide(self, waiting: Sequence[WaitingView]) -> None:
        super()._divide(waiting)
        self._first_latest_s = min(map(self._deadlines.latest_start_s, waiting), default=math.inf)


class TargetLongPrompts(LongQueue):
    """The long class, in which a TTFT target protects its request until it is infeasible."""

    def __init__(self, knobs: LongKnobs, slo: SloKnobs, model: StepModel) -> None:
        self._slo = slo
        super().__init__(knobs, model)

    def set_slo(self, slo: SloKnobs) -> None:
        self._slo = slo
        self.stamp += 1

    def find_age_s(self, view: WaitingView) -> float:
        return aged_at_s(view, self.model, self.knobs, self._slo.age_bound_s(view, self.knobs))
