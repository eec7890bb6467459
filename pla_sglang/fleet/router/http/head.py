"""Heads of requests and answers, parsed strictly (RFC 9110, RFC 9112).

A router must read a message exactly as the server behind it does, or requests can be smuggled. So nothing is guessed:
what is not plain HTTP/1.x is refused. Bare line feeds, folded headers, spaces before a colon, a length that is given
twice, and a length together with a transfer coding are all errors.
"""

from __future__ import annotations

import functools
import re

from pla_sglang.common.errors import PlaError

CRLF2 = b"\r\n\r\n"
FIELD = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\r\n"
_REQUEST = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]{1,32}) ([\x21-\x7e]+) HTTP/1\.([0-9])").fullmatch
# RFC 3986: an IP literal, or a name or IPv4 address; user information is no part of a host.
_AUTHORITY = rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9\-._~!$&'()*+,;=%]*)(?::[0-9]*)?"
_HOST = re.compile(_AUTHORITY).fullmatch
_ABSOLUTE = re.compile(rb"(?i:https?)://(?=[^/?:])" + _AUTHORITY + rb"(?=[/?]|\Z)").match
_ANSWER = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*)?").fullmatch
_DIGITS = re.compile(rb"[0-9]{1,18}")
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+").fullmatch
# What a value may hold.
_TEXT = b"\t" + bytes(range(0x20, 0x7F)) + bytes(range(0x80, 0x100))
# Names that were found good, and how they are written in lower case: messages have few names.
_SEEN: dict[bytes, bytes] = {}
SEEN_NAMES, SEEN_NAME_BYTES = 1024, 64
SEEN_LINES = 64  # first lines, of which there are few as well; each may be as long as a head


