"""Points: what each simulated case gave, one flat record a case, and from such records the results again.

A record holds the name of what was measured, the case by the parameters' names, and the fields of the result. Tables,
statements and pictures come from the results alone, so whoever has the points can make them again.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pla_sglang.common.errors import PlaError

Point = dict[str, Any]  # flat: numbers, texts, None, lists of numbers
MEASURED = "measured"  # column with the name of the function
VALUE = "value"  # column of a result without fields
PLAIN = (str, int, float, bool, type(None))


class PointsError(PlaError):
    """Points from which a result cannot be made: of another form, or of other cases."""


def fields_of(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def case_columns(call: Callable[..., Any], parts: Sequence[Any]) -> Point:
    """The parts of a case by parameter; of a dataclass its plain fields."""
    columns: Point = {MEASURED: call.__name__}
    for name, part in zip(inspect.signature(call).parameters, parts, strict=False):
        plain = fields_of(part) if dataclasses.is_dataclass(part) else {name: part}
        columns |= {key: value for key, value in plain.items() if isinstance(value, PLAIN)}
    return columns


def point_of(call: Callable[..., Any], parts: Sequence[Any], result: Any) -> Point:
    """Lists are JSON; a result without fields is ``value``. A case that the result holds is not repeated."""
    case = case_columns(call, parts)
    if dataclasses.is_dataclass(result):
        fields = {name: value for name, value in fields_of(result).items() if not dataclasses.is_dataclass(value)}
    elif isinstance(result, Mapping):
        fields = dict(result)
    else:
        fields = {VALUE: result if isinstance(result, PLAIN) else json.dumps(result)}
    if both := case.keys() & fields.keys():
        raise PointsError(f"{call.__name__}: {', '.join(sorted(both))} of the case and of the result have one name")
    return case | {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in fields.items()}


def result_of(call: Callable[..., Any], parts: Sequence[Any], point: Point | None) -> Any:
    """The inverse of ``point_of``, by what ``call`` says that it returns. Raises PointsError for another case."""
    if point is None:
        raise PointsError("there are fewer points than cases")
    case = case_columns(call, parts)
    if different := [name for name, value in case.items() if point.get(name) != value]:
        shown = ", ".join(f"{name} {point.get(name)}, not {case[name]}" for name in different)
        raise PointsError(f"a point is of another case: {shown}")
    kind = typing.get_type_hints(call)["return"]
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        of_case = {type(part): part for part in parts if dataclasses.is_dataclass(part)}
        return kind(**{name: restored(point.get(name), hint, of_case) for name, hint in hints.items()})  # type: ignore[operator]
    if typing.get_origin(kind) is dict:
        return {name: value for name, value in point.items() if name not in case and value is not None}
    return restored(point[VALUE], kind, {})


def restored(value: Any, hint: Any, of_case: Mapping[Any, Any]) -> Any:
    """A field as its type has it: arrays and tuples are lists in a file, a part of the case is not in it at all."""
    if hint in of_case:
        return of_case[hint]
    if typing.get_origin(hint) is np.ndarray:
        return np.asarray(value, dtype=np.float64)
    if typing.get_origin(hint) is tuple:
        return tuple(tuple(item) if isinstance(item, list) else item for item in value)
    if hint in (int, bool):
        return hint(value)
    return json.loads(value) if isinstance(value, str) and hint is not str else value


def write_points(points: Sequence[Point], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    names = dict.fromkeys(name for point in points for name in point)
    table = pa.table({name: [point.get(name) for point in points] for name in names})
    parquet.write_table(table, path, compression="zstd")


def read_points(path: Path) -> list[Point]:
    """Raises PointsError for a file without the points of cases."""
    import pyarrow.parquet as parquet

    points: list[Point] = parquet.read_table(path).to_pylist()
    if not points or MEASURED not in points[0]:
        raise PointsError(f"{path.name} does not say what was measured: it is older than this form")
    return points
