"""What an answer of an instance says that went wrong, by its status and the beginning of its body. Pure.

An error may stand in the status, or in an event of a stream whose status is 200: SGLang 0.5.17 writes
``data: {"error": {..., "code": 503}}`` there, and on /generate a finish reason
``{"type": "abort", "status_code": 503, ...}``. In JSON, quotes inside strings are escaped, so a model's or a client's
words cannot look like these patterns.
"""

from __future__ import annotations

import enum
import re

from pla_sglang.fleet.router.wire.messages import FailureKind, Outcome

ABORTED = re.compile(rb'"(?:type|finish_reason)":\s*"abort"')
ERROR = re.compile(rb'"error":\s*\{')
CODE_MARK = b'code":'  # in every error that names a code, in hardly any other event: a cheap first look
ABORT_MARK = b'"abort"'  # as ABORTED wants it: likewise. Looked for from the end, which costs a third in usual events
_CODE = re.compile(rb'"(?:status_)?code":\s*(\d{3})\b')
_MESSAGE = re.compile(rb'"message":\s*"((?:[^"\\]|\\.){1,300})')
# SGLang 0.5.17: Scheduler.handle_inflight_transfer_failure and handle_bootstrap_failure, and the decode side's
# pop_transferred. An ordered abort causes the same message, with a reason that the second pattern finds.
# The last is that of a stateless instance (fleet.stateless.transfer: receiving, sending).
_FAILED = (b" failed for request rank=", b" transfer failed for request ")
_ORDERED = re.compile(rb"KVTransferError\(bootstrap_room=[^)]*\): Aborted by")
# The same: _set_or_validate_priority and _abort_on_running_timeout. The first is due to the request, which fares alike
# everywhere; the second has been computed for long, so that another attempt would double the load.
NOT_FOR_ROOM = (b"Using priority is disabled for this server", b"Request running timeout reached")


class LoadRefusal(enum.Enum):
    """What an instance means by 429 or 503."""

    FULL = "full"  # it had no room; another one may have
    FINAL = "final"  # another one would say the same, or the work has been done in vain


def transfer_failed(status: int, beginning: bytes) -> bool:
    """True if the beginning of an answer says that the KV did not get from prefill to decode, without an abort having
    been ordered."""
    if not any(mark in beginning for mark in _FAILED) or _ORDERED.search(beginning):
        return False
    return status >= 500 or bool(ABORTED.search(beginning) or ERROR.search(beginning))


def error_code(status: int, data: bytes) -> int | None:
    """The status that an answer stands for: its own from 400 on, else the one that an error in ``data`` names."""
    if status >= 400:
        return status
    if CODE_MARK not in data or not (ABORTED.search(data) or ERROR.search(data)):
        return None
    code = _CODE.search(data)
    return None if code is None else int(code[1])


def load_refusal(code: int | None, data: bytes) -> LoadRefusal | None:
    """``code``: from ``error_code``. None: the instance has not refused the request for load."""
    if code not in (429, 503):
        return None
    return LoadRefusal.FINAL if any(words in data for words in NOT_FOR_ROOM) else LoadRefusal.FULL


def given_up(data: bytes) -> bool:
    """True if an event, or an answer whose status is 200, says that the instance has given the request up, and not
    because of the request (4xx) or its load (429, 503). An abort that was ordered at the instance itself counts too;
    of one that the router has ordered nobody reads the answer any more."""
    code = _CODE.search(data)
    if ABORTED.search(data) is None and (code is None or ERROR.search(data) is None):
        return False
    return code is None or (int(code[1]) not in range(400, 500) and int(code[1]) != 503)


class ResponseVerdict:
    """What one answer has reported of errors so far.

    Attributes:
        error_code: as in ``error_code``, of the last error.
        load_refusal: whether that error refuses the request for load.
    """

    __slots__ = ("error_code", "load_refusal")

    def __init__(self) -> None:
        self.error_code: int | None = None
        self.load_refusal: LoadRefusal | None = None

    def note_data(self, status: int, data: bytes) -> None:
        """``status``: of the answer; 0: ``data`` is a later piece of a stream."""
        code = error_code(status, data)
        if code is not None:
            self.error_code, self.load_refusal = code, load_refusal(code, data)

    def judge_outcome(self, status: int) -> tuple[Outcome, FailureKind | None]:
        """How the request of a complete answer has ended, and what the instance is to be reported for."""
        if self.load_refusal is not None:
            return Outcome.INSTANCE_REFUSED, FailureKind.FULL if self.load_refusal is LoadRefusal.FULL else None
        if (self.error_code or 0) >= 500:
            return Outcome.UPSTREAM_ERROR, FailureKind.STATUS
        return Outcome.OK if status < 400 else Outcome.CLIENT_ERROR, None


def error_message(data: bytes) -> str:
    """For people: the message of an error where it has one, else the beginning of ``data`` without framing."""
    message = _MESSAGE.search(data)
    return (message[1] if message else data[:300]).decode("utf-8", "replace")
