"""Answers that the router itself gives."""

from __future__ import annotations

import email.utils
import functools
import http
import math
import time

import msgspec

from pla_sglang.fleet.router.http.bodies import ErrorBody, ErrorDetail

STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in http.HTTPStatus}
STATUS_LINES[499] = b"HTTP/1.1 499 Client Closed Request\r\n"  # known from nginx; only logs and metrics see it
JSON = "application/json"
RETRY_SOON = (("retry-after", "1"),)


def whole_response(
    status: int,
    body: bytes = b"",
    *,
    content_type: str = JSON,
    keep_alive: bool = True,
    headers: tuple[tuple[str, str], ...] = (),
) -> bytes:
    """A whole answer with its length. ``status`` must be one that HTTP knows."""
    lines = [STATUS_LINES[status], _date_line(int(time.time())), b"content-length: %d\r\n" % len(body)]
    if body:
        lines.append(f"content-type: {content_type}\r\n".encode())
    lines += [f"{name}: {value}\r\n".encode("latin-1") for name, value in headers]
    lines.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    return b"".join(lines) + body


@functools.lru_cache(maxsize=1)
def _date_line(unix_s: int) -> bytes:
    return b"date: %s\r\n" % email.utils.formatdate(unix_s, usegmt=True).encode()


def error_body(status: int, code: str, message: str) -> bytes:
    """The error object of the OpenAI API, which SGLang uses too."""
    return msgspec.json.encode(ErrorBody(ErrorDetail(message, code, status)))


def retry_after(seconds: float | None) -> tuple[tuple[str, str], ...]:
    """The header takes whole seconds; rounded up, so that nobody comes back too early."""
    return () if seconds is None else (("retry-after", str(max(1, math.ceil(seconds)))),)


def error_event(status: int, code: str, message: str) -> bytes:
    """The end of a chunked event stream that has failed: the error as an event, then the last chunk.

    The blank line in front ends an event of which only a part has come; behind a complete one it means nothing.
    """
    event = b"\n\ndata: " + error_body(status, code, message) + b"\n\n"
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event)
