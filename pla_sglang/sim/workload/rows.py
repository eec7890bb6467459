"""Converts rows of a file to columns of a trace; invalid rows are reported, and skipped or refused as requested."""

from __future__ import annotations

import decimal
import re
import typing
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal

import numpy as np

from pla_sglang.common.errors import PlaError
from pla_sglang.common.reading import shorten
from pla_sglang.sim.workload.trace import LATEST_ARRIVAL_S, BadRow, Trace, TraceError, sort_by_arrival

BadRows = typing.Literal["refuse", "skip"]
BAD_ROWS: tuple[BadRows, ...] = ("refuse", "skip")
LARGEST_TOKENS = 100_000_000  # above it a length is a broken row, not a request
LARGEST_TIME = Decimal("1e24")  # a file's times may count from any day, in any unit
LARGEST_ID = 1 << 40  # whole numbers up to it stay what they are: copies of a trace add a multiple to them
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?", re.ASCII)
_EXACT = decimal.Context(prec=64)  # of differences of times

Id = int | str


class RowError(PlaError):
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
    arrival_s: array[float] = field(default_factory=lambda: array("d"))  # after the first request
    input_tokens: array[int] = field(default_factory=lambda: array("q"))
    output_tokens: array[int] = field(default_factory=lambda: array("q"))
    extra: dict[str, list[Id]] = field(default_factory=dict)
    hash_ids: list[tuple[Id, ...]] = field(default_factory=list)
    skipped: list[BadRow] = field(default_factory=list)
    _first: Decimal | None = None
    _last: Decimal = Decimal(0)

    def __post_init__(self) -> None:
        if self.bad_rows not in BAD_ROWS:
            raise TraceError(f"bad_rows is {self.bad_rows!r}; allowed: {', '.join(BAD_ROWS)}")

    def add(
        self,
        arrival: Decimal,
        input_tokens: int,
        output_tokens: int,
        *,
        extra: dict[str, Id] | None = None,
        hash_ids: tuple[Id, ...] | None = None,
    ) -> None:
        """``arrival`` is in seconds, from any day on. Raises RowError for a row that is no request.

        Nothing is added then. Times count from the first request, and are subtracted before they are rounded:
        seconds since 1970 keep all their digits.
        """
        if not (arrival.is_finite() and 0 <= arrival <= LARGEST_TIME):
            raise RowError(f"arrival {float(arrival)} s; allowed: finite, 0 and more, up to {LARGEST_TIME}")
        if not self.sort and arrival < self._last:
            raise RowError(
                f"arrival {arrival:.17g} s is before {self._last:.17g} s in an earlier row; allowed: ascending"
            )
        require_tokens(input_tokens, "input tokens")
        require_tokens(output_tokens, "output tokens")
        after_s = 0.0 if self._first is None else float(_EXACT.subtract(arrival, self._first))
        if abs(after_s) > LATEST_ARRIVAL_S:
            raise RowError(
                f"arrival {arrival:.17g} s is {after_s:g} s from the first; allowed: up to {LATEST_ARRIVAL_S:g}"
            )
        self._first = arrival if self._first is None else self._first
        self._last = arrival
        self.arrival_s.append(after_s)
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

    def trace(self) -> Trace:
        """The trace; its times count from the first request."""
        columns: dict[str, typing.Any] = {
            "arrival_s": np.array(self.arrival_s, dtype=np.float64),
            "input_tokens": np.array(self.input_tokens, dtype=np.int64),
            "output_tokens": np.array(self.output_tokens, dtype=np.int64),
        }
        for column, values in self.extra.items():
            numbers = values if column == "turn" else number_ids([values])[0]
            columns[column] = np.array(numbers, dtype=np.int64)
        columns["hash_ids"] = tuple(map(tuple, number_ids(self.hash_ids))) if self.hash_ids else None
        columns = sort_by_arrival(columns) if self.sort else columns
        if self.sort and self.arrival_s:
            columns["arrival_s"] = columns["arrival_s"] - columns["arrival_s"][0]
        return Trace(self.name, **columns, skipped=tuple(self.skipped))


def number(given: typing.Any, what: str, allowed: str = "a number") -> Decimal:
    """A number from JSON or CSV text, exactly. Raises RowError."""
    try:
        if isinstance(given, bool) or (isinstance(given, str) and "_" in given):  # Python's own, in no data format
            raise ValueError
        value = Decimal(given)
        if value.is_snan() or (value.is_finite() and value.adjusted() > 308):  # more than a double holds
            raise ValueError
        return value
    except (TypeError, ValueError, ArithmeticError):
        raise RowError(f"{what} is {shorten(given)}; allowed: {allowed}") from None


def whole_number(given: typing.Any, what: str) -> int:
    """An integer from JSON or CSV text; ``12.0`` is valid, ``12.5`` is not. Raises RowError."""
    allowed = "a whole number"
    value = number(given, what, allowed)
    if not value.is_finite() or value.adjusted() > 18 or value != value.to_integral_value():
        raise RowError(f"{what} is {shorten(given)}; allowed: {allowed}")
    return int(value)


def require_tokens(tokens: int, what: str) -> int:
    """The same number. Raises RowError for one that is no length of a prompt or an answer."""
    if not 1 <= tokens <= LARGEST_TOKENS:
        raise RowError(f"{what} {shorten(tokens)}; allowed: 1 to {LARGEST_TOKENS}")
    return tokens


def read_id(given: typing.Any, what: str) -> Id:
    """An id of any kind: a whole number, however written, is that number; all else is its text. Raises RowError."""
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    text = str(given).strip() if isinstance(given, (str, Decimal)) else ""
    if not text:
        raise RowError(f"{what} is {shorten(given)}; allowed: a number or a text")
    is_padded = text[0] == "0" and text[1:2].isdigit()  # 007 is another id than 7
    if text.isascii() and text.isdigit() and not is_padded and len(text) < 1000:
        return int(text)
    if is_padded or _NUMBER.fullmatch(text) is None:
        return text
    value = Decimal(text)
    is_whole = value.adjusted() < 1000 and value == value.to_integral_value()
    return int(value) if is_whole else text


def number_ids(rows: Sequence[Sequence[Id]]) -> Sequence[Sequence[int]]:
    """Ids as they are if all are whole numbers from 0 on that are not huge; else numbered as they first appear."""
    if all(isinstance(one, int) and 0 <= one <= LARGEST_ID for row in rows for one in row):
        return typing.cast(Sequence[Sequence[int]], rows)
    numbers: dict[Id, int] = {}
    return [[numbers.setdefault(one, len(numbers)) for one in row] for row in rows]
