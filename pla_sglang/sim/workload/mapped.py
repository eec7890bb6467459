"""Tables of requests whose columns are named by a mapping: logs of servers and of load generators.

A mapping is ``arrival=NAME,input=NAME,output=NAME`` and, where known, ``session=NAME`` and ``duration=NAME``. In JSON a
name may lead into objects with dots. The file is CSV, a JSON array of objects, or an object a line. Times may say their
unit (``arrival=created:ms``); without one a text is a date and time, and a number is in seconds, or, too large for
seconds since 1970, in milli-, micro- or nanoseconds since then.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path

from pla_sglang.common.errors import ConfigError
from pla_sglang.common.reading import open_text, read_json, refuse_unreadable, shorten
from pla_sglang.sim.workload.csv_formats import read_rows, wall_clock_s
from pla_sglang.sim.workload.json_formats import LARGEST_DATASET, read_json_lines
from pla_sglang.sim.workload.rows import BadRows, Columns, RowError, number, read_id, whole_number
from pla_sglang.sim.workload.trace import Trace, TraceError

Row = dict[str, typing.Any]
UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
ISO = "iso"
NEEDED = ("arrival", "input", "output")
OTHERS = ("session", "duration")
LATEST_S = 10**11  # of a clock that counts seconds since 1970: the year 5138; in milliseconds it was 1973
MAPPING = "arrival=NAME[:UNIT],input=NAME,output=NAME[,session=NAME][,duration=NAME[:UNIT]]"


@dataclasses.dataclass(frozen=True, slots=True)
class MappedField:
    """Where a value stands: the first of ``names`` that a row has. ``unit``: of a time; None: told by the value."""

    names: tuple[str, ...]
    unit: str | None = None

    def find(self, row: Mapping[str, typing.Any]) -> typing.Any:
        """None where the row has none of them."""
        return next((value for name in self.names if (value := find_field(row, name)) is not None), None)

    def time_s(self, row: Mapping[str, typing.Any]) -> Decimal:
        """Raises RowError."""
        value, what = self.find(row), self.names[0]
        if self.unit == ISO or (self.unit is None and isinstance(value, str) and "-" in value[1:] and ":" in value):
            return wall_clock_s(value if isinstance(value, str) else None, what)
        time = number(value, what)
        if self.unit is not None:
            return time / UNITS[self.unit]
        return time / next((per_s for per_s in UNITS.values() if not abs(time) >= LATEST_S * per_s), UNITS["ns"])


@dataclasses.dataclass(frozen=True, slots=True)
class ColumnMap:
    """Which column is what.

    Attributes:
        duration: subtracted from ``arrival``, which is the end of a request then.
        served: values that a row must have; any other row is a request that was not served, skipped and counted.
    """

    arrival: MappedField
    input: MappedField
    output: MappedField
    session: MappedField | None = None
    duration: MappedField | None = None
    served: tuple[tuple[str, typing.Any], ...] = ()

    @property
    def needed(self) -> list[MappedField]:
        columns = (self.arrival, self.input, self.output, self.session, self.duration)
        return [column for column in columns if column is not None]

    def add_row(self, row: Mapping[str, typing.Any], line: int, columns: Columns) -> None:
        """Raises RowError for a row that is no request."""
        for name, wanted in self.served:
            if (found := find_field(row, name)) != wanted and not (wanted is None and found == ""):
                columns.drop(line, f"not served: {name} is {shorten(found)}")
                return
        arrival_s = self.arrival.time_s(row) - (Decimal(0) if self.duration is None else self.duration.time_s(row))
        session = None if self.session is None else read_id(self.session.find(row), self.session.names[0])
        columns.add(
            arrival_s,
            whole_number(self.input.find(row), self.input.names[0]),
            whole_number(self.output.find(row), self.output.names[0]),
            extra={} if session is None else {"session": session},
        )


def find_field(row: Mapping[str, typing.Any], name: str) -> typing.Any:
    """The value of ``a``, or of ``a.b`` inside of it; None where there is none."""
    if name in row:
        return row[name]
    first, _, rest = name.partition(".")
    inner = row.get(first)
    return find_field(inner, rest) if rest and isinstance(inner, dict) else None


def parse_columns(text: str) -> ColumnMap:
    """The mapping of ``--columns``. Raises ConfigError."""
    named: dict[str, MappedField] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        name, colon, unit = value.rpartition(":")
        if not colon or unit not in (*UNITS, ISO):
            name, unit = value, ""
        if key not in (*NEEDED, *OTHERS) or not (equals and name) or key in named:
            raise ConfigError(f"--columns {part.strip()!r}: allowed: {MAPPING}, each once")
        if unit and key not in ("arrival", "duration"):
            raise ConfigError(f"--columns {part.strip()!r}: only times have a unit")
        named[key] = MappedField((name,), unit or None)
    if missing := [key for key in NEEDED if key not in named]:
        raise ConfigError(f"--columns {text!r} lacks {', '.join(missing)}; allowed: {MAPPING}")
    return ColumnMap(
        named["arrival"], named["input"], named["output"], session=named.get("session"), duration=named.get("duration")
    )


def load_mapped(path: Path, mapping: ColumnMap, *, bad_rows: BadRows = "refuse", sort: bool = False) -> Trace:
    """Raises TraceError: no such file, no such column (with those that there are), a bad row (unless skipped)."""
    columns = Columns(path.name, bad_rows, sort)
    with refuse_unreadable(path, TraceError), open_text(path, TraceError) as text:
        first = text.read(1 << 16).lstrip()[:1]
    if first not in ("{", "["):
        names = tuple(name for column in mapping.needed for name in column.names)
        read_rows(path, names, columns, lambda row: mapping.add_row(row, row["#line"], columns))
        return columns.trace()
    for place, (line, record) in enumerate(_read_objects(path, columns, array=first == "[")):
        if place == 0:
            _require_fields(path, record, mapping)
        try:
            mapping.add_row(record, line, columns)
        except RowError as error:
            columns.bad(line, str(error))
    return columns.trace()


def _read_objects(path: Path, columns: Columns, *, array: bool) -> Iterator[tuple[int, Row]]:
    if not array:
        yield from read_json_lines(path, columns)
        return
    for place, record in enumerate(read_json(path, TraceError, most=LARGEST_DATASET), 1):
        if isinstance(record, dict):
            yield place, record
        else:
            columns.bad(place, f"expected a JSON object, got {type(record).__name__}")


def _require_fields(path: Path, record: Row, mapping: ColumnMap) -> None:
    """Raises TraceError where a request that was served lacks one; any other may lack its lengths."""
    if any(find_field(record, name) != wanted for name, wanted in mapping.served):
        return
    found = list(_list_fields(record))
    missing = [" or ".join(column.names) for column in mapping.needed if not set(column.names) & set(found)]
    if missing:
        there = shorten(", ".join(found) or "nothing", 300)
        raise TraceError(f"{path}: no column {', '.join(missing)}; found: {there}")


def _list_fields(record: Row, prefix: str = "") -> Iterator[str]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _list_fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


# Where tools write what; a file of theirs is told by the words in ``load.MARKS``.
TOOL_COLUMNS = {
    # per-request records of AIPerf, profile_export.jsonl
    "aiperf": ColumnMap(
        MappedField(("metadata.request_start_ns",), "ns"),
        MappedField(("metrics.input_sequence_length.value",)),
        MappedField(("metrics.output_sequence_length.value",)),
        session=MappedField(("metadata.conversation_id", "metadata.x_request_id")),
        served=(("error", None), ("metadata.benchmark_phase", "profiling")),
    ),
    # per_request_lifecycle_metrics.json of inference-perf, as its releases have it and as it was before
    "inference-perf": ColumnMap(
        MappedField(("start_time",), "s"),
        MappedField(("info.request_metrics.text.input_tokens", "info.input_tokens")),
        MappedField(("info.response_metrics.output_tokens", "info.output_tokens")),
        served=(("error", None),),
    ),
    # the access log of our router; a line is written at the end of its request
    "access-log": ColumnMap(
        MappedField(("at_s",), "s"),
        MappedField(("input_tokens",)),
        MappedField(("output_tokens",)),
        duration=MappedField(("duration_ms",), "ms"),
        served=(("outcome", "ok"),),
    ),
}
