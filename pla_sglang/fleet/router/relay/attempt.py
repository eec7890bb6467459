"""One attempt of a request: connects its legs, sends to all of them, reads their answers, and ends them.

A pair has two legs with the same body. The decode part's answer is the client's. The prefill part's answer is read and
dropped; it says whether the prefill has failed. An attempt that goes on with an answer has one leg: the client's body
is sent again, with tags that say what there is of the answer, and nothing of it is the client's before its first event
is complete.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Protocol

from pla_sglang.fleet.router.http.head import ResponseHead
from pla_sglang.fleet.router.http.json_body import with_members
from pla_sglang.fleet.router.relay.aborts import ABORT_TIMES_S, LINGER_S
from pla_sglang.fleet.router.relay.context import RelayContext
from pla_sglang.fleet.router.relay.forwarded_response import ForwardedResponse
from pla_sglang.fleet.router.relay.movability import Tags
from pla_sglang.fleet.router.relay.request_body import RequestBody
from pla_sglang.fleet.router.relay.request_translation import (
    age_line,
    body_of_attempt,
    head_for_worker,
    members_of_attempt,
    passed_on_lines,
    router_key_line,
)
from pla_sglang.fleet.router.relay.response_errors import (
    ABORTED,
    ERROR,
    LoadRefusal,
    error_code,
    error_message,
    given_up,
    load_refusal,
    transfer_failed,
)
from pla_sglang.fleet.router.relay.upstream_connection import UpstreamConnection
from pla_sglang.fleet.router.wire.messages import Ask, Assign, Cause, FailureKind, Outcome, Progress
from pla_sglang.fleet.router.wire.rids import rids_at_instances

SNIFF_BYTES = 16_384  # of a prefill's answer, which holds one token or an error, and of a refusal to go on
# For all answers of a cancelled attempt to end: a forward pass is not cut short, and a crowded instance is late in
# saying that it is done.
ROLL_BACK_S = 60.0
EndOfCancellation = Callable[["Cause | None", "UpstreamLeg | None"], None]  # see ``Attempt.cancel_legs``


class AttemptOwner(Protocol):
    """The request that an attempt belongs to; two of its attempts may be under way."""

    def on_connected(self, attempt: Attempt) -> None:
        """Every leg has a connection."""

    def on_unreachable(self, attempt: Attempt, leg: UpstreamLeg, why: str) -> None:
        """A leg cannot get a connection. Nothing was sent to any instance."""

    def on_prefill_end(self, leg: UpstreamLeg, cause: Cause | None, status: int, detail: str) -> None:
        """The prefill's answer is complete. Nothing more is called.

        ``cause``: None: it is done; REFUSED: the request is bad, or would be refused everywhere; ABORTED: an error of
        the instance, or an abort. ``status``: as status or in an error of the stream; below 400 where an error names
        none. ``detail``: what the error says.
        """

    def on_first_events(self, leg: UpstreamLeg, events: bytes) -> None:
        """An attempt that goes on with an answer has begun with ``events``, the last of which may not be complete."""

    def on_not_resumed(self, leg: UpstreamLeg, cause: Cause, kind: FailureKind | None, detail: str) -> None:
        """It is over before its first event. ``kind``: what its instance is to be reported for."""

    def on_leg_lost(self, leg: UpstreamLeg, kind: FailureKind, detail: str) -> None:
        """The connection is closed, and its answer was not complete. Nothing more is called."""


class UpstreamLeg:
    """One leg's connection, and what comes on it (``ResponseSink``).

    Attributes:
        done: the answer is complete, so its instance holds nothing of the request any more.
        plain: as in ``ResponseSink``.
    """

    __slots__ = ("connection", "done", "owner", "plain", "worker")
    owner: AttemptOwner

    def __init__(self, owner: AttemptOwner, worker: int, *, plain: bool) -> None:
        self.owner, self.worker, self.plain = owner, worker, plain
        self.connection: UpstreamConnection | None = None
        self.done = False

    def on_head(self, head: ResponseHead) -> None:
        raise NotImplementedError

    def on_body(self, data: bytes) -> None:
        raise NotImplementedError

    def on_done(self) -> None:
        raise NotImplementedError

    def on_lost(self, kind: FailureKind, detail: str) -> None:
        """The connection stays here: it still knows whether the answer broke between two events."""
        self.owner.on_leg_lost(self, kind, detail)


class DiscardedResponse:
    """Reads the rest of a leg's answer, which nobody gets any more (``ResponseSink``).

    Args:
        on_end: called once: whether the answer is complete, else it is lost.
    """

    __slots__ = ("_leg", "_on_end")
    plain = False

    def __init__(self, leg: UpstreamLeg, on_end: Callable[[UpstreamLeg, bool], None]) -> None:
        assert leg.connection is not None
        self._leg, self._on_end = leg, on_end
        leg.connection.replace_sink(self)
        leg.connection.set_paused(False)  # how fast the client reads does not matter any more
        del leg.owner  # the request may be over long before this is

    def on_head(self, head: ResponseHead) -> None:
        """Whatever it says."""

    def on_body(self, data: bytes) -> None:
        """Whatever it says."""

    def on_done(self) -> None:
        self._leg.done, self._leg.connection = True, None
        self._on_end(self._leg, True)

    def on_lost(self, kind: FailureKind, detail: str) -> None:
        self._on_end(self._leg, False)


class ResponseLeg(UpstreamLeg):
    """The leg whose answer the client gets: that of decode, or of a unified instance."""

    __slots__ = ("_response",)

    def __init__(self, owner: AttemptOwner, worker: int, response: ForwardedResponse, *, plain: bool) -> None:
        super().__init__(owner, worker, plain=plain)
        self._response = response

    def on_head(self, head: ResponseHead) -> None:
        self.plain = self._response.on_response_head(head) or self.plain

    def on_body(self, data: bytes) -> None:
        self._response.on_response_body(data)

    def on_done(self) -> None:
        self.done, self.connection = True, None
        self._response.on_response_done()


class ResumingLeg(ResponseLeg):
    """The leg of an attempt that goes on with an answer. From its first event on, that comes from here."""

    __slots__ = ("_beginning", "_has_begun", "_status")

    def __init__(self, owner: AttemptOwner, worker: int, response: ForwardedResponse) -> None:
        super().__init__(owner, worker, response, plain=True)
        self._status, self._beginning, self._has_begun = 0, b"", False

    def on_head(self, head: ResponseHead) -> None:
        self._status = head.status

    def on_body(self, data: bytes) -> None:
        if self._has_begun:
            super().on_body(data)
            return
        self._beginning += data[: SNIFF_BYTES - len(self._beginning)] if self._status != 200 else data
        if self._status != 200 or b"\n\n" not in self._beginning:
            return
        events, self._beginning = self._beginning, b""
        if error_code(0, events) is not None or ABORTED.search(events):
            self._turn_down(events)
            return
        self._has_begun = True
        self.owner.on_first_events(self, events)

    def on_done(self) -> None:
        if self._has_begun:
            super().on_done()
        else:
            self.done, self.connection = True, None
            self._turn_down(self._beginning)

    def on_lost(self, kind: FailureKind, detail: str) -> None:
        if self._has_begun:
            super().on_lost(kind, detail)
        else:
            self.owner.on_not_resumed(self, Cause.LOST, kind, detail)

    def _turn_down(self, said: bytes) -> None:
        """Its instance has said why it does not go on."""
        code = error_code(self._status if self._status != 200 else 0, said)
        if load_refusal(code, said) is LoadRefusal.FULL:
            self.owner.on_not_resumed(self, Cause.FULL, FailureKind.FULL, error_message(said))
            return
        kind = FailureKind.STATUS if code is None or code >= 500 else None
        cause = Cause.ABORTED if self._status == 200 and given_up(said) else Cause.REFUSED
        self.owner.on_not_resumed(self, cause, kind, error_message(said) or "an empty answer")


class PrefillLeg(UpstreamLeg):
    """The prefill part of a pair. Nobody gets its answer; it is read to see whether the prefill failed."""

    __slots__ = ("_beginning", "_status")

    def __init__(self, owner: AttemptOwner, worker: int) -> None:
        super().__init__(owner, worker, plain=True)
        self._status, self._beginning = 0, b""

    def on_head(self, head: ResponseHead) -> None:
        self._status = head.status

    def on_body(self, data: bytes) -> None:
        if len(self._beginning) < SNIFF_BYTES:
            self._beginning += data[:SNIFF_BYTES]

    def on_done(self) -> None:
        self.done, self.connection = True, None
        beginning, self._beginning = self._beginning, b""
        cause, status, detail = None, self._status, ""
        if status >= 400 or b'"abort"' in beginning or b'"error"' in beginning:  # as ABORTED and ERROR want it
            cause, status = self._judge_end(beginning)
            detail = error_message(beginning)
        self.owner.on_prefill_end(self, cause, status, detail)

    def _judge_end(self, beginning: bytes) -> tuple[Cause | None, int]:
        code = error_code(self._status, beginning)
        status = self._status if code is None else code
        if transfer_failed(self._status, beginning):
            return Cause.TRANSFER_FAILED, status
        refusal = load_refusal(code, beginning)
        if refusal is not None:
            return (Cause.FULL if refusal is LoadRefusal.FULL else Cause.REFUSED), status
        if status >= 500 or (code is None and ABORTED.search(beginning)):
            return Cause.ABORTED, status
        if code is not None or ERROR.search(beginning):
            return Cause.REFUSED, status
        return None, status


class Attempt:
    """The legs of one ``Assign``. That whose answer the client gets is the first; a prefill part is behind it.

    Attributes:
        progress: what was reported of it.
        has_begun: it was told to connect.
        is_sent: instances may have got it.
    """

    __slots__ = (
        "_ask",
        "_context",
        "_owner",
        "_released",
        "_timers",
        "assign",
        "has_begun",
        "is_sent",
        "legs",
        "progress",
        "response_leg",
    )

    def __init__(
        self,
        context: RelayContext,
        owner: AttemptOwner,
        ask: Ask,
        assign: Assign,
        legs: tuple[ResponseLeg] | tuple[ResponseLeg, PrefillLeg],
    ) -> None:
        self._context, self._owner, self._ask, self.assign = context, owner, ask, assign
        self.legs, self.response_leg = legs, legs[0]
        self.progress: list[Progress] = []
        self._timers: tuple[asyncio.TimerHandle, ...] = ()  # of a cancellation
        self._released = self.has_begun = self.is_sent = False

    @property
    def rids(self) -> Sequence[str]:
        """Under which its instances know the request."""
        ask = self._ask
        return rids_at_instances(ask.rid, ask.rids, prompts=ask.prompts, attempt=self.assign.attempt)

    # -- connect -----------------------------------------------------------------------------------------------------

    def connect_legs(self) -> bool:
        """Returns False where an instance is not known."""
        self.has_begun = True
        context, absent = self._context, []
        for leg in self.legs:
            worker = context.workers.find_worker(leg.worker)
            if worker is None:
                return False
            leg.connection = context.pool.take_idle(worker)
            if leg.connection is None:
                absent.append((leg, worker))
        if not absent:
            self._owner.on_connected(self)
        for leg, worker in absent:
            context.pool.open_connection(worker, functools.partial(self._on_connection, leg))
        return True

    def _on_connection(self, leg: UpstreamLeg, connection: UpstreamConnection | None, why: str) -> None:
        pool = self._context.pool
        if self._released:  # the request has ended, or goes to other instances
            if connection is not None:
                pool.give_back(connection)
            return
        if connection is None:
            self._owner.on_unreachable(self, leg, why)
            return
        leg.connection = connection
        if any(member.connection is None for member in self.legs):
            return
        for member in self.legs:  # the first may have been closed while the second was being connected
            if member.connection is not None and not member.connection.is_usable():
                worker, member.connection = member.connection.worker, None
                pool.take_connection(worker, functools.partial(self._on_connection, member))
                return
        self._owner.on_connected(self)

    # -- send --------------------------------------------------------------------------------------------------------

    def send_request(self, kept: RequestBody, *, tags: Tags | None) -> None:
        """To every leg; all are connected."""
        self.is_sent = True
        ask, body, request = self._ask, kept.body, kept.head
        assert request is not None
        members = members_of_attempt(ask, self.assign, body)
        raw = body_of_attempt(kept.raw, ask, body, attempt=self.assign.attempt)
        if tags is not None:
            tagged, raw = tags.put_into(raw)
            members = b",".join(filter(None, (members, tagged)))
        front, rest = with_members(raw, members) if members else (b"", memoryview(raw))
        ids = f"x-request-id: {ask.rid}\r\ntraceparent: {ask.trace}\r\n".encode("latin-1")
        ids += age_line(self._context.now_s() - ask.arrived_s)
        keyless: bool | None = None  # of ``lines``; both instances get the same but for a key
        lines, length, own_keys = b"", len(front) + len(rest), self._context.config.checks_keys
        for leg in self.legs:
            assert leg.connection is not None
            worker = leg.connection.worker
            if keyless is not (own_keys or bool(worker.api_key)):
                keyless = own_keys or bool(worker.api_key)
                lines = passed_on_lines(request, keep_key=not keyless) + ids
            proof = router_key_line(worker.router_key) if worker.router_key else b""
            head = head_for_worker(worker, request, length, lines + proof, method="POST")
            leg.connection.send_request("POST", head + front, rest, leg)

    # -- end ---------------------------------------------------------------------------------------------------------

    def end_attempt(self, outcome: Outcome) -> tuple[int, ...]:
        """However far it has come: connections are dropped, and what may still work is aborted.

        Returns the instances that were told to abort.
        """
        self._stop_timers()
        self._released = True
        context, aborted = self._context, []
        for leg in self.legs:
            connection, leg.connection = leg.connection, None
            if not self.is_sent:
                if connection is not None:
                    context.pool.give_back(connection)
                continue
            if leg.done:
                continue
            if outcome in LINGER_S and connection is not None and connection.is_busy() and isinstance(leg, PrefillLeg):
                leg.connection = connection
                self.leave_leg(leg, LINGER_S[outcome])
                continue
            if connection is not None:
                connection.drop_connection()
            aborted.append(leg.worker)
            context.aborts.abort_repeatedly(leg.worker, self.rids)
        return tuple(aborted)

    def leave_leg(self, leg: UpstreamLeg, limit_s: float) -> None:
        """Its answer may end by itself, for so long; then it is aborted."""
        assert leg.connection is not None
        lingering = self._context.lingering
        lingering.add_leg(leg, leg.worker, leg.connection, self.rids, until_s=self._context.now_s() + limit_s)
        DiscardedResponse(leg, lingering.remove_leg)

    def cancel_legs(self, on_end: EndOfCancellation) -> None:
        """Makes sure that no instance holds anything of it, so that the request may be dispatched again.

        Who has not answered completely is told to abort, and its answer is waited for. An abort that is still on its
        way then hits nothing: the next attempt has another id. ``on_end`` is called once, unless the attempt is ended
        before: with None if all instances have answered completely, else with a leg that has not, and whether its
        instance is lost or silent: what it still holds is not known.
        """
        if all(leg.done for leg in self.legs):
            on_end(None, None)
            return
        end = functools.partial(self._end_cancellation, on_end)
        for leg in self.legs:
            if not leg.done:
                DiscardedResponse(leg, functools.partial(self._on_cancelled_leg, end))
        call_later = self._context.call_later
        aborts = [call_later(at_s, self._abort_legs) for at_s in ABORT_TIMES_S]
        self._timers = (*aborts, call_later(ROLL_BACK_S, self._give_up_cancellation, end))

    def _abort_legs(self) -> None:
        for leg in self.legs:
            if not leg.done:
                self._context.aborts.send_abort(leg.worker, self.rids)

    def _on_cancelled_leg(self, end: EndOfCancellation, leg: UpstreamLeg, complete: bool) -> None:
        if not complete:
            end(Cause.LOST, leg)
        elif all(member.done for member in self.legs):
            end(None, None)

    def _give_up_cancellation(self, end: EndOfCancellation) -> None:
        end(Cause.SILENT, next(leg for leg in self.legs if not leg.done))

    def _end_cancellation(self, on_end: EndOfCancellation, cause: Cause | None, leg: UpstreamLeg | None) -> None:
        self._stop_timers()
        on_end(cause, leg)

    def _stop_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers = ()
