"""Mixed batches: running decodes join a prefill pass, which is cut for the sake of their next tokens or of KV cache.

They join the pass of any policy that decides prefills. One with piggybacked decodes costs

    mixed(L, H, n, C) = max(step(L + n, H) + extra + each*n + read*C, decode(n, C))
    decode(n, C)      = base + request*n + read*C

with L new and H history tokens of the prefills, n running requests and C tokens of their context. Its piggybacked
decodes take part in the linear layers, and their context is read besides; it is never faster than their decode step
alone. ``extra`` is what it loses: a captured graph, for example.

The rule, for a pass that was chosen without regard to decodes:

1. The decodes join if that takes less device time than the pass and a decode step of their own (TOGETHER), else they
   step alone after it (ALONE), before the next prefill. Once in ``SloKnobs.probe_passes`` they join all the same
   (PROBE), if that makes no token late: only passes with piggybacked decodes show what piggybacked decodes cost, and
   the first ones may have been slow because something was compiled.
2. The pass is cut until it ends, by the model and its error, before the first next-token deadline of those that run
   (TOKEN_DEADLINE): a long gets a smaller chunk, companions and the last short prompts of a batch wait. A chunk is not
   cut below the crossing of the roofline, where it would be no faster, and short prompts that must start now are kept.
   A long that was to overtake the chunk under way cannot be cut: where it is too late, the chunk goes on. While all
   first tokens are in time at that pace, a pass also ends within ``SloKnobs.token_share`` of the TPOT target: answers
   gain nothing by being as slow as they may.
3. Where KV cache is short, a long is cut to the time of ``SloKnobs.short_steps`` decode steps (KV_SHORT): what starts
   next waits for memory, not for this prefill, and only those that run free any. With large chunks they step seldom,
   then often without a prefill to share the step with; and more prompts are in the cache at once, and are thrown out
   again.
4. Where even rule 2 is too late (LATE), running requests that have sat out a pass decode first, alone (HOLD). After a
   decode step it is the prefill's turn whatever it costs: targets that no pass can keep must not starve prefills.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence

from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.interface.prefill import Action, PassDecision, PassReason, PassView, Piggyback, WaitingView
from pla_sglang.policy.pla.temporal import TemporalPolicy
from pla_sglang.policy.slo.knobs import EnginePolicyKnobs, SloKnobs
from pla_sglang.policy.slo.plan import spare_share
from pla_sglang.policy.slo.reserve import is_kv_short

Amounts = tuple[int, int, int]  # new tokens, history tokens and attention of a pass


@dataclasses.dataclass(frozen=True, slots=True)
class MixedBatchModel:
    """Coefficients of the two formulas above, in seconds, and the relative error of the first.

    ``error`` is the 99th percentile of measured over predicted, less 1; passes are planned to be so much longer.
    """

    base_s: float
    request_s: float
    read_s: float
    extra_s: float = 0.0
    piggyback_s: float = 0.0
    error: float = 0.0

    def decode_s(self, batch: int, context_tokens: float) -> float:
        return self.base_s + self.request_s * batch + self.read_s * context_tokens

    def added_s(self, piggybacked: int, context_tokens: float) -> float:
        """What piggybacked decodes add to a pass beside their tokens in the linear layers."""
        return self.extra_s + self.piggyback_s * piggybacked + self.read_s * context_tokens


# About a 7B model on a Hopper GPU, until passes with piggybacked decodes were measured.
START = MixedBatchModel(base_s=6e-3, request_s=1e-5, read_s=4e-8, error=0.25)


def model_beside(step: StepModel, mixed_model: MixedBatchModel, piggybacked: int, context_tokens: float) -> StepModel:
    """``step`` for passes that all of these join: each pass pays for them, so one more pass costs more than without."""
    added_s = mixed_model.added_s(piggybacked, context_tokens)
    memory_s = step.g0_s + step.gw_s * piggybacked + added_s
    return StepModel(  # in full: ``replace`` would take three times as long, in every pass
        g0_s=max(memory_s, mixed_model.decode_s(piggybacked, context_tokens)),
        gw_s=step.gw_s,
        gr_s=step.gr_s,
        k0_s=step.k0_s + step.b_s * piggybacked + added_s,
        b_s=step.b_s,
        a_s=step.a_s,
        kr_s=step.kr_s,
        ridge=step.ridge,
        pass_s=step.pass_s,
        bend=step.bend,
        edge=step.edge,
    )


class PassCost:
    """What one pass beside the running requests of ``view`` takes, with and without them.

    Attributes:
        step: of prefills without them.
        decode_s: of their decode step alone.
        error: relative, of passes that they join.
    """

    def __init__(self, view: PassView, step: StepModel, mixed_model: MixedBatchModel) -> None:
        self.step = step
        self.error = mixed_model.error
        self._piggybacked = view.running
        self._added_s = mixed_model.added_s(view.running, view.context_tokens)
        self.decode_s = mixed_model.decode_s(view.running, view.context_tokens)

    def mixed_s(self, new: float, history: float, attention: float) -> float:
        joint_s = self.step.step_s(new + self._piggybacked, history, attention) + self._added_s
        return max(joint_s, self.decode_s)

    def apart_s(self, new: float, history: float, attention: float) -> float:
        """The pass, and the decode step after it."""
        return self.step.step_s(new, history, attention) + self.decode_s

    def least_s(self, new: float, history: float, attention: float) -> float:
        """Until the running requests have their next token, in the cheaper way."""
        return min(self.mixed_s(new, history, attention), self.apart_s(new, history, attention))

    def is_in_time(self, amounts: Amounts, allowed_s: float) -> bool:
        """``least_s`` is within ``allowed_s``."""
        return self.mixed_s(*amounts) <= allowed_s or self.apart_s(*amounts) <= allowed_s

    def tokens_within(self, allowed_s: float, most: int) -> int:
        """New tokens of the largest mixed pass of one prompt within ``allowed_s``, at most so many; by bisection."""
        low, high = 0, most
        while high - low > most // 64:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.mixed_s(middle, 0, middle * middle) <= allowed_s else (low, middle - 1)
        return low

    def joins(self, new: float, history: float, attention: float) -> bool:
        return self.mixed_s(new, history, attention) <= self.apart_s(new, history, attention)


class MixedBatches:
    """A policy for prefills, whose passes running decodes may join where the host can let them.

    Attributes:
        prefills: decides the passes as if nothing joined them, by step times that count the decodes in.
        mixed_model: what decodes cost.
    """

    def __init__(self, prefills: TemporalPolicy, knobs: SloKnobs, mixed_model: MixedBatchModel = START) -> None:
        self.prefills = prefills
        self.mixed_model = mixed_model
        self._knobs = knobs
        self._decodes_stayed_out = False  # of the last pass, which they might have joined
        self._passes_alone = 0  # since decodes joined one

    def set_knobs(self, knobs: EnginePolicyKnobs) -> None:
        self._knobs = knobs.slo
        self.prefills.set_knobs(knobs)

    def set_model(self, model: StepModel) -> None:
        self.prefills.set_model(model)

    def set_mixed_model(self, mixed_model: MixedBatchModel) -> None:
        self.mixed_model = mixed_model

    def on_arrival(self, view: WaitingView, now_s: float) -> None:
        self.prefills.on_arrival(view, now_s)

    def decide(self, view: PassView, now_s: float) -> PassDecision:
        """As ``TemporalPolicy.decide``. Decodes that stayed out of the last pass, as that was cheaper, step first."""
        if not view.can_piggyback or view.running == 0:
            return self.prefills.decide(view, now_s)
        if self._decodes_stayed_out and view.decode_wait_s > 0 and (view.waiting or view.chunk):
            return PassDecision(Action.HOLD, PassReason.DECODE_TURN, release_s=now_s)
        step = self.prefills.model
        decision = self.prefills.decide(
            view, now_s, model_beside(step, self.mixed_model, view.running, view.context_tokens)
        )
        if decision.action is Action.HOLD:
            return decision
        grid = self.prefills.knobs.long_prompts.grid_tokens
        probe = self._passes_alone >= self._knobs.probe_passes
        cost = PassCost(view, step, self.mixed_model)
        return plan_mixed_batch(
            decision,
            view,
            cost,
            self._knobs,
            now_s=now_s,
            grid_tokens=grid,
            probe=probe,
            most_s=self._usual_s(view, cost, now_s),
        )

    def _usual_s(self, view: PassView, cost: PassCost, now_s: float) -> float:
        """What a pass may take while all first tokens are in time at that pace; infinite where one would not be.

        On the hot path: the pace is that of passes without history, and what waits adds its attention to it.
        """
        target_s, waiting = view.tpot_target_s, view.waiting
        if target_s is None or len(waiting) > self._knobs.most_planned:
            return math.inf
        usual_s = self._knobs.token_share * target_s
        tokens = cost.tokens_within(usual_s, view.pass_budget_tokens)
        if tokens < max(1, cost.step.crossing_tokens(0)):
            return math.inf  # a smaller pass would be no faster, or there is none
        left, attention, due_s = 0, 0, math.inf
        for one in waiting if view.chunk is None else (*waiting, view.chunk):
            if one.deadline_s is None:
                return math.inf
            if one.deadline_s >= now_s:
                left += one.new_tokens
                attention += one.new_tokens * (one.new_tokens + 2 * one.history_tokens)
                due_s = min(due_s, one.deadline_s)
        if not left:
            return usual_s
        # With the decodes, and the attention of a pass of so many tokens.
        work_s = usual_s / tokens * left + cost.step.a_s * (attention - tokens * left)
        spare = spare_share(self.prefills.rate, work_s / left, now_s)
        return usual_s if self._knobs.slower * work_s <= spare * (due_s - now_s) else math.inf

    def on_pass(self, decision: PassDecision, view: PassView, admitted: Sequence[WaitingView], now_s: float) -> None:
        if decision.action is not Action.HOLD:
            self._decodes_stayed_out = decision.piggyback is not None and not decision.piggyback.joins
            if decision.piggyback is not None:
                self._passes_alone = 0 if decision.piggyback.joins else self._passes_alone + 1
        self.prefills.on_pass(decision, view, admitted, now_s)

    def predict_s(self, decision: PassDecision, view: PassView, admitted: Sequence[WaitingView]) -> float:
        """Duration of the pass that admitted these; of a decode step where it admitted none."""
        if not admitted:
            return self.mixed_model.decode_s(view.running, view.context_tokens)
        alone_s = self.prefills.predict_s(decision, view, admitted)
        if decision.piggyback is None or not decision.piggyback.joins or not view.running:
            return alone_s
        added_s = self.mixed_model.added_s(view.running, view.context_tokens)
        return alone_s + added_s + self.prefills.model.b_s * view.running


def plan_mixed_batch(
    decision: PassDecision,
    view: PassView,
    cost: PassCost,
    knobs: SloKnobs,
    *,
    now_s: float,
    grid_tokens: int,
    probe: bool = False,
    most_s: float = math.inf,
) -> PassDecision:
    """``decision``, SHORT or LONG, with the decodes that run joined or not, and cut for their next tokens or memory.

    ``probe``: they join even where a step of their own is cheaper. ``most_s``: what the pass may take besides.

    A long that was to overtake the chunk under way gives way to it if whole it would be too late: it cannot be cut.
    """
    allowed_s = most_s if view.token_slack_s is None else min(most_s, view.token_slack_s / (1 + cost.error))
    is_short = is_kv_short(view, knobs)
    short_s = knobs.short_steps * cost.decode_s
    decision = _part_from_chunk(decision, view, cost, min(allowed_s, short_s) if is_short else allowed_s)
    if decision.shares_with_chunk:
        planned, fits = decision, True
    elif decision.action is Action.SHORT:
        planned, fits = _cut_shorts(decision, cost, allowed_s, now_s)
    else:
        planned, fits = _cut_long(decision, view, cost, allowed_s, grid_tokens)
    if not fits and view.decode_wait_s > 0:
        return PassDecision(Action.HOLD, PassReason.TOKEN_DEADLINE, release_s=now_s)
    how = Piggyback.TOGETHER if planned is decision else Piggyback.TOKEN_DEADLINE
    if fits and planned.action is Action.LONG and not planned.park and len(planned.selected) < 2 and is_short:
        in_steps, _ = _cut_long(planned, view, cost, short_s, grid_tokens)
        if in_steps is not planned:
            planned, how = in_steps, Piggyback.KV_SHORT
    amounts = _amounts(planned, view)
    pages = grid_tokens * max(1, len(planned.selected))  # the host allocates whole ones
    if amounts[0] + view.piggyback_kv_tokens + pages > view.kv_room_tokens:
        return dataclasses.replace(planned, piggyback=Piggyback.NO_ROOM)
    if not cost.joins(*amounts):
        joins = probe and cost.mixed_s(*amounts) <= allowed_s
        return dataclasses.replace(planned, piggyback=Piggyback.PROBE if joins else Piggyback.ALONE)
    if not fits:
        return dataclasses.replace(planned, piggyback=Piggyback.LATE)
    return dataclasses.replace(planned, piggyback=how)


def _part_from_chunk(decision: PassDecision, view: PassView, cost: PassCost, most_s: float) -> PassDecision:
    """``decision`` without the piece of a long that shares the pass of others, where next tokens or KV forbid it.

    Where even the first of those others is a long that is too late, it is to go alone, as it can then be cut; where it
    was to overtake a chunk, that goes on instead.
    """
    shared = decision.shares_with_chunk
    if not shared and (decision.action is not Action.LONG or len(decision.selected) < 2 or not decision.chunk_tokens):
        return decision
    if cost.is_in_time(_amounts(decision, view), most_s):
        return decision
    others, park = decision.selected if shared else decision.selected[:-1], view.chunk is not None
    first = others[0]
    is_long = first.new_tokens > cost.step.crossing_tokens(first.history_tokens)
    if is_long and not cost.is_in_time(_running_sums([(first, first.new_tokens)])[0], most_s):
        return dataclasses.replace(decision, action=Action.LONG, selected=others[:1], park=park)
    return PassDecision(Action.SHORT, decision.reason, others, park=park)


def _cut_shorts(decision: PassDecision, cost: PassCost, allowed_s: float, now_s: float) -> tuple[PassDecision, bool]:
    """The first short prompts of the batch that are done in time, and whether they are: one goes in any case."""
    batch = decision.selected
    sums = _running_sums([(one, one.new_tokens) for one in batch])
    if cost.is_in_time(sums[-1], allowed_s):
        return decision, True
    count = _count_in_time(sums, cost, allowed_s)
    urgent = _count_urgent(batch, cost.step.step_s(*sums[-1]), cost.step, now_s)
    taken = max(1, count, urgent)
    fits = count > 0 or urgent > 0
    return (decision if taken == len(batch) else dataclasses.replace(decision, selected=batch[:taken])), fits


def _count_in_time(sums: Sequence[Amounts], cost: PassCost, allowed_s: float) -> int:
    """How many of a batch, from its first, a pass may hold to end within ``allowed_s``; 0: not even the first.

    By bisection, as one more never makes a pass shorter.
    """
    return bisect.bisect_left(sums, True, key=lambda amounts: not cost.is_in_time(amounts, allowed_s))


def _count_urgent(batch: Sequence[WaitingView], whole_s: float, step: StepModel, now_s: float) -> int:
    """How many of ``batch`` a pass holds that ends with the last of them that must start; 0: none must.

    ``whole_s``: a pass over all of them, which no pass over one exceeds: most are seen by it to have time.
    """
    urgent = 0
    for count, view in enumerate(batch, 1):
        if view.deadline_s is None:
            continue
        left_s = view.deadline_s - now_s
        if left_s >= 0 and left_s - whole_s <= whole_s and _must_start(view, step, now_s):
            urgent = count
    return urgent


def _must_start(view: WaitingView, step: StepModel, now_s: float) -> bool:
    """A pass later than the next would miss its target, which this one keeps."""
    if view.deadline_s is None:
        return False
    pass_s = step.step_s(view.new_tokens, view.history_tokens)
    return 0 <= view.deadline_s - now_s - pass_s <= pass_s


def _cut_long(
    decision: PassDecision, view: PassView, cost: PassCost, allowed_s: float, grid_tokens: int
) -> tuple[PassDecision, bool]:
    """The pass with as many companions as are in time, or with a smaller chunk, and whether its end is in time."""
    amounts = _amounts(decision, view)
    if cost.is_in_time(amounts, allowed_s):
        return decision, True
    if len(decision.selected) > 1:
        fitting = _count_in_time(_running_sums(decision.list_parts(view.chunk)), cost, allowed_s)
        decision = dataclasses.replace(decision, selected=decision.selected[: max(1, fitting)])
        if fitting:
            return decision, True
    room_tokens = view.pass_budget_tokens
    if decision.park:
        room_tokens = min(room_tokens, view.kv_room_tokens) // grid_tokens * grid_tokens
        if room_tokens == 0:
            return decision, False
        decision = PassDecision(Action.LONG, decision.reason, chunk_tokens=room_tokens)
    elif decision.chunk_tokens is None and not decision.selected:
        return decision, False  # chunking is off
    long = decision.selected[0] if decision.selected else view.chunk
    assert long is not None, "a long pass has a long"
    most = min(long.new_tokens, decision.chunk_tokens or long.new_tokens, room_tokens)
    return _cut_chunk(decision, long, most, cost, allowed_s, grid_tokens)


def _cut_chunk(
    decision: PassDecision,
    long: WaitingView,
    most: int,
    cost: PassCost,
    allowed_s: float,
    grid_tokens: int,
) -> tuple[PassDecision, bool]:
    history = long.history_tokens

    def until_token_s(tokens: int) -> float:
        return cost.least_s(tokens, history, tokens * (tokens + 2 * history))

    if until_token_s(most) <= allowed_s:
        return dataclasses.replace(decision, chunk_tokens=most), True
    crossing = min(cost.step.crossing_tokens(history), most)
    low = max(1, -(-int(crossing) // grid_tokens))
    high = max(low, most // grid_tokens)
    if until_token_s(low * grid_tokens) > allowed_s:
        return dataclasses.replace(decision, chunk_tokens=low * grid_tokens), False
    while low < high:
        middle = (low + high + 1) // 2
        if until_token_s(middle * grid_tokens) <= allowed_s:
            low = middle
        else:
            high = middle - 1
    return dataclasses.replace(decision, chunk_tokens=low * grid_tokens), True


def _amounts(decision: PassDecision, view: PassView) -> Amounts:
    """New tokens, history and attention of the pass that ``decision`` asks for."""
    return _running_sums(decision.list_parts(view.chunk))[-1]


def _running_sums(parts: Sequence[tuple[WaitingView, int]]) -> list[Amounts]:
    """New tokens, history and attention of each pass that holds the first of ``parts``, by how many they are."""
    sums: list[Amounts] = []
    new = history = attention = 0
    for view, tokens in parts:
        past = view.history_tokens
        new += tokens
        history += past
        attention += tokens * (tokens + 2 * past)
        sums.append((new, history, attention))
    return sums
