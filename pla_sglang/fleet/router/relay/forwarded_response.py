"""The answer of an instance on its way to the client, and what the client gets where it fails."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Protocol

from pla_sglang.fleet.router.http import responses
from pla_sglang.fleet.router.http.head import ResponseHead
from pla_sglang.fleet.router.relay.marked_stream import MarkedStreamReader
from pla_sglang.fleet.router.relay.response_errors import ABORT_MARK, CODE_MARK, ResponseVerdict, given_up
from pla_sglang.fleet.router.relay.response_tokens import ResponseTokens, tokens_of_response
from pla_sglang.fleet.router.relay.response_writer import ResponseWriter
from pla_sglang.fleet.router.relay.upstream_connection import UpstreamConnection
from pla_sglang.fleet.router.wire.messages import Ask, Completed, Endpoint, Outcome

EVENT_BYTES = 4096  # up to here the first event of a stream is waited for, to see whether it is an error
LAST_CHUNK = b"0\r\n\r\n"
# Behind what of a piece an abort begins: with its chunk's head, or with its event where there are no chunks.
_ABORT_CHUNK = re.compile(rb'(?:\A|(?<=\n\n\r\n))[0-9A-Fa-f]+\r\ndata: [^\n]*"abort"')
_ABORT_EVENT = re.compile(rb'(?:\A|(?<=\n\n))data: [^\n]*"abort"')
_SAYS_FINISH = frozenset({Endpoint.GENERATE, Endpoint.COMPLETIONS, Endpoint.CHAT, Endpoint.INVOCATIONS})
RETRY_AFTER_S = 1  # told to clients of full instances that name no time themselves


class ResponseOwner(Protocol):
    """The request that the answer belongs to."""

    def on_beginning(self, status: int, data: bytes, *, whole: bool) -> bool:
        """The body begins with ``data``, or is ``whole`` in it, and nothing of the answer was forwarded yet.

        Called again with each further piece until ``begin_forwarding`` is. Returns whether the answer is the client's;
        one that is whole is then forwarded by the caller.
        """

    def on_response_done(self, status: int) -> None:
        """Everything was forwarded, or is about to be."""

    def on_given_up(self, data: bytes) -> None:
        """``data`` says that the instance has given the request up; it was not forwarded."""

    def on_more_tokens(self) -> None:
        """A further piece of the answer has come, while ``is_watched``."""


@dataclasses.dataclass(frozen=True, slots=True)
class KeptRefusal:
    """What an instance has said in refusing the request, for a client who cannot be served by another one either.

    ``head`` None: the client cannot get the instance's own answer, so ``body`` is the router's.
    """

    status: int
    head: ResponseHead | None
    body: bytes


class ForwardedResponse:
    """The answer of the legs that the client's answer comes from, one after the other.

    The head is kept until the body begins: one segment for both, and errors still get their own status.

    Attributes:
        marked: the stream, where its events carry their token ids: it is forwarded event by event, in chunks of our
            own. Set before the head comes; None from there on where the answer is something else.
        output_bytes: of the body, forwarded.
        events: SSE events forwarded; 0 for an answer that is no stream.
        first_s, last_s: first and last byte forwarded; None without any.
        is_watched: the owner is told of each piece.
        verdict: what it has reported of errors so far.
    """

    __slots__ = (
        "_ask",
        "_at_boundary",
        "_beginning",
        "_chunks",
        "_client",
        "_head",
        "_kept",
        "_may_give_up",
        "_names_errors",
        "_now_s",
        "_owner",
        "_streams",
        "_tokens",
        "events",
        "first_s",
        "is_watched",
        "last_s",
        "marked",
        "output_bytes",
        "verdict",
    )

    def __init__(self, client: ResponseWriter, owner: ResponseOwner, ask: Ask, now_s: Callable[[], float]) -> None:
        self._client, self._owner, self._ask, self._now_s = client, owner, ask, now_s
        self._head: ResponseHead | None = None
        self._tokens: ResponseTokens | None = None  # from the head on
        self._beginning = b""  # of the body, not forwarded yet
        self._kept: KeptRefusal | None = None
        self._streams = self._names_errors = self._chunks = self._may_give_up = self._at_boundary = False
        self.is_watched = False
        self.marked: MarkedStreamReader | None = None
        self.verdict = ResponseVerdict()
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.output_bytes = self.events = 0

    @property
    def forwarded_status(self) -> int:
        """The status that the client has got; 0 where it has got none."""
        return self._head.status if self.first_s is not None and self._head is not None else 0

    @property
    def delivered_tokens(self) -> int:
        """Tokens that the client has, where the stream says their ids."""
        return len(self.marked.ids) if self.first_s is not None and self.marked is not None else 0

    @property
    def has_refusal(self) -> bool:
        """An instance's refusal was kept."""
        return self._kept is not None

    def forget_head(self) -> None:
        """The attempt is over, and nothing of its answer was forwarded."""
        self.drop_ids()
        self._head, self._beginning, self._streams, self._tokens = None, b"", False, None
        self.verdict = ResponseVerdict()

    def drop_ids(self) -> None:
        """They are not needed any more."""
        if self.marked is not None:
            self.marked.free_ids()
            self.marked = None

    # -- for its leg -------------------------------------------------------------------------------------------------

    def on_response_head(self, head: ResponseHead) -> bool:
        """True if the body is wanted without its framing."""
        self._head = head
        self._streams = (head.get_header(b"content-type") or b"").startswith(b"text/event-stream")
        self._tokens = tokens_of_response(self._ask, streams=self._streams)
        # Below 400 only a stream has anything to say of errors. In other answers a member "error" is the client's own
        # (/v1/responses repeats its metadata and tools, also in streams) or the model's (arguments of a tool).
        echoes = self._ask.endpoint is Endpoint.RESPONSES
        self._names_errors = head.status >= 400 or (self._streams and not echoes)
        says = self._names_errors if self._streams else self._ask.endpoint in _SAYS_FINISH
        self._may_give_up = head.status == 200 and self._ask.is_single and says  # of several answers the others go on
        if not (self._streams and head.status == 200 and head.chunked):
            self.marked = None
        self._chunks = self.marked is not None and self._client.understands_chunks
        return self.marked is not None

    def on_response_body(self, data: bytes) -> None:
        marked = self.marked
        if marked is None:
            self._take_body(data)
            return
        events = marked.take_events(data)
        if events and self.first_s is not None:
            self._forward_body(events)
        elif events:
            self._take_body(events)
        if marked.given_up:
            self._owner.on_given_up(marked.given_up)
        elif self.is_watched:
            self._owner.on_more_tokens()

    def _is_given_up(self, data: bytes) -> bool:
        return self._may_give_up and data.rfind(ABORT_MARK) >= 0 and given_up(data)

    def _take_body(self, data: bytes) -> bool:
        """Returns whether it may go on: False, the instance has given the request up."""
        if self.first_s is None:
            assert self._head is not None
            self._beginning = beginning = self._beginning + data if self._beginning else data
            if self._streams and b"\n\n" not in beginning and len(beginning) < EVENT_BYTES:
                return True
            if self._is_given_up(beginning):
                self._owner.on_given_up(beginning)
                return False
            self._note_errors(self._head.status, beginning)
            self._owner.on_beginning(self._head.status, beginning, whole=False)
        elif self.marked is None and self._streams and data.rfind(ABORT_MARK) >= 0 and self._is_given_up(data):
            begins = (_ABORT_EVENT if self._chunks or not self._client.understands_chunks else _ABORT_CHUNK).search(
                data
            )
            before, self._at_boundary = (data[: begins.start()], True) if begins else (data, False)
            if before:
                self._forward_body(before)
            self._owner.on_given_up(data)
            return False
        else:
            self._forward_body(data)
        return True

    def _forward_body(self, data: bytes) -> None:
        self.last_s = self._now_s()
        self.output_bytes += len(data)
        if self._streams:
            self.events += data.count(b"\n\n")
            if CODE_MARK in data:
                self._note_errors(0, data)
        assert self._tokens is not None
        self._tokens.feed(data)
        self._client.write_bytes(self._frame(data) if self._chunks else data)

    def _frame(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunks else data

    def on_response_done(self) -> None:
        head, rest = self._head, b"" if self.marked is None else self.marked.take_rest()
        assert head is not None
        if rest and not self._take_body(rest):
            return
        if self.first_s is None:
            beginning = self._beginning
            if self._is_given_up(beginning):
                self._owner.on_given_up(beginning)
                return
            self._note_errors(head.status, beginning)
            if not self._owner.on_beginning(head.status, beginning, whole=True):
                return
            self._client.write_bytes(self._forwarded_head(head) + (beginning and self._frame(beginning)))
            self.output_bytes = len(beginning)
        if self._chunks:
            self._client.write_bytes(LAST_CHUNK)
        self._owner.on_response_done(head.status)
        self._finish_response(head)

    def _note_errors(self, status: int, data: bytes) -> None:
        if self._names_errors:
            self.verdict.note_data(status, data)

    # -- for the request ---------------------------------------------------------------------------------------------

    def begin_forwarding(self) -> None:
        """Forward the head and what has come of the body."""
        assert self._head is not None
        data, self._beginning = self._beginning, b""
        self.first_s = self.last_s = self._now_s()
        self.output_bytes = len(data)
        self.events = data.count(b"\n\n") if self._streams else 0
        assert self._tokens is not None
        self._tokens.feed(data)
        self._client.write_bytes(self._forwarded_head(self._head) + self._frame(data))

    def make_ended(
        self, outcome: Outcome, status: int, *, at_s: float, aborted: tuple[int, ...], detail: str
    ) -> Completed:
        """The last message about the request, with what was forwarded of its answer. The request is let go: it and its
        answer point at each other, and would be garbage later."""
        del self._owner
        tokens = None if self._tokens is None else self._tokens.count()
        return Completed(
            self._ask.rid,
            outcome,
            status,
            at_s,
            output_bytes=self.output_bytes,
            events=self.events,
            first_s=self.first_s,
            last_s=self.last_s,
            aborted=aborted,
            detail=detail,
            output_tokens=self.events if tokens is None else tokens,
            exact_tokens=tokens is not None,
            cached_tokens=None if self._tokens is None else self._tokens.count_cached(),
            input_tokens=None if self._tokens is None else self._tokens.count_input(),
        )

    def keep_refusal(self, status: int, message: str = "") -> None:
        """An instance refuses the request, and another one is asked first.

        Without ``message`` its answer is the client's, and is complete.
        """
        head, body = self._head, self._beginning
        if message:
            head, body = None, responses.error_body(status, "instance_full", message)
        elif self._chunks:
            body = self._frame(body) + LAST_CHUNK
        self._kept = KeptRefusal(status, head, body)

    def forward_refusal(self, end_request: Callable[[int], None]) -> None:
        """No other instance takes the request: the client gets what was kept. ``end_request`` is called with its status
        before another request can follow on the connection."""
        kept = self._kept
        assert kept is not None
        self.output_bytes = len(kept.body)
        end_request(kept.status)
        if kept.head is None:
            headers = (*responses.retry_after(RETRY_AFTER_S), ("x-request-id", self._ask.rid))
            self._client.send_response(kept.status, kept.body, headers=headers)
        else:
            self._client.write_bytes(self._forwarded_head(kept.head) + kept.body)
            self._finish_response(kept.head)

    def _forwarded_head(self, head: ResponseHead) -> bytes:
        added = b""
        if head.status in (429, 503) and head.get_header(b"retry-after") is None:
            added = b"retry-after: %d\r\n" % RETRY_AFTER_S
        return self._client.forwarded_head(head, self._ask.rid, added=added)

    def _finish_response(self, head: ResponseHead) -> None:
        self._client.finish_response(reusable=head.length is not None or head.chunked or head.status in (204, 304))

    def can_append_event(self, connection: UpstreamConnection | None) -> bool:
        """True if the client's stream is complete up to a chunk, so that another event can follow. ``connection``: to
        the instance that it comes from; None where there is none at the moment."""
        if self._chunks:
            return self.first_s is not None
        ready = self.first_s is not None and self._streams and self._client.understands_chunks
        return ready and connection is not None and (self._at_boundary or connection.at_boundary())

    def send_failure(
        self, status: int, code: str, message: str, *, headers: tuple[tuple[str, str], ...], append: bool
    ) -> None:
        """Report the failure in the best form still possible: a status, an event at the end of the stream, or a cut.

        ``append``: from ``can_append_event``, before the connection was dropped.
        """
        if self.first_s is None:
            self._client.send_error(status, code, message, headers=(*headers, ("x-request-id", self._ask.rid)))
        elif append:
            self._client.write_bytes(responses.error_event(status, code, message))
            self._client.finish_response(reusable=True)
        else:
            self._client.cut_connection()
