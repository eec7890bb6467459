"""The page of a bench: verdict, conditions, every figure as a table that can be sorted, lines where there are points.

It knows no bench: it looks at the shape of the result. A mapping of mappings has a row for each arm; mappings of
figures that have the same names are columns side by side; a list of mappings is a table of points. What has none of
these shapes is named, and stands in the setting at the end of the page.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pla_sglang.sim.report.columns import NOTHING
from pla_sglang.sim.report.figures import Line, colour_names, draw_lines
from pla_sglang.sim.report.page import Heading, Page, PageTable, Section, render_page

Rows = Mapping[str, Mapping[str, Any]]  # figures by name of row
CONDITIONS = (
    *("hardware", "device", "profile", "time_scale", "model", "sglang", "sglang_version", "plugin_commit"),
    *("seed", "seeds", "rounds", "load", "server_flags", "python"),
)
COMPLAINTS = ("problems", "warnings", "targets_missed", "goals_missed", "errors", "first_errors")
OVER = ("rate_rps", "rate_per_s", "load", "instances", "engines", "concurrency", "batch", "context")
DRAWN = (
    *("attainment", "slo_attainment", "goodput_rps", "goodput_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p99_s"),
    *("measured_ms", "ready_s", "pss_gib", "flips"),
)
SPREAD = {"median", "low", "high"}  # of a figure over rounds
MOST_LINES = 24
MOST_COLUMNS = 40


def write_bench_page(path: Path, name: str, result: Mapping[str, Any], *, picture: Path) -> None:
    """``picture``: of the same run, shown where it is there."""
    shown = picture.read_bytes() if picture.is_file() else None
    path.write_text(render_page(make_bench_page(name, result, shown)), encoding="utf-8")


def make_bench_page(name: str, result: Mapping[str, Any], picture: bytes | None = None) -> Page:
    """``result``: as the bench has emitted it. ``picture``: a PNG."""
    plain = json.loads(json.dumps(result), parse_constant=lambda _: None)  # what is no number is not known
    sections = list(_make_sections(plain, picture))
    return Page(f"Bench {name}", _list_facts(plain), _list_verdict(plain), sections, plain)


def _list_facts(result: Mapping[str, Any]) -> dict[str, str]:
    known = {**result.get("environment", {}), **result}
    facts = {key.replace("_", " "): show_cell(known[key]) for key in CONDITIONS if known.get(key) not in (None, "")}
    workload = result.get("workload")
    return facts | ({"workload": show_cell(workload.get("name", NOTHING))} if isinstance(workload, Mapping) else {})


def _list_verdict(result: Mapping[str, Any]) -> list[str]:
    """Tells whether the run counts, then its figures in one sentence, then what is wrong with it."""
    said = {True: "The run is valid.", False: "The run is NOT valid."}
    parts = [said.get(result.get("valid"), "The run says nothing on whether it is valid.")]  # type: ignore[arg-type]
    if not result.get("complete", True):
        parts.append("It was interrupted: what had been measured until then follows.")
    skip = {*CONDITIONS, "bench", "valid", "complete"}
    figures = [f"{key} {show_cell(value)}" for key, value in result.items() if key not in skip and _is_number(value)]
    if figures:
        parts.append(f"{'; '.join(figures)}.")
    claims = result.get("claims")
    if isinstance(claims, list):
        held = sum(claim.get("holds") is True for claim in claims)
        parts.append(f"{held} of {len(claims)} statements hold.")
    for key in COMPLAINTS:
        if isinstance(result.get(key), list):
            parts += [f"{key.replace('_', ' ')}: {text}" for text in result[key]]
    return parts


def _make_sections(result: Mapping[str, Any], picture: bytes | None) -> Iterator[Section]:
    if picture is not None:
        source = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        yield Section("Picture", "As the bench has drawn it, of the same run.", picture=source)
    rest = dict(result)
    for key, value in result.items():
        if _is_rows(value):
            yield _make_table(key, {str(name): flatten_figures(row) for name, row in value.items()}, "arm")
        elif isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
            rows = [flatten_figures(row) for row in value]
            yield from draw_points(key, rows)
            yield _make_table(key, {str(number): row for number, row in enumerate(rows, 1)}, "row")
        else:
            continue
        del rest[key]
    for keys in group_columns(rest):
        names = list(dict.fromkeys(name for key in keys for name in rest[key]))
        rows_by_name = {name: {key: rest[key].get(name) for key in keys} for name in names}
        yield _make_table(", ".join(keys[:3]) + (", ..." if len(keys) > 3 else ""), rows_by_name, "name")
        for key in keys:
            del rest[key]
    skip = {*CONDITIONS, *COMPLAINTS, "environment"}
    left = [key for key, value in rest.items() if key not in skip and isinstance(value, (list, dict)) and value]
    if left:
        yield Section("Not drawn", f"Of another shape than arms and points; in the setting below: {', '.join(left)}.")


def _is_rows(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(row, Mapping) for row in value.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def flatten_figures(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Figures below each other get one name; a spread stays one figure; lists are counted."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and not value.keys() >= SPREAD:
            flat |= flatten_figures(value, f"{name} ")
        elif isinstance(value, list) and any(isinstance(one, (list, dict)) for one in value):
            flat[name] = f"{len(value)} entries"
        else:
            flat[name] = value
    return flat


def group_columns(result: Mapping[str, Any]) -> list[list[str]]:
    """Names of plain mappings that share at least half of their names, so that they stand side by side."""
    groups: list[list[str]] = []
    for key, value in result.items():
        if not isinstance(value, Mapping) or not value or key in ("environment", "workload"):
            continue
        if any(isinstance(one, (list, dict)) for one in value.values()):
            continue
        for group in groups:
            shared = len(result[group[0]].keys() & value.keys())
            if 2 * shared >= max(len(value), len(result[group[0]])):
                group.append(key)
                break
        else:
            groups.append([key])
    return groups


def _make_table(title: str, rows: Rows, first: str) -> Section:
    """At most ``MOST_COLUMNS``; a row of its own for each name. Where one value is all there is, it is a column too."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    kept = names[:MOST_COLUMNS]
    headings = [Heading(first), *(Heading(name.replace("_", " ")) for name in kept)]
    cells = [[label, *(show_cell(row.get(name)) for name in kept)] for label, row in rows.items()]
    note = f" {len(names) - len(kept)} further columns stand in the setting below." if len(names) > len(kept) else ""
    return Section(
        title.replace("_", " "), f"A click on a column's name sorts by it.{note}", table=PageTable(headings, cells)
    )


