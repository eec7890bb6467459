"""Traces in CSV files: Azure LLM inference, BurstGPT, and the plain form."""

from __future__ import annotations

import csv
import datetime
import re
import typing
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path

from pla_sglang.common.reading import LONGEST_LINE, find_bad_byte, read_lines, shorten
from pla_sglang.sim.workload.rows import BadRows, Columns, Id, RowError, number, read_id, whole_number
from pla_sglang.sim.workload.trace import Trace, TraceError

AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_HEADER = ("Timestamp", "Request tokens", "Response tokens")
PLAIN_HEADER = ("arrival_s", "input_tokens", "output_tokens")
_PLAIN_NAMES = {"session_id": ("session", read_id), "turn": ("turn", whole_number), "client_id": ("client", read_id)}
_WALL_CLOCK = re.compile(
    r"(\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d)?)?)(?:\.(\d+))?\s*(?:Z|([-+])(\d\d):?(\d\d))?", re.ASCII
)

Row = dict[str, typing.Any]


def load_plain(path: Path, *, bad_rows: BadRows = "refuse", sort: bool = False) -> Trace:
    """``arrival_s,input_tokens,output_tokens`` and optionally ``session_id``, ``turn``, ``client_id``.

    Line k of a file beside ``path`` whose name ends in ``.hashes.txt.gz`` instead of ``.csv.gz``, if it exists, has the
    prefix block ids of data row k, separated by blanks.

    Raises:
        TraceError: no such file, a header that lacks a column, a bad row (unless skipped), or another number of lines
            in the file of block ids.
    """
    columns = Columns(path.name, bad_rows, sort)
    ids = _block_ids_beside(path)

    def one(row: Row) -> None:
        mine = None if ids is None else next(ids, None)
        if ids is not None and mine is None:
            raise TraceError(f"{path}: its file of block ids has fewer lines than it has rows")
        extra = {ours: read(row[theirs], theirs) for theirs, (ours, read) in _PLAIN_NAMES.items() if theirs in row}
        columns.add(
            number(row["arrival_s"], "arrival_s"),
            whole_number(row["input_tokens"], "input_tokens"),
            whole_number(row["output_tokens"], "output_tokens"),
            extra=extra,
            hash_ids=mine,
        )

    read_rows(path, PLAIN_HEADER, columns, one)
    if ids is not None and next(ids, None) is not None:
        raise TraceError(f"{path}: its file of block ids has more lines than it has rows")
    return columns.trace()


def load_azure(path: Path, *, bad_rows: BadRows = "refuse", sort: bool = False) -> Trace:
    """Azure LLM inference traces (2023, 2024): wall-clock TIMESTAMP, ContextTokens, GeneratedTokens."""
    columns = Columns(path.name, bad_rows, sort)

    def one(row: Row) -> None:
        columns.add(
            wall_clock_s(row["TIMESTAMP"]),
            whole_number(row["ContextTokens"], "ContextTokens"),
            whole_number(row["GeneratedTokens"], "GeneratedTokens"),
        )

    read_rows(path, AZURE_HEADER, columns, one)
    return columns.trace()


def load_burstgpt(path: Path, *, bad_rows: BadRows = "refuse", sort: bool = False) -> Trace:
    """BurstGPT: Timestamp in seconds, Request tokens, Response tokens.

    A row with no response token is a request that failed (as its authors say): skipped and counted, also when bad
    rows are refused.
    """
    columns = Columns(path.name, bad_rows, sort)

    def one(row: Row) -> None:
        response = whole_number(row["Response tokens"], "Response tokens")
        if response == 0:
            columns.drop(row["#line"], "failed request: no response token")
            return
        arrival = number(row["Timestamp"], "Timestamp")
        columns.add(arrival, whole_number(row["Request tokens"], "Request tokens"), response)

    read_rows(path, BURSTGPT_HEADER, columns, one)
    return columns.trace()


def read_rows(path: Path, header: tuple[str, ...], columns: Columns, one: Callable[[Row], None]) -> None:
    """Calls ``one`` for each row; refused rows go to ``columns.bad``. Raises TraceError for a lacking column."""
    rows = read_csv_rows(path, columns)
    _, names = next(rows, (0, []))
    missing = [name for name in header if name not in names]
    if missing:
        raise TraceError(
            f"{path}: no column {', '.join(missing)}; found: {shorten(', '.join(names) or 'nothing', 300)}"
        )
    if twice := [name for name in (*header, *_PLAIN_NAMES) if names.count(name) > 1]:
        raise TraceError(f"{path}: two columns {twice[0]}; allowed: one")
    for line, fields in rows:
        try:
            if any(fields[len(names) :]):
                raise RowError(f"{len(fields)} fields under {len(names)} columns")
            one(dict.fromkeys(names) | dict(zip(names, fields, strict=False)) | {"#line": line})
        except RowError as error:
            columns.bad(line, str(error))


def read_csv_rows(path: Path, columns: Columns | None = None) -> Iterator[tuple[int, list[str]]]:
    """Rows that are not blank, with the number of their last line, the fields stripped of blanks around them.

    The first is the header, which has to be good; others that are no CSV go to ``columns.bad``. Raises TraceError.
    """
    line, room, is_header = 0, LONGEST_LINE, True

    def lines() -> Iterator[str]:
        nonlocal line, room
        for content in read_lines(path, TraceError):
            line, room = line + 1, room - len(content)
            if room < 0:
                raise TraceError(f"{path}, line {line}: a row without end; allowed: {LONGEST_LINE} characters")
            yield content

    reader = csv.reader(lines(), strict=True)
    while True:
        room = LONGEST_LINE
        before = csv.field_size_limit(LONGEST_LINE)  # of the whole process
        try:
            fields = [field.strip() for field in next(reader)]
            bad = find_bad_byte(",".join(fields))
        except StopIteration:
            return
        except csv.Error as error:
            fields, bad = [], str(error)
        finally:
            csv.field_size_limit(before)
        if bad is not None and (is_header or columns is None):
            raise TraceError(f"{path}, line {line}: {bad}")
        if bad is not None and columns is not None:
            columns.bad(line, bad)
        elif any(fields):
            is_header = False
            yield line, fields


def wall_clock_s(text: str | None, what: str = "TIMESTAMP") -> Decimal:
    """Seconds since 1970 of ``2023-11-16 18:15:46.6805900``, with all its digits; without a time zone it is UTC."""
    found = _WALL_CLOCK.fullmatch(text or "")
    try:
        if found is None:
            raise ValueError
        whole, fraction, sign, hours, minutes = found.groups()
        at_s = int(datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC).timestamp())
        if sign:
            at_s -= int(f"{sign}1") * (int(hours) * 3600 + int(minutes) * 60)
        return at_s + Decimal(f"0.{fraction or 0}")
    except (ValueError, OverflowError):
        raise RowError(f"{what} is {shorten(text)}; allowed: like 2023-11-16 18:15:46.68") from None


def _block_ids_beside(path: Path) -> Iterator[tuple[Id, ...]] | None:
    beside = path.with_name(path.name.removesuffix(".gz").removesuffix(".csv") + ".hashes.txt.gz")
    return _read_block_ids(beside) if beside.is_file() else None


def _read_block_ids(path: Path) -> Iterator[tuple[Id, ...]]:
    for number_, line in enumerate(read_lines(path, TraceError), 1):
        if (bad := find_bad_byte(line)) is not None:
            raise TraceError(f"{path}, line {number_}: {bad}")
        yield tuple(read_id(one, "block id") for one in line.split())
