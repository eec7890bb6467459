"""One dispatched request: from the question to the control plane to the last byte for the client.

    ASKING ──assign──► CONNECTING ──all connected──► WAITING ──first byte──► FORWARDING ──last byte──► ENDED
       ▲                   │ no connection: nothing was sent, ask again  │ KV transfer failed
       ├───────────────────┘                                             ▼
       └───────────────────── both instances have ended it ───────── RECALLING
                                             (from every state: failure, time limit, abort, client gone ──► ENDED)

A pair has two legs with the same body. The decode leg's answer is the client's. The prefill leg's answer is read and
dropped; if it says that the prefill failed before the decode leg has begun to answer, the request has failed: without
the prompt's KV the decode instance would wait for minutes. Whatever ends a request, every instance that may still
work for it is told to abort.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec

from pla_sglang.router.body import Body, with_members
from pla_sglang.router.http import answers
from pla_sglang.router.http.head import AnswerHead, RequestHead
from pla_sglang.router.legs import OK, LegSink, release, transfer_failed
from pla_sglang.router.messages import (
    Abort,
    Again,
    Ask,
    Assign,
    Ended,
    Failure,
    FailureKind,
    Leg,
    OpenRequest,
    Outcome,
    Refuse,
    Stage,
    Step,
)
from pla_sglang.router.recall import Recall
from pla_sglang.router.request import body_of_attempt, head_to, header_lines, members_of, passed_on, rids_at_instances
from pla_sglang.router.states import ASKING, CONNECTING, ENDED, FORWARDING, LEGAL, RECALLING, WAITING, State
from pla_sglang.router.upstream import UpstreamConnection

if TYPE_CHECKING:
    from pla_sglang.router.front import ClientConnection
    from pla_sglang.router.relay import Relay

# A bad request is refused by both instances, and decode's answer is the better one; but it must not be waited for long.
REFUSAL_GRACE_S = 0.3
DETAIL_CHARS = 300  # of what an instance says
# Named once: CPython 3.11 takes 0.2 us to look a member up in its class, and every request meets these.
_WHOLE, _PREFILL, _DECODE = Leg
_SENT, _PREFILL_DONE, _FIRST_TOKEN = Step


class Exchange:
    """Made when the request's body is complete; ``start`` asks where it goes."""

    __slots__ = (
        *("_answer", "_client", "_deadline_s", "_events", "_first_s", "_head", "_kept", "_last_s", "_legs"),
        *("_output_bytes", "_paused", "_recall", "_refusal", "_relay", "_state", "_steps", "_streams"),
        *("ask", "assign", "body", "raw"),
    )

    def __init__(
        self, relay: Relay, client: ClientConnection, head: RequestHead, *, raw: bytes, body: Body, ask: Ask
    ) -> None:
        self._relay, self._client = relay, client
        self._head: RequestHead | None = head
        self.raw, self.body, self.ask = raw, body, ask
        self.assign: Assign | None = None
        self._state = ASKING
        self._legs: list[LegSink] = []
        self._answer: AnswerHead | None = None
        self._refusal: tuple[int, str] | None = None  # status and text, where prefill found the request bad
        self._steps: list[Stage] = []
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._output_bytes = self._events = 0
        self._streams = self._paused = self._kept = False
        self._recall: Recall | None = None
        self._deadline_s = 0.0

    # -- asking ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._deadline_s = self.ask.arrived_s + self._relay.config.dispatch_timeout_s
        self._relay.say(self.ask)

    def ask_again_of_new_control(self) -> None:
        """The control plane has restarted: it knows nothing of questions that it has not answered."""
        if self._state is ASKING:
            self._relay.say(self.ask)

    def opened(self) -> OpenRequest | None:
        """For a control plane that has just started; None where it is to be asked first."""
        if self.assign is None or self._state in (ASKING, ENDED):
            return None
        return OpenRequest(self.ask, self.assign, tuple(self._steps))

    def on_assign(self, assign: Assign) -> None:
        if self._state is not ASKING or assign.attempt != self.ask.attempt:
            return  # an answer to a former question, or too late
        self.assign = assign
        self._to(CONNECTING)
        relay, role = self._relay, _WHOLE if assign.prefill is None else _DECODE
        legs = self._legs = [LegSink(self, role, assign.decode, plain=not self._client.understands_chunks)]
        if assign.prefill is not None:
            legs.append(LegSink(self, _PREFILL, assign.prefill, plain=False))
        absent = []
        for leg in legs:
            worker = relay.worker(leg.worker)
            if worker is None:
                text = "the control plane named an instance that is not known"
                self._fail(Outcome.NO_CONTROL, 503, "no_worker", text)
                return
            leg.connection = relay.pool.idle(worker)
            if leg.connection is None:
                absent.append((leg, worker))
        if not absent:
            self._send()
        for leg, worker in absent:
            relay.pool.connect(worker, functools.partial(self._connected, assign.attempt, leg))

    def on_refuse(self, refuse: Refuse) -> None:
        if self._state is ASKING and refuse.attempt == self.ask.attempt:
            headers = answers.retry_after(refuse.retry_after_s)
            self._fail(Outcome.REFUSED, refuse.status, refuse.code, refuse.message, headers)

    def _connected(self, attempt: int, leg: LegSink, got: UpstreamConnection | None, why: str) -> None:
        if self._state is not CONNECTING or attempt != self.ask.attempt:
            if got is not None:  # the request ended, or is on its way to others
                self._relay.pool.give(got)
            return
        if got is None:
            self._relay.say(Failure(leg.worker, leg.leg, FailureKind.CONNECT, self._relay.now_s(), self.ask.rid, why))
            self._reconsider(leg.worker, why)
            return
        leg.connection = got
        if any(one.connection is None for one in self._legs):
            return
        for one in self._legs:  # the first may have been closed while the second was being connected
            if one.connection is not None and not one.connection.usable():
                worker, one.connection = one.connection.worker, None
                self._relay.pool.take(worker, functools.partial(self._connected, attempt, one))
                return
        self._send()

    def _reconsider(self, worker: int, why: str) -> None:
        """Nothing was sent to anybody."""
        release(self._relay, self._legs, tuple, Outcome.UPSTREAM_LOST, sent=False)
        excluded = (*self.ask.excluded, worker)
        if len(excluded) >= self._relay.config.connect_attempts:
            self._fail(Outcome.UPSTREAM_LOST, 502, "upstream_unreachable", f"no instance could be reached: {why}")
            return
        self._ask_again(Again.NOT_SENT, why, excluded)

    def _ask_again(self, why: Again, detail: str, excluded: tuple[int, ...]) -> None:
        """The attempt is over, nobody has anything of it, and the client has not got a byte."""
        relay = self._relay
        self._to(ASKING)
        relay.count("retries_total", reason=why.name.lower())
        self._legs, self._steps, self._answer, self._refusal, self._streams = [], [], None, None, False
        self.assign = None
        body = self.raw if relay.wants_bodies else None
        told = {"again": why, "detail": detail, "reached": self.ask.reached + (why is Again.TRANSFER_FAILED)}
        attempt = self.ask.attempt + 1
        self.ask = msgspec.structs.replace(self.ask, attempt=attempt, excluded=excluded, body=body, **told)
        self._deadline_s = relay.now_s() + relay.config.dispatch_timeout_s
        relay.say(self.ask)

    def _send(self) -> None:
        assign, relay, ask, request = self.assign, self._relay, self.ask, self._head
        assert assign is not None and request is not None
        members = members_of(ask, assign, self.body, header_priority=ask.priority)
        raw = body_of_attempt(self.raw, ask, self.body)
        front, rest = with_members(raw, members) if members else (b"", memoryview(raw))
        self._to(WAITING)
        self._deadline_s = relay.now_s() + relay.config.first_byte_timeout_s
        own = b"x-request-id: %s\r\ntraceparent: %s\r\n" % (ask.rid.encode("latin-1"), ask.trace.encode("latin-1"))
        keyless: bool | None = None  # of ``lines``; both instances get the same but for a key
        lines, length, key = b"", len(front) + len(rest), relay.config.api_key
        for leg in self._legs:
            assert leg.connection is not None
            worker = leg.connection.worker
            if keyless is not bool(key or worker.api_key):
                keyless = bool(key or worker.api_key)
                lines = passed_on(request, keep_key=not keyless) + own
            extra = assign.prefill_headers if leg.leg is _PREFILL else assign.decode_headers
            of_leg = lines + header_lines(extra) if extra else lines
            leg.connection.send("POST", head_to(worker, request, length, of_leg) + front, rest, leg)
        # A pair's transfer may fail, and the request be sent again; from a unified instance nothing comes back.
        if len(self._legs) > 1 and relay.config.transfer_attempts > 1 and (self._kept or relay.keep(len(self.raw))):
            self._kept = True
        else:
            self._drop_body()
        if ask.body is not None:
            self.ask = msgspec.structs.replace(ask, body=None)
        self._step(_SENT)

    def _drop_body(self) -> None:
        """Nothing is sent again from here on."""
        if self._kept:
            self._relay.keep(-len(self.raw))
        self._kept, self.raw, self._head = False, b"", None

    # -- the answer --------------------------------------------------------------------------------------------------

    def on_answer_head(self, head: AnswerHead) -> None:
        """Kept until there is something to go with it: one segment for both, and errors still get their own status."""
        self._answer = head
        self._streams = (head.get(b"content-type") or b"").startswith(b"text/event-stream")

    def on_answer_body(self, data: bytes) -> None:
        if self._kept and self._answer is not None and transfer_failed(self._answer.status, data):
            self._take_back(data[:DETAIL_CHARS].decode("utf-8", "replace"))
            return
        self._last_s = self._relay.now_s()
        self._output_bytes += len(data)
        if self._streams:
            self._events += data.count(b"\n\n")
        if self._state is FORWARDING:
            self._client.write(data)
            return
        self._to(FORWARDING)
        self._drop_body()
        self._first_s = self._last_s
        assert self._answer is not None
        self._client.write(self._client.head_of(self._answer, self.ask.rid) + data)
        self._step(_FIRST_TOKEN)

    def on_answer_done(self) -> None:
        answer = self._answer
        assert answer is not None
        if self._state is WAITING:  # an answer without a body
            self._client.write(self._client.head_of(answer, self.ask.rid))
        outcome = OK
        if answer.status >= 400:
            outcome = Outcome.CLIENT_ERROR if answer.status < 500 else Outcome.UPSTREAM_ERROR
        if answer.status >= 500:
            self._report(self._legs[0], FailureKind.STATUS, f"status {answer.status}")
        self._end(outcome, answer.status)
        self._client.done(reusable=answer.length is not None or answer.chunked or answer.status in (204, 304))

    def on_answer_lost(self, leg: LegSink, kind: FailureKind, detail: str) -> None:
        self._report(leg, kind, detail)
        self._fail(Outcome.UPSTREAM_LOST, 502, "upstream_lost", f"the instance that worked on this is lost: {detail}")

    # -- the prefill leg ---------------------------------------------------------------------------------------------

    def on_prefill_done(self, leg: LegSink) -> None:
        if self._state is ENDED:
            self._relay.lingering.pop(leg, None)
        else:
            self._step(_PREFILL_DONE)

    def on_prefill_failed(self, leg: LegSink, kind: FailureKind | None, detail: str, *, transfer: bool) -> None:
        if self._state is ENDED:
            self._relay.lingering.pop(leg, None)
            return
        if kind is not None:
            self._report(leg, kind, detail)
        if self._state is WAITING and transfer:
            self._take_back(detail)
        elif self._state is WAITING:  # else decode has the KV already, and answers
            self._fail(Outcome.PREFILL_FAILED, 502, "prefill_failed", f"the prefill failed: {detail}")

    def _take_back(self, detail: str) -> None:
        """The KV transfer has failed, and the client has not got a byte: another attempt, where that is allowed."""
        if not self._kept or self.ask.reached + 1 >= self._relay.config.transfer_attempts:
            self._transfer_failed(detail)
            return
        self._to(RECALLING)
        rids = rids_at_instances(self.ask, self.body)
        self._recall = Recall(self._relay, self._legs, rids, functools.partial(self._recalled, detail))
        self._recall.start()

    def _recalled(self, detail: str, over: bool) -> None:
        self._recall = None
        if over:
            self._ask_again(Again.TRANSFER_FAILED, detail, self.ask.excluded)
        else:
            self._transfer_failed(detail)

    def _transfer_failed(self, detail: str) -> None:
        message = f"the KV transfer from prefill to decode failed, attempt {self.ask.attempt}: {detail}"
        self._fail(Outcome.PREFILL_FAILED, 502, "transfer_failed", message)

    def on_prefill_refused(self, leg: LegSink, status: int, detail: str) -> None:
        if self._state is ENDED:
            self._relay.lingering.pop(leg, None)
        elif self._state is WAITING:
            self._refusal = (status, detail)
            self._deadline_s = self._relay.now_s() + REFUSAL_GRACE_S

    # -- ends --------------------------------------------------------------------------------------------------------

    def client_gone(self, detail: str) -> None:
        self._end(Outcome.CLIENT_GONE, self._answer.status if self._first_s is not None and self._answer else 0, detail)

    def on_abort(self, abort: Abort, outcome: Outcome = Outcome.ABORTED) -> None:
        self._fail(outcome, abort.status, abort.code, abort.message)

    def tick(self, now_s: float) -> None:
        """Time limits; called a few times a second. A client that does not read is the client connection's matter."""
        config = self._relay.config
        if now_s - self.ask.arrived_s > config.request_timeout_s:
            self._time_out(f"not done within {config.request_timeout_s:g} s")
        elif now_s <= self._deadline_s or self._paused or self._moves(now_s):
            return
        elif self._state is ASKING:
            self._fail(
                Outcome.NO_CONTROL, 503, "not_dispatched", "no instance was assigned in time", (("retry-after", "1"),)
            )
        elif self._state is WAITING and self._refusal is not None:
            status, detail = self._refusal
            self._fail(Outcome.PREFILL_FAILED, status, "prefill_refused", f"the prefill was refused: {detail}")
        elif self._state is WAITING:
            self._time_out(f"no answer within {config.first_byte_timeout_s:g} s")
        elif self._state is FORWARDING:
            self._time_out(f"the answer stood still for {config.stall_timeout_s:g} s")

    def _moves(self, now_s: float) -> bool:
        """Whether its answer has not stood still for too long."""
        last_s = self._last_s if self._state is FORWARDING else None
        return last_s is not None and now_s <= last_s + self._relay.config.stall_timeout_s

    def _time_out(self, message: str) -> None:
        for leg in self._legs:
            if leg.leg is not _PREFILL and self._state is not CONNECTING:
                self._report(leg, FailureKind.TIMEOUT, message)
        self._fail(Outcome.TIMED_OUT, 504, "timeout", message)

    def pause(self) -> None:
        """The client's buffers are full."""
        self._paused = True
        if self._legs and self._legs[0].connection is not None:
            self._legs[0].connection.pause()

    def resume(self) -> None:
        self._paused = False
        self._deadline_s = self._relay.now_s() + self._relay.config.stall_timeout_s
        if self._legs and self._legs[0].connection is not None:
            self._legs[0].connection.resume()

    def _fail(
        self, outcome: Outcome, status: int, code: str, message: str, headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """Tell the client as well as can still be done: a status, an event at the end of its stream, or a cut."""
        if self._state is ENDED:
            return
        begun = self._first_s is not None
        decode = self._legs[0].connection if self._legs else None
        can_add = begun and self._streams and self._client.understands_chunks and decode and decode.at_boundary()
        self._end(outcome, self._answer.status if begun and self._answer else status, message)
        if not begun:
            body = answers.error_body(status, code, message)
            self._client.answer(status, body, headers=(*headers, ("x-request-id", self.ask.rid)))
        elif can_add:
            self._client.write(answers.error_event(status, code, message))
            self._client.done(reusable=True)
        else:
            self._client.cut()

    def _end(self, outcome: Outcome, status: int, detail: str = "") -> None:
        """Exactly once: free the instances, tell the control plane, forget the request."""
        if self._state is ENDED:
            return
        sent = self._state in (WAITING, RECALLING, FORWARDING)
        self._to(ENDED)
        if self._recall is not None:
            self._recall.cancel()
        self._drop_body()
        legs, self._legs = self._legs, []  # they point back here; without the cycle, a request is freed at once
        aborted = release(self._relay, legs, lambda: rids_at_instances(self.ask, self.body), outcome, sent=sent)
        now_s, counts = self._relay.now_s(), (self._output_bytes, self._events, self._first_s, self._last_s)
        self._relay.close(self, Ended(self.ask.rid, outcome, status, now_s, *counts, aborted, detail))

    def give_up(self, leg: LegSink) -> None:
        """A prefill leg whose answer should have ended by now."""
        if leg.connection is not None:
            leg.connection.drop()
        self._relay.abort_upstream(leg.worker, rids_at_instances(self.ask, self.body))

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _to(self, state: State) -> None:
        if state not in LEGAL[self._state]:
            raise RuntimeError(f"request {self.ask.rid}: {self._state.value} -> {state.value} is not allowed")
        self._state = state

    def _step(self, step: Step) -> None:
        stage = Stage(self.ask.rid, step, self._relay.now_s())
        self._steps.append(stage)
        self._relay.say(stage)

    def _report(self, leg: LegSink, kind: FailureKind, detail: str) -> None:
        self._relay.say(Failure(leg.worker, leg.leg, kind, self._relay.now_s(), self.ask.rid, detail[:DETAIL_CHARS]))
