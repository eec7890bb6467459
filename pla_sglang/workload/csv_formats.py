"""Traces in CSV files: Azure LLM inference, BurstGPT, and the plain form."""

from __future__ import annotations

import csv
import datetime
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

from pla_sglang.workload.rows import BadRows, Columns, RowError, number, open_text, whole_number
from pla_sglang.workload.trace import Trace, TraceError

AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_HEADER = ("Timestamp", "Request tokens", "Response tokens")
PLAIN_HEADER = ("arrival_s", "input_tokens", "output_tokens")
_PLAIN_NAMES = {"session_id": "session", "turn": "turn", "client_id": "client"}

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
        extra = {ours: whole_number(row[theirs], theirs) for theirs, ours in _PLAIN_NAMES.items() if theirs in row}
        columns.add(
            number(row["arrival_s"], "arrival_s"),
            whole_number(row["input_tokens"], "input_tokens"),
            whole_number(row["output_tokens"], "output_tokens"),
            extra=extra,
            hash_ids=mine,
        )

    _read(path, PLAIN_HEADER, columns, one)
    if ids is not None and next(ids, None) is not None:
        raise TraceError(f"{path}: its file of block ids has more lines than it has rows")
    return columns.trace()


def load_azure(path: Path, *, bad_rows: BadRows = "refuse", sort: bool = False) -> Trace:
    """Azure LLM inference traces (2023, 2024): wall-clock TIMESTAMP, ContextTokens, GeneratedTokens.

    Times count from the first row.
    """
    columns = Columns(path.name, bad_rows, sort)
    first: list[float] = []

    def one(row: Row) -> None:
        at_s = _wall_clock_s(row["TIMESTAMP"])
        first.append(at_s) if not first else None
        columns.add(
            at_s - first[0] if not sort else at_s,
            whole_number(row["ContextTokens"], "ContextTokens"),
            whole_number(row["GeneratedTokens"], "GeneratedTokens"),
        )

    _read(path, AZURE_HEADER, columns, one)
    return columns.trace(from_zero=True)


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
        arrival_s = number(row["Timestamp"], "Timestamp")
        columns.add(arrival_s, whole_number(row["Request tokens"], "Request tokens"), response)

    _read(path, BURSTGPT_HEADER, columns, one)
    return columns.trace(from_zero=True)


def _read(path: Path, header: tuple[str, ...], columns: Columns, one: Callable[[Row], None]) -> None:
    """Calls ``one`` for each row; refused rows go to ``columns.bad``."""
    with open_text(path) as text:
        reader = csv.DictReader(text)
        missing = [name for name in header if name not in (reader.fieldnames or ())]
        if missing:
            raise TraceError(
                f"{path}: no column {', '.join(missing)}; found: {', '.join(reader.fieldnames or ['nothing'])}"
            )
        for row in reader:
            line = reader.line_num
            row["#line"] = line
            try:
                one(row)
            except RowError as error:
                columns.bad(line, str(error))


def _wall_clock_s(text: str | None) -> float:
    """Seconds since 1970 of ``2023-11-16 18:15:46.6805900`` (UTC); their seven decimal digits are truncated to six."""
    try:
        whole, _, fraction = (text or "").strip().partition(".")
        fraction = fraction.split("+")[0].rstrip("Z")
        day = datetime.datetime.fromisoformat(whole.split("+")[0]).replace(tzinfo=datetime.UTC)
        return day.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
    except ValueError:
        raise RowError(f"TIMESTAMP is {text!r}; allowed: like 2023-11-16 18:15:46.68") from None


def _block_ids_beside(path: Path) -> Iterator[tuple[int, ...]] | None:
    beside = path.with_name(path.name.removesuffix(".gz").removesuffix(".csv") + ".hashes.txt.gz")
    return _read_block_ids(beside) if beside.is_file() else None


def _read_block_ids(path: Path) -> Iterator[tuple[int, ...]]:
    with open_text(path) as text:
        for number_, line in enumerate(text, 1):
            try:
                yield tuple(map(int, line.split()))
            except ValueError:
                raise TraceError(f"{path}, line {number_}: block ids are whole numbers") from None
