"""One log of many processes: whole lines, each with the name of its source."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable

READ_BYTES = 1 << 16
ERROR = re.compile(r"error|exception", re.IGNORECASE)
# What a router and the cluster itself ask for again and again; uvicorn's words, where it went well.
POLL = re.compile(r'"GET /(?:health|v1/loads|server_info|get_server_info)[ ?][^"]*" 200')
ACCESS = re.compile(r'"[A-Z]+ /[^"]* HTTP/[0-9.]+" [0-9]{3}')  # uvicorn's line for a request
LONGEST_LINE = 1 << 14  # SGLang prints all its arguments in one line; nobody reads more of it than this


def is_poll(line: str) -> bool:
    """True if a line is the access line of a health check or of a poll of the load."""
    return POLL.search(line) is not None


class LastErrors:
    """What each member said last that looks like an error, to be repeated where its end is reported."""

    def __init__(self) -> None:
        self._lines: dict[str, str] = {}

    def note_line(self, name: str, line: str) -> None:
        if ACCESS.search(line):
            return
        if ERROR.search(line) or not ERROR.search(self._lines.get(name, "")):
            self._lines[name] = line

    def describe_error(self, name: str, *, errors_only: bool = False) -> str:
        """The line behind a colon; without an error, the last line; nothing where there was none."""
        line = self._lines.get(name, "").strip()
        return f": {line}" if line and (ERROR.search(line) or not errors_only) else ""

    def forget_member(self, name: str) -> None:
        """It starts again."""
        self._lines.pop(name, None)


class LineReader:
    """Reads one descriptor in an event loop and passes on whole lines. Owns the descriptor."""

    def __init__(self, name: str, descriptor: int, sink: Callable[[str, str], None]) -> None:
        self.name = name
        self._descriptor = descriptor
        self._sink = sink
        self._rest = b""
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self._on_readable)

    def _on_readable(self) -> bool:
        """True if there was something to read."""
        try:
            data = os.read(self._descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.close_reader()
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._emit_line(line)
        if len(self._rest) > LONGEST_LINE:
            self._emit_line(self._rest)
            self._rest = b""
        return True

    def read_rest(self) -> None:
        """What is in the pipe now, to its end. For a process that has ended."""
        while self._descriptor >= 0 and self._on_readable():
            pass

    def close_reader(self) -> None:
        """Stop reading; a last line without end is passed on."""
        if self._descriptor < 0:
            return
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1
        if self._rest:
            self._emit_line(self._rest)
            self._rest = b""

    def _emit_line(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        if text:
            self._sink(self.name, text if len(text) <= LONGEST_LINE else text[:LONGEST_LINE] + " ...")
