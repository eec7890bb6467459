"""One request in the control plane, from its relay's first Ask until no instance holds anything of it.

A record has hops: a hop is the request's stay at one set of instances, a unified instance or a prefill and a decode
instance. A retry opens another attempt of the hop, whose legs remember theirs. Where an instance is lost, or a request
is moved, another hop follows; the last one is what the client sees, and legs of those before are closed one by one.

Hop and legs move between states by the two tables below; nothing else changes them. A record is kept for /pla/explain
after its end, without what only its dispatch needed. Thousands are kept: a record holds nothing that could point back
to it, so the garbage collector need not visit it.
"""

from __future__ import annotations

import msgspec

from pla_sglang.common.errors import IllegalMoveError
from pla_sglang.fleet.router.control.requests.prompts import Prompt
from pla_sglang.fleet.router.control.requests.targets import find_tpot_target, find_ttft_target
from pla_sglang.fleet.router.control.workers.table import Worker
from pla_sglang.fleet.router.wire.messages import Ask, Leg, MoveKind, Outcome
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.interface.fast_enum import FastEnum
from pla_sglang.policy.interface.fleet import RequestView
from pla_sglang.policy.pairs import Choice


class Stage(FastEnum):
    """Where a request is, as far as the router knows."""

    WAITING = "waiting"  # admitted, at no instance
    PREFILL = "prefill"  # sent, no token yet
    STREAMING = "streaming"  # its client has seen a token
    ENDED = "ended"


class LegState(FastEnum):
    OPEN = "open"  # may have been sent, may be executing
    LEAVING = "leaving"  # the request goes on elsewhere; the instance was told to commit and has not answered
    ABORTING = "aborting"  # ordered to abort
    CLOSED = "closed"  # the instance holds nothing for it


_LEGAL_STAGES: dict[Stage, frozenset[Stage]] = {
    Stage.WAITING: frozenset({Stage.PREFILL, Stage.ENDED}),
    Stage.PREFILL: frozenset({Stage.STREAMING, Stage.WAITING, Stage.ENDED}),  # back to WAITING: to be sent again
    Stage.STREAMING: frozenset({Stage.ENDED}),
    Stage.ENDED: frozenset(),
}
_LEGAL_LEGS: dict[LegState, frozenset[LegState]] = {
    LegState.OPEN: frozenset({LegState.LEAVING, LegState.ABORTING, LegState.CLOSED}),
    LegState.LEAVING: frozenset({LegState.ABORTING, LegState.CLOSED}),
    LegState.ABORTING: frozenset({LegState.CLOSED}),
    LegState.CLOSED: frozenset(),
}

# Named once: see ``fast_enum``.
OPEN, LEAVING, ABORTING, CLOSED = LegState
WAITING, PREFILL, STREAMING, ENDED = Stage
_WHOLE, _PREFILL_LEG, _DECODE_LEG = Leg
_REFUSED = Outcome.REFUSED
# The relay does not know why the control plane refused a request; ``RequestRecord.admission`` does.
_REFUSED_FOR = {"no_instance": Outcome.NO_INSTANCE, "fault": Outcome.FAULT}


class MoveReason(FastEnum):
    """Why there is another hop; policies have reasons of their own."""

    SURVIVE = "survive"  # the instance of the one before was lost
    NOT_SENT = "not_sent"  # the one before did not reach its instance
    FULL = "full"  # its instance had no room
    ABORTED = "aborted"  # its instance has given it up, and lives
    DRAIN = "drain"  # its instance is to be empty


class LegEntry(msgspec.Struct, gc=False, eq=False):
    """What one instance holds for one attempt of a request.

    ``worker`` is the number of the instance, ``attempt`` counts from 1 over all hops, ``room`` is shared by the legs of
    a hand-off, ``reached`` says under which id the instance knows the request (``rids.rid_at_instance``).
    """

    leg: Leg
    worker: int
    since_s: float
    attempt: int = 1
    room: int | None = None
    state: LegState = LegState.OPEN
    reached: int = 0
    executed: bool = True  # False: it has not reached the instance, or was rolled back: nothing can come of it

    def move(self, state: LegState, now_s: float) -> None:
        if state not in _LEGAL_LEGS[self.state]:
            raise IllegalMoveError(f"leg {self.leg.name.lower()}: {self.state.value} -> {state.value} is not allowed")
        self.state, self.since_s = state, now_s


