"""One dispatched request: from the question to the control plane to the last byte for the client.

    ASKING ──assign──► CONNECTING ──all connected──► WAITING ──first byte──► FORWARDING ──last byte──► ENDED
       ▲                   │ no connection: nothing was sent, ask again  │ KV transfer failed, or an instance is full
       ├───────────────────┘                                             ▼
       └──────────────────── all instances have ended it ────────── ROLLING_BACK
                                             (from every state: failure, time limit, abort, client gone ──► ENDED)

With ``--migration on``, a request whose instance is lost may go on elsewhere:

    WAITING, FORWARDING ──instance lost──► MOVING ──continue, nothing was shown──► CONNECTING
                                             │ ▲ lost again        ──first event of the next hop──► FORWARDING
                                             └─┘

A pair has two legs with the same body. The decode part's answer is the client's. The prefill part's answer is read and
dropped; if it says that the prefill failed before the decode part has begun to answer, the request has failed: without
the prompt's KV the decode instance would wait for minutes. An answer that refuses the request for load is held back
until the control plane has said whether another instance is asked. Whatever ends a request, every instance that may
still work for it is told to abort.
"""

from __future__ import annotations

import functools

import msgspec

from pla_sglang.fleet.router.http import responses
from pla_sglang.fleet.router.http.head import RequestHead
from pla_sglang.fleet.router.http.json_body import Body
from pla_sglang.fleet.router.relay.attempt import Attempt
from pla_sglang.fleet.router.relay.attempt_cancellation import AttemptCancellation
from pla_sglang.fleet.router.relay.attempt_rules import may_leave_full, may_repeat_transfer, next_ask
from pla_sglang.fleet.router.relay.context import RelayContext
from pla_sglang.fleet.router.relay.forwarded_response import ForwardedResponse
from pla_sglang.fleet.router.relay.movability import Unmovable
from pla_sglang.fleet.router.relay.request_body import RequestBody
from pla_sglang.fleet.router.relay.request_life import OnEnd, RequestLife
from pla_sglang.fleet.router.relay.request_moves import RequestMoves
from pla_sglang.fleet.router.relay.request_state import ASKING, CONNECTING, FORWARDING, MOVING, ROLLING_BACK, WAITING
from pla_sglang.fleet.router.relay.response_errors import LoadRefusal, error_message, transfer_failed
from pla_sglang.fleet.router.relay.response_writer import ClientWork, ResponseWriter
from pla_sglang.fleet.router.relay.upstream_leg import PrefillLeg, PrefillResult, ResponseLeg, UpstreamLeg
from pla_sglang.fleet.router.wire import messages as m

# A bad request is refused by both instances, and decode's answer is the better one; but it must not be waited for long.
REFUSAL_GRACE_S = 0.3
# An answer that refuses a request for load is short and complete at once. One that is not is forwarded as it is.
HELD_BYTES = 65_536
HELD_S = 1.0
_WHOLE, _PREFILL, _DECODE = m.Leg
_SENT, _PREFILL_DONE, _FIRST_TOKEN = m.Milestone
_PREFILLED, _, _TRANSFER_FAILED, _REFUSED, _FULL = PrefillResult
_DEAD, _BROKEN, _ABORTED = m.LossReason.DEAD, m.LossReason.BROKEN, m.LossReason.ABORTED


