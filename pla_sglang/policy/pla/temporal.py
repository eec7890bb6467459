"""Temporal disaggregation on one instance (PLA-Serve section 3.2): short prefills pass long ones.

Order of the rules in ``decide``, first match wins:

0. running requests that have not stepped for ``decode_gap_s`` decode once (DECODE_TURN): SGLang prefers prefill to
   decode, so without this rule a short's second token would wait for the long prompts that its first token has passed.
   Where steps are so long that this would take more than ``decode_share`` of the device, the gap is longer;
1. a long with a better priority than every waiting short advances (PRIORITY);
2. an aged long that is owed device time advances (AGE), or, if only memory holds it back, the others stop taking memory
   until it fits (KV_DRAIN);
3. short prompts that are due run (AWD's reason);
4. a long advances (NO_SHORT, SHORT_HELD, SHORT_BLOCKED), unless starting it would leave expected short prompts no
   memory (KV_HEADROOM);
5. short prompts wait for a fuller batch (WAIT_FOR_DEPTH); or nothing can run (BLOCKED), or waits (EMPTY).

Who shares the pass of those that these rules have chosen is decided by seconds (``sharing.py``); in the paper the
classes never share one.

A class whose pass came back empty is *blocked* until memory or slots are freed, and the other class goes on. The one
exception is KV_DRAIN: without it a stream of short prompts would take every freed token and the aged long never fit.
"""

from __future__ import annotations

import dataclasses
import enum
import heapq
import operator
from collections.abc import Iterable, Sequence

from pla_sglang.common.checks import Range, knob
from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.interface.prefill import Action, PassDecision, PassReason, PassView, PrefillClass, WaitingView
from pla_sglang.policy.pla.arrival_rate import ArrivalRate
from pla_sglang.policy.pla.awd import Awd, AwdKnobs, BatchChoice
from pla_sglang.policy.pla.blocked import BlockedClasses
from pla_sglang.policy.pla.boundary import Boundary
from pla_sglang.policy.pla.class_queues import ClassQueues, classify
from pla_sglang.policy.pla.long_prompts import LongKnobs, LongPick, LongQueue, by_order, chunk_tokens, resume
from pla_sglang.policy.pla.sharing import PassContents, Sharing, contents_of, contents_of_parts

# Of the latest short prompt in the mean of what they hold: where that changes, half of it is known after seven of them.
# With half of the weight after fourteen, with twice as much after four.
FOOTPRINT_WEIGHT = 0.1
# Of either class; more are not looked at in a pass, which must not wait for a long decision. It bounds only passes of
# very small prompts: with a batch of 16 beside them half and twice as much make 48 and 144 of 80.
MOST_COMPANIONS = 64
_NEW_TOKENS = operator.attrgetter("new_tokens")


def _new_tokens(views: Iterable[WaitingView]) -> int:
    return sum(map(_NEW_TOKENS, views))


def parts_of(decision: PassDecision, view: PassView, admitted: Sequence[WaitingView]) -> list[tuple[WaitingView, int]]:
    """The parts that were asked for, without those of requests that were not admitted."""
    shown = set(map(id, admitted))
    return [(one, tokens) for one, tokens in decision.list_parts(view.chunk) if id(one) in shown]


class Mixing(enum.Enum):
    """Long and short prefills share a pass where that takes fewer seconds, never (the paper), or always."""

    AUTO = "auto"
    NEVER = "never"
    ALLOW = "allow"


@dataclasses.dataclass(frozen=True)
class TemporalKnobs:
    """Knobs of the whole policy.

    Attributes:
        boundary_tokens: fixed class boundary; None: from the step model.
        awd, long_prompts: knobs of the two classes.
        boundary_cap_tokens: nothing above is short, whatever the boundary says (it would not fit one pass).
        headroom_requests: typical short prompts for which starting a long must leave KV cache.
        decode_gap_s: running requests get a decode step at least this often while prefills go on; 0: only when no
            prefill can run, as in SGLang.
        decode_share: of the device, at most, for these steps.
        mixing: who shares a pass.
    """

    boundary_tokens: int | None = None
    boundary_cap_tokens: int | None = None
    awd: AwdKnobs = dataclasses.field(default_factory=AwdKnobs)
    long_prompts: LongKnobs = dataclasses.field(default_factory=LongKnobs)
    headroom_requests: int = knob(4, allowed=Range(0))
    decode_gap_s: float = knob(0.0, allowed=Range(0))
    decode_share: float = knob(0.05, allowed=Range(0, 1, above=True))
    mixing: Mixing = Mixing.AUTO