class Hop(msgspec.Struct, gc=False, eq=False):
    """A request's stay at one set of instances.

    Times are seconds of the machine's monotonic clock; None: not reached. ``prefill`` and ``decode`` are one worker on
    a unified instance; None: at no instance. What the last choice was, and what it was based on, stays when the attempt
    is rolled back.

    Attributes:
        legs: those of all attempts that are not closed, and of the last one.
        number: from 1.
        how, why: of a hop beyond the first: how it goes on with what there was, and for what reason.
        key: of one that is not the present one: its name in the load trackers.
        reached: likewise, as in ``Ask``.
        kv_tokens: whose KV cache went to it from the one before.
        tokens: of the answer, that the client had when it began.
        gap_s: of it, between the last event of the one before and its first.
        room: KV room of the last attempt.
        attempts: times that it was assigned, over all hops so far.
        adopted: assigned by a former life of the control plane.
        own_prefill_s: expected prefill time of this request alone.
        token_interval_s: of the decode instance when it was chosen.
        candidates: name, queued tokens and cached tokens of instances that were ready.
        excluded: names of ready instances that were left out, each with the reason.
        placed_s: when its decode was placed, where that was not at its dispatch.
        placed_on: name of the instance that it was to decode at then, and was about to move to; None: here.
        first_transfer: until it was sent, no KV had gone from this prefill to this decode instance: what lies between
            the end of its prefill and its first token has the set-up of their connection in it.
    """

    number: int = 1
    how: MoveKind | None = None
    why: str = ""
    key: tuple[str, int] = ("", 0)
    reached: int = 0
    kv_tokens: int = 0
    tokens: int = 0
    gap_s: float | None = None
    stage: Stage = Stage.WAITING
    prefill: Worker | None = None
    decode: Worker | None = None
    legs: list[LegEntry] = []  # msgspec copies it
    room: int | None = None
    attempts: int = 0
    adopted: bool = False
    choice: Choice | None = None
    cached_tokens: int = 0
    predicted_ttft_s: float | None = None
    own_prefill_s: float | None = None
    token_interval_s: float | None = None
    candidates: tuple[tuple[str, int, int], ...] = ()
    excluded: tuple[tuple[str, str], ...] = ()
    assigned_s: float | None = None
    sent_s: float | None = None
    prefill_done_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    placed_s: float | None = None
    placed_on: str | None = None
    first_transfer: bool = False

    def note_first_token(self, prefill: Worker, decode: Worker, at_s: float) -> None:
        """``prefill`` and ``decode`` are connected from now on, if they are two."""
        self.first_token_s = at_s
        if prefill is not decode:
            connected_s = prefill.connected_s.setdefault(decode.number, at_s)
            self.first_transfer = self.assigned_s is not None and self.assigned_s <= connected_s

    def move(self, stage: Stage) -> None:
        """Raises IllegalMoveError for a move that the table above does not have."""
        if stage not in _LEGAL_STAGES[self.stage]:
            raise IllegalMoveError(f"{self.stage.value} -> {stage.value} is not allowed")
        self.stage = stage

    def open_legs(self) -> list[LegEntry]:
        return [leg for leg in self.legs if leg.state is not CLOSED]

    def workers(self) -> list[tuple[Worker, Leg]]:
        """Where the present attempt is, and with which leg."""
        if self.prefill is None or self.decode is None:
            return []
        if self.prefill is self.decode:
            return [(self.prefill, _WHOLE)]
        return [(self.prefill, _PREFILL_LEG), (self.decode, _DECODE_LEG)]

    def is_dispatched(self) -> bool:
        return self.assigned_s is not None or self.adopted

    def roll_back(self) -> None:
        """The attempt is over and has left nothing: the request is nowhere yet. Its time counts as queueing."""
        self.prefill = self.decode = None
        self.assigned_s = self.sent_s = self.prefill_done_s = None
        self.adopted = False


class FormerAttempt(msgspec.Struct, frozen=True, gc=False):
    """An attempt that came to nothing, before the present one."""

    prefill: str | None
    decode: str | None
    why: str
    detail: str


