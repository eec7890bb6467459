"""Files that others have written, read within bounds of memory: of one line, of a whole text, of what gzip unpacks.

Whatever is wrong with a file ends in one line of the kind of error that the caller names, never in one of gzip or of a
codec. Text is UTF-8, or UTF-16 and UTF-32 with a byte order mark, as spreadsheets and PowerShell write it. A byte that
is not UTF-8 does not end the reading: it stays in its line, where ``find_bad_byte`` finds it.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import itertools
import json
import typing
import zlib
from collections.abc import Iterator
from pathlib import Path

from pla_sglang.common.errors import PlaError

LONGEST_LINE = 16 << 20  # bytes or characters
MOST_BLANK_LINES = 10_000  # in a row
LARGEST_TEXT = 64 << 20  # characters of a file that is read as a whole
# gzip makes a text 3 to 30 times smaller: what unpacks to more than this, and is not small, was made to fill memory
UNPACKED_TIMES = 200
UNPACKED_LEAST_BYTES = 32 << 20
_GZIP = b"\x1f\x8b"
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

Error = type[PlaError]
Stamp = tuple[int, int, int]  # time of the last change, size, number on its disk


def read_stamp(path: Path) -> Stamp | None:
    """Another one where the file has changed; None: it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


@contextlib.contextmanager
def refuse_unreadable(path: Path, error: Error) -> Iterator[None]:
    """What files, gzip and codecs raise becomes ``error``, with the name of the file."""
    try:
        yield
    except OSError as problem:
        raise error(f"{path}: {problem.strerror or problem}") from None
    except (EOFError, zlib.error) as problem:
        raise error(f"{path} is damaged: {problem}") from None
    except UnicodeError as problem:
        raise error(f"{path}: {problem}; allowed: UTF-8, or UTF-16 with a byte order mark") from None


def open_bytes(path: Path, error: Error) -> typing.BinaryIO:
    """The file, unpacked if it is gzip, whatever its name says. Raises OSError; ``error`` while a bomb is read."""
    file = path.open("rb")
    if file.peek(2)[:2] != _GZIP:
        return file
    return typing.cast(typing.BinaryIO, io.BufferedReader(_Unpacked(path, file, error), 1 << 16))


def open_text(path: Path, error: Error) -> typing.TextIO:
    """The file as text, line ends as they are. Raises as ``open_bytes``, and UnicodeError while it is read."""
    file = open_bytes(path, error)
    head = file.peek(4)  # type: ignore[attr-defined]
    encoding = next((name for mark, name in _MARKS if head.startswith(mark)), "utf-8")
    errors = "surrogateescape" if encoding.startswith("utf-8") else "strict"
    return io.TextIOWrapper(file, encoding=encoding, errors=errors, newline="")


def read_lines(path: Path, error: Error) -> Iterator[str]:
    """The lines of a text, each with its end. Raises ``error``."""
    blank = 0
    with refuse_unreadable(path, error), open_text(path, error) as text:
        for number in itertools.count(1):
            line = text.readline(LONGEST_LINE + 1)
            if not line:
                return
            if len(line) > LONGEST_LINE:
                raise error(f"{path}, line {number} is too long; allowed: {LONGEST_LINE} characters")
            blank = blank + 1 if line.isspace() else 0
            if blank > MOST_BLANK_LINES:
                raise error(f"{path}, line {number}: no end of blank lines; allowed: {MOST_BLANK_LINES} in a row")
            yield line


def read_byte_lines(path: Path, error: Error) -> Iterator[bytes]:
    """The lines of a file that a program has written, undecoded. Raises ``error``."""
    with refuse_unreadable(path, error), open_bytes(path, error) as file:
        for number in itertools.count(1):
            line = file.readline(LONGEST_LINE + 1)
            if not line:
                return
            if len(line) > LONGEST_LINE:
                raise error(f"{path}, line {number} is too long; allowed: {LONGEST_LINE} bytes")
            yield line


def read_text(path: Path, error: Error, *, most: int = LARGEST_TEXT) -> str:
    """All of a text of at most so many characters. Raises ``error``."""
    with refuse_unreadable(path, error), open_text(path, error) as file:
        parts, left = [], most
        while part := file.read(1 << 20):  # a read of n characters takes room for n bytes first
            parts.append(part)
            left -= len(part)
            if left < 0:
                raise error(f"{path} is too large; allowed: {most} characters")
    text = "".join(parts)
    if (bad := find_bad_byte(text)) is not None:
        raise error(f"{path}: {bad}")
    return text


def read_json(path: Path, error: Error, *, most: int = LARGEST_TEXT) -> typing.Any:
    """The JSON value of a file. Raises ``error``."""
    try:
        return parse_json(read_text(path, error, most=most))
    except ValueError as problem:
        if isinstance(problem, PlaError):
            raise
        raise error(f"{path} is not JSON: {problem}") from None


def parse_json(text: str | bytes, **options: typing.Any) -> typing.Any:
    """As ``json.loads``; raises ValueError for all that is wrong, also for what is nested without end."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def find_bad_byte(text: str) -> str | None:
    """Which byte of a text was not UTF-8, in words; None: all are."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        byte, place = ord(text[problem.start]) & 0xFF, problem.start
        line = text.count("\n", 0, place) + 1
        where = f"character {place + 1}" + (f", line {line}" if line > 1 else "")
        return f"byte 0x{byte:02x} at {where} is not UTF-8; allowed: UTF-8"
    return None


def shorten(value: object, most: int = 60) -> str:
    """A value as a message shows it."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


class _Unpacked(io.RawIOBase):
    """A gzip file as it is unpacked; it raises ``error`` where it becomes far larger than it is."""

    def __init__(self, path: Path, file: typing.BinaryIO, error: Error) -> None:
        size = path.stat().st_size
        self._most = max(UNPACKED_LEAST_BYTES, UNPACKED_TIMES * size)
        self._path, self._packed, self._error = path, file, error
        self._file = gzip.GzipFile(fileobj=file)
        self._count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: typing.Any, /) -> int:
        view = memoryview(buffer)
        data = self._file.read1(len(view))
        view[: len(data)] = data
        self._count += len(data)
        if self._count > self._most:
            raise self._error(f"{self._path} unpacks to more than {self._most} bytes, {UNPACKED_TIMES} times its size")
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
            self._packed.close()
        super().close()