class DispatchedRequest(ClientWork):
    """Made when the request's body is complete; ``ask_control`` asks where it goes.

    It is the owner of its answer (``ResponseOwner``), and observes its prefill part (``PrefillObserver``). ``moves``
    takes it to other instances.

    Args:
        raw: the body as the client sent it, counted as incoming until it is sent; ``body``: what was read of it.
        on_end: called once, with the last message about the request.
    """

    __slots__ = ("_body", "_client", "_holds", "_refusal", "life", "moves")

    def __init__(
        self,
        context: RelayContext,
        client: ResponseWriter,
        head: RequestHead,
        *,
        raw: bytes,
        body: Body,
        ask: m.Ask,
        on_end: OnEnd,
    ) -> None:
        self._client, self._body = client, body
        self.life = RequestLife(context, ask, RequestBody(context, head, raw), on_end)
        self.life.response = ForwardedResponse(client, self, ask, context.now_s)
        self.moves = RequestMoves(self.life, body)
        self._refusal: tuple[int, str] | None = None  # status and text, where prefill found the request bad
        self._holds = False

    # -- dispatch ----------------------------------------------------------------------------------------------------

    def ask_control(self) -> None:
        """Asks control where it goes, or goes on. Again, where the control plane has restarted and has not answered."""
        life = self.life
        question = life.ask if life.state is ASKING else life.hops.question
        if question is not None:
            life.context.send_to_control(question)

    def on_assign(self, assign: m.Assign) -> None:
        """Where it goes, or goes on from the beginning."""
        life = self.life
        if life.state in (ASKING, MOVING) and assign.attempt == life.ask.attempt:  # else to a former question, or late
            self._begin_attempt(assign)

    def _begin_attempt(self, assign: m.Assign) -> None:
        """The client has seen nothing of the request."""
        life = self.life
        life.move_to(CONNECTING)
        self._refusal, self._holds = None, False
        legs: tuple[ResponseLeg] | tuple[ResponseLeg, PrefillLeg]
        plain = not self._client.understands_chunks
        if assign.prefill is None:
            legs = (ResponseLeg(_WHOLE, assign.decode, life.response, plain=plain),)
        else:
            decode = ResponseLeg(_DECODE, assign.decode, life.response, plain=plain)
            legs = (decode, PrefillLeg(assign.prefill, self))
        life.attempt = Attempt(
            life.context, assign, legs, on_connected=self._send_attempt, on_unreachable=self._on_unreachable
        )
        if not life.attempt.connect_legs():
            text = "the control plane named an instance that is not known"
            life.fail_request(m.Outcome.NO_CONTROL, 503, "no_worker", text)

    def on_refuse(self, refuse: m.Refuse) -> None:
        life = self.life
        if life.state is not ASKING or refuse.attempt != life.ask.attempt:
            return
        if life.ask.refused_by:
            self._end_refused()
        else:
            headers = responses.retry_after(refuse.retry_after_s)
            life.fail_request(m.Outcome.REFUSED, refuse.status, refuse.code, refuse.message, headers)

    def on_abort(self, abort: m.Abort, outcome: m.Outcome = m.Outcome.ABORTED) -> None:
        life = self.life
        if abort.silent and abort.worker is not None:
            self.moves.on_silence(abort.worker, abort.message)
        elif abort.worker is None or not self.moves.on_death(abort.worker, abort.message):
            life.fail_request(outcome, abort.status, abort.code, abort.message)

    def _on_unreachable(self, leg: ResponseLeg | PrefillLeg, why: str) -> None:
        life = self.life
        assert life.attempt is not None
        life.report_failure(leg, m.FailureKind.CONNECT, why)
        life.attempt.return_connections()
        if len(life.ask.excluded) + 1 >= life.context.config.connect_attempts:
            life.fail_request(
                m.Outcome.UPSTREAM_LOST, 502, "upstream_unreachable", f"no instance could be reached: {why}"
            )
            return
        self._ask_again(m.RetryReason.NOT_SENT, why, excluded=(leg.worker,))

    def _ask_again(self, reason: m.RetryReason, detail: str, **instances: tuple[int, ...]) -> None:
        """The attempt is over, no instance holds anything of it, and the client has not got a byte.

        ``instances``: ``excluded`` or ``refused_by``, as in ``next_ask``.
        """
        life = self.life
        context = life.context
        life.move_to(ASKING)
        context.counters.count_event("retries_total", reason=reason.name.lower())
        life.forget_attempt()
        body = life.kept.raw if context.workers.wants_bodies else None
        life.ask = next_ask(life.ask, reason, detail, body=body, **instances)
        life.deadline_s = context.now_s() + context.config.dispatch_timeout_s
        self.ask_control()

    def _send_attempt(self) -> None:
        life = self.life
        attempt, context, ask, kept = life.attempt, life.context, life.ask, life.kept
        assert attempt is not None and kept.head is not None
        life.move_to(WAITING)
        life.deadline_s = context.now_s() + context.config.first_byte_timeout_s
        # A pair's transfer may fail, an instance be full or be lost, and the request be sent again.
        again = len(attempt.legs) > 1 and context.config.transfer_attempts > 1
        again = again or may_leave_full(ask, context.config)
        if life.hops.judge(ask, self._body, kept.raw) and not kept.try_keep():
            life.hops.count_unmovable(Unmovable.KEPT_BYTES)
        tags = life.hops.begin_stream(ask, attempt.assign)
        life.response.marked = life.hops.stream
        attempt.send_request(ask, kept.head, kept.raw, self._body, tags=tags)
        if not again or not kept.try_keep():
            life.drop_body()
        kept.end_waiting()
        if ask.body is not None:
            life.ask = msgspec.structs.replace(ask, body=None)
        life.report_progress(_SENT)

    # -- ResponseOwner and PrefillObserver -----------------------------------------------------------------------------

    def on_beginning(self, status: int, data: bytes, *, whole: bool) -> bool:
        life = self.life
        assert life.attempt is not None
        if life.kept.is_kept and len(life.attempt.legs) > 1 and transfer_failed(status, data):
            self._roll_back(error_message(data))
            return False
        if (
            life.response.verdict.load_refusal is LoadRefusal.FULL
            and self._can_leave_full()
            and len(data) <= HELD_BYTES
        ):
            if whole:
                life.response.keep_refusal(status)
                self._leave_full(life.attempt.response_leg, error_message(data))
            elif not self._holds:
                self._holds, life.deadline_s = True, life.context.now_s() + HELD_S
            return False
        if not whole:
            self._forward_response()
        return True

    def _forward_response(self) -> None:
        life = self.life
        life.move_to(FORWARDING)
        self._holds = False
        life.hops.note_first_events(life.response.marked)
        life.drop_body()
        life.response.begin_forwarding()
        life.report_progress(_FIRST_TOKEN)

    def on_response_done(self, status: int) -> None:
        life = self.life
        outcome, failure = life.response.verdict.judge_outcome(status)
        if failure is not None:
            assert life.attempt is not None
            life.report_failure(life.attempt.response_leg, failure, f"status {life.response.verdict.error_code}")
        life.end_request(outcome, status)

    def on_given_up(self, data: bytes) -> None:
        life, detail = self.life, error_message(data)
        attempt = life.attempt
        assert attempt is not None
        if life.state is WAITING and life.kept.is_kept and len(attempt.legs) > 1 and transfer_failed(200, data):
            self._roll_back(detail)
            return
        life.report_failure(attempt.response_leg, m.FailureKind.STATUS, detail)
        if not self.moves.go_on(_ABORTED, attempt.response_leg.worker, detail):
            life.lose_request(detail, _ABORTED)

    def on_prefill_end(self, leg: UpstreamLeg, result: PrefillResult, status: int, detail: str) -> None:
        life = self.life
        if result is _PREFILLED:
            life.report_progress(_PREFILL_DONE)
        elif result is _REFUSED:
            if life.state is WAITING:
                self._refusal = (max(status, 400), detail)
                life.deadline_s = life.context.now_s() + REFUSAL_GRACE_S
        elif result is _TRANSFER_FAILED:  # it may be decode's fault
            if life.state is WAITING:
                self._roll_back(detail)
        elif result is _FULL:
            self._on_prefill_full(leg, status, detail)
        else:
            if status >= 500:
                life.report_failure(leg, m.FailureKind.STATUS, detail)
            # Without stream SGLang answers a client's mistake with 500, too; in a stream it breaks off then.
            gave_up = life.state is WAITING and (life.ask.stream or status < 400)
            if not (gave_up and self.moves.go_on(_ABORTED, leg.worker, detail)):
                self._fail_prefill(detail)

    def _on_prefill_full(self, leg: UpstreamLeg, status: int, detail: str) -> None:
        life = self.life
        if life.state is not WAITING:
            life.report_failure(leg, m.FailureKind.FULL, detail)
            return
        life.response.keep_refusal(status, f"the prefill instance has refused the request: {detail}")
        if self._can_leave_full():
            self._leave_full(leg, detail)
        else:
            life.report_failure(leg, m.FailureKind.FULL, detail)
            self._end_refused()

    def on_leg_lost(self, leg: UpstreamLeg, kind: m.FailureKind, detail: str) -> None:
        life = self.life
        life.report_failure(leg, kind, detail)
        response = life.response
        if leg.leg is not _PREFILL and response.first_s is not None and response.marked is not None:
            end = response.marked.take_end()
            if end is not None:
                response.on_response_body(end)
                response.on_response_done()
                return
        if leg.leg is _PREFILL and life.state is not WAITING:
            return  # decode has the KV already, and answers
        why = _BROKEN if kind is m.FailureKind.BROKEN else _DEAD
        if self.moves.go_on(why, leg.worker, detail):
            return
        if leg.leg is _PREFILL and why is _DEAD:
            self._fail_prefill(detail)
        else:
            life.lose_request(detail, why)

    def _fail_prefill(self, detail: str) -> None:
        life = self.life
        if life.state is WAITING:  # else decode has the KV already, and answers
            life.fail_request(m.Outcome.PREFILL_FAILED, 502, "prefill_failed", f"the prefill failed: {detail}")

    # -- another attempt ---------------------------------------------------------------------------------------------

    def _can_leave_full(self) -> bool:
        life = self.life
        return life.kept.is_kept and may_leave_full(life.ask, life.context.config)

    def _leave_full(self, leg: UpstreamLeg, detail: str) -> None:
        """An instance has refused the request for load, and what it said is kept: perhaps another one has room."""
        life = self.life
        life.report_failure(leg, m.FailureKind.FULL, detail)
        on_end = functools.partial(self._on_left, detail, leg.worker)
        assert life.attempt is not None
        life.move_to(ROLLING_BACK)
        if all(member.done for member in life.attempt.legs):
            on_end(True)
        else:
            life.cancellation = AttemptCancellation(life.context, life.attempt.legs, life.current_rids(), on_end)

    def _on_left(self, detail: str, worker: int, over: bool) -> None:
        life = self.life
        life.cancellation = None
        if over:
            self._ask_again(m.RetryReason.INSTANCE_FULL, detail, refused_by=(worker,))
        else:
            self._end_refused()

    def _end_refused(self) -> None:
        """No other instance takes it: the client gets what the last one has said."""
        life = self.life
        life.response.forward_refusal(functools.partial(life.end_request, m.Outcome.INSTANCE_REFUSED))

    def _roll_back(self, detail: str) -> None:
        """The KV transfer has failed, and the client has not got a byte: another attempt, where that is allowed."""
        life = self.life
        if not life.kept.is_kept or not may_repeat_transfer(life.ask, life.context.config):
            self._fail_transfer(detail)
            return
        assert life.attempt is not None
        life.move_to(ROLLING_BACK)
        on_end = functools.partial(self._on_rolled_back, detail)
        life.cancellation = AttemptCancellation(life.context, life.attempt.legs, life.current_rids(), on_end)

    def _on_rolled_back(self, detail: str, over: bool) -> None:
        life = self.life
        life.cancellation = None
        if over:
            self._ask_again(m.RetryReason.TRANSFER_FAILED, detail)
        else:
            self._fail_transfer(detail)

    def _fail_transfer(self, detail: str) -> None:
        life = self.life
        message = f"the KV transfer from prefill to decode failed, attempt {life.ask.attempt}: {detail}"
        life.fail_request(m.Outcome.PREFILL_FAILED, 502, "transfer_failed", message)

    # -- ClientWork --------------------------------------------------------------------------------------------------

    def on_disconnect(self, detail: str) -> None:
        life = self.life
        life.end_request(m.Outcome.CLIENT_GONE, life.response.forwarded_status, detail)

    def set_paused(self, paused: bool) -> None:
        life = self.life
        life.paused = paused
        if not paused:
            life.deadline_s = life.context.now_s() + life.context.config.stall_timeout_s
        if life.attempt is not None and life.attempt.response_leg.connection is not None:
            life.attempt.response_leg.connection.set_paused(paused)

    # -- ends --------------------------------------------------------------------------------------------------------

    def check_time_limits(self, now_s: float) -> None:
        """Called a few times a second. A client that does not read is the client connection's matter."""
        life = self.life
        config = life.context.config
        if now_s - life.ask.arrived_s > config.request_timeout_s:
            life.time_out(f"not done within {config.request_timeout_s:g} s")
        elif now_s <= life.deadline_s or life.paused:
            return
        elif life.state is ASKING:
            headers = responses.retry_after(1)
            life.fail_request(m.Outcome.NO_CONTROL, 503, "not_dispatched", "no instance was assigned in time", headers)
        elif life.state is WAITING and self._holds:
            self._forward_response()
        elif life.state is WAITING and self._refusal is not None:
            status, detail = self._refusal
            life.fail_request(m.Outcome.PREFILL_FAILED, status, "prefill_refused", f"the prefill was refused: {detail}")
        elif life.state is MOVING:
            self.moves.check_response()
        elif life.state is WAITING:
            life.time_out(f"no answer within {config.first_byte_timeout_s:g} s")
        elif life.response.last_s is not None and now_s > life.response.last_s + config.stall_timeout_s:
            life.time_out(f"the answer stood still for {config.stall_timeout_s:g} s")
