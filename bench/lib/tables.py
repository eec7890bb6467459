"""Rows as a table: on the screen, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from bench.lib.report import stdout


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[object]], *, caption: str | None = None) -> None:
    """On stdout, for people. Whole numbers get thousands separators, other numbers three digits."""
    table = Table(*header, title=title, caption=caption)
    for row in rows:
        table.add_row(*map(text, row))
    stdout.print(table)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are taken as they are; a ``|`` in one would begin another."""
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " --- |" * (len(header) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def text(value: object) -> str:
    """A cell."""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
