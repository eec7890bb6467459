"""Tables of the fleet benches: the same cells on the screen and on bench/lab/docs/fleets.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from bench.lab.named_workloads import WORKLOADS

Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # header, rows


def mark_best(
    corner: str,
    values: Mapping[str, Mapping[str, float | None]],
    *,
    best: Callable[[Iterable[float]], float],
    text: Callable[[float, str], str],  # of a value and its column
    bound: str = "",
) -> Table:
    """A row an outer name, a column an inner one; the best of a column is bold, that of the row ``bound`` aside."""
    columns = list(dict.fromkeys(column for row in values.values() for column in row))
    known = {
        column: [value for name, row in values.items() if name != bound and (value := row.get(column)) is not None]
        for column in columns
    }

    def heading(column: str) -> str:  # a workload, or its series by interval
        load = WORKLOADS.get(column.removesuffix("_1h"))
        return column if load is None or load.recorded else f"{column} (synthetic)"

    def cell(name: str, column: str) -> str:
        value = values[name].get(column)
        if value is None:
            return "-"
        return f"**{text(value, column)}**" if name != bound and value == best(known[column]) else text(value, column)

    cells = [[f"`{name}`", *(cell(name, column) for column in columns)] for name in values]
    return [corner, *map(heading, columns)], cells
