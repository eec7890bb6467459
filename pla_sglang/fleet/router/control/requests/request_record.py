"""One request in the control plane, from its relay's first Ask until no instance holds anything of it.

A record is a list of attempts: an attempt is a stay at one set of instances, a unified instance or a prefill and a
decode instance. Another one follows where an attempt is over before the answer is; the *present* one is what the client
sees. Where a running request is to move, the next attempt is a *candidate* beside the present one, which is held; it
takes its place, or comes to nothing. Exactly one attempt ends the request.

Attempts and their legs move between states by the two tables below; nothing else changes them. A record is kept for
/pla/explain after its end, without what only its dispatch needed. Thousands are kept: a record holds nothing that could
point back to it, so the garbage collector need not visit it.
"""

from __future__ import annotations

import msgspec

from pla_sglang.common.errors import IllegalMoveError
from pla_sglang.fleet.router.attempt_rules import ENDS, LOSSES
from pla_sglang.fleet.router.control.requests.prompts import Prompt
from pla_sglang.fleet.router.control.requests.targets import TPOT_MEMBER, TTFT_MEMBER, Target, find_target
from pla_sglang.fleet.router.control.workers.table import Worker
from pla_sglang.fleet.router.wire.messages import Ask, Cause, Outcome, Over
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.interface.fast_enum import FastEnum
from pla_sglang.policy.interface.fleet import RequestView
from pla_sglang.policy.pairs import PairChoice


class AttemptState(FastEnum):
    """How far an attempt is, as far as the router knows. The state of a request is that of its present attempt."""

    WAITING = "waiting"  # at no instance yet
    PREFILL = "prefill"  # sent, no token yet
    STREAMING = "streaming"  # its client has seen a token
    OVER = "over"  # it came to nothing, or the request was taken over by the next one
    ENDED = "ended"  # the request has ended with it


class LegState(FastEnum):
    OPEN = "open"  # may have been sent, may be executing
    LEAVING = "leaving"  # the request goes on elsewhere; the instance was told to commit and has not answered
    ABORTING = "aborting"  # ordered to abort
    CLOSED = "closed"  # the instance holds nothing for it


_LEGAL_ATTEMPTS: dict[AttemptState, frozenset[AttemptState]] = {
    AttemptState.WAITING: frozenset({AttemptState.PREFILL, AttemptState.OVER, AttemptState.ENDED}),
    AttemptState.PREFILL: frozenset({AttemptState.STREAMING, AttemptState.OVER, AttemptState.ENDED}),
    AttemptState.STREAMING: frozenset({AttemptState.OVER, AttemptState.ENDED}),
    AttemptState.OVER: frozenset(),
    AttemptState.ENDED: frozenset(),
}
_LEGAL_LEGS: dict[LegState, frozenset[LegState]] = {
    LegState.OPEN: frozenset({LegState.LEAVING, LegState.ABORTING, LegState.CLOSED}),
    LegState.LEAVING: frozenset({LegState.ABORTING, LegState.CLOSED}),
    LegState.ABORTING: frozenset({LegState.CLOSED}),
    LegState.CLOSED: frozenset(),
}

# Named once: see ``fast_enum``.
OPEN, LEAVING, ABORTING, CLOSED = LegState
WAITING, PREFILL, STREAMING, OVER, ENDED = AttemptState
_REFUSED, _TRANSFER_FAILED = Outcome.REFUSED, Cause.TRANSFER_FAILED
# The relay does not know why the control plane refused a request; ``RequestRecord.admission`` does.
_REFUSED_FOR = {"no_instance": Outcome.NO_INSTANCE, "fault": Outcome.FAULT}
DISPATCH = "dispatch"  # cause of a request's first attempt
DRAIN = "drain"  # of one that moves away, as its instance is to be empty; policies have reasons of their own


class MoveKind(FastEnum):
    """How an attempt goes on with a request that was at another instance."""

    PULL = "pull"  # it receives the KV cache of the request, which is paused
    REDO = "redo"  # it computes prompt and answer so far again


