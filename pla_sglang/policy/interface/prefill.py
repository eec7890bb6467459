"""Input and output of a prefill policy.

Views are mutable and slotted on purpose: the engine keeps one ``WaitingView`` per waiting request and refreshes two
fields per pass, because building a thousand objects in every scheduling pass would cost more than the decision.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Protocol


class PrefillClass(enum.Enum):
    """Side of the boundary on which a request's new tokens lie."""

    SHORT = "short"
    LONG = "long"


class Action(enum.Enum):
    """What the next prefill pass runs."""

    SHORT = "short"  # only requests of the short class; a running long chunk stays parked
    LONG = "long"  # one long advances by one chunk, or one long that fits a single pass overtakes it
    HOLD = "hold"  # no prefill in this pass: decode runs, or the device waits


class Piggyback(enum.Enum):
    """Why running decodes join a prefill pass, or stay out of it."""

    TOGETHER = "together"  # they join: less device time than a decode step of their own
    TOKEN_DEADLINE = "token_deadline"  # they join, and the pass was cut so that their next tokens are in time
    KV_SHORT = "kv_short"  # they join, and the pass was cut because KV cache is short and only they free any
    LATE = "late"  # they join although their next token is late: no smaller pass would be in time
    PROBE = "probe"  # they join although a step of their own looks cheaper: what that rests on was measured long ago
    ALONE = "alone"  # they step alone after the pass: that is cheaper
    NO_ROOM = "no_room"  # they step alone after the pass: there is no KV cache for their tokens beside it

    @property
    def joins(self) -> bool:
        return self not in (Piggyback.ALONE, Piggyback.NO_ROOM)


class PassReason(enum.Enum):
    """Reason of a pass decision. Every decision carries exactly one."""

    # SHORT passes (AWD, PLA-Serve Algorithm 1)
    DEPTH = "depth"  # target depth D reached
    TOKENS = "tokens"  # the batch is full: token budget (M_s) or request slots
    WINDOW = "window"  # the waiting window W, or the hard cap on the head's wait, is over
    SLACK = "slack"  # the least slack of the batch is at or below sigma
    BUCKET = "bucket"  # requests of another bucket of a grid of graphs wait for the next batch
    NO_GAIN = "no_gain"  # waiting for one more request would cost more than it saves
    QUEUE_END = "queue_end"  # nothing else waits that could fill the batch (DOPD Algorithm 1, line 10)
    ORDER = "order"  # the next in the order of a baseline policy
    RESUMED = "resumed"  # holds a retracted request: its user already sees a stream
    # LONG passes
    NO_SHORT = "no_short"  # no short is waiting
    SHORT_HELD = "short_held"  # short prompts are waiting for a fuller batch
    SHORT_BLOCKED = "short_blocked"  # the short class could not run (KV cache, slots)
    AGE = "age"  # a long is near its age bound and is owed device time
    LOST_SHORT = "lost_short"  # only infeasible short prompts are waiting; this long one is feasible
    LOST_LONG = "lost_long"  # the long one that was next is infeasible or rejected; this one is not
    OVERDUE = "overdue"  # an infeasible request was deferred for its bound; SHORT passes too
    URGENT = "urgent"  # first by deadlines of those that are to be kept; in the usual order one of them would be late
    PRIORITY = "priority"  # the long has a better priority than every short
    # HOLD
    DECODE_TURN = "decode_turn"  # running requests have waited long enough for their next token
    TOKEN_DEADLINE = "token_deadline"  # they decode now, or their next token would be late
    WAIT_FOR_DEPTH = "wait_for_depth"  # waiting pays
    KV_DRAIN = "kv_drain"  # an aged long, or the chunk under way, needs KV cache that running requests will free
    KV_HEADROOM = "kv_headroom"  # starting the long would leave no KV cache for expected short prompts
    RESERVE = "reserve"  # only infeasible requests wait, and would take KV cache or decode time of those to come
    BLOCKED = "blocked"  # nothing that waits can run before memory or slots are freed
    EMPTY = "empty"  # nothing waits


class ReservationReason(enum.Enum):
    """Why a request gets KV cache in its turn, of those whose KV comes from elsewhere."""

    SLACK = "slack"  # it has the least slack
    UNTARGETED = "untargeted"  # it has no target, and has waited for as long as that allows
    FITS = "fits"  # one with less slack has no room, and time left to wait for it
    PRIORITY = "priority"  # its priority is above that of one with less slack
    OVERDUE = "overdue"  # it is infeasible and was deferred for its bound
    INFEASIBLE = "infeasible"  # it cannot meet its target, and nobody waits that can


