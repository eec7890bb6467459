"""Who competes for the next pass where deadlines decide: those that are lost, or given up, leave it to the others.

First those that cannot be kept even alone are left out (``deadlines.py``). Of the others a plan keeps as many as
possible (``most_kept.py``): who is given up for their sake is left out too, in this pass; the next one plans again.
Where nobody can be kept the lost ones run, as far as that leaves room for those to come (``reserve.py``).
Where the usual order would make one late that is kept, the first long of the plan is *urgent*. Not where those that are
kept do not fit the KV cache together: then memory decides, and larger requests first would keep fewer (measured on
mooncake and azure_conv, docs/reference/policies/temporal.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pla_sglang.policy.interface.prefill import PassView, Reason, WaitingView
from pla_sglang.policy.pla.boundary import StepModel
from pla_sglang.policy.pla.class_queues import ClassQueues
from pla_sglang.policy.pla.deadlines import Deadlines
from pla_sglang.policy.pla.longs import LongPick, LongQueue
from pla_sglang.policy.pla.most_kept import Plan
from pla_sglang.policy.pla.reserve import leave_reserve


@dataclasses.dataclass(slots=True)
class Contenders:
    """Attributes:
    pick: the next long by order.
    shorts, longs: without those that give way.
    why: the reason of a long that is next only because others give way.
    lost_chunk: the chunk under way is lost.
    some_give_way: to others that are kept, or that may still come.
    reserved: all that wait are lost, and nobody starts for the sake of those to come.
    urgent: the long that has to go before shorts and smaller longs.
    """

    pick: LongPick | None
    shorts: list[WaitingView]
    longs: list[WaitingView]
    why: Reason | None = None
    lost_chunk: bool = False
    some_give_way: bool = False
    reserved: bool = False
    urgent: LongPick | None = None


class Contest:
    """Leaves out who gives way. ``queues`` have been followed up to the pass that is asked for."""

    def __init__(self, deadlines: Deadlines, longs: LongQueue, queues: ClassQueues) -> None:
        self._deadlines = deadlines
        self._longs = longs
        self._queues = queues

    def choose(self, field: Contenders, view: PassView, now_s: float, model: StepModel) -> None:
        """Takes out of ``field`` who gives way. ``model``: step times of a pass, with what its riders add."""
        self._leave_lost_out(field, view, now_s)
        self._keep_most(field, view, now_s, model)

    def _leave_lost_out(self, field: Contenders, view: PassView, now_s: float) -> None:
        """Shorts that are lost give way to longs too, longs only among themselves: shorts go first."""
        deadlines, shorts, longs = self._deadlines, field.shorts, field.longs
        kept_shorts, kept = shorts, longs
        if self._queues.any_is_late(now_s):
            kept_shorts, kept = deadlines.keep(shorts, now_s), deadlines.keep(longs, now_s)
        field.lost_chunk = view.chunk is not None and deadlines.is_lost(view.chunk, now_s)
        can_keep = len(kept_shorts) + len(kept)
        field.some_give_way = field.lost_chunk or can_keep < len(view.waiting)
        if kept and (field.lost_chunk or len(kept) < len(longs)):
            self._pick_among(field, kept, view, now_s, chunk_lost=field.lost_chunk)
        if len(kept_shorts) < len(shorts) and (kept_shorts or kept):
            field.why = field.why if kept_shorts or field.why else Reason.LOST_SHORT
            field.shorts = kept_shorts
        if not kept and can_keep < len(view.waiting):
            self._leave_reserve(field, view, now_s, shorts_lost=not kept_shorts)

    def _leave_reserve(self, field: Contenders, view: PassView, now_s: float, *, shorts_lost: bool) -> None:
        """All longs are lost, and the shorts that are left too, or none of them."""
        if shorts_lost:
            field.shorts = leave_reserve(field.shorts, view)
        longs = leave_reserve(field.longs, view)
        if len(longs) < len(field.longs):
            self._pick_among(field, longs, view, now_s, chunk_lost=False)
            field.why = None
        field.reserved = not field.shorts and not longs

    def _keep_most(self, field: Contenders, view: PassView, now_s: float, model: StepModel) -> None:
        chunk = view.chunk
        candidates = field.longs if chunk is None or field.lost_chunk else [chunk, *field.longs]
        plan = self._deadlines.plan(candidates, field.shorts, now_s, model)
        if plan is None or not plan.turns:
            return
        if plan.given_up:
            field.some_give_way = True
            field.shorts = [short for short in field.shorts if plan.keeps(short)]
            chunk_gives_way = chunk is not None and (field.lost_chunk or not plan.keeps(chunk))
            kept = [long for long in field.longs if plan.keeps(long)]
            self._pick_among(field, kept, view, now_s, chunk_lost=chunk_gives_way)
        first = field.shorts or (() if field.pick is None else (field.pick.view,))
        fits = sum(turn.view.footprint_tokens for turn in plan.turns) <= view.kv_free_tokens
        if fits and not plan.bears(first, now_s):
            field.urgent = self._find_first_long(plan, field.shorts, view)

    def _pick_among(
        self, field: Contenders, longs: list[WaitingView], view: PassView, now_s: float, *, chunk_lost: bool
    ) -> None:
        """The next long is one of these."""
        before, field.longs = field.pick, longs
        field.pick = self._longs.pick(
            longs, view.chunk, now_s, shorts=False, budget_tokens=view.pass_budget_tokens, chunk_lost=chunk_lost
        )[0]
        if before is None or field.pick is None or before.view is not field.pick.view:
            field.why = Reason.LOST_LONG

    def _find_first_long(self, plan: Plan, shorts: Sequence[WaitingView], view: PassView) -> LongPick | None:
        """The first of the plan that can run now; None where that is a short."""
        chunk, among_shorts = view.chunk, {id(short) for short in shorts}
        limit = min(self._longs.knobs.chunk_max_tokens or 0, view.pass_budget_tokens)
        for turn in plan.turns:
            if id(turn.view) in among_shorts:
                return None
            if chunk is None or turn.view is chunk or turn.view.new_tokens <= limit:
                running = turn.view is chunk
                return LongPick(turn.view, running=running, overtakes=chunk is not None and not running)
        return None
