"""From a client's request to the question for the control plane, and to what goes to the instances. No sockets here."""

from __future__ import annotations

import functools
import hashlib
import math
import random
import re
from collections.abc import Callable

from pla_sglang.common.checks import AGE_HEADER, AGE_RANGE_MS, SLO_RANGE_MS, describe_bad_ms
from pla_sglang.fleet.reserved import ROUTER_KEY_HEADER
from pla_sglang.fleet.router.http.head import HOP_HEADERS, BadMessage, RequestHead
from pla_sglang.fleet.router.http.json_body import Body, with_rid
from pla_sglang.fleet.router.wire.inference import BY_ENDPOINT
from pla_sglang.fleet.router.wire.messages import Ask, Assign, Endpoint, WorkerEntry
from pla_sglang.fleet.router.wire.rids import RID_PREFIX, rid_at_instance

# Headers that instances act on and only the router may set: SGLang's own, and ours.
RESERVED_HEADERS = (b"x-data-parallel-rank", b"x-override-", b"x-pla-")
_AGE_HEADER = AGE_HEADER.encode("ascii")
MAX_LABEL_CHARS = 64
MOST_ANSWER_TOKENS = 1_000_000
# Not passed on: they are about one connection, or written anew.
_HOP = HOP_HEADERS | {
    *(b"transfer-encoding", b"host", b"content-length", b"expect", b"traceparent", b"x-request-id"),
}
_TRACE = re.compile(rb"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")  # W3C: zeroes are no ids
_SPAN, _FLAGS = slice(36, 52), slice(53, 55)  # in a traceparent
_NUMBER = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{0,40})?")
_LABEL = re.compile(rb"[\x21-\x7e]{1,%d}" % MAX_LABEL_CHARS)


