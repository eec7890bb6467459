"""One log of many processes: whole lines, each with the name of its source."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

READ_BYTES = 1 << 16
LONGEST_LINE = 1 << 14  # SGLang prints all its arguments in one line; nobody reads more of it than this


class LineReader:
    """Reads one descriptor of an event loop and hands on whole lines. Owns the descriptor."""

    def __init__(self, name: str, descriptor: int, sink: Callable[[str, str], None]) -> None:
        self._name = name
        self._descriptor = descriptor
        self._sink = sink
        self._rest = b""
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self._readable)

    def _readable(self) -> None:
        try:
            data = os.read(self._descriptor, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._emit(line)
        if len(self._rest) > LONGEST_LINE:
            self._emit(self._rest)
            self._rest = b""

    def close(self) -> None:
        """Stop reading; what was left without an end of line is handed on."""
        if self._descriptor < 0:
            return
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1
        if self._rest:
            self._emit(self._rest)
            self._rest = b""

    def _emit(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        if text:
            self._sink(self._name, text if len(text) <= LONGEST_LINE else text[:LONGEST_LINE] + " ...")
