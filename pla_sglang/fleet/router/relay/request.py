"""One request: from the question to the control plane to the last byte for the client.

A request is a list of attempts. While none of it was shown to the client, an attempt begins from scratch; afterwards it
goes on behind what the client has.

    ASKING ──assign──► CONNECTING ──all connected──► WAITING ──first byte──► FORWARDING ──last byte──► ENDED
      ▲                    │ not sent                   │ lost                   │ lost
      ├────────────────────┴────────────────────────────┼────────────────────────┘
      │                                                 │ KV transfer failed, or an instance is full
      └───────── all instances have ended it ───── ROLLING_BACK
                                                (from every state: failure, time limit, abort, client gone ──► ENDED)

Whether another attempt follows says ``attempt_rules``; where it goes says the control plane. If it says nowhere, the
request ends as it would have without the question.

The control plane moves a request that runs: it is paused at its instance, and a *candidate* is tried beside the present
attempt (``_try_candidate``). The client notices nothing, whatever comes of that. Whatever ends a request, every
instance that may still work for it is told to abort.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping

import msgspec

from pla_sglang.fleet.router.attempt_rules import LOSSES, RULES, count_over, may_follow
from pla_sglang.fleet.router.http import responses
from pla_sglang.fleet.router.relay.attempt import (
    Attempt,
    PrefillLeg,
    ResponseLeg,
    ResumingLeg,
    UpstreamLeg,
)
from pla_sglang.fleet.router.relay.context import RelayContext
from pla_sglang.fleet.router.relay.forwarded_response import ForwardedResponse
from pla_sglang.fleet.router.relay.marked_stream import MarkedStreamReader
from pla_sglang.fleet.router.relay.movability import Tags, Unmovable, judge_request
from pla_sglang.fleet.router.relay.request_body import RequestBody
from pla_sglang.fleet.router.relay.response_errors import LoadRefusal, error_message, transfer_failed
from pla_sglang.fleet.router.relay.response_writer import ClientWork, ResponseWriter
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.fleet.router.wire.rids import rid_at_instance

# A bad request is refused by both instances, and decode's answer is the better one; but it must not be waited for long.
REFUSAL_GRACE_S = 0.3
# An answer that refuses a request for load is short and complete at once. One that is not is forwarded as it is.
HELD_BYTES = 65_536
HELD_S = 1.0
STILL_S = 1.0  # a stream that has got something within that time is not given up for its instance's silence
# How long the instance that a request has left may take to end its stream. Its own limit for the hold is 10 s.
LEFT_S = 12.0
DETAIL_CHARS = 300  # of what an instance says

_NOT_SENT, _TRANSFER_FAILED, _FULL, _LOST, _BROKEN, _ABORTED, _REFUSED, _RESUMED, _SILENT = m.Cause
_SENT, _PREFILL_DONE, _FIRST_TOKEN = m.Milestone


class RequestState(enum.IntEnum):
    ASKING = 0
    CONNECTING = 1
    WAITING = 2
    FORWARDING = 3
    ROLLING_BACK = 4
    ENDED = 5


ASKING, CONNECTING, WAITING, FORWARDING, ROLLING_BACK, ENDED = RequestState

LEGAL = {
    ASKING: {CONNECTING, ENDED},
    CONNECTING: {ASKING, WAITING, ENDED},
    WAITING: {ASKING, FORWARDING, ROLLING_BACK, ENDED},
    FORWARDING: {ASKING, ENDED},
    ROLLING_BACK: {ASKING, ENDED},
    ENDED: set(),
}

OnEnd = Callable[["Request", m.Completed], None]


class Request(ClientWork):
    """Made when the request's body is complete; ``ask_control`` asks where it goes.

    It is the owner of its attempts (``AttemptOwner``) and of its answer (``ResponseOwner``).

    Args:
        kept: the body as the client sent it, counted as incoming until it is sent.
        on_end: called once, with the last message about the request.

    Attributes:
        ask: the present or last question.
        attempt: the present one, of which the answer comes; None while it is asked.
        last_attempt: the highest number of an attempt so far; 0: there was none.
        response: what the client gets.
    """

    __slots__ = (
        "_candidate",
        "_client",
        "_context",
        "_deadline_s",
        "_first_rid",
        "_got_on",
        "_holds",
        "_kept",
        "_movable",
        "_on_end",
        "_over_times",
        "_paused",
        "_refusal",
        "ask",
        "attempt",
        "last_attempt",
        "response",
        "state",
    )

    def __init__(
        self, context: RelayContext, client: ResponseWriter, kept: RequestBody, ask: m.Ask, on_end: OnEnd
    ) -> None:
        self._context, self._client, self._kept, self._on_end = context, client, kept, on_end
        self.ask = ask
        self.state = ASKING
        self._deadline_s = ask.arrived_s + context.config.dispatch_timeout_s  # of the present state
        self.response = ForwardedResponse(client, self, ask, context.now_s)
        self.attempt: Attempt | None = None
        self._candidate: Attempt | None = None
        self.last_attempt = 0
        self._over_times: Mapping[m.Cause, int] = {}  # attempts that are over, but for candidates
        self._got_on = False  # the client has got something from the present attempt
        self._movable: Tags | Unmovable | None = None  # None: not judged yet
        self._first_rid = ""  # under which the instance knew it whose stream has begun
        self._paused = False  # the client's buffers are full
        self._refusal: tuple[int, str] | None = None  # status and text, where prefill found the request bad
        self._holds = False  # the beginning of an answer that may be a refusal for load

    def _move_to(self, state: RequestState) -> None:
        if state not in LEGAL[self.state]:
            raise RuntimeError(f"request {self.ask.rid}: {self.state.name} -> {state.name} is not allowed")
        self.state = state

    @property
    def _is_shown(self) -> bool:
        """The client has got something of the answer."""
        return self.response.first_s is not None

    # -- where it goes -----------------------------------------------------------------------------------------------

    def ask_control(self) -> None:
        """Asks where it goes, or goes on. Again, where the control plane has restarted and has not answered."""
        self._context.send_to_control(self.ask)

    def on_assign(self, assign: m.Assign) -> None:
        if assign.attempt <= self.last_attempt:
            return  # the answer to a former question, or late
        if assign.held_tokens is not None:
            self._try_candidate(assign)
        elif self.state is ASKING:
            self._begin_attempt(assign)

    def on_refuse(self, refuse: m.Refuse) -> None:
        over = self.ask.over
        if self.state is not ASKING or refuse.over != (0 if over is None else over.attempt):
            return
        headers = responses.retry_after(refuse.retry_after_s)
        if over is None:
            self._fail_request(m.Outcome.REFUSED, refuse.status, refuse.code, refuse.message, headers)
        else:
            self._end_over(over.cause, f"{over.detail}; {refuse.message}", headers)

    # -- an attempt --------------------------------------------------------------------------------------------------

    def _begin_attempt(self, assign: m.Assign) -> None:
        self._move_to(CONNECTING)
        self._refusal, self._holds, self._got_on = None, False, False
        self.last_attempt = assign.attempt
        if self.ask.body is not None:  # it was for the control plane
            self.ask = msgspec.structs.replace(self.ask, body=None)
        response, plain = self.response, not self._client.understands_chunks
        legs: tuple[ResponseLeg] | tuple[ResponseLeg, PrefillLeg]
        if response.last_s is not None:
            self._deadline_s = response.last_s + self._context.config.stall_timeout_s
            legs = (ResumingLeg(self, assign.decode, response),)
        else:
            first = ResponseLeg(self, assign.decode, response, plain=plain)
            legs = (first,) if assign.prefill is None else (first, PrefillLeg(self, assign.prefill))
        self.attempt = Attempt(self._context, self, self.ask, assign, legs)
        if not self.attempt.connect_legs():
            text = "the control plane named an instance that is not known"
            if not self._is_shown:
                self._fail_request(m.Outcome.NO_CONTROL, 503, "no_worker", text)
            else:
                self._go_on(_NOT_SENT, assign.decode, text)

    def on_unreachable(self, attempt: Attempt, leg: UpstreamLeg, why: str) -> None:
        self._report_failure(leg, m.FailureKind.CONNECT, why)
        if attempt is self._candidate:
            self._drop_candidate(_NOT_SENT, why)
        else:
            self._go_on(_NOT_SENT, leg.worker, why)

    def on_connected(self, attempt: Attempt) -> None:
        if attempt is self._candidate:
            attempt.send_request(self._kept, tags=self._tags_of_rest())
            return
        self._move_to(WAITING)
        if self._is_shown:
            attempt.send_request(self._kept, tags=self._tags_of_rest())
        else:
            self._deadline_s = self._context.now_s() + self._context.config.first_byte_timeout_s
            self._send_first(attempt)
        self._report_progress(attempt, _SENT)

    def _send_first(self, attempt: Attempt) -> None:
        """Its answer is to be the client's from its first byte on. The body is kept for another attempt."""
        kept = self._kept
        may_move = self._judge_movable()
        again = self._may_follow(_FULL) or (len(attempt.legs) > 1 and self._may_follow(_TRANSFER_FAILED))
        keeps = (may_move or again) and kept.try_keep()
        attempt.send_request(kept, tags=self._begin_stream(attempt) if may_move else None)
        if not keeps:
            kept.drop()
        kept.end_waiting()

    # -- its answer --------------------------------------------------------------------------------------------------

    def on_beginning(self, status: int, data: bytes, *, whole: bool) -> bool:
        attempt, response = self.attempt, self.response
        assert attempt is not None
        if self._kept.is_kept and len(attempt.legs) > 1 and transfer_failed(status, data):
            self._roll_back(_TRANSFER_FAILED, attempt.response_leg, error_message(data))
            return False
        full = response.verdict.load_refusal is LoadRefusal.FULL
        if full and self._may_follow(_FULL) and len(data) <= HELD_BYTES:
            if whole:
                response.keep_refusal(status)
                self._leave_full(attempt.response_leg, error_message(data))
            elif not self._holds:
                self._holds, self._deadline_s = True, self._context.now_s() + HELD_S
            return False
        if not whole:
            self._forward_response()
        return True

    def _forward_response(self) -> None:
        assert self.attempt is not None
        self._move_to(FORWARDING)
        self._holds, self._got_on = False, True
        marked = self.response.marked
        if marked is not None and not marked.prompt:  # the instance was asked for ids, and cannot say them of this one
            self._set_unmovable(Unmovable.INSTANCE)
        movable = self._is_movable(shown=True)
        if not movable:
            self._kept.drop()
        self.response.begin_forwarding()
        self._deadline_s = self._context.now_s() + self._context.config.stall_timeout_s
        self._report_progress(self.attempt, _FIRST_TOKEN, movable=movable)

    def on_first_events(self, leg: UpstreamLeg, events: bytes) -> None:
        """The answer comes from this attempt from here on."""
        candidate, left, response = self._candidate, self.attempt, self.response
        if candidate is not None and leg is candidate.response_leg:
            assert left is not None
            left.leave_leg(left.response_leg, LEFT_S)
            self.attempt, self._candidate, response.is_watched = candidate, None, False
        else:
            self._move_to(FORWARDING)
        assert self.attempt is not None and response.marked is not None and response.last_s is not None
        response.marked.begin_attempt()
        self._got_on = True
        if self._paused and leg.connection is not None:
            leg.connection.set_paused(True)
        gap_s = self._context.now_s() - response.last_s
        self._report_progress(self.attempt, _FIRST_TOKEN, movable=self._is_movable(shown=True), gap_s=gap_s)
        response.on_response_body(events)

    def on_response_done(self, status: int) -> None:
        outcome, failure = self.response.verdict.judge_outcome(status)
        if failure is not None:
            assert self.attempt is not None
            self._report_failure(self.attempt.response_leg, failure, f"status {self.response.verdict.error_code}")
        self._end_request(outcome, status)

    # -- an attempt that is over before the answer is ----------------------------------------------------------------

    def on_prefill_end(self, leg: UpstreamLeg, cause: m.Cause | None, status: int, detail: str) -> None:
        assert self.attempt is not None
        waits = self.state is WAITING  # else decode has the KV already, and answers
        if cause is None:
            self._report_progress(self.attempt, _PREFILL_DONE)
        elif cause is _REFUSED:
            if waits:
                self._refusal = (max(status, 400), detail)
                self._deadline_s = self._context.now_s() + REFUSAL_GRACE_S
        elif cause is _TRANSFER_FAILED:  # it may be decode's fault
            if waits:
                self._roll_back(_TRANSFER_FAILED, leg, detail)
        elif cause is _FULL:
            if waits:
                self.response.keep_refusal(status, f"the prefill instance has refused the request: {detail}")
                self._leave_full(leg, detail)
            else:
                self._report_failure(leg, m.FailureKind.FULL, detail)
        else:
            if status >= 500:
                self._report_failure(leg, m.FailureKind.STATUS, detail)
            if waits:  # without stream SGLang answers a client's mistake with 500, too; in a stream it breaks off then
                gave_up = self.ask.stream or status < 400
                self._lose_prefill(_ABORTED if gave_up else _REFUSED, leg, detail)

    def _lose_prefill(self, cause: m.Cause, leg: UpstreamLeg, detail: str) -> None:
        if self._may_follow(cause):
            self._ask_again(cause, leg.worker, detail)
        else:
            self._fail_request(m.Outcome.PREFILL_FAILED, 502, "prefill_failed", f"the prefill failed: {detail}")

    def on_leg_lost(self, leg: UpstreamLeg, kind: m.FailureKind, detail: str) -> None:
        self._report_failure(leg, kind, detail)
        cause = _BROKEN if kind is m.FailureKind.BROKEN else _LOST
        if isinstance(leg, PrefillLeg):
            if self.state is not WAITING:
                return  # decode has the KV already, and answers
            if cause is _LOST:
                self._lose_prefill(cause, leg, detail)
                return
        elif self._is_shown and self.response.marked is not None:
            end = self.response.marked.take_end()
            if end is not None:
                self.response.on_response_body(end)
                self.response.on_response_done()
                return
        self._go_on(cause, leg.worker, detail)

    def on_given_up(self, data: bytes) -> None:
        attempt, detail = self.attempt, error_message(data)
        assert attempt is not None
        leg = attempt.response_leg
        if not self._is_shown and self._kept.is_kept and len(attempt.legs) > 1 and transfer_failed(200, data):
            self._roll_back(_TRANSFER_FAILED, leg, detail)
            return
        self._report_failure(leg, m.FailureKind.STATUS, detail)
        self._go_on(_ABORTED, leg.worker, detail)

    def on_not_resumed(self, leg: UpstreamLeg, cause: m.Cause, kind: m.FailureKind | None, detail: str) -> None:
        if kind is not None:
            self._report_failure(leg, kind, detail)
        if self._candidate is not None and leg is self._candidate.response_leg:
            self._drop_candidate(cause, detail)
        else:
            self._go_on(cause, leg.worker, detail)

    def _leave_full(self, leg: UpstreamLeg, detail: str) -> None:
        """An instance has refused the request for load, and what it said is kept: perhaps another one has room."""
        self._report_failure(leg, m.FailureKind.FULL, detail)
        self._roll_back(_FULL, leg, detail)

    # -- another attempt ---------------------------------------------------------------------------------------------

    def _may_follow(self, cause: m.Cause) -> bool:
        """True if another attempt may follow if the present one is over for ``cause``."""
        ask, shown = self.ask, self._is_shown
        return self._kept.head is not None and may_follow(
            cause,
            self._over_times,
            self._context.config,
            shown=shown,
            single=ask.is_single,
            movable=self._is_movable(shown=shown),
            got_on=self._got_on,
            lost=0 if ask.over is None else len(ask.over.lost_with),
        )

    def _go_on(self, cause: m.Cause, worker: int, detail: str) -> None:
        """The present attempt is over, because of ``worker``: another one follows, or the request ends."""
        if self._may_follow(cause):
            self._ask_again(cause, worker, detail)
        else:
            self._end_over(cause, detail)

    def _roll_back(self, cause: m.Cause, leg: UpstreamLeg, detail: str) -> None:
        """As ``_go_on``, when no instance holds anything of the attempt any more."""
        assert self.attempt is not None
        if not self._may_follow(cause):
            self._end_over(cause, detail)
            return
        self._move_to(ROLLING_BACK)
        self.attempt.cancel_legs(functools.partial(self._on_rolled_back, cause, leg.worker, detail))

    def _on_rolled_back(
        self, cause: m.Cause, worker: int, detail: str, loss: m.Cause | None, lost: UpstreamLeg | None
    ) -> None:
        """``loss``, ``lost``: an instance is gone, or says nothing, before it has ended the attempt."""
        if lost is None or loss is None:
            self._ask_again(cause, worker, detail)
        elif self._may_follow(loss):
            self._ask_again(loss, lost.worker, detail)
        else:
            self._end_over(cause, detail)

    def _ask_again(self, cause: m.Cause, worker: int, detail: str) -> None:
        context, config = self._context, self._context.config
        attempt, self.attempt = self.attempt, None
        assert attempt is not None
        self._move_to(ASKING)
        self._cancel_candidate()
        attempt.end_attempt(m.Outcome.UPSTREAM_LOST)
        if not self._is_shown:
            self.response.forget_head()
        self._over_times = count_over(cause, self._over_times, got_on=self._got_on)
        context.counters.count_event("retries_total", reason=cause.label)
        self._deadline_s = context.now_s() + config.dispatch_timeout_s
        over = self._describe_over(cause, attempt, worker, detail)
        body = self._kept.raw if context.workers.wants_bodies else None
        self.ask = msgspec.structs.replace(self.ask, over=over, body=body)
        self.ask_control()

    def _describe_over(self, cause: m.Cause, attempt: Attempt, worker: int, detail: str) -> m.Over:
        last = self.ask.over
        lost_with, refused_by, avoid = ((), (), ()) if last is None else (last.lost_with, last.refused_by, last.avoid)
        if cause in LOSSES:
            lost_with = (*lost_with, worker)
        elif cause is _FULL:
            refused_by = (*refused_by, worker)
        elif cause is _NOT_SENT:
            avoid = (*avoid, worker)
        return m.Over(
            attempt.assign.attempt,
            cause,
            self._context.now_s(),
            self._is_shown,
            self.response.delivered_tokens,
            lost_with,
            refused_by,
            avoid,
            detail[:DETAIL_CHARS],
        )

    def _end_over(self, cause: m.Cause, detail: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        """The last attempt is over, and no other one follows."""
        if self.response.has_refusal and not self._is_shown and cause in (_FULL, _NOT_SENT, _TRANSFER_FAILED):
            self.response.forward_refusal(functools.partial(self._end_request, m.Outcome.INSTANCE_REFUSED))
            return
        rule = RULES[cause] if RULES[cause].code else RULES[_LOST]
        outcome = m.Outcome.PREFILL_FAILED if cause is _TRANSFER_FAILED else m.Outcome.UPSTREAM_LOST
        number = f", attempt {self.last_attempt}" if self.last_attempt > 1 else ""
        self._fail_request(outcome, rule.status, rule.code, f"{rule.text}{number}: {detail}", headers)

    # -- a candidate beside the present attempt ----------------------------------------------------------------------

    def _try_candidate(self, assign: m.Assign) -> None:
        """The request is paused at its instance: when everything before the pause is here, another one is asked to go
        on.

        From its first event on, the candidate is the answer. The stream that was left is read to its end and thrown
        away. Tokens that come behind the pause win: the first instance has gone on by itself, and the candidate is
        dropped. Where the request is not what the control plane takes it for, nothing changes.
        """
        if self.state is not FORWARDING or self._candidate is not None:
            return
        self.last_attempt = assign.attempt
        legs = (ResumingLeg(self, assign.decode, self.response),)
        self._candidate = Attempt(self._context, self, self.ask, assign, legs)
        if not self._kept.is_kept or not self._is_movable(shown=True):
            self._drop_candidate(_REFUSED, "its stream cannot go on elsewhere any more")
            return
        self.response.is_watched = True
        self.on_more_tokens()

    def on_more_tokens(self) -> None:
        candidate, marked = self._candidate, self.response.marked
        if candidate is None or candidate.assign.held_tokens is None or marked is None:
            return
        behind = len(marked.ids) - candidate.assign.held_tokens
        if behind > 0:
            self._drop_candidate(_RESUMED, "it has gone on where it was paused")
        elif behind == 0 and not candidate.has_begun and not candidate.connect_legs():
            self._drop_candidate(_NOT_SENT, "the control plane named an instance that is not known")

    def _drop_candidate(self, cause: m.Cause, detail: str) -> None:
        assert self._candidate is not None
        number = self._candidate.assign.attempt
        self._cancel_candidate()
        self._context.send_to_control(m.Dropped(self.ask.rid, number, cause, detail[:DETAIL_CHARS]))

    def _cancel_candidate(self) -> tuple[int, ...]:
        """Nobody is told. Returns the instances that were told to abort."""
        candidate, self._candidate, self.response.is_watched = self._candidate, None, False
        return () if candidate is None else candidate.end_attempt(m.Outcome.UPSTREAM_LOST)

    # -- whether it can go on behind what the client has -------------------------------------------------------------

    def _judge_movable(self) -> bool:
        """True if its body is to be kept for an attempt elsewhere whatever becomes of this one, and is kept."""
        if not self._context.workers.migration:
            return False
        if self._movable is None:
            self._movable = judge_request(self.ask, self._kept.body, self._kept.raw)
            if isinstance(self._movable, Unmovable):
                self._set_unmovable(self._movable)
        if isinstance(self._movable, Tags) and not self._kept.try_keep():
            self._set_unmovable(Unmovable.KEPT_BYTES)
        return isinstance(self._movable, Tags)

    def _set_unmovable(self, reason: Unmovable) -> None:
        self._movable = reason
        self._context.counters.count_event("unmovable_total", reason=reason.value)

    def _is_movable(self, *, shown: bool) -> bool:
        """``shown``: the client has got something of the answer, which must say its token ids then."""
        if not isinstance(self._movable, Tags):
            return False
        return not shown or (self.response.marked is not None and self.response.marked.can_go_on)

    def _begin_stream(self, attempt: Attempt) -> Tags | None:
        """Its first event may come from this attempt. Returns the tags that mark the stream; None: it is none, or its
        instances cannot."""
        movable = self._movable
        if not isinstance(movable, Tags) or not self.ask.stream:
            return None
        workers = [self._context.workers.find_worker(leg.worker) for leg in attempt.legs]
        if not all(worker is not None and worker.hops for worker in workers):
            self._context.counters.count_event("unmovable_total", reason=Unmovable.INSTANCE.value)
            return None
        self.response.marked = MarkedStreamReader(self._context.kept, wants_usage=movable.wants_usage)
        self._first_rid = rid_at_instance(self.ask.rid, attempt.assign.attempt)
        return movable

    def _tags_of_rest(self) -> Tags:
        movable, marked = self._movable, self.response.marked
        assert isinstance(movable, Tags) and marked is not None
        return movable.for_rest(marked.ids, seen=marked.seen, prompt=marked.prompt, answer_id=self._first_rid)

    # -- reports to the control plane --------------------------------------------------------------------------------

    def _report_progress(
        self, attempt: Attempt, milestone: m.Milestone, *, movable: bool = False, gap_s: float | None = None
    ) -> None:
        number, now_s = attempt.assign.attempt, self._context.now_s()
        progress = m.Progress(self.ask.rid, milestone, now_s, movable, number, gap_s)
        attempt.progress.append(progress)
        self._context.send_to_control(progress)

    def _report_failure(self, leg: UpstreamLeg, kind: m.FailureKind, detail: str) -> None:
        self._context.send_to_control(m.Failure(leg.worker, kind, detail[:DETAIL_CHARS], self.ask.rid))

    def describe_open(self) -> m.OpenRequest | None:
        """For a control plane that has just started, which knows nothing of a candidate: what is paused goes on by
        itself. None where it is to be asked first."""
        self._cancel_candidate()
        if self.attempt is None:
            return None
        assign = self.attempt.assign
        if len(self.attempt.legs) == 1:  # whoever has handed its KV cache over holds nothing of it any more
            assign = msgspec.structs.replace(assign, prefill=None, held_tokens=None)
        tokens, progress = self.response.delivered_tokens, tuple(self.attempt.progress)
        return m.OpenRequest(self.ask, assign, progress, tokens, self.last_attempt)

    # -- what ends it from outside -----------------------------------------------------------------------------------

    def on_disconnect(self, detail: str) -> None:
        self._end_request(m.Outcome.CLIENT_GONE, self.response.forwarded_status, detail)

    def set_paused(self, paused: bool) -> None:
        self._paused = paused
        if not paused:
            self._deadline_s = self._context.now_s() + self._context.config.stall_timeout_s
        if self.attempt is not None and self.attempt.response_leg.connection is not None:
            self.attempt.response_leg.connection.set_paused(paused)

    def on_abort(self, abort: m.Abort, outcome: m.Outcome = m.Outcome.ABORTED) -> None:
        """An instance that is dead or silent is nothing to a request that has left it."""
        attempt, worker = self.attempt, abort.worker
        if worker is not None:
            if attempt is None or all(leg.worker != worker for leg in attempt.legs):
                return
            runs = self.state in (WAITING, FORWARDING)
            if abort.silent:
                if runs and self._stands_still() and self._may_follow(_SILENT):
                    self._ask_again(_SILENT, worker, abort.message)
                return
            cause = _LOST if runs else _NOT_SENT
            if (runs or self.state is CONNECTING) and self._may_follow(cause):
                self._ask_again(cause, worker, abort.message)
                return
        self._fail_request(outcome, abort.status, abort.code, abort.message)

    def _stands_still(self) -> bool:
        last_s = self.response.last_s
        return self.state is not FORWARDING or last_s is None or self._context.now_s() - last_s >= STILL_S

    def check_time_limits(self, now_s: float) -> None:
        """Called a few times a second. A client that does not read is the client connection's matter."""
        config, over, last_s = self._context.config, self.ask.over, self.response.last_s
        if now_s - self.ask.arrived_s > config.request_timeout_s:
            self._time_out(f"not done within {config.request_timeout_s:g} s")
        elif now_s <= self._deadline_s or self._paused:
            return
        elif self.state is ASKING and over is None:
            text, headers = "no instance was assigned in time", responses.retry_after(1)
            self._fail_request(m.Outcome.NO_CONTROL, 503, "not_dispatched", text, headers)
        elif self.state is ASKING and over is not None:
            self._end_over(over.cause, over.detail)
        elif self._holds and self.state is WAITING:
            self._forward_response()
        elif self._refusal is not None and self.state is WAITING:
            status, detail = self._refusal
            self._fail_request(
                m.Outcome.PREFILL_FAILED, status, "prefill_refused", f"the prefill was refused: {detail}"
            )
        elif last_s is None and self.state is WAITING:
            self._time_out(f"no answer within {config.first_byte_timeout_s:g} s")
        elif last_s is not None and now_s > last_s + config.stall_timeout_s:
            self._time_out(f"the answer stood still for {config.stall_timeout_s:g} s")

    def _time_out(self, message: str) -> None:
        if self.attempt is not None and self.state in (WAITING, FORWARDING):  # else no instance was too slow
            self._report_failure(self.attempt.response_leg, m.FailureKind.TIMEOUT, message)
        self._fail_request(m.Outcome.TIMED_OUT, 504, "timeout", message)

    # -- its end -----------------------------------------------------------------------------------------------------

    def _fail_request(
        self, outcome: m.Outcome, status: int, code: str, message: str, headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """End the request, and report why to the client."""
        if self.state is ENDED:
            return
        response = self.response
        append = response.can_append_event(None if self.attempt is None else self.attempt.response_leg.connection)
        self._end_request(outcome, response.forwarded_status or status, message)
        response.send_failure(status, code, message, headers=headers, append=append)

    def _end_request(self, outcome: m.Outcome, status: int, detail: str = "") -> None:
        """Exactly once: free the instances, tell the control plane, forget the request."""
        if self.state is ENDED:
            return
        self._move_to(ENDED)
        aborted = () if self._candidate is None else self._cancel_candidate()
        attempt = self.attempt
        if attempt is not None:
            aborted += attempt.end_attempt(outcome)
        self.response.drop_ids()
        self._kept.drop()
        self._kept.end_waiting()
        ended = self.response.make_ended(outcome, status, at_s=self._context.now_s(), aborted=aborted, detail=detail)
        self._on_end(self, ended)
        self.attempt = None  # it points back here; without the cycle, both are freed at once