class RequestRecord(msgspec.Struct, gc=False, eq=False):
    """One request. ``key`` names its present attempt in the load trackers; also an item of the fair queue.

    Times are wall time but for those of ``view``, which is the policy's: they are in device seconds.

    Attributes:
        ask: the first one of its relay, without the body.
        ttft_slo_s, tpot_slo_s: its targets.
        slo_from: where these came from: header, body or default.
        attempt, reached: as the relay counts them, see ``Ask``.
        since_s: when it began to wait for an instance.
        arrived_at_policy: the policy has been told of it.
        refused_by: numbers of the workers that have refused it for load.
        failed_pair: prefill and decode instance between which the last KV transfer failed.
        serial: the highest number that an attempt of it has had, those included that came to nothing.
        last_number: of the last pending hop of which nothing has come.
        pending: the hop that is to follow the present one, which goes on if nothing comes of it.
        strays: legs of pending hops of which nothing has come, that are not closed.
        policy_tokens: of its answer, that the policy was told of when hops ended.
        movable: its stream can go on at another instance, as its relay says.
        given_up_as: why the control plane has ended it; its relay only knows that it was told to.
        admission: reason of the last verdict; "adopted" after a restart of the control plane.
        status: of the answer; 0: there was none.
        output_tokens, exact_output: once it has ended, see ``Completed``.
    """

    rid: str
    relay: int
    ask: Ask
    view: RequestView
    prompt: Prompt
    ttft_slo_s: float
    tpot_slo_s: float
    slo_from: tuple[str, str] = ("default", "default")
    tenant: str = ""
    priority: int = 0
    attempt: int = 1
    reached: int = 0
    key: tuple[str, int] = ("", 0)
    since_s: float = 0.0
    arrived_at_policy: bool = False
    refused_by: tuple[int, ...] = ()
    failed_pair: tuple[Worker, Worker] | None = None
    serial: int = 0
    last_number: int = 0
    pending: Hop | None = None
    strays: list[LegEntry] = []
    policy_tokens: int = 0
    movable: bool = False
    given_up_as: Outcome | None = None
    admission: str = ""
    former: list[FormerAttempt] = []
    hops: list[Hop] = []
    outcome: Outcome | None = None
    status: int = 0
    detail: str = ""
    output_tokens: int | None = None
    exact_output: bool = False

    def __post_init__(self) -> None:
        self.key = (self.rid, self.attempt)
        self.serial = self.attempt
        if not self.hops:
            self.hops = [Hop()]

    @property
    def hop(self) -> Hop:
        """The present hop."""
        return self.hops[-1]

    @property
    def stage(self) -> Stage:
        return self.hops[-1].stage

    @property
    def shown_hop(self) -> Hop:
        """The hop whose first token is the request's, as far as there is one."""
        return next((hop for hop in self.hops if hop.first_token_s is not None), self.hops[-1])

    def all_legs(self) -> list[LegEntry]:
        """The legs of all hops."""
        if len(self.hops) == 1 and self.pending is None and not self.strays:
            return self.hops[0].legs
        pending = [] if self.pending is None else self.pending.legs
        return [*(leg for hop in self.hops for leg in hop.legs), *pending, *self.strays]

    def open_legs(self) -> list[LegEntry]:
        return [leg for leg in self.all_legs() if leg.state is not CLOSED]

    @property
    def cost_tokens(self) -> int:
        """What its dispatch adds to its tenant's service."""
        return self.prompt.tokens

    @property
    def due_s(self) -> float:
        """When its first token is due: the target counts from its arrival, whatever attempt this is."""
        return self.ask.arrived_s + self.ttft_slo_s

    def is_single(self) -> bool:
        """One prompt, one answer: an instance that has answered with an error holds nothing of it."""
        return self.ask.prompts == 1 and self.ask.samples == 1

    def start_attempt(self, ask: Ask) -> None:
        """Its relay asks again. What is known of the attempt so far moves to ``former``."""
        hop, choice = self.hop, self.hop.choice
        prefill, decode = (None, None) if choice is None else (choice.prefill.name, choice.decode.name)
        self.former.append(FormerAttempt(prefill, decode, ask.retry_reason.name.lower(), ask.detail))
        self.attempt, self.key = ask.attempt, (self.rid, ask.attempt)
        self.serial = max(self.serial, ask.attempt)
        hop.roll_back()

    def set_view_times(self, clock: DeviceClock) -> None:
        view = self.view
        view.arrival_s = clock.device_s(self.ask.arrived_s)
        view.ttft_slo_s, view.tpot_slo_s = clock.device_s(self.ttft_slo_s), clock.device_s(self.tpot_slo_s)

    def outcome_for(self, reported: Outcome) -> Outcome:
        """How it has ended, given what its relay reports."""
        outcome = reported if self.given_up_as is None else self.given_up_as
        return _REFUSED_FOR.get(self.admission, outcome) if outcome is _REFUSED else outcome

    def release_prompt(self) -> None:
        """It has ended: the keys of its prompt's blocks are needed no more."""
        self.prompt.keys = ()


def record_of(
    ask: Ask, view: RequestView, prompt: Prompt, *, default_ttft_slo_s: float, default_tpot_slo_s: float
) -> RequestRecord:
    """The record of a new request; the body of ``ask`` is not kept."""
    ttft, tpot = find_ttft_target(ask, default_ttft_slo_s), find_tpot_target(ask, default_tpot_slo_s)
    return RequestRecord(
        ask.rid,
        ask.relay,
        ask if ask.body is None else msgspec.structs.replace(ask, body=None),
        view,
        prompt,
        ttft.slo_s,
        tpot.slo_s,
        slo_from=(ttft.source, tpot.source),
        tenant=ask.tenant or "",
        priority=ask.priority or 0,
        attempt=ask.attempt,
        reached=ask.reached,
        refused_by=ask.refused_by,
    )
