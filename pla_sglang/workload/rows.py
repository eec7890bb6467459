"""Converts rows of a file to columns of a trace; invalid rows are reported, and skipped or refused as requested."""

from __future__ import annotations

import gzip
import io
import math
import typing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pla_sglang.workload.trace import BadRow, Trace, TraceError, sort_by_arrival

BadRows = typing.Literal["refuse", "skip"]
BAD_ROWS: tuple[BadRows, ...] = ("refuse", "skip")
LARGEST_TOKENS = 100_000_000  # above it a length is a broken row, not a request


class RowError(Exception):
    """One row is not a request; the message gives the reason. Caught by ``Columns.add``'s callers."""


@dataclass
class Columns:
    """Collects the rows of one file.

    Attributes:
        name: of the trace.
        bad_rows: what to do with a row that is not a request.
        sort: rows may come in any order; otherwise a row earlier than its predecessor is a bad row.
    """

    name: str
    bad_rows: BadRows = "refuse"
    sort: bool = False
    arrival_s: list[float] = field(default_factory=list)
    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    extra: dict[str, list[int]] = field(default_factory=dict)
    hash_ids: list[tuple[int, ...]] = field(default_factory=list)
    skipped: list[BadRow] = field(default_factory=list)
    _last_s: float = 0.0

    def __post_init__(self) -> None:
        if self.bad_rows not in BAD_ROWS:
            raise TraceError(f"bad_rows is {self.bad_rows!r}; allowed: {', '.join(BAD_ROWS)}")

    def add(
        self,
        arrival_s: float,
        input_tokens: int,
        output_tokens: int,
        *,
        extra: dict[str, int] | None = None,
        hash_ids: tuple[int, ...] | None = None,
    ) -> None:
        """Raises RowError for a row that is not a request; then nothing is added."""
        if not math.isfinite(arrival_s) or arrival_s < 0:
            raise RowError(f"arrival {arrival_s} s; allowed: finite, 0 and more")
        if not self.sort and arrival_s < self._last_s:
            raise RowError(f"arrival {arrival_s} s is before {self._last_s} s in an earlier row; allowed: ascending")
        for what, tokens in (("input tokens", input_tokens), ("output tokens", output_tokens)):
            if not 1 <= tokens <= LARGEST_TOKENS:
                raise RowError(f"{what} {tokens}; allowed: 1 to {LARGEST_TOKENS}")
        self._last_s = arrival_s
        self.arrival_s.append(arrival_s)
        self.input_tokens.append(input_tokens)
        self.output_tokens.append(output_tokens)
        for column, value in (extra or {}).items():
            self.extra.setdefault(column, []).append(value)
        if hash_ids is not None:
            self.hash_ids.append(hash_ids)

    def bad(self, line: int, reason: str) -> None:
        """Record a row that is not a request. Raises TraceError if such rows are refused."""
        if self.bad_rows == "refuse":
            raise TraceError(f"{self.name}, line {line}: {reason} (bad_rows='skip' leaves such rows out)")
        self.skipped.append(BadRow(line, reason))

    def drop(self, line: int, reason: str) -> None:
        """Record a row that the format marks as failed: always skipped and counted."""
        self.skipped.append(BadRow(line, reason))

    def trace(self, *, from_zero: bool = False) -> Trace:
        """The trace; ``from_zero`` counts times from the first request."""
        columns: dict[str, typing.Any] = {
            "arrival_s": np.array(self.arrival_s, dtype=np.float64),
            "input_tokens": np.array(self.input_tokens, dtype=np.int64),
            "output_tokens": np.array(self.output_tokens, dtype=np.int64),
        }
        for column, values in self.extra.items():
            columns[column] = np.array(values, dtype=np.int64)
        columns["hash_ids"] = tuple(self.hash_ids) if self.hash_ids else None
        columns = sort_by_arrival(columns) if self.sort else columns
        if from_zero and self.arrival_s:
            columns["arrival_s"] = columns["arrival_s"] - columns["arrival_s"][0]
        return Trace(self.name, **columns, skipped=tuple(self.skipped))


def whole_number(text: typing.Any, what: str) -> int:
    """An integer from JSON or CSV text; ``12.0`` is valid, ``12.5`` is not. Raises RowError."""
    try:
        value = float(text)
    except (TypeError, ValueError):
        raise RowError(f"{what} is {text!r}; allowed: a whole number") from None
    if not math.isfinite(value) or value != int(value):
        raise RowError(f"{what} is {text!r}; allowed: a whole number")
    return int(value)


def number(text: typing.Any, what: str) -> float:
    """Raises RowError if the text is not a number."""
    try:
        return float(text)
    except (TypeError, ValueError):
        raise RowError(f"{what} is {text!r}; allowed: a number") from None


def open_text(path: Path) -> typing.TextIO:
    """The file as text, decompressed if its name ends in .gz. Raises TraceError if it does not exist."""
    if not path.is_file():
        raise TraceError(f"trace file {path} does not exist")
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")
