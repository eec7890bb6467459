"""One leg of a request: the answer of one instance, and what it means for the request."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from pla_sglang.router.http.head import AnswerHead
from pla_sglang.router.messages import FailureKind, Leg, Outcome
from pla_sglang.router.upstream import UpstreamConnection

if TYPE_CHECKING:
    from pla_sglang.router.relay import Relay

_PREFILL, OK = Leg.PREFILL, Outcome.OK  # named once, as in ``states``
# How long a prefill leg may take to end its answer once decode has answered completely, by whether that went well.
LINGER_S = {OK: 5.0, Outcome.CLIENT_ERROR: 0.5}
SNIFF_BYTES = 16_384  # of a prefill's answer; it holds one token, or an error
# In JSON, quotes inside strings are escaped, so a model's words cannot look like this.
ABORTED = re.compile(rb'"(?:type|finish_reason)":\s*"abort"')
ERROR = re.compile(rb'"error":\s*\{')
# SGLang 0.5.17: Scheduler.handle_inflight_transfer_failure and handle_bootstrap_failure, and the decode side's
# pop_transferred. Whoever orders an abort causes the same message, with a reason that the second pattern finds.
_FAILED = b" failed for request rank="
_ORDERED = re.compile(rb"KVTransferError\(bootstrap_room=[^)]*\): Aborted by")


def transfer_failed(status: int, said: bytes) -> bool:
    """Whether the beginning of an answer says that the KV did not get from prefill to decode, and by nobody's order.

    Words of a model or of a client cannot look like it: in JSON their quotes are escaped.
    """
    if _FAILED not in said or _ORDERED.search(said):
        return False
    return status >= 500 or bool(ABORTED.search(said) or ERROR.search(said))


class Request(Protocol):
    """Whom a leg tells. After the end of its answer, or its loss, a leg says nothing more."""

    def on_answer_head(self, head: AnswerHead) -> None: ...

    def on_answer_body(self, data: bytes) -> None: ...

    def on_answer_done(self) -> None: ...

    def on_answer_lost(self, leg: LegSink, kind: FailureKind, detail: str) -> None: ...

    def on_prefill_done(self, leg: LegSink) -> None: ...

    def on_prefill_failed(self, leg: LegSink, kind: FailureKind | None, detail: str, *, transfer: bool) -> None:
        """``kind``: what it is to the instance's circuit breaker; ``transfer``: as ``transfer_failed``."""

    def on_prefill_refused(self, leg: LegSink, status: int, detail: str) -> None: ...

    def give_up(self, leg: LegSink) -> None:
        """The request was answered, and this leg has not ended in time."""


class LegSink:
    """One leg's connection, and what its answer means for the request.

    ``done``: the answer is complete, so its instance holds nothing of the request any more.
    """

    __slots__ = ("_sniffed", "_status", "connection", "done", "exchange", "leg", "plain", "worker")

    def __init__(self, exchange: Request, leg: Leg, worker: int, *, plain: bool) -> None:
        self.exchange, self.leg, self.worker, self.plain = exchange, leg, worker, plain
        self.connection: UpstreamConnection | None = None
        self.done = False
        self._status = 0
        self._sniffed = b""

    def on_head(self, head: AnswerHead) -> None:
        self._status = head.status
        if self.leg is not _PREFILL:
            self.exchange.on_answer_head(head)

    def on_body(self, data: bytes) -> None:
        if self.leg is not _PREFILL:
            self.exchange.on_answer_body(data)
        elif len(self._sniffed) < SNIFF_BYTES:
            self._sniffed += data[:SNIFF_BYTES]

    def on_done(self) -> None:
        self.done, self.connection = True, None
        if self.leg is not _PREFILL:
            self.exchange.on_answer_done()
            return
        said, self._sniffed = self._sniffed, b""
        if self._status < 400 and b'"abort"' not in said and b'"error"' not in said:  # as ABORTED and ERROR want it
            self.exchange.on_prefill_done(self)
            return
        detail = said[:300].decode("utf-8", "replace")
        transfer = transfer_failed(self._status, said)
        if transfer or self._status >= 500 or ABORTED.search(said):
            kind = FailureKind.STATUS if self._status >= 500 and not transfer else None  # it may be decode's fault
            self.exchange.on_prefill_failed(self, kind, f"status {self._status}: {detail}", transfer=transfer)
        elif self._status >= 400 or ERROR.search(said):
            self.exchange.on_prefill_refused(self, max(self._status, 400), detail)
        else:
            self.exchange.on_prefill_done(self)

    def on_lost(self, kind: FailureKind, detail: str) -> None:
        """The connection is closed; it still knows whether the answer broke between two events."""
        if self.leg is _PREFILL:
            self.exchange.on_prefill_failed(self, kind, detail, transfer=False)
        else:
            self.exchange.on_answer_lost(self, kind, detail)


def release(
    relay: Relay, legs: Sequence[LegSink], rids: Callable[[], Sequence[str]], outcome: Outcome, *, sent: bool
) -> tuple[int, ...]:
    """The end of a request at its instances: gives connections back or drops them, and aborts what may still work.

    ``rids``: under which ids they know it. ``sent``: they have got it. Returns those that were told to abort at once.
    """
    aborted = []
    for leg in legs:
        connection, leg.connection = leg.connection, None
        if not sent:
            if connection is not None:
                relay.pool.give(connection)
        elif leg.done:
            continue
        elif outcome in LINGER_S and connection is not None:
            leg.connection = connection
            relay.lingering[leg] = relay.now_s() + LINGER_S[outcome]
        else:
            if connection is not None:
                connection.drop()
            aborted.append(leg.worker)
            relay.abort_upstream(leg.worker, rids())
    return tuple(aborted)
