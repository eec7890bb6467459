"""Why a connection or a request over it failed, in the words of the system: no class names of a client library."""

from __future__ import annotations

import os
import ssl


def describe_connection_error(error: BaseException) -> str:
    """Such as "connection refused", "connection reset by peer", "no answer in time"."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    for inner in (getattr(error, "certificate_error", None), getattr(error, "os_error", None), error):  # of aiohttp
        if isinstance(inner, ssl.SSLError):  # its number is none of the system
            said = (getattr(inner, name, None) for name in ("verify_message", "reason"))
            return f"TLS: {next(filter(None, said), 'the handshake failed')}"
    reason = getattr(error, "reason", error)  # of urllib: what it has wrapped
    if reason is not error and isinstance(reason, BaseException):
        return describe_connection_error(reason)
    number = reason.errno if isinstance(reason, OSError) else None
    if number is not None and number > 0:
        return _uncapitalize(os.strerror(number))
    text = reason.strerror if isinstance(reason, OSError) and reason.strerror else str(reason)
    return _uncapitalize(" ".join(text.split())) or "the connection broke"


def _uncapitalize(text: str) -> str:
    """For a text behind a colon; a name such as HTTP stays."""
    return text[:1].lower() + text[1:] if text[1:2].islower() else text
