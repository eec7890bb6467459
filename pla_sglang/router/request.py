"""From a client's request to the question for the control plane, and to what goes to the instances. No sockets here."""

from __future__ import annotations

import functools
import hashlib
import math
import random
import re
from collections.abc import Callable

from pla_sglang.router.body import RID_PREFIX, Body, rid_there, with_rid
from pla_sglang.router.http.head import BadMessage, RequestHead
from pla_sglang.router.messages import Ask, Assign, Endpoint, Worker

ENDPOINTS = {
    "/generate": Endpoint.GENERATE,
    "/v1/completions": Endpoint.COMPLETIONS,
    "/v1/chat/completions": Endpoint.CHAT,
}
# Headers that instances act on and only the router may set: SGLang's own, and ours.
RESERVED_HEADERS = (b"x-data-parallel-rank", b"x-override-", b"x-pla-")
SLO_RANGE_MS = (1.0, 3_600_000.0)
MAX_LABEL_CHARS = 64
# Not passed on: they are about one connection, or written anew.
_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"host", b"content-length", b"expect", b"traceparent", b"x-request-id"),
    }
)
_TRACE = re.compile(rb"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")  # W3C: zeroes are no ids
_SPAN, _FLAGS = slice(36, 52), slice(53, 55)  # in a traceparent
_LABEL = re.compile(rb"[\x21-\x7e]{1,%d}" % MAX_LABEL_CHARS)


