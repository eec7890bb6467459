"""The access log: one JSON object a request, written in blocks."""

from __future__ import annotations

import logging
import sys
import time
from typing import BinaryIO

import msgspec

from pla_sglang.fleet.router.wire.messages import Ask, Assign, Completed

FLUSH_BYTES = 65_536
_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class AccessLog:
    """Appends to a file ("-": stderr; "off": nowhere). Lines of several relays do not mix: each block is one write.

    A full disk costs lines, not requests: ``lost`` counts them.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, target: str) -> None:
        self.lost = 0
        self._fails = False  # the last block could not be written
        self._file: BinaryIO | None = None
        self._owned = target not in ("off", "-")
        if target == "-":
            self._file = sys.stderr.buffer
        elif self._owned:
            self._file = open(target, "ab", buffering=0)  # noqa: SIM115 - closed by close_log()
        self._lines: list[bytes] = []
        self._bytes = 0

    def write_entry(self, ask: Ask, assign: Assign | None, ended: Completed, *, attempts: int) -> None:
        """Prompts and answers do not appear, keys neither."""
        if self._file is None:
            return
        line = _encode(log_entry(ask, assign, ended, time.time(), attempts=attempts)) + b"\n"
        self._lines.append(line)
        self._bytes += len(line)
        if self._bytes > FLUSH_BYTES:
            self.flush_lines()

    def flush_lines(self) -> None:
        if self._file is not None and self._lines:
            try:
                self._file.write(b"".join(self._lines))
                self._file.flush()
                self._fails = False
            except OSError as error:
                self.lost += len(self._lines)
                if not self._fails:
                    _log.error("the access log cannot be written, and loses lines: %s", error)
                self._fails = True
        self._lines.clear()
        self._bytes = 0

    def close_log(self) -> None:
        self.flush_lines()
        if self._owned and self._file is not None:
            self._file.close()
        self._file = None


def log_entry(ask: Ask, assign: Assign | None, ended: Completed, unix_s: float, *, attempts: int) -> dict[str, object]:
    """What is logged. ``unix_s``: wall-clock time of the end. ``attempts``: number of the last one."""
    exact = ask.exact_tokens or (ask.prompts == 1 and ended.input_tokens is not None)
    first = None if ended.first_s is None else round((ended.first_s - ask.arrived_s) * 1e3, 3)
    return {
        "at_s": round(unix_s, 3),
        "rid": ask.rid,
        "trace": ask.trace,
        "endpoint": ask.endpoint.name.lower(),
        "outcome": ended.outcome.name.lower(),
        "status": ended.status,
        "duration_ms": round((ended.at_s - ask.arrived_s) * 1e3, 3),
        "first_byte_ms": first,
        "body_bytes": ask.body_bytes,
        "output_bytes": ended.output_bytes,
        "events": ended.events,
        "input_tokens": ask.input_tokens if ask.exact_tokens or not exact else ended.input_tokens,
        "exact_input": exact,
        "output_tokens": ended.output_tokens,
        "exact_tokens": ended.exact_tokens,
        "prefill": None if assign is None else assign.prefill,
        "decode": None if assign is None else assign.decode,
        "reason": None if assign is None else assign.reason,
        "attempts": attempts,
        "tenant": ask.tenant,
        "detail": ended.detail,
    }
