"""Findings as tables for people, and as files: JSON, parquet, PNG, and the table of docs/papers.md."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.papers.finding import Finding, finite, number

SHOWN_ALONE = 6  # values without a printed one; more of them are for the picture
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def show(finding: Finding, console: Console) -> None:
    """Paper value, our value, ratio, and a sentence where they differ; then what had to hold."""
    table = Table(title=f"{finding.title}: {finding.setting}", title_justify="left", width=150)
    for name, justify in (
        ("quantity", "left"),
        ("paper", "right"),
        ("ours", "right"),
        ("ratio", "right"),
        ("", "left"),
    ):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in finding.rows:
        values = number(row.paper, row.unit), number(row.ours, row.unit), number(row.ratio)
        table.add_row(row.what, *values, row.sentence)
    console.print(table)
    for claim in finding.claims:
        console.print(f"  {'holds' if claim.holds else 'FAILS'}: {claim.text} ({claim.seen})", soft_wrap=True)


def write(finding: Finding, folder: Path, about: Mapping[str, Any]) -> None:
    """``name.json``, ``name.parquet`` (its points), ``name.png``."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / finding.name
    record = {**finding.as_json(), "about": dict(about)}
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    stem.with_suffix(".png").write_bytes(finding.picture)
    names = list(dict.fromkeys(name for point in finding.points for name in point))
    columns = {name: [finite(point.get(name)) for point in finding.points] for name in names}
    parquet.write_table(pa.table(columns), stem.with_suffix(".parquet"))


def markdown(records: Iterable[Mapping[str, Any]]) -> str:
    """A section a figure, from the JSON records: the table of paper against ours, what only we have, the claims."""
    return "\n\n".join(_section(record) for record in records)


def _section(record: Mapping[str, Any]) -> str:
    lines = [f"### {record['title']}", "", *textwrap.wrap(record["setting"] + ".", 118), ""]
    printed = [row for row in record["rows"] if row["paper"] is not None]
    if printed:
        lines += ["| quantity | paper | ours | ratio | why they differ |", "| --- | ---: | ---: | ---: | --- |"]
        lines += [*(_line(row) for row in printed), ""]
    for why in dict.fromkeys(row["why"] for row in record["rows"] if row["paper"] is None):
        alone = [row for row in record["rows"] if row["paper"] is None and row["why"] == why]
        values = "; ".join(f"{row['what']} {number(row['ours'], row['unit'])}" for row in alone)
        if len(alone) > SHOWN_ALONE:
            values = f"{len(alone)} values, in `{record['name']}.json`"
        lines += [*textwrap.wrap(f"Ours alone ({why.rstrip('.')}): {values}.", 118), ""]
    return "\n".join([*lines, *(_bullet(claim) for claim in record["claims"])]).rstrip()


def _line(row: Mapping[str, Any]) -> str:
    values = number(row["paper"], row["unit"]), number(row["ours"], row["unit"]), number(row["ratio"])
    return "| " + " | ".join((row["what"], *values, row["sentence"])) + " |"


def _bullet(claim: Mapping[str, Any]) -> str:
    return f"* {'holds' if claim['holds'] else '**fails**'}: {claim['text']} ({claim['seen']})"


def publish(folder: Path, page: Path, order: Sequence[str]) -> None:
    """Puts the table of ``folder`` between the marks of ``page``."""
    text = page.read_text(encoding="utf-8")
    page.write_text(with_table(text, folder, order), encoding="utf-8")


def with_table(text: str, folder: Path, order: Sequence[str]) -> str:
    """``text`` with the table of the results in ``folder``, in this order; scripts without result are left out."""
    records = [
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in order if _has(folder, name)
    ]
    head, rest = text.split(BEGIN)
    table = f"\n{markdown(records)}\n\n" if records else ""
    return f"{head}{BEGIN}\n{table}{END}{rest.split(END)[1]}"


def _has(folder: Path, name: str) -> bool:
    return (folder / f"{name}.json").is_file()
