"""One leg of a request: the answer of one instance, and what it means for the request."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pla_sglang.router.http.head import AnswerHead
from pla_sglang.router.messages import FailureKind, Leg
from pla_sglang.router.upstream import UpstreamConnection

if TYPE_CHECKING:
    from pla_sglang.router.exchange import Exchange

SNIFF_BYTES = 16_384  # of a prefill's answer; it holds one token, or an error
# In JSON, quotes inside strings are escaped, so a model's words cannot look like this.
_ABORTED = re.compile(rb'"(?:type|finish_reason)":\s*"abort"')
_ERROR = re.compile(rb'"error":\s*\{')


class LegSink:
    """One leg's connection, and what its answer means for the request.

    ``done``: the answer is complete, so its instance holds nothing of the request any more.
    """

    __slots__ = ("_sniffed", "_status", "connection", "done", "exchange", "leg", "plain", "worker")

    def __init__(self, exchange: Exchange, leg: Leg, worker: int, *, plain: bool) -> None:
        self.exchange, self.leg, self.worker, self.plain = exchange, leg, worker, plain
        self.connection: UpstreamConnection | None = None
        self.done = False
        self._status = 0
        self._sniffed = b""

    def on_head(self, head: AnswerHead) -> None:
        self._status = head.status
        if self.leg is not Leg.PREFILL:
            self.exchange.on_answer_head(head)

    def on_body(self, data: bytes) -> None:
        if self.leg is not Leg.PREFILL:
            self.exchange.on_answer_body(data)
        elif len(self._sniffed) < SNIFF_BYTES:
            self._sniffed += data[:SNIFF_BYTES]

    def on_done(self) -> None:
        self.done, self.connection = True, None
        if self.leg is not Leg.PREFILL:
            self.exchange.on_answer_done()
            return
        said, self._sniffed = self._sniffed, b""
        detail = said[:300].decode("utf-8", "replace")
        if self._status >= 500 or _ABORTED.search(said):
            kind = FailureKind.STATUS if self._status >= 500 else None
            self.exchange.on_prefill_failed(self, kind, f"status {self._status}: {detail}")
        elif self._status >= 400 or _ERROR.search(said):
            self.exchange.on_prefill_refused(self, max(self._status, 400), detail)
        else:
            self.exchange.on_prefill_done(self)

    def on_lost(self, kind: FailureKind, detail: str) -> None:
        """The connection is closed; it still knows whether the answer broke between two events."""
        if self.leg is Leg.PREFILL:
            self.exchange.on_prefill_failed(self, kind, detail)
        else:
            self.exchange.on_answer_lost(self, kind, detail)
