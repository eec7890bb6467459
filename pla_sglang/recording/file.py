"""Recordings as files of JSON lines; a name that ends in ``.gz`` is compressed."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import msgspec

from pla_sglang.common.reading import read_byte_lines
from pla_sglang.recording.rows import VERSION, Header, Line, RecordError, Row

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Line)
FLUSH_LINES = 200


class RecordWriter:
    """Appends lines to a new file. Raises OSError if it cannot be written."""

    def __init__(self, path: Path) -> None:
        self.lines = 0
        self._file = _create(path)

    def write(self, row: Row) -> None:
        self._file.write(_encoder.encode(row) + b"\n")
        self.lines += 1
        if self.lines % FLUSH_LINES == 0:
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> Iterator[Line]:
    """The lines of a recording, ``Header`` first.

    Raises:
        RecordError: the file cannot be read, is not a recording, or has another version; names the line.
    """
    number = 0
    for number, data in enumerate(read_byte_lines(path, RecordError), 1):
        try:
            line: Line = _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            if number == 1:
                raise RecordError(f"{path} is no recording of the router (--record): line 1: {error}") from None
            raise RecordError(f"{path} line {number}: {error}") from None
        _check(path, number, line)
        yield line
    if number == 0:
        raise RecordError(f"{path} is empty")


def _check(path: Path, number: int, line: Line) -> None:
    if (number == 1) is not isinstance(line, Header):
        raise RecordError(f"{path} line {number}: a recording begins with its header, and has one")
    if isinstance(line, Header) and line.version not in range(1, VERSION + 1):
        raise RecordError(f"{path}: version {line.version}; this program reads 1 to {VERSION}")


def _create(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "wb", compresslevel=3))
    return path.open("wb")
