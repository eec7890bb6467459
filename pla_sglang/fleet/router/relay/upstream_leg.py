"""One leg of a request: the answer of one instance, and what it means for the request."""

from __future__ import annotations

import enum
from typing import Protocol

from pla_sglang.fleet.router.http.head import ResponseHead
from pla_sglang.fleet.router.relay.response_errors import (
    ABORTED,
    ERROR,
    LoadRefusal,
    error_code,
    error_message,
    load_refusal,
    transfer_failed,
)
from pla_sglang.fleet.router.relay.upstream_connection import UpstreamConnection
from pla_sglang.fleet.router.wire.messages import FailureKind, Leg

SNIFF_BYTES = 16_384  # of a prefill's answer; it holds one token, or an error
DETAIL_CHARS = 300  # of what an instance says


class PrefillResult(enum.Enum):
    """What the complete answer of a prefill part says."""

    DONE = enum.auto()
    FAILED = enum.auto()  # an error of the instance, or an abort
    TRANSFER_FAILED = enum.auto()
    REFUSED = enum.auto()  # the request is bad, or would be refused everywhere
    FULL = enum.auto()  # the instance has no room for it


_DONE, _FAILED_PREFILL, _TRANSFER_FAILED, _REFUSED, _FULL = PrefillResult


class LegObserver(Protocol):
    def on_leg_lost(self, leg: UpstreamLeg, kind: FailureKind, detail: str) -> None:
        """The connection is closed, and its answer was not complete. Nothing more is called."""


class ResponseObserver(LegObserver, Protocol):
    """Gets the answer that is the client's. After ``on_response_done`` nothing more is called."""

    def on_response_head(self, head: ResponseHead) -> bool:
        """True if the body is wanted without its framing."""

    def on_response_body(self, data: bytes) -> None: ...

    def on_response_done(self) -> None: ...


class PrefillObserver(LegObserver, Protocol):
    def on_prefill_end(self, leg: UpstreamLeg, result: PrefillResult, status: int, detail: str) -> None:
        """The prefill's answer is complete. Nothing more is called.

        ``status``: as status or in an error of the stream; below 400 where an error names none. ``detail``: what the
        error says.
        """


class UpstreamLeg:
    """One leg's connection.

    Attributes:
        done: the answer is complete, so its instance holds nothing of the request any more.
        plain: as in ``ResponseSink``.
    """

    __slots__ = ("connection", "done", "leg", "plain", "worker")
    observer: LegObserver

    def __init__(self, leg: Leg, worker: int, *, plain: bool) -> None:
        self.leg, self.worker, self.plain = leg, worker, plain
        self.connection: UpstreamConnection | None = None
        self.done = False

    def on_lost(self, kind: FailureKind, detail: str) -> None:
        """The connection stays here: it still knows whether the answer broke between two events."""
        self.observer.on_leg_lost(self, kind, detail)


class ResponseLeg(UpstreamLeg):
    """The leg whose answer the client gets: that of decode, or of a unified instance."""

    __slots__ = ("observer",)
    observer: ResponseObserver

    def __init__(self, leg: Leg, worker: int, observer: ResponseObserver, *, plain: bool) -> None:
        super().__init__(leg, worker, plain=plain)
        self.observer = observer

    def on_head(self, head: ResponseHead) -> None:
        self.plain = self.observer.on_response_head(head) or self.plain

    def on_body(self, data: bytes) -> None:
        self.observer.on_response_body(data)

    def on_done(self) -> None:
        self.done, self.connection = True, None
        self.observer.on_response_done()


class PrefillLeg(UpstreamLeg):
    """The prefill part of a pair. Nobody gets its answer; it is read to see whether the prefill failed."""

    __slots__ = ("_beginning", "_status", "observer")
    observer: PrefillObserver

    def __init__(self, worker: int, observer: PrefillObserver) -> None:
        super().__init__(Leg.PREFILL, worker, plain=True)
        self.observer = observer
        self._status = 0
        self._beginning = b""

    def on_head(self, head: ResponseHead) -> None:
        self._status = head.status

    def on_body(self, data: bytes) -> None:
        if len(self._beginning) < SNIFF_BYTES:
            self._beginning += data[:SNIFF_BYTES]

    def on_done(self) -> None:
        self.done, self.connection = True, None
        beginning, self._beginning = self._beginning, b""
        result, status, detail = _DONE, self._status, ""
        if status >= 400 or b'"abort"' in beginning or b'"error"' in beginning:  # as ABORTED and ERROR want it
            result, status = self._judge_result(beginning)
            detail = error_message(beginning)
        self.observer.on_prefill_end(self, result, status, detail)

    def _judge_result(self, beginning: bytes) -> tuple[PrefillResult, int]:
        code = error_code(self._status, beginning)
        status = self._status if code is None else code
        if transfer_failed(self._status, beginning):
            return _TRANSFER_FAILED, status
        refusal = load_refusal(code, beginning)
        if refusal is not None:
            return (_FULL if refusal is LoadRefusal.FULL else _REFUSED), status
        if status >= 500 or (code is None and ABORTED.search(beginning)):
            return _FAILED_PREFILL, status
        return (_REFUSED if code is not None or ERROR.search(beginning) else _DONE), status