class Names:
    """Request and trace ids of one relay: random, and the same for the same generator."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._prefix = f"{RID_PREFIX}{rng.getrandbits(48):012x}-"
        self._next = 0

    def rid(self) -> str:
        """All of one length: SGLang aborts every request whose rid starts with the one named."""
        self._next += 1
        return f"{self._prefix}{self._next:010x}"

    def trace(self, *, sampled: bool = True) -> str:
        """A W3C traceparent of a new trace."""
        flags = "01" if sampled else "00"
        return f"00-{self._rng.getrandbits(128) or 1:032x}-{self._rng.getrandbits(64) or 1:016x}-{flags}"

    def span(self, trace: str, share: float) -> tuple[str, str | None]:
        """A span of ours under the client's ``trace`` ("": it has none), as ``Ask.trace`` and ``Ask.parent``.

        A client's trace is sampled where its flags say so; of the others, ``share``.
        """
        if not trace:
            sampled = self._rng.random() < share
            return self.trace(sampled=sampled), "" if sampled else None
        if not int(trace[_FLAGS], 16) & 1:
            return trace, None
        own = f"{self._rng.getrandbits(64) or 1:016x}"
        return f"{trace[: _SPAN.start]}{own}{trace[_SPAN.stop :]}", trace[_SPAN]


class Wishes:
    """What the headers of a request say about it. Raises BadMessage for what cannot be granted."""

    __slots__ = ("parent", "priority", "session", "slo_tpot_ms", "slo_ttft_ms", "tenant", "trace")

    def __init__(self, head: RequestHead) -> None:
        self.slo_ttft_ms: float | None = None
        self.slo_tpot_ms: float | None = None
        self.priority: int | None = None
        self.session: str | None = None
        self.tenant: str | None = None
        self.trace = ""
        self.parent: str | None = None  # as in Ask
        key: bytes | None = None
        for name, value in head.headers:
            if name == b"authorization":
                key = value
            elif name == b"traceparent" and _TRACE.fullmatch(value):
                self.trace = value.decode("ascii")
            elif name == b"content-encoding" and value.lower() != b"identity":
                raise BadMessage("content_encoding", "compressed bodies are not supported", 415)
            elif name.startswith(b"x-"):
                self._own(name, value)
        if self.tenant is None and key is not None:
            self.tenant = "key-" + hashlib.blake2s(key, digest_size=6).hexdigest()

    def _own(self, name: bytes, value: bytes) -> None:
        if name.startswith(RESERVED_HEADERS):
            raise BadMessage("reserved_header", f"header {name.decode()} is set by the router and may not be sent")
        reader = _READERS.get(name)
        if reader is not None:
            reader(self, name.decode(), value)


def _slo(attribute: str) -> Callable[[Wishes, str, bytes], None]:
    def read(wishes: Wishes, name: str, value: bytes) -> None:
        low, high = SLO_RANGE_MS
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not low <= number <= high:
            shown = value[:40].decode("latin-1")
            raise BadMessage("slo", f"{name} must be at least {low:g} and at most {high:g}, got {shown!r}")
        setattr(wishes, attribute, number)

    return read


def _label(attribute: str) -> Callable[[Wishes, str, bytes], None]:
    def read(wishes: Wishes, name: str, value: bytes) -> None:
        if _LABEL.fullmatch(value) is None:
            raise BadMessage("label", f"{name} must have 1 to {MAX_LABEL_CHARS} visible characters")
        setattr(wishes, attribute, value.decode("ascii"))

    return read


def _priority(wishes: Wishes, name: str, value: bytes) -> None:
    if re.fullmatch(rb"-?[0-9]{1,6}", value) is None:
        raise BadMessage("priority", f"{name} must be a whole number of at most 6 digits")
    wishes.priority = int(value)


_READERS: dict[bytes, Callable[[Wishes, str, bytes], None]] = {
    b"x-slo-ttft-ms": _slo("slo_ttft_ms"),
    b"x-slo-tpot-ms": _slo("slo_tpot_ms"),
    b"x-priority": _priority,
    b"x-tenant-id": _label("tenant"),
    b"x-session-id": _label("session"),
}


def ask_of(  # the arguments are what a relay knows, each from another place
    endpoint: Endpoint, wishes: Wishes, body: Body, *, rid: str, relay: int, arrived_s: float, body_bytes: int
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
        wishes.slo_ttft_ms,
        wishes.slo_tpot_ms,
        wishes.priority if body.priority is None else body.priority,
        wishes.tenant,
        wishes.session,
        wishes.trace,
        parent=wishes.parent,
        rids=body.rids,
    )


def members_of(ask: Ask, assign: Assign, body: Body, *, header_priority: int | None) -> bytes:
    """The JSON members that go in front of the client's own, without outer commas.

    A batch gets its rid as one string too: SGLang names the prompts ``rid_0``, ``rid_1`` and so on.
    """
    parts = []
    if body.rid is None and not body.rids and not body.null_rid:
        parts.append(f'"rid":"{rid_there(ask.rid, ask.reached)}"')  # one of ours: nothing in it needs escaping
    if assign.prefill is not None:
        parts.append(
            f'"bootstrap_host":"{assign.bootstrap_host}","bootstrap_port":{assign.bootstrap_port}'
            f',"bootstrap_room":{assign.bootstrap_room}'
        )
    if header_priority is not None and body.priority is None:
        parts.append(f'"priority":{header_priority}')
    if assign.fields:
        parts.append(assign.fields)
    return ",".join(parts).encode()


def rids_at_instances(ask: Ask, body: Body) -> tuple[str, ...]:
    """Under which ids SGLang knows the prompts of a request."""
    if body.rids:
        return tuple(rid_there(rid, ask.reached) for rid in body.rids)
    rid = rid_there(ask.rid, ask.reached)
    return (rid,) if ask.prompts == 1 else tuple(f"{rid}_{index}" for index in range(ask.prompts))


def body_of_attempt(raw: bytes, ask: Ask, body: Body) -> bytes:
    """The client's body, with another rid in place of its own where instances got the request before, or where its own
    is null: of two members of a name the last one counts, so that of ``members_of`` would not."""
    if body.null_rid:
        return with_rid(raw, rid_there(ask.rid, ask.reached))
    if not ask.reached or (body.rid is None and not body.rids):
        return raw
    return with_rid(raw, list(rids_at_instances(ask, body)) if body.rids else rid_there(ask.rid, ask.reached))


def passed_on(head: RequestHead, *, keep_key: bool) -> bytes:
    """Header lines of a client that its instances get.

    ``keep_key``: its Authorization is meant for the instance; else it was for the router.
    """
    return b"".join(
        [
            b"%s: %s\r\n" % (name, value)
            for name, value in head.headers
            if name not in _HOP and (keep_key or name != b"authorization")
        ]
    )


def head_to(worker: Worker, head: RequestHead, length: int, lines: bytes) -> bytes:
    """The request's head for one instance. ``lines``: headers of the client and the router, each with its line end."""
    method = head.method.encode()
    sized = b"content-length: %d\r\n" % length if length or method == b"POST" else b""
    key = b"authorization: Bearer %s\r\n" % worker.api_key.encode() if worker.api_key else b""
    host = _authority(worker.host, worker.port)
    return b"%s %s HTTP/1.1\r\nhost: %s\r\n%s%s%s\r\n" % (method, head.target, host, sized, lines, key)


def header_lines(headers: tuple[tuple[str, str], ...]) -> bytes:
    return b"".join([f"{name}: {value}\r\n".encode("latin-1") for name, value in headers])


@functools.lru_cache(maxsize=4096)
def _authority(host: str, port: int) -> bytes:
    return (f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode()