def show_cell(value: Any) -> str:
    """Numbers first, so that the column can be sorted."""
    if value is None:
        return NOTHING
    if isinstance(value, Mapping) and not value.keys() >= SPREAD:
        return f"{len(value)} entries"
    if isinstance(value, Mapping):
        return f"{show_cell(value['median'])} ({show_cell(value['low'])} .. {show_cell(value['high'])})"
    if isinstance(value, list):
        return ", ".join(map(show_cell, value)) or NOTHING
    if isinstance(value, (bool, str)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def draw_points(title: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[Section]:
    """A line for each combination of texts (layout, policy, ...), where some number was varied."""
    over = next((name for name in OVER if len({row.get(name) for row in rows if _is_number(row.get(name))}) > 1), None)
    if over is None:
        return
    texts = [name for name, value in rows[0].items() if isinstance(value, str) and "commit" not in name]
    for figure in DRAWN:
        points: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if _is_number(row.get(over)) and _is_number(row.get(figure)):
                label = ", ".join(str(row.get(name)) for name in texts) or title
                points.setdefault(label, []).append((row[over], row[figure]))
        lines = [Line(name, [at for at, _ in pairs], [value for _, value in pairs]) for name, pairs in points.items()]
        if not any(len(line.tried) > 1 for line in lines):
            continue
        shown = lines[:MOST_LINES]
        caption = "A mark is one row of the table below."
        if len(lines) > len(shown):
            caption += f" The first {len(shown)} of {len(lines)} lines."
        drawing = draw_lines(shown, colour_names([line.name for line in shown]), over.replace("_", " "), figure)
        yield Section(f"{figure.replace('_', ' ')} by {over.replace('_', ' ')}", caption, drawing)