class IdGenerator:
    """Request and trace ids of one relay: random, and the same for the same generator."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._prefix = f"{RID_PREFIX}{rng.getrandbits(48):012x}-"
        self._next = 0

    def make_rid(self) -> str:
        """All of one length: SGLang aborts every request whose rid starts with the one named."""
        self._next += 1
        return f"{self._prefix}{self._next:010x}"

    def make_trace(self, *, sampled: bool = True) -> str:
        """A W3C traceparent of a new trace."""
        flags = "01" if sampled else "00"
        return f"00-{self._rng.getrandbits(128) or 1:032x}-{self._rng.getrandbits(64) or 1:016x}-{flags}"

    def make_span(self, trace: str, share: float) -> tuple[str, str | None]:
        """A span of ours under the client's ``trace`` ("": it has none), as ``Ask.trace`` and ``Ask.parent``.

        A client's trace is sampled where its flags say so; of the others, ``share``.
        """
        if not trace:
            sampled = self._rng.random() < share
            return self.make_trace(sampled=sampled), "" if sampled else None
        if not int(trace[_FLAGS], 16) & 1:
            return trace, None
        own = f"{self._rng.getrandbits(64) or 1:016x}"
        return f"{trace[: _SPAN.start]}{own}{trace[_SPAN.stop :]}", trace[_SPAN]


class RequestHeaders:
    """What the headers of a request say about it. Raises BadMessage for what cannot be granted."""

    __slots__ = ("answer_tokens", "parent", "priority", "session", "slo_tpot_ms", "slo_ttft_ms", "tenant", "trace")

    def __init__(self, head: RequestHead) -> None:
        self.slo_ttft_ms: float | None = None
        self.slo_tpot_ms: float | None = None
        self.priority: int | None = None
        self.session: str | None = None
        self.tenant: str | None = None
        self.answer_tokens: int | None = None
        self.trace = ""
        self.parent: str | None = None  # as in Ask
        key: bytes | None = None
        for name, value in head.headers:
            if name == b"authorization":
                if key is not None:
                    raise BadMessage("authorization", "a request has one Authorization header")
                key = value
            elif name == b"traceparent" and _TRACE.fullmatch(value):
                self.trace = value.decode("ascii")
            elif name == b"content-encoding" and value.lower() != b"identity":
                raise BadMessage("content_encoding", "compressed bodies are not supported", 415)
            elif name.startswith(b"x-"):
                self._read_own_header(name, value)
        if head.tenant is not None:  # what a key says, a header cannot change
            self.tenant = head.tenant
        elif self.tenant is None and key is not None:
            self.tenant = "key-" + hashlib.blake2s(key, digest_size=6).hexdigest()

    def _read_own_header(self, name: bytes, value: bytes) -> None:
        if name.startswith(RESERVED_HEADERS):
            raise BadMessage("reserved_header", f"header {name.decode()} is set by the router and may not be sent")
        reader = _READERS.get(name)
        if reader is not None:
            reader(self, name.decode(), value)


def _check_once(headers: RequestHeaders, attribute: str, name: str) -> None:
    """Refuses a header that is sent twice: which value the client means is not known, and instances would get both."""
    if getattr(headers, attribute) is not None:
        raise BadMessage("header_twice", f"{name} may be sent once")


def _slo_reader(attribute: str) -> Callable[[RequestHeaders, str, bytes], None]:
    def read(headers: RequestHeaders, name: str, value: bytes) -> None:
        low, high = SLO_RANGE_MS
        _check_once(headers, attribute, name)
        number = float(value) if _NUMBER.fullmatch(value) else math.nan
        if not low <= number <= high:
            shown = value[:40].decode("latin-1")
            raise BadMessage("slo", describe_bad_ms(f"header {name}", shown))
        setattr(headers, attribute, number)

    return read


def _label_reader(attribute: str) -> Callable[[RequestHeaders, str, bytes], None]:
    def read(headers: RequestHeaders, name: str, value: bytes) -> None:
        _check_once(headers, attribute, name)
        if _LABEL.fullmatch(value) is None:
            raise BadMessage("label", f"{name} must have 1 to {MAX_LABEL_CHARS} visible characters")
        setattr(headers, attribute, value.decode("ascii"))

    return read


def _read_priority(headers: RequestHeaders, name: str, value: bytes) -> None:
    _check_once(headers, "priority", name)
    if re.fullmatch(rb"-?[0-9]{1,6}", value) is None:
        raise BadMessage("priority", f"{name} must be a whole number of at most 6 digits")
    headers.priority = int(value)


def _read_answer_tokens(headers: RequestHeaders, name: str, value: bytes) -> None:
    _check_once(headers, "answer_tokens", name)
    tokens = int(value) if re.fullmatch(rb"[0-9]{1,8}", value) else 0
    if not 1 <= tokens <= MOST_ANSWER_TOKENS:
        raise BadMessage("answer_tokens", f"{name} must be a whole number of 1 to {MOST_ANSWER_TOKENS}")
    headers.answer_tokens = tokens


_READERS: dict[bytes, Callable[[RequestHeaders, str, bytes], None]] = {
    b"x-slo-ttft-ms": _slo_reader("slo_ttft_ms"),
    b"x-slo-tpot-ms": _slo_reader("slo_tpot_ms"),
    b"x-priority": _read_priority,
    b"x-tenant-id": _label_reader("tenant"),
    b"x-session-id": _label_reader("session"),
    b"x-answer-tokens": _read_answer_tokens,
}


def build_ask(  # the arguments are what a relay knows, each from another place
    endpoint: Endpoint, headers: RequestHeaders, body: Body, *, rid: str, relay: int, arrived_s: float, body_bytes: int
) -> Ask:
    return Ask(
        rid,
        relay,
        endpoint,
        body.stream,
        arrived_s,
        body_bytes,
        body.input_tokens,
        body.exact_tokens,
        body.prompts,
        body.samples,
        body.output_tokens,
        headers.slo_ttft_ms,
        headers.slo_tpot_ms,
        headers.priority if body.priority is None else body.priority,
        headers.tenant,
        headers.session,
        headers.trace,
        parent=headers.parent,
        rids=body.rids,
        answer_tokens=headers.answer_tokens,
        adapter=body.adapter,
        continues_session=body.continues_session,
        model=body.model,
    )


def members_of_attempt(ask: Ask, assign: Assign, body: Body) -> bytes:
    """The JSON members that go in front of the client's own, without outer commas.

    A batch gets its rid as one string too: SGLang names the prompts ``rid_0``, ``rid_1`` and so on.
    """
    parts = []
    rid_member = BY_ENDPOINT[ask.endpoint].rid_member
    if rid_member and body.rid is None and not body.rids and not body.null_rid:
        # One of ours: nothing in it needs escaping.
        parts.append(f'"{rid_member}":"{rid_at_instance(ask.rid, assign.attempt)}"')
    if assign.prefill is not None:
        parts.append(
            f'"bootstrap_host":"{assign.bootstrap_host}","bootstrap_port":{assign.bootstrap_port}'
            f',"bootstrap_room":{assign.bootstrap_room}'
        )
    if ask.priority is not None and body.priority is None:  # it came in a header
        parts.append(f'"priority":{ask.priority}')
    return ",".join(parts).encode()


def body_of_attempt(raw: bytes, ask: Ask, body: Body, *, attempt: int) -> bytes:
    """The client's body, with another rid in place of its own behind the first attempt, or where its own is null: of
    two members of a name the last one counts, so that of ``members_of_attempt`` would not."""
    member = BY_ENDPOINT[ask.endpoint].rid_member or "rid"
    if body.null_rid:
        return with_rid(raw, rid_at_instance(ask.rid, attempt), member)
    if attempt == 1 or (body.rid is None and not body.rids):
        return raw
    if body.rids:
        return with_rid(raw, [rid_at_instance(rid, attempt) for rid in body.rids], member)
    return with_rid(raw, rid_at_instance(ask.rid, attempt), member)


def passed_on_lines(head: RequestHead, *, keep_key: bool) -> bytes:
    """Header lines of a client that its instances get.

    ``keep_key``: its Authorization is meant for the instance; else it was for the router.
    """
    hop = _HOP | head.named_by_connection() if head.own_hop else _HOP
    return b"".join(
        [
            b"%s: %s\r\n" % (name, value)
            for name, value in head.headers
            if name not in hop and (keep_key or name != b"authorization")
        ]
    )


def head_for_worker(worker: WorkerEntry, head: RequestHead, length: int, lines: bytes, *, method: str) -> bytes:
    """The request's head for one instance. ``lines``: headers of the client and the router, each with its line end."""
    sized = b"content-length: %d\r\n" % length if length or method == "POST" else b""
    key = b"authorization: Bearer %s\r\n" % worker.api_key.encode() if worker.api_key else b""
    host = host_header(worker.host, worker.port)
    return b"%s %s HTTP/1.1\r\nhost: %s\r\n%s%s%s\r\n" % (method.encode(), head.target, host, sized, lines, key)


def age_line(age_s: float) -> bytes:
    """The header that says how long a request has been at this router, former attempts included.

    A span, not a time: the clocks of two hosts differ. The instance takes it off the target that the request has.
    """
    low_ms, high_ms = AGE_RANGE_MS
    return b"%s: %d\r\n" % (_AGE_HEADER, min(max(1e3 * age_s, low_ms), high_ms))


@functools.lru_cache(maxsize=4)
def router_key_line(key: str) -> bytes:
    """The header by which a stateless instance knows a request for the router's own."""
    return f"{ROUTER_KEY_HEADER}: {key}\r\n".encode()


@functools.lru_cache(maxsize=4096)
def host_header(host: str, port: int) -> bytes:
    return (f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode()