class LegEntry(msgspec.Struct, gc=False, eq=False):
    """What one instance holds for one attempt. ``worker``: its number; ``room`` is shared by the legs of a hand-off."""

    worker: int
    since_s: float
    room: int | None = None
    state: LegState = LegState.OPEN
    executed: bool = True  # False: it has not reached the instance, or was rolled back: nothing can come of it

    def move(self, state: LegState, now_s: float) -> None:
        if state not in _LEGAL_LEGS[self.state]:
            raise IllegalMoveError(f"leg at {self.worker}: {self.state.value} -> {state.value} is not allowed")
        self.state, self.since_s = state, now_s


class Placement(msgspec.Struct, gc=False, eq=False):
    """Why an attempt is where it is: the choice, and what it was based on.

    Attributes:
        own_prefill_s: expected prefill time of this request alone.
        token_interval_s: of the decode instance when it was chosen.
        candidates: name, queued tokens and cached tokens of instances that were ready, and the TTFT that the policy
            predicted there, without that in which the request had waited already; None: it predicts none.
        excluded: names of ready instances that were left out, each with the reason.
        placed_s: when its decode was placed, where that was not at its dispatch.
        placed_on: name of the instance that it was to decode at then, and was about to move to; None: here.
    """

    choice: PairChoice
    cached_tokens: int = 0
    predicted_ttft_s: float | None = None
    own_prefill_s: float | None = None
    token_interval_s: float | None = None
    candidates: tuple[tuple[str, int, int, float | None], ...] = ()
    excluded: tuple[tuple[str, str], ...] = ()
    placed_s: float | None = None
    placed_on: str | None = None


class Attempt(msgspec.Struct, gc=False, eq=False):
    """A request's stay at one set of instances.

    Times are seconds of the machine's monotonic clock; None: not reached. ``prefill`` and ``decode`` are one worker on
    a unified instance; None: at no instance.

    Attributes:
        number: from 1, above that of all before.
        cause: why there is this attempt: "dispatch", the ``Cause`` of the end of the one before, or why it moves.
        how: where it goes on with a request that ran at another instance; None: it begins from the beginning.
        delivered_tokens: of the answer, that the client had when it began.
        kv_tokens: whose KV cache went to it from the one before.
        predicted_gain: of the move to it, as ``Migrate.gain``; None: no policy has ordered it.
        placement: None until it is dispatched, and where a former life of the control plane has done that.
        asked_s: when it began to wait for an instance.
        gap_s: of the answer, between the last event of the attempt before and its first.
        first_transfer: until it was sent, no KV had gone from this prefill to this decode instance: what lies between
            the end of its prefill and its first token has the set-up of their connection in it.
        over: what its relay said of its end, where another one was to follow.
        failure: why nothing came of the move to it; "": it is no such attempt.
    """

    number: int = 1
    cause: str = DISPATCH
    how: MoveKind | None = None
    state: AttemptState = AttemptState.WAITING
    prefill: Worker | None = None
    decode: Worker | None = None
    legs: list[LegEntry] = []  # msgspec copies it
    delivered_tokens: int = 0
    kv_tokens: int = 0
    predicted_gain: float | None = None
    placement: Placement | None = None
    asked_s: float = 0.0
    assigned_s: float | None = None
    sent_s: float | None = None
    prefill_done_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    gap_s: float | None = None
    first_transfer: bool = False
    over: Over | None = None
    failure: str = ""

    def move(self, state: AttemptState) -> None:
        """Raises IllegalMoveError for a move that the table above does not have."""
        if state not in _LEGAL_ATTEMPTS[self.state]:
            raise IllegalMoveError(f"{self.state.value} -> {state.value} is not allowed")
        self.state = state

    def note_first_token(self, prefill: Worker, decode: Worker, at_s: float) -> None:
        """``prefill`` and ``decode`` are connected from now on, if they are two."""
        self.first_token_s = at_s
        if prefill is not decode:
            connected_s = prefill.connected_s.setdefault(decode.number, at_s)
            self.first_transfer = self.assigned_s is not None and self.assigned_s <= connected_s

    def open_legs(self) -> list[LegEntry]:
        return [leg for leg in self.legs if leg.state is not CLOSED]

    def workers(self) -> list[Worker]:
        """Where it is."""
        if self.prefill is None or self.decode is None:
            return []
        return [self.prefill] if self.prefill is self.decode else [self.prefill, self.decode]

    @property
    def room(self) -> int | None:
        return self.legs[0].room if self.legs else None

    @property
    def choice(self) -> PairChoice | None:
        return None if self.placement is None else self.placement.choice