@dataclasses.dataclass(slots=True)
class Candidates:
    """Who may run in the next pass.

    Attributes:
        pick: the next long by order; None: there is none.
        short_prompts, long_prompts: in host order.
        aged: the long that may advance in the time that is set aside for aged ones.
    """

    pick: LongPick | None
    short_prompts: list[WaitingView]
    long_prompts: list[WaitingView]
    aged: LongPick | None = None


@dataclasses.dataclass(slots=True, frozen=True)
class NextLong:
    """The long that would advance next.

    Attributes:
        pick: None where there is none.
        stuck: why it cannot advance; None: it can.
        owed: it is aged, and its share of device time is due.
    """

    pick: LongPick | None
    stuck: PassReason | None
    owed: bool


class TemporalPolicy:
    """Decides each prefill pass of one engine. Pure: same calls, same answers, on every rank."""

    def __init__(self, knobs: TemporalKnobs, model: StepModel) -> None:
        self.knobs = knobs
        self.model = model
        self._pass_model = model  # of the pass that is being decided
        self.boundary = Boundary(fixed_tokens=knobs.boundary_tokens, cap_tokens=knobs.boundary_cap_tokens, model=model)
        self.awd = Awd(knobs.awd)
        self.long_prompts = LongQueue(knobs.long_prompts, model)
        self._queues = ClassQueues(self.boundary)
        self.short_rate = ArrivalRate()
        self.passing_rate = ArrivalRate()
        self.rate = ArrivalRate()
        self._blocked = BlockedClasses()
        # Predicted device seconds of aged long prompts and of all others since some long became aged; None while none
        # is.
        self._aged_use_s: tuple[float, float] | None = None
        self._aged: WaitingView | None = None  # the aged long of the last decision
        self._footprint_tokens = 0.0

    # -- what the engine reports -----------------------------------------------------------------------------------

    def set_knobs(self, knobs: TemporalKnobs) -> None:
        self.knobs = knobs
        self.awd.set_knobs(knobs.awd)
        self.long_prompts.set(knobs.long_prompts, self.model)
        self.boundary.set_fixed(knobs.boundary_tokens, self.model)

    def set_model(self, model: StepModel) -> None:
        self.model = model
        self.boundary.update(model)
        self.long_prompts.set(self.knobs.long_prompts, model)

    def on_arrival(self, view: WaitingView, now_s: float) -> None:
        """A request was seen for the first time; its new tokens are those after prefix match."""
        if self.boundary.is_short(view.new_tokens, view.history_tokens):
            self.short_rate.observe(now_s, view.new_tokens)
            weight = FOOTPRINT_WEIGHT if self._footprint_tokens else 1.0
            self._footprint_tokens += weight * (view.footprint_tokens - self._footprint_tokens)
        self.rate.observe(now_s, view.new_tokens)
        largest = self.knobs.long_prompts.chunk_max_tokens
        if largest is None or view.new_tokens <= largest:
            self.passing_rate.observe(now_s, view.new_tokens)

    def on_pass(self, decision: PassDecision, view: PassView, admitted: Sequence[WaitingView], now_s: float) -> None:
        """The pass that ``decision`` asked for admitted these requests, among them a chunk that went on in it."""
        if decision.action is Action.HOLD:
            return
        cls = PrefillClass.SHORT if decision.action is Action.SHORT else PrefillClass.LONG
        begun = [one for one in admitted if one is not view.chunk]
        self._blocked.on_pass(cls, view, admitted=bool(begun if decision.selected else admitted))
        if not admitted:
            return
        if begun:
            self._queues.remove(begun)
        short_prompts = [one for one in begun if self.boundary.is_short(one.new_tokens, one.history_tokens)]
        if short_prompts and cls is PrefillClass.SHORT:
            self._note_batch(decision, short_prompts, now_s)
        if self._aged_use_s is not None:
            parts = parts_of(decision, view, admitted)
            step_s = contents_of_parts(parts).step_s(self.model)
            aged_s, others_s = self._aged_use_s
            aged_tokens = sum(tokens for one, tokens in parts if one is self._aged)
            mine_s = step_s * aged_tokens / max(1, sum(tokens for _, tokens in parts))
            self._aged_use_s = (aged_s + mine_s, others_s + step_s - mine_s)

    def _note_batch(self, decision: PassDecision, short_prompts: Sequence[WaitingView], now_s: float) -> None:
        self.awd.on_dispatch(len(short_prompts), now_s - min(short.arrival_s for short in short_prompts))

    def predict_s(self, decision: PassDecision, view: PassView, admitted: Sequence[WaitingView]) -> float:
        """Duration of the pass that admitted these."""
        return contents_of_parts(parts_of(decision, view, admitted)).step_s(self.model)

    # -- the decision ------------------------------------------------------------------------------------------------

    def classify(self, waiting: Sequence[WaitingView]) -> tuple[list[WaitingView], list[WaitingView]]:
        """Short and long views of any queue, its order kept."""
        return classify(waiting, self.boundary)

    def decide(self, view: PassView, now_s: float, pass_model: StepModel | None = None) -> PassDecision:
        """The next pass, by the rules above.

        Changes nothing that another call could see in its answer, so a driver may ask twice in a pass, as ours does
        when a prefix match turns out to have changed. ``on_pass`` reports what became of the answer.

        Args:
            pass_model: step times of this pass, where something shares it that is no prefill; None: ``model``.
        """
        self._pass_model = self.model if pass_model is None else pass_model
        if self._decode_is_due(view):
            return PassDecision(Action.HOLD, PassReason.DECODE_TURN, release_s=now_s)
        short_prompts, long_prompts = self._queues.follow(view.waiting)
        by_order, aged = self.long_prompts.pick(
            long_prompts, view.chunk, now_s, short_prompts=bool(short_prompts), budget_tokens=view.pass_budget_tokens
        )
        self._track_ageing(aged)
        return self._choose(Candidates(by_order, short_prompts, long_prompts, aged), view, now_s)

    def _choose(self, field: Candidates, view: PassView, now_s: float) -> PassDecision:
        """Rules 1 to 5."""
        long = self._find_next_long(field, view, now_s)
        return self._choose_by_right(field, long, view, now_s) or self._choose_by_class(field, long, view, now_s)

    def _find_next_long(self, field: Candidates, view: PassView, now_s: float) -> NextLong:
        aged = field.aged
        owed = aged is not None and self._aged_are_owed()
        pick = aged if owed else field.pick
        if view.running == 0 and view.chunk is None:
            self._blocked.clear_if_all()
        if pick is None:
            return NextLong(None, None, owed)
        other = bool(field.short_prompts) or view.chunk is not None
        stuck = self._find_obstacle(pick, view, now_s, owed=owed, other=other)
        if stuck is not None and view.chunk is not None:
            # What would overtake cannot run; the chunk under way goes on, if there is room for a piece of it.
            pick = resume(view.chunk)
            stuck = self._find_obstacle(pick, view, now_s, owed=owed, other=other)
        return NextLong(pick, stuck, owed)

    def _choose_by_right(self, field: Candidates, long: NextLong, view: PassView, now_s: float) -> PassDecision | None:
        """Rules 1 and 2: by priority and by age. None where neither says anything."""
        pick = long.pick
        if pick is None:
            return None
        if long.stuck is None and field.short_prompts:
            rank = pick.view.priority_rank
            if all(short.priority_rank > rank for short in field.short_prompts):
                return self._long(pick, view, field, now_s, PassReason.PRIORITY)
        if long.owed:
            if long.stuck is None and (field.short_prompts or pick is not field.pick):
                return self._alone(pick, view, field.long_prompts, now_s, PassReason.AGE)
            if long.stuck is not None and view.running > 0:
                return PassDecision(Action.HOLD, PassReason.KV_DRAIN)
        return None

    def _choose_by_class(self, field: Candidates, long: NextLong, view: PassView, now_s: float) -> PassDecision:
        """Rules 3 to 5: short prompts that are due, then the long, then who waits and why."""
        pick, stuck = long.pick, long.stuck
        choice = (
            self._choose_shorts(view, field.short_prompts, pick, field.long_prompts, now_s)
            if field.short_prompts
            else None
        )
        short_stuck = choice is not None and (
            view.slots <= 0 or self._blocked.is_blocked(PrefillClass.SHORT, view, other=pick is not None)
        )
        if choice is not None and choice.due and not short_stuck:
            # A chunk that is stuck cannot share the pass either: the host would allocate its piece without asking.
            return self._short(choice, view, field, None if stuck else pick, now_s)
        if pick is not None and stuck is None:
            reason = PassReason.NO_SHORT
            if choice is not None:
                reason = PassReason.SHORT_BLOCKED if short_stuck else PassReason.SHORT_HELD
            return self._long(pick, view, field, now_s, reason)
        if choice is not None and not short_stuck:
            return PassDecision(Action.HOLD, choice.reason, release_s=choice.release_s)
        if choice is None and pick is None:
            return PassDecision(Action.HOLD, PassReason.EMPTY)
        return PassDecision(Action.HOLD, stuck or PassReason.BLOCKED)

    def _choose_shorts(
        self,
        view: PassView,
        short_prompts: list[WaitingView],
        pick: LongPick | None,
        long_prompts: list[WaitingView],
        now_s: float,
    ) -> BatchChoice:
        def alternative_s() -> float:
            if pick is None:
                return 0.0
            tokens = min(pick.view.new_tokens, self._chunk(pick, long_prompts, now_s) or pick.view.new_tokens)
            return self._pass_model.step_s(tokens, pick.view.history_tokens)

        return self.awd.decide(
            short_prompts,
            now_s,
            budget_tokens=self._short_budget_tokens(short_prompts, view, now_s),
            slots=view.slots,
            model=self._pass_model,
            rate_per_s=self.short_rate.per_second(now_s),
            alternative_s=alternative_s,
        )

    def _short_budget_tokens(self, short_prompts: Sequence[WaitingView], view: PassView, now_s: float) -> int:
        """New tokens that a pass of short prompts may hold."""
        return view.pass_budget_tokens

    def _long(
        self, pick: LongPick, view: PassView, field: Candidates, now_s: float, reason: PassReason
    ) -> PassDecision:
        """The long, and who shares its pass."""
        long = pick.view
        if pick.running:
            tokens = self._piece(pick, view, field.long_prompts, now_s)
        else:
            tokens = None if pick.overtakes else self._chunk(pick, field.long_prompts, now_s)
        if tokens is None and pick.running:
            return PassDecision(Action.LONG, reason)
        part = min(long.new_tokens, long.new_tokens if tokens is None else tokens, view.pass_budget_tokens)
        short_prompts = () if reason in (PassReason.SHORT_BLOCKED, PassReason.SHORT_HELD) else field.short_prompts
        contents = PassContents().with_part(part, long.history_tokens)
        others = self._find_companions(contents, (long,), short_prompts, field.long_prompts, view, now_s)
        if pick.running:
            if not others:
                return PassDecision(Action.LONG, reason, chunk_tokens=tokens)
            return PassDecision(Action.SHORT, reason, others, chunk_tokens=part + _new_tokens(others))
        if part == long.new_tokens and (others or pick.overtakes):
            return PassDecision(Action.LONG, reason, (long, *others), park=view.chunk is not None)
        if others:
            return PassDecision(Action.LONG, reason, (*others, long), chunk_tokens=part + _new_tokens(others))
        return PassDecision(Action.LONG, reason, (long,), chunk_tokens=tokens)

    def _find_companions(
        self,
        contents: PassContents,
        first: Sequence[WaitingView],
        short_prompts: Sequence[WaitingView],
        long_prompts: Sequence[WaitingView],
        view: PassView,
        now_s: float,
    ) -> tuple[WaitingView, ...]:
        """Who joins the pass of ``first`` whole: short prompts in host order, then long prompts by theirs."""
        room = view.pass_budget_tokens - sum(contents.lengths)
        if self.knobs.mixing is Mixing.NEVER or room <= 0:
            return ()
        fitting = [one for one in long_prompts if one.new_tokens <= room]
        if self.knobs.long_prompts.least_remaining:
            fitting = heapq.nsmallest(MOST_COMPANIONS, fitting, key=by_order)
        others = [one for one in short_prompts[: len(first) + MOST_COMPANIONS] if one.new_tokens <= room] + fitting
        if not others:
            return ()
        rank, mine = max(one.priority_rank for one in first), set(map(id, first))
        others = [one for one in others if one.priority_rank <= rank and id(one) not in mine]
        if not others:
            return ()
        sharing = self._sharing(view, now_s)
        return tuple(sharing.take_companions(contents, others, budget_tokens=view.pass_budget_tokens, slots=view.slots))

    def _sharing(self, view: PassView, now_s: float) -> Sharing:
        count, tokens = len(view.waiting), _new_tokens(view.waiting)
        if view.chunk is not None:
            count, tokens = count + 1, tokens + view.chunk.new_tokens
        model = self._pass_model
        backlog_s = tokens * model.b_s + count * (model.pass_s + model.k0_s)
        concerned = count + backlog_s * self.rate.usual_per_second(now_s)
        return Sharing(concerned, model, self.knobs.awd.layout)

    def _alone(
        self, pick: LongPick, view: PassView, long_prompts: list[WaitingView], now_s: float, reason: PassReason
    ) -> PassDecision:
        """Alone, so that all of its time is its own. Cut as ever: those that pass it wait for each of its chunks."""
        if pick.running:
            return PassDecision(Action.LONG, reason, chunk_tokens=self._piece(pick, view, long_prompts, now_s))
        chunk = None if pick.overtakes else self._chunk(pick, long_prompts, now_s)
        return PassDecision(Action.LONG, reason, (pick.view,), chunk_tokens=chunk, park=pick.overtakes)

    def _short(
        self, choice: BatchChoice, view: PassView, field: Candidates, pick: LongPick | None, now_s: float
    ) -> PassDecision:
        """The batch of short prompts, and who shares its pass. ``pick``: the next long, where one can run now."""
        batch = choice.batch
        long_prompts = field.long_prompts if pick is not None else ()
        batch = (
            *batch,
            *self._find_companions(contents_of(batch), batch, field.short_prompts, long_prompts, view, now_s),
        )
        alone = PassDecision(Action.SHORT, choice.reason, batch, park=view.chunk is not None)
        if pick is None or pick.overtakes or pick.view in batch:
            return alone
        room = self._room_beside(pick, batch, view)
        if room >= pick.view.new_tokens and not pick.running:
            return alone  # whole, it was refused as one of the batch
        if room <= 0 or not self._takes_chunk(pick, batch, room, view, field.long_prompts, now_s):
            return alone
        tokens = _new_tokens(batch) + room
        if pick.running:
            return PassDecision(Action.SHORT, choice.reason, batch, chunk_tokens=tokens)
        return PassDecision(Action.LONG, choice.reason, (*batch, pick.view), chunk_tokens=tokens)

    def _room_beside(self, pick: LongPick, batch: Sequence[WaitingView], view: PassView) -> int:
        """Tokens that the long may take of the pass of ``batch``; the host allocates a chunk's without asking."""
        grid = self.knobs.long_prompts.grid_tokens
        held = _new_tokens(batch) + (grid - 1) * len(batch)
        room = min(view.pass_budget_tokens, view.kv_room_tokens) - held
        return pick.view.new_tokens if pick.view.new_tokens <= room else room // grid * grid

    def _takes_chunk(
        self,
        pick: LongPick,
        batch: Sequence[WaitingView],
        tokens: int,
        view: PassView,
        long_prompts: list[WaitingView],
        now_s: float,
    ) -> bool:
        if self.knobs.mixing is not Mixing.AUTO or self.knobs.long_prompts.chunk_max_tokens is None:
            return self.knobs.mixing is Mixing.ALLOW and pick.running
        usual = min(pick.view.new_tokens, self._chunk(pick, long_prompts, now_s) or pick.view.new_tokens)
        return self._sharing(view, now_s).takes_chunk(contents_of(batch), pick.view, tokens, usual)

    def _chunk(self, pick: LongPick, long_prompts: list[WaitingView], now_s: float) -> int | None:
        """Cut for the sake of those that would pass it: short prompts, and long prompts where they are typically half
        as long."""
        passing = self.passing_rate
        if pick.view.new_tokens < 2 * passing.mean_tokens():
            passing = self.short_rate
        return chunk_tokens(
            pick.view,
            long_prompts=max(1, len(long_prompts) + (1 if pick.running else 0)),
            passing_rate_per_s=passing.usual_per_second(now_s),
            passing_tokens=passing.mean_tokens(),
            model=self._pass_model,
            knobs=self.knobs.long_prompts,
        )

    def _piece(self, pick: LongPick, view: PassView, long_prompts: list[WaitingView], now_s: float) -> int | None:
        """The next piece of the chunk under way: no more than there is room for."""
        tokens, grid = self._chunk(pick, long_prompts, now_s), self.knobs.long_prompts.grid_tokens
        return None if tokens is None else min(tokens, max(grid, view.kv_room_tokens // grid * grid))

    # -- small questions ---------------------------------------------------------------------------------------------

    def _decode_is_due(self, view: PassView) -> bool:
        if view.running == 0 or not (view.waiting or view.chunk):
            return False
        if self.knobs.decode_gap_s <= 0:
            return False
        return view.decode_wait_s >= max(self.knobs.decode_gap_s, view.decode_step_s / self.knobs.decode_share)

    def _find_obstacle(
        self, pick: LongPick, view: PassView, now_s: float, *, owed: bool, other: bool
    ) -> PassReason | None:
        """Why ``pick`` cannot advance now; None when it can.

        Room was left for a chunk under way when it was admitted, but running requests grow meanwhile, more than the
        host had estimated. The host would allocate its next piece without asking and end with an allocation failure.
        """
        if pick.running:
            return None if self._has_room_for_piece(pick.view, view) else PassReason.KV_DRAIN
        if self._blocked.is_blocked(PrefillClass.LONG, view, other=other):
            return PassReason.BLOCKED
        return PassReason.KV_HEADROOM if not owed and self._must_leave_headroom(pick, view, now_s) else None

    def _has_room_for_piece(self, chunk: WaitingView, view: PassView) -> bool:
        long_prompts = self.knobs.long_prompts
        piece = (
            chunk.new_tokens
            if long_prompts.chunk_max_tokens is None
            else min(long_prompts.grid_tokens, chunk.new_tokens)
        )
        return view.kv_room_tokens >= piece

    def _track_ageing(self, aged: LongPick | None) -> None:
        self._aged = None if aged is None else aged.view
        if aged is None:
            self._aged_use_s = None
        elif self._aged_use_s is None:
            self._aged_use_s = (0.0, 0.0)

    def _aged_are_owed(self) -> bool:
        assert self._aged_use_s is not None, "tracked while some long is aged"
        share = self.knobs.long_prompts.share
        aged_s, others_s = self._aged_use_s
        return aged_s * (1 - share) < others_s * share

    def _must_leave_headroom(self, pick: LongPick, view: PassView, now_s: float) -> bool:
        """Starting this long would leave no KV cache for the short prompts that are expected while it runs."""
        if view.running == 0 or self.short_rate.per_second(now_s) <= 0:
            return False
        headroom = self._footprint_tokens * self.knobs.headroom_requests
        return view.kv_free_tokens - pick.view.footprint_tokens < headroom