@dataclasses.dataclass(slots=True, eq=False)
class WaitingView:
    """One request waiting for its prefill; compares by identity. Times are on the clock that all ranks share.

    Attributes:
        rid: request id.
        new_tokens: prompt (and replayed output) tokens that are not in the prefix cache.
        history_tokens: tokens that are in the prefix cache (device and host).
        arrival_s: when the engine first saw the request.
        deadline_s: target time of the first token; None without a TTFT target.
        priority_rank: 0 is the best priority among the waiting requests; equal for all without priorities.
        resumed: retracted or preempted, so it has already been served tokens.
        output_tokens: upper estimate of the KV tokens of its decode.
        handle: the driver's own object for this request, not used by policies.
        seen: reported to the policy as an arrival already.
        aged_at_s, aged_stamp: cache of the long policy, valid for the stamp it was computed under.
        rematched: its prefix match has changed since its class was last looked up (``pla/class_queues.py``).
        latest_s, latest_stamp: cache, when the prefill must begin to keep the target.
        overtaken_s: from then on it has been deferred for long enough (``slo/turns.py``); infinite: not known yet.
    """

    rid: str
    new_tokens: int
    history_tokens: int
    arrival_s: float
    deadline_s: float | None = None
    priority_rank: int = 0
    resumed: bool = False
    output_tokens: int = 0
    handle: object = None
    seen: bool = False
    aged_at_s: float = 0.0
    aged_stamp: int = -1
    rematched: bool = False
    latest_s: float = 0.0
    latest_stamp: int = -1
    overtaken_s: float = math.inf

    def set_history(self, history_tokens: int) -> None:
        """The prefix match has changed; the sum of new and history tokens has not."""
        self.new_tokens += self.history_tokens - history_tokens
        self.history_tokens = history_tokens
        self.aged_stamp = self.latest_stamp = -1
        self.rematched = True

    @property
    def footprint_tokens(self) -> int:
        """KV tokens this request may come to hold beyond what is cached already."""
        return self.new_tokens + self.output_tokens


@dataclasses.dataclass(slots=True)
class PassView:
    """Snapshot for one scheduling pass.

    ``waiting`` is in the host's order (priority, longest prefix match, ...), which policies keep within a class.

    Attributes:
        waiting: all waiting requests.
        chunk: the long that has begun (parked between two of its chunks); None without one.
        pass_budget_tokens: new tokens that one pass may hold.
        slots: requests that may still be added to the running batch.
        kv_free_tokens: KV tokens free or evictable, less what running requests are expected to add.
        kv_room_tokens: KV tokens free or evictable now: what this pass can allocate at most.
        kv_capacity_tokens: of the whole KV cache.
        running: requests that are decoding.
        decode_wait_s: time since their last decode step; 0 without any.
        decode_step_s: recent decode step time; 0: unknown.
        can_piggyback: the host can let them join this pass.
        context_tokens: KV tokens that they hold. With ``can_piggyback`` only, as the next three.
        piggyback_kv_tokens: KV tokens that their next tokens take.
        token_slack_s: time until the first of them is due its next token, by its TPOT target; None: none has one.
        tpot_target_s: the least TPOT target of them; None: none has one.
    """

    waiting: list[WaitingView]
    chunk: WaitingView | None
    pass_budget_tokens: int
    slots: int
    kv_free_tokens: int
    kv_room_tokens: int
    kv_capacity_tokens: int
    running: int
    decode_wait_s: float = 0.0
    decode_step_s: float = 0.0
    can_piggyback: bool = False
    context_tokens: int = 0
    piggyback_kv_tokens: int = 0
    token_slack_s: float | None = None
    tpot_target_s: float | None = None


@dataclasses.dataclass(slots=True, frozen=True)
class PassDecision:
    """Answer for one pass.

    Attributes:
        action: what runs.
        reason: why.
        selected: SHORT: the requests to admit whole. LONG: the long to start or to let overtake, and others that share
            its pass whole; empty when the running chunk continues alone. HOLD: empty.
        chunk_tokens: LONG: new tokens this pass may take from the long; None: the whole rest in one pass. With others
            selected they are those of the whole pass, and the last one selected is cut to what the others leave. SHORT:
            None, or the tokens of the whole pass, of which the running chunk gets what the others leave.
        park: a running chunk is parked in this pass.
        release_s: HOLD: latest time of the next decision; None: at the next change.
        piggyback: whether running requests join the pass and get their next token in it; None: as the host does by
            itself.
    """

    action: Action
    reason: PassReason
    selected: tuple[WaitingView, ...] = ()
    chunk_tokens: int | None = None
    park: bool = False
    release_s: float | None = None
    piggyback: Piggyback | None = None

    @property
    def shares_with_chunk(self) -> bool:
        """The running chunk goes on in the pass of others."""
        return self.action is Action.SHORT and self.chunk_tokens is not None

    def list_parts(self, chunk: WaitingView | None) -> list[tuple[WaitingView, int]]:
        """Whom the pass computes, and how many new tokens of each. ``chunk``: the one under way.

        All are whole but the last, which gets what the others leave of ``chunk_tokens``: the chunk, where it goes on.
        """
        members = list(self.selected)
        if self.shares_with_chunk or (self.action is Action.LONG and not members):
            assert chunk is not None, "a chunk goes on"
            members.append(chunk)
        parts = [(view, view.new_tokens) for view in members]
        if self.chunk_tokens is not None and parts:
            last, tokens = parts.pop()
            left = self.chunk_tokens - sum(whole for _, whole in parts)
            parts.append((last, max(1, min(tokens, left))))
        return parts


class EnginePolicy(Protocol):
    """Decides the prefill passes of one engine. Policies that keep no statistics inherit the two reports."""

    def on_arrival(self, view: WaitingView, now_s: float) -> None:
        """A request was seen for the first time."""
        return

    def decide(self, view: PassView, now_s: float) -> PassDecision: ...

    def on_pass(self, decision: PassDecision, view: PassView, admitted: Sequence[WaitingView], now_s: float) -> None:
        """The pass that ``decision`` asked for admitted these requests, among them a chunk that went on in it."""
        return