class End(msgspec.Struct, frozen=True, gc=False):
    """How a request has ended. ``status`` 0: its client got no answer; tokens as in ``Completed``."""

    outcome: Outcome
    status: int = 0
    detail: str = ""
    output_tokens: int | None = None
    exact_tokens: bool = False


class RequestRecord(msgspec.Struct, gc=False, eq=False):
    """One request; also an item of the fair queue.

    Times are wall time but for those of ``view``, which is the policy's: they are in device seconds.

    Attributes:
        ask: the first one of its relay, without the body and without ``over``.
        ttft, tpot: its targets.
        attempts: all so far, in the order of their numbers, those that came to nothing included.
        present: the one that the client sees.
        candidate: the one that is to follow it while it is held.
        known_to_policy: the policy has been told of ``view``.
        policy_tokens: of its answer, that the policy was told of when earlier views of it ended.
        movable: its stream can go on at another instance, as its relay says.
        given_up_as: why the control plane has ended it; its relay only knows that it was told to.
        charged_s: to its tenant's limit, in device seconds; None: nothing.
        admission: reason of the last verdict; "adopted" after a restart of the control plane.
        last_number: the highest number of an attempt, those included that a former life of the control plane has given.
        rests_until_s: a policy has ordered it to move, and orders nothing before then.
        move_failed_s, moves_failed: when its last move came to nothing, and how many did in a row.
    """

    rid: str
    ask: Ask
    view: RequestView
    prompt: Prompt
    ttft: Target
    tpot: Target
    present: Attempt
    attempts: list[Attempt]
    candidate: Attempt | None = None
    known_to_policy: bool = False
    policy_tokens: int = 0
    movable: bool = False
    given_up_as: Outcome | None = None
    charged_s: float | None = None
    admission: str = ""
    last_number: int = 0
    rests_until_s: float = 0.0
    move_failed_s: float | None = None
    moves_failed: int = 0
    end: End | None = None

    @property
    def relay(self) -> int:
        return self.ask.relay

    @property
    def tenant(self) -> str:
        return self.ask.tenant or ""

    @property
    def priority(self) -> int:
        return self.ask.priority or 0

    @property
    def state(self) -> AttemptState:
        return self.present.state

    @property
    def key(self) -> tuple[str, int]:
        """Names the present attempt in the load trackers."""
        return self.rid, self.present.number

    @property
    def shown_attempt(self) -> Attempt:
        """The attempt whose first token is the request's, as far as there is one."""
        if len(self.attempts) == 1:  # as of nearly all
            return self.present
        return next((one for one in self.attempts if one.first_token_s is not None), self.present)

    @property
    def left_attempt(self) -> Attempt | None:
        """The one that the client has seen before the present one."""
        former = (one for one in reversed(self.attempts) if one is not self.present)
        return next((one for one in former if one.first_token_s is not None), None)

    @property
    def last_over(self) -> Over | None:
        """What its relay has said last of an attempt that was over."""
        if len(self.attempts) == 1:  # as of nearly all
            return self.present.over
        return next((one.over for one in reversed(self.attempts) if one.over is not None), None)

    @property
    def lost_early_s(self) -> float | None:
        """When it was lost with an instance, or could not go on at one, that it got nothing from; None: it was not."""
        if self.present.how is None:  # as of nearly all
            return None
        last = next((one for one in reversed(self.attempts) if one.over is not None), None)
        if last is None or last.over is None or last.over.cause not in ENDS or last.first_token_s is not None:
            return None
        return None if last.assigned_s is None else last.over.at_s  # None: that was in a former life of this process

    def find_attempt(self, number: int) -> Attempt | None:
        return next((one for one in self.attempts if one.number == number), None)

    def find_failed_transfer(self) -> Attempt | None:
        """The last attempt that was over for that."""
        if len(self.attempts) == 1:
            return None
        attempts = self.attempts[:-1]
        failed = (one for one in reversed(attempts) if one.over is not None and one.over.cause is _TRANSFER_FAILED)
        return next(failed, None)

    def forget_avoided(self) -> None:
        """It has waited: who could not take it before may be able to now."""
        for attempt in self.attempts:
            if attempt.over is not None:
                refused_by = () if attempt.over.shown else attempt.over.refused_by
                attempt.over = msgspec.structs.replace(attempt.over, avoid=(), refused_by=refused_by)

    def all_legs(self) -> list[LegEntry]:
        """The legs of all attempts."""
        if len(self.attempts) == 1:
            return self.attempts[0].legs
        return [leg for one in self.attempts for leg in one.legs]

    def open_legs(self) -> list[LegEntry]:
        return [leg for leg in self.all_legs() if leg.state is not CLOSED]

    @property
    def cost_tokens(self) -> int:
        """What its dispatch adds to its tenant's service."""
        return self.prompt.tokens

    @property
    def due_s(self) -> float:
        """When its first token is due: the target counts from its arrival, whatever attempt this is."""
        return self.ask.arrived_s + self.ttft.slo_s

    def next_attempt(self, cause: str, *, how: MoveKind | None = None, delivered_tokens: int = 0) -> Attempt:
        """Another one, which waits for an instance; the caller makes it the present one or the candidate."""
        self.last_number += 1
        attempt = Attempt(self.last_number, cause, how, delivered_tokens=delivered_tokens)
        self.attempts.append(attempt)
        return attempt

    def begin_attempt(self, over: Over, now_s: float) -> Attempt:
        """The present attempt is over; another one waits for an instance."""
        lost = over.shown or over.cause in LOSSES
        how = MoveKind.REDO if lost else None
        self.present = self.next_attempt(over.cause.label, how=how, delivered_tokens=over.delivered_tokens)
        self.present.asked_s = now_s
        return self.present

    def set_view_times(self, clock: DeviceClock) -> None:
        view = self.view
        view.arrival_s = clock.device_s(self.ask.arrived_s)
        view.ttft_slo_s, view.tpot_slo_s = clock.device_s(self.ttft.slo_s), clock.device_s(self.tpot.slo_s)

    def outcome_for(self, reported: Outcome) -> Outcome:
        """How it has ended, given what its relay reports."""
        outcome = reported if self.given_up_as is None else self.given_up_as
        return _REFUSED_FOR.get(self.admission, outcome) if outcome is _REFUSED else outcome


_NOWHERE = Attempt()


def record_of(
    ask: Ask, view: RequestView, prompt: Prompt, *, default_ttft_slo_s: float, default_tpot_slo_s: float
) -> RequestRecord:
    """The record of a request that its relay asks about for the first time, as far as is known here. The body of
    ``ask`` is not kept. ``ask.over``: of an attempt that a former life of the control plane has made."""
    over = ask.over
    former = [] if over is None else [Attempt(over.attempt, state=OVER, ended_s=over.at_s, over=over)]
    record = RequestRecord(
        ask.rid,
        ask if ask.body is None and over is None else msgspec.structs.replace(ask, body=None, over=None),
        view,
        prompt,
        find_target(ask.body, TTFT_MEMBER, ask.ttft_slo_ms, default_ttft_slo_s),
        find_target(ask.body, TPOT_MEMBER, ask.tpot_slo_ms, default_tpot_slo_s),
        present=former[0] if former else _NOWHERE,
        attempts=former,
        last_number=0 if over is None else over.attempt,
    )
    if over is None:
        record.present = record.next_attempt(DISPATCH)
    else:
        record.begin_attempt(over, over.at_s)
    return record
