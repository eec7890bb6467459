"""Deadlines decide: infeasible and rejected requests are deferred. Around PLA-Serve's temporal policy.

The paper's policy chooses among those that are left, by its own rules (``pla/temporal.py``). Two rules come between its
second and its third: an infeasible request that was deferred for long enough runs, in its small share of time
(OVERDUE, ``overdue.py``); then a long one that would be late behind others, and is to be kept (URGENT).
Where only infeasible requests wait, nothing may run for the sake of those to come (RESERVE). While deadlines do not
decide, all is as without this file.

First infeasible requests are left out (``deadlines.py``). Of the others a plan keeps as many as possible
(``plan.py``): who is rejected for their sake is left out too, in this pass; the next one plans again.
Where none is feasible the infeasible ones run, as far as that leaves room for those to come (``reserve.py``).
Where the usual order would make one late that is kept, the first long one of the plan is *urgent*. Not where those that
are kept do not fit the KV cache together: then memory decides, and larger requests first would keep fewer (measured on
mooncake and azure_conv, bench/lab/docs/rules.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.interface.prefill import Action, PassDecision, PassReason, PassView, PrefillClass, WaitingView
from pla_sglang.policy.pla.long_prompts import LongPick
from pla_sglang.policy.pla.sharing import contents_of_parts
from pla_sglang.policy.pla.temporal import Candidates, TemporalPolicy, parts_of
from pla_sglang.policy.slo.deadlines import DeadlineQueues, Deadlines, TargetLongPrompts
from pla_sglang.policy.slo.knobs import EnginePolicyKnobs
from pla_sglang.policy.slo.overdue import OverdueShare, share_of, take_overdue
from pla_sglang.policy.slo.plan import DeadlinePlan, spare_share
from pla_sglang.policy.slo.reservation import ReservationOrder
from pla_sglang.policy.slo.reserve import leave_reserve
from pla_sglang.policy.slo.turns import ArrivalOrder


@dataclasses.dataclass(slots=True)
class Contenders(Candidates):
    """The candidates without those that are deferred.

    Attributes:
        why: the reason of a long one that is next only because others are deferred.
        infeasible_chunk: the chunk under way is infeasible.
        some_deferred: some are, to others that are kept, or that may still come.
        reserved: all that wait are infeasible, and none starts for the sake of those to come.
        urgent: the long one that has to go before short and smaller long ones.
    """

    why: PassReason | None = None
    infeasible_chunk: bool = False
    some_deferred: bool = False
    reserved: bool = False
    urgent: LongPick | None = None


class SloPolicy(TemporalPolicy):
    """PLA-Serve's temporal policy, in which TTFT targets decide who competes for a pass."""

    knobs: EnginePolicyKnobs
    long_prompts: TargetLongPrompts
    _queues: DeadlineQueues

    def __init__(self, knobs: EnginePolicyKnobs, model: StepModel) -> None:
        super().__init__(knobs, model)
        self.deadlines = Deadlines(knobs.long_prompts, knobs.slo, model)
        self.overdue = OverdueShare()
        self.reservations = ReservationOrder(self.deadlines)
        self._arrivals = ArrivalOrder()
        self._queued = 0  # as the last decision saw the queue, which its pass changes
        self.long_prompts = TargetLongPrompts(knobs.long_prompts, knobs.slo, model)
        self._queues = DeadlineQueues(self.boundary, self.deadlines)

    def set_knobs(self, knobs: EnginePolicyKnobs) -> None:  # type: ignore[override]  # as it was made from
        self.long_prompts.set_slo(knobs.slo)
        super().set_knobs(knobs)
        self.deadlines.set(knobs.long_prompts, knobs.slo, self.model)
        if not self.deadlines.bounds_deferral:
            self._arrivals = ArrivalOrder()

    def set_model(self, model: StepModel) -> None:
        super().set_model(model)
        self.deadlines.set(self.knobs.long_prompts, self.knobs.slo, model)

    def on_arrival(self, view: WaitingView, now_s: float) -> None:
        super().on_arrival(view, now_s)
        if self.deadlines.bounds_deferral:
            self._arrivals.on_arrival(view)

    def on_pass(self, decision: PassDecision, view: PassView, admitted: Sequence[WaitingView], now_s: float) -> None:
        super().on_pass(decision, view, admitted, now_s)
        if decision.action is Action.HOLD or not admitted:
            return
        # Overtaken requests need no share: their bound grows with the load.
        is_theirs = decision.reason is PassReason.OVERDUE and not any(one.overtaken_s <= now_s for one in admitted)
        if is_theirs or self.overdue.pause_s > 0:
            share = None
            if is_theirs:
                bound_s = self.knobs.slo.deferral_s(self.knobs.long_prompts)
                share = share_of(self._list_overdue(view, now_s), self.model, bound_s, self.knobs.slo)
            self.overdue.note(contents_of_parts(parts_of(decision, view, admitted)).step_s(self.model), share=share)
        if self.deadlines.bounds_deferral:
            self._note_turns(view, admitted, now_s)

    def _note_turns(self, view: PassView, admitted: Sequence[WaitingView], now_s: float) -> None:
        """Whose turn has come in the order of arrival knows from now on until when it may be deferred."""
        started = sum(one is not view.chunk for one in admitted)
        for one in self._arrivals.on_pass(started, self._queued - started):
            one.overtaken_s = self.deadlines.overtaken_s(one, now_s)
            self._queues.note_overtaken(one.overtaken_s)

    def _note_batch(self, decision: PassDecision, short_prompts: Sequence[WaitingView], now_s: float) -> None:
        """What AWD learns from its batches; a pass of overdue requests is none of them."""
        if decision.reason is not PassReason.OVERDUE:
            super()._note_batch(decision, short_prompts, now_s)

    def _choose(self, field: Candidates, view: PassView, now_s: float) -> PassDecision:
        self._queued = len(view.waiting)
        if self.knobs.slo.infeasible_age_s is None:
            return super()._choose(field, view, now_s)
        left = Contenders(field.pick, field.short_prompts, field.long_prompts, field.aged)
        self._leave_out(left, view, now_s, self._pass_model)
        long = self._find_next_long(left, view, now_s)
        decision = self._choose_by_right(left, long, view, now_s) or self._choose_by_target(left, view, now_s)
        if decision is not None:
            return decision
        decision = self._choose_by_class(left, long, view, now_s)
        if decision.reason is PassReason.EMPTY and left.reserved:
            return PassDecision(Action.HOLD, PassReason.RESERVE)
        if decision.reason is not PassReason.NO_SHORT:
            return decision
        why, pick = left.why, long.pick
        if left.some_deferred and pick is not None and pick.running and self._is_overdue(pick.view, now_s):
            why = PassReason.OVERDUE  # others cannot overtake it, so its share pays for all of it
        return decision if why is None else dataclasses.replace(decision, reason=why)

    def _short_budget_tokens(self, short_prompts: Sequence[WaitingView], view: PassView, now_s: float) -> int:
        """As many as a pass computes that ends in time for all who are in it, and for who comes as it begins.

        All of a pass have their first token at its end. Who comes as it begins waits for it, and for a pass of its own:
        so it takes half of the least TTFT target at most. Not below the crossing of the roofline, where a smaller pass
        would be no shorter.
        """
        budget = view.pass_budget_tokens
        if not self.deadlines.decides:
            return budget
        allowed_s = math.inf
        for one in short_prompts[: self.knobs.awd.depth_max]:
            if one.deadline_s is not None and one.deadline_s > now_s:
                allowed_s = min(allowed_s, one.deadline_s - now_s, (one.deadline_s - one.arrival_s) / 2)
        pass_s = self._pass_model.step_s(budget, 0, budget * self.rate.mean_tokens())
        if pass_s <= allowed_s:
            return budget
        least = math.ceil(self._pass_model.crossing_tokens(0))
        return min(budget, max(1, least, int(budget * allowed_s / pass_s)))

    def _choose_by_target(self, field: Contenders, view: PassView, now_s: float) -> PassDecision | None:
        """Whose share of time it is, then who would be late in the usual order. None where that is nobody."""
        if field.some_deferred:
            overdue = self._overdue_pass(view, field.long_prompts, now_s)
            if overdue is not None:
                return overdue
        if field.urgent is None:
            return None
        other = bool(field.short_prompts) or view.chunk is not None
        if self._find_obstacle(field.urgent, view, now_s, owed=False, other=other) is not None:
            return None
        return self._long(field.urgent, view, field, now_s, PassReason.URGENT)

    def _is_overdue(self, view: WaitingView, now_s: float) -> bool:
        return bool(self.deadlines.list_overdue([view], now_s))

    def _list_overdue(self, view: PassView, now_s: float) -> list[WaitingView]:
        """All that are overdue, with the chunk under way, which is no longer in the queue."""
        waiting = view.waiting if view.chunk is None else [*view.waiting, view.chunk]
        return self.deadlines.list_overdue(waiting, now_s)

    def _list_owed(self, view: PassView, now_s: float) -> list[WaitingView]:
        """Overdue requests whose turn it is: those that are overtaken, else all while their share is due."""
        is_owed = self.overdue.is_owed
        chunk_is_overtaken = view.chunk is not None and view.chunk.overtaken_s <= now_s
        if not (is_owed or chunk_is_overtaken or self._queues.any_is_overtaken(now_s)):
            return []
        overdue = self._list_overdue(view, now_s)
        return [one for one in overdue if one.overtaken_s <= now_s] or (overdue if is_owed else [])

    def _overdue_pass(self, view: PassView, long_prompts: list[WaitingView], now_s: float) -> PassDecision | None:
        """The pass of the earliest that are owed one; None where there are none, or they cannot run."""
        chunk, overdue = view.chunk, self._list_owed(view, now_s)
        if not overdue:
            return None
        most_tokens = self.knobs.long_prompts.chunk_max_tokens or 0
        batch = take_overdue(overdue, view, self.boundary, most_tokens=most_tokens)
        if not batch:
            return None
        first = batch[0]
        if first is not chunk and self.boundary.is_short(first.new_tokens, first.history_tokens):
            if view.slots <= 0 or self._blocked.is_blocked(PrefillClass.SHORT, view, other=True):
                return None
            return PassDecision(Action.SHORT, PassReason.OVERDUE, batch, park=chunk is not None)
        pick = LongPick(first, running=first is chunk, overtakes=chunk is not None and first is not chunk)
        if self._find_obstacle(pick, view, now_s, owed=False, other=True) is not None:
            return None
        return self._alone(pick, view, long_prompts, now_s, PassReason.OVERDUE)

    # -- who is deferred ---------------------------------------------------------------------------------------------

    def _leave_out(self, field: Contenders, view: PassView, now_s: float, model: StepModel) -> None:
        """Removes deferred requests from ``field``. ``model``: step times of a pass, with what decodes add."""
        self._leave_infeasible_out(field, view, now_s)
        self._keep_most(field, view, now_s, model)

    def _leave_infeasible_out(self, field: Contenders, view: PassView, now_s: float) -> None:
        """Infeasible short prompts are deferred behind long ones too, long ones only among themselves."""
        deadlines, short_prompts, long_prompts = self.deadlines, field.short_prompts, field.long_prompts
        feasible_short_prompts, kept = short_prompts, long_prompts
        if self._queues.any_is_late(now_s):
            feasible_short_prompts, kept = deadlines.keep(short_prompts, now_s), deadlines.keep(long_prompts, now_s)
        field.infeasible_chunk = view.chunk is not None and deadlines.is_infeasible(view.chunk, now_s)
        can_keep = len(feasible_short_prompts) + len(kept)
        field.some_deferred = field.infeasible_chunk or can_keep < len(view.waiting)
        if kept and (field.infeasible_chunk or len(kept) < len(long_prompts)):
            self._pick_among(field, kept, view, now_s, yields=field.infeasible_chunk)
        if len(feasible_short_prompts) < len(short_prompts) and (feasible_short_prompts or kept):
            field.why = field.why if feasible_short_prompts or field.why else PassReason.LOST_SHORT
            field.short_prompts = feasible_short_prompts
        if not kept and can_keep < len(view.waiting):
            self._leave_reserve(field, view, now_s, short_prompts_infeasible=not feasible_short_prompts)

    def _leave_reserve(
        self, field: Contenders, view: PassView, now_s: float, *, short_prompts_infeasible: bool
    ) -> None:
        """All long prompts are infeasible, and the short ones that are left too, or none of them."""
        if short_prompts_infeasible:
            field.short_prompts = leave_reserve(field.short_prompts, view, self.knobs.slo)
        long_prompts = leave_reserve(field.long_prompts, view, self.knobs.slo)
        if len(long_prompts) < len(field.long_prompts):
            self._pick_among(field, long_prompts, view, now_s, yields=False)
            field.why = None
        field.reserved = not field.short_prompts and not long_prompts

    def _keep_most(self, field: Contenders, view: PassView, now_s: float, model: StepModel) -> None:
        chunk = view.chunk
        candidates = field.long_prompts if chunk is None or field.infeasible_chunk else [chunk, *field.long_prompts]
        spare = self._spare_share(view, now_s, model)
        plan = self.deadlines.plan(candidates, field.short_prompts, now_s, model, spare=spare)
        if plan is None or not plan.turns:
            return
        if plan.rejected:
            field.some_deferred = True
            field.short_prompts = [short for short in field.short_prompts if plan.keeps(short)]
            chunk_gives_way = chunk is not None and (field.infeasible_chunk or not plan.keeps(chunk))
            kept = [long for long in field.long_prompts if plan.keeps(long)]
            self._pick_among(field, kept, view, now_s, yields=chunk_gives_way)
        first = field.short_prompts or (() if field.pick is None else (field.pick.view,))
        fits = sum(turn.view.footprint_tokens for turn in plan.turns) <= view.kv_free_tokens
        if fits and not plan.allows(first, now_s, spare):
            field.urgent = self._find_first_long(plan, field.short_prompts, view)

    def _spare_share(self, view: PassView, now_s: float, model: StepModel) -> float:
        """Share of the device that is left to what waits, by what a token takes in a full pass."""
        tokens = max(1, view.pass_budget_tokens)
        token_s = model.step_s(tokens, 0, tokens * self.rate.mean_tokens()) / tokens
        return spare_share(self.rate, self.knobs.slo.slower * token_s, now_s)

    def _pick_among(
        self, field: Contenders, long_prompts: list[WaitingView], view: PassView, now_s: float, *, yields: bool
    ) -> None:
        """The next long is one of these."""
        before, field.long_prompts = field.pick, long_prompts
        field.pick = self.long_prompts.pick(
            long_prompts, view.chunk, now_s, short_prompts=False, budget_tokens=view.pass_budget_tokens, yields=yields
        )[0]
        if before is None or field.pick is None or before.view is not field.pick.view:
            field.why = PassReason.LOST_LONG

    def _find_first_long(
        self, plan: DeadlinePlan, short_prompts: Sequence[WaitingView], view: PassView
    ) -> LongPick | None:
        """The first of the plan that can run now; None where that is a short."""
        chunk, among_shorts = view.chunk, {id(short) for short in short_prompts}
        limit = min(self.long_prompts.knobs.chunk_max_tokens or 0, view.pass_budget_tokens)
        for turn in plan.turns:
            if id(turn.view) in among_shorts:
                return None
            if chunk is None or turn.view is chunk or turn.view.new_tokens <= limit:
                running = turn.view is chunk
                return LongPick(turn.view, running=running, overtakes=chunk is not None and not running)
        return None