class BadMessage(PlaError):
    """The peer does not speak HTTP/1.x as it should, or a client's request is refused by the router.

    Attributes:
        status: what a client is told.
        reason: a word for counters and the answer's type.
        headers: further ones of the answer.
    """

    def __init__(
        self, reason: str, message: str, status: int = 400, *, headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.reason, self.status, self.headers = reason, status, headers
        super().__init__(message)


class Head:
    """What both kinds of head share.

    Attributes:
        minor: of the version HTTP/1.minor.
        headers: (name in lower case, value without outer blanks), in order.
        length: Content-Length; None without one.
        chunked: Transfer-Encoding: chunked.
        keep_alive: whether the sender wants to use the connection again.
        own_hop: whether there are headers that are not passed on: those about this connection alone, such as
            Connection, and X-Request-Id, which the router sets.
    """

    __slots__ = ("_closes", "chunked", "headers", "keep_alive", "length", "minor", "own_hop")

    def __init__(self, minor: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.minor = minor
        self.length: int | None = None
        self.chunked = False
        self.keep_alive = minor == 1
        self.own_hop = self._closes = False
        self.headers = headers
        for name, value in headers:
            if name in _FRAMING:
                self._read_framing_header(name, value)
        if self.chunked and self.length is not None:
            raise BadMessage("two_lengths", "Content-Length and Transfer-Encoding in one message")

    def _read_framing_header(self, name: bytes, value: bytes) -> None:
        if name == b"connection":
            self.own_hop = True
            options = {option.strip().lower() for option in value.split(b",")}
            self._closes = self._closes or b"close" in options  # in any line: it wins (RFC 9112, section 9.3)
            self.keep_alive = not self._closes and (self.keep_alive or b"keep-alive" in options)
        elif name in _HOP:
            self.own_hop = True
        elif name == b"content-length":
            if self.length is not None or _DIGITS.fullmatch(value) is None:
                raise BadMessage("content_length", f"Content-Length {value[:40]!r} is not one number")
            self.length = int(value)
        elif self.chunked or value.lower() != b"chunked" or self.minor == 0:
            ends = value.lower().endswith(b"chunked")  # else nobody knows where the body ends (RFC 9112, section 6.3)
            raise BadMessage(
                "transfer_encoding", f"Transfer-Encoding {value[:40]!r} is not supported", 501 if ends else 400
            )
        else:
            self.chunked = True

    def named_by_connection(self) -> frozenset[bytes]:
        """Headers that are about this connection alone, as the sender says (RFC 9110, section 7.6.1)."""
        values = [value.lower() for name, value in self.headers if name == b"connection"]
        if all(value in _USUAL_OPTIONS for value in values):
            return frozenset()
        return frozenset(option.strip() for value in values for option in value.split(b","))

    def get_header(self, name: bytes) -> bytes | None:
        """The value of header ``name`` (in lower case); the first, if it is there more than once."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


HOP_HEADERS = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade"})
_USUAL_OPTIONS = frozenset({b"close", b"keep-alive"})
_HOP = HOP_HEADERS | {b"x-request-id"}
_FRAMING = _HOP | {b"content-length", b"transfer-encoding"}


class RequestHead(Head):
    """Attributes: method, target (in origin form), path (what is before the first "?"), and tenant: whose key it
    brings, once that was found good; None: keys have no tenants."""

    __slots__ = ("method", "path", "target", "tenant")

    def __init__(self, line: tuple[str, bytes, str, int], headers: list[tuple[bytes, bytes]]) -> None:
        self.method, self.target, self.path, minor = line
        self.tenant: str | None = None
        super().__init__(minor, headers)


BODILESS = frozenset({204, 304})  # statuses of answers that end with their head, whatever it says


class ResponseHead(Head):
    """Attributes: status, and raw: the head as received, with its closing blank line."""

    __slots__ = ("raw", "status")

    def __init__(self, status: int, minor: int, headers: list[tuple[bytes, bytes]], raw: bytes) -> None:
        super().__init__(minor, headers)
        self.status, self.raw = status, raw
        if status in BODILESS and (self.chunked or self.length is not None):
            self.own_hop = True  # a 204 may not say it
            if self.chunked or self.length:  # a body may come all the same, and would be read as the next answer
                self.keep_alive = False


def parse_request(raw: bytes, *, max_headers: int) -> RequestHead:
    """``raw`` ends with the blank line that closes the head. Raises BadMessage."""
    lines = raw.split(b"\r\n")
    first = _parse_request_line(lines[0])
    headers = None if first is None else _split_headers(raw, lines)
    if first is None or headers is None:
        raise _explain_refusal(raw)
    if first[1][:1] != b"/":
        raise BadMessage("target", "the request target must be a path, or http:// with a host and a path")
    if len(headers) > max_headers:
        raise BadMessage("headers", f"more than {max_headers} headers", 431)
    head = RequestHead(first, headers)
    hosts = 0
    for name, value in headers:
        if name == b"host":
            hosts += 1 if _HOST(value) else 2
    if hosts > 1 or (hosts == 0 and head.minor == 1):
        raise BadMessage("host", "an HTTP/1.1 request has exactly one Host header, with a host and perhaps a port")
    return head


def _explain_refusal(raw: bytes) -> BadMessage:
    line = raw.partition(b"\r\n")[0]
    version = line.rpartition(b" ")[2]
    if version.startswith(b"HTTP/") and re.fullmatch(rb"HTTP/1\.[0-9]", version) is None:
        return BadMessage("version", f"{version[:20].decode('latin-1')} is not supported", 505)
    return BadMessage("head", "this is not an HTTP/1.1 request")


def parse_response(raw: bytes) -> ResponseHead:
    """``raw`` ends with the blank line that closes the head. Raises BadMessage."""
    lines = raw.split(b"\r\n")
    first = _parse_status_line(lines[0])
    headers = None if first is None else _split_headers(raw, lines)
    if first is None or headers is None:
        raise BadMessage("head", "this is not an HTTP/1.1 answer")
    return ResponseHead(*first, headers, raw)


@functools.lru_cache(maxsize=SEEN_LINES)
def _parse_request_line(line: bytes) -> tuple[str, bytes, str, int] | None:
    """Method, target in origin form, path and minor version."""
    match = _REQUEST(line)
    if match is None:
        return None
    method, target, minor = match.groups()
    absolute = None if target[:1] == b"/" else _ABSOLUTE(target)
    if absolute is not None:  # as to a proxy; its host is not looked at, as Host is not (RFC 9112, section 3.2.2)
        target = target[absolute.end() :]
        target = target if target[:1] == b"/" else b"/" + target
    path = target.partition(b"?")[0]
    # What is newer than HTTP/1.1 is read as HTTP/1.1 (RFC 9110, section 2.5).
    return method.decode("ascii"), target, path.decode("ascii"), min(minor[0] - ord("0"), 1)


@functools.lru_cache(maxsize=SEEN_LINES)
def _parse_status_line(line: bytes) -> tuple[int, int] | None:
    """Status and minor version."""
    match = _ANSWER(line)
    return None if match is None else (int(match[2]), match[1][0] & 1)


def _split_headers(raw: bytes, lines: list[bytes]) -> list[tuple[bytes, bytes]] | None:
    """Names in lower case and values of a head; None where a line is none of ``FIELD``.

    ``lines``: ``raw`` split at its line ends: the first line, the headers, and two empty strings. Faster than one
    pattern for all of it, whose cost is its turn for each header.
    """
    if lines[-2:] != _END or raw.replace(b"\r\n", b"").translate(None, _TEXT):
        return None
    headers = []
    for line in lines[1:-2]:
        name, colon, value = line.partition(b":")
        lower = _SEEN.get(name)
        if lower is None:
            lower = _check_name(name)
        if lower is None or not colon:
            return None
        headers.append((lower, value.strip(b" \t")))
    return headers


_END = [b"", b""]


def _check_name(name: bytes) -> bytes | None:
    if _NAME(name) is None:
        return None
    lower = name.lower()
    if len(name) <= SEEN_NAME_BYTES:
        if len(_SEEN) >= SEEN_NAMES:
            _SEEN.clear()
        _SEEN[name] = lower
    return lower
