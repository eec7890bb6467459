"""What all parts of the work on one request share: its state, its present attempt, and how it ends, exactly once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from pla_sglang.fleet.router.relay.attempt import Attempt
from pla_sglang.fleet.router.relay.attempt_cancellation import AttemptCancellation
from pla_sglang.fleet.router.relay.context import RelayContext
from pla_sglang.fleet.router.relay.forwarded_response import ForwardedResponse
from pla_sglang.fleet.router.relay.request_body import RequestBody
from pla_sglang.fleet.router.relay.request_hops import RequestHops
from pla_sglang.fleet.router.relay.request_state import ASKING, ENDED, FORWARDING, LEGAL, MOVING, WAITING, RequestState
from pla_sglang.fleet.router.relay.upstream_leg import DETAIL_CHARS, UpstreamLeg
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.fleet.router.wire.rids import rids_at_instances


class HopTrial(Protocol):
    """A next hop that is being tried while the present one is held."""

    def cancel(self) -> tuple[int, ...]:
        """Nothing comes of it. Returns the instances that were told to abort."""


# Code and words for a client whose request no other instance goes on with.
_LOST_WORDS = {
    m.LossReason.BROKEN: ("upstream_broke_off", "the instance has broken off its answer to this request"),
    m.LossReason.ABORTED: ("upstream_aborted", "the instance has given this request up"),
}
_OTHER_WORDS = ("upstream_lost", "the instance that worked on this is lost")
OnEnd = Callable[[m.Ask, "m.Assign | None", m.Completed], None]


class RequestLife:
    """One request, as ``DispatchedRequest`` and its parts see it.

    Args:
        on_end: called once, with the last message about the request.

    Attributes:
        response: set by the owner before anything else happens.
        attempt: the present one; None while it is asked where the request goes, or goes on.
        deadline_s: of the present state.
        progress: what was reported of the present attempt, or of the first hop.
        paused: the client's buffers are full.
        cancellation: of an attempt that is being taken back.
        trial: of another hop.
    """

    __slots__ = (
        "_on_end",
        "ask",
        "attempt",
        "cancellation",
        "context",
        "deadline_s",
        "hops",
        "kept",
        "paused",
        "progress",
        "response",
        "state",
        "trial",
    )
    response: ForwardedResponse

    def __init__(self, context: RelayContext, ask: m.Ask, kept: RequestBody, on_end: OnEnd) -> None:
        self.context, self.ask, self.kept, self._on_end = context, ask, kept, on_end
        self.hops = RequestHops(context)
        self.state = ASKING
        self.deadline_s = ask.arrived_s + context.config.dispatch_timeout_s
        self.attempt: Attempt | None = None
        self.cancellation: AttemptCancellation | None = None
        self.trial: HopTrial | None = None
        self.progress: list[m.Progress] = []
        self.paused = False

    def move_to(self, state: RequestState) -> None:
        if state not in LEGAL[self.state]:
            raise RuntimeError(f"request {self.ask.rid}: {self.state.name} -> {state.name} is not allowed")
        self.state = state

    def forget_attempt(self) -> None:
        """It is over, and the client has not got a byte of it."""
        self.attempt, self.progress = None, []
        self.response.forget_head()

    def describe_open(self) -> m.OpenRequest | None:
        """For a control plane that has just started; None where it is to be asked first."""
        hops = self.hops
        assign = hops.assign if self.attempt is None else self.attempt.assign
        if assign is None or self.state is ASKING:
            return None
        if hops.number > 1:  # whoever has handed its KV cache over holds nothing of it any more
            assign = msgspec.structs.replace(assign, prefill=None)
        tokens = 0 if hops.stream is None else len(hops.stream.ids)
        lost = hops.question is not None
        return m.OpenRequest(self.ask, assign, tuple(self.progress), hops.number, tokens, lost)

    def drop_body(self) -> None:
        """Nothing is sent again from here on, but where another instance goes on with what there is."""
        if not self.hops.may_go_on(shown=self.state is FORWARDING):
            self.kept.drop()

    def current_rids(self) -> Sequence[str]:
        ask = self.ask
        return rids_at_instances(ask.rid, ask.rids, prompts=ask.prompts, reached=ask.reached)

    # -- reports to the control plane --------------------------------------------------------------------------------

    def report_progress(self, milestone: m.Milestone) -> None:
        movable = milestone is m.Milestone.FIRST_TOKEN and self.hops.may_go_on(shown=True)
        progress = m.Progress(self.ask.rid, milestone, self.context.now_s(), movable)
        self.progress.append(progress)
        self.context.send_to_control(progress)

    def report_failure(self, leg: UpstreamLeg, kind: m.FailureKind, detail: str) -> None:
        self.context.send_to_control(m.Failure(leg.worker, kind, detail[:DETAIL_CHARS], self.ask.rid))

    # -- ends --------------------------------------------------------------------------------------------------------

    def time_out(self, message: str) -> None:
        if self.attempt is not None and self.state in (WAITING, FORWARDING, MOVING):  # else no instance was too slow
            self.report_failure(self.attempt.response_leg, m.FailureKind.TIMEOUT, message)
        self.fail_request(m.Outcome.TIMED_OUT, 504, "timeout", message)

    def lose_request(self, detail: str, why: m.LossReason = m.LossReason.DEAD) -> None:
        """Its hop is over, and no other instance goes on."""
        code, text = _LOST_WORDS.get(why, _OTHER_WORDS)
        self.fail_request(m.Outcome.UPSTREAM_LOST, 502, code, f"{text}: {detail}")

    def fail_request(
        self, outcome: m.Outcome, status: int, code: str, message: str, headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """End the request, and report why to the client."""
        if self.state is ENDED:
            return
        response = self.response
        append = response.can_append_event(None if self.attempt is None else self.attempt.response_leg.connection)
        self.end_request(outcome, response.forwarded_status or status, message)
        response.send_failure(status, code, message, headers=headers, append=append)

    def end_request(self, outcome: m.Outcome, status: int, detail: str = "") -> None:
        """Exactly once: free the instances, tell the control plane, forget the request."""
        if self.state is ENDED:
            return
        self.move_to(ENDED)
        if self.cancellation is not None:
            self.cancellation.give_up()
        aborted = () if self.trial is None else self.trial.cancel()
        self.hops.end_stream()
        self.kept.drop()
        self.kept.end_waiting()
        attempt, self.attempt = self.attempt, None  # it points back here; without the cycle, it is freed at once
        if attempt is not None:
            aborted += attempt.end_attempt(self.current_rids, outcome)
        ended = self.response.make_ended(outcome, status, at_s=self.context.now_s(), aborted=aborted, detail=detail)
        self._on_end(self.ask, None if attempt is None else attempt.assign, ended)
