"""The page of a bench: its question, the answer in one sentence, its chart, its table; then all data, folded.

The question is the first line of the bench's module, the chart is its picture, the table is the one that docs show.
The data are shown by their shape: a mapping of mappings has a row for each arm; mappings of figures that have the same
names are columns side by side; a list of mappings is a table of points, with lines where a number was varied. What has
none of these shapes is named, and stands in the setting at the end of the page.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.bench import Bench
from bench.harness.catalogue import BENCHES
from bench.harness.publish import MISFITS
from pla_sglang.common.legend.colours import COLOURS, STOCK_COLOUR
from pla_sglang.sim.report.columns import NOTHING
from pla_sglang.sim.report.figures import Line, colour_names, draw_lines, make_layout, name_axis
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
KEY = re.compile(r"[a-z0-9]+(?:_[a-z0-9]+)+")
MOST_LINES = 24
MOST_HEADLINES = 5
LOG_SPAN = 50  # of values that stand in one chart of bars
LABEL_CHARS = 34  # of a line beside a bar
# What an answer is made of: the first of these that a result has, each with the key of what it is a part of.
HEADLINES: Mapping[str, tuple[str, str]] = {
    "short_ttft_p99_gain": ("P99 TTFT of short prompts {} times better than stock", ""),
    "short_ttft_p50_ratio": ("their P50 {} of it", ""),
    "long_ttft_p90_ratio": ("P90 TTFT of long prompts {} of it", ""),
    "combined_vs_best_stock_geomean": ("combined serves {} times the rate of the best stock arm (geometric mean)", ""),
    "vs_best_stock": ("{} times the rate of the best stock arm", ""),
    "turning_vs_best_fixed": ("{} times the rate of the best fixed split", ""),
    "fewer_than_router": ("{} fewer late requests, as a share, than behind SGLang's router", ""),
    "job_time_p50_ratio": ("jobs take {} of the time of the best stock arm (P50)", ""),
    "ttft_ratio": ("TTFT {} of stock's", ""),
    "tpot_ratio": ("TPOT {} of stock's", ""),
    "throughput_ratio": ("throughput {} of stock's", ""),
    "confirmed": ("{} answers confirmed", "cases"),
    "identical_share": ("{} of the decisions, as a share, came out as they did live", ""),
    "completed": ("{} requests completed", "streams"),
    "served_share": ("{} of what instances alone serve, as a share", ""),
    "failed": ("{} requests failed", "requests"),
    "tokens_wrong": ("{} tokens wrong", "tokens"),
    "bytes_wrong": ("{} bytes wrong", ""),
    "leaks": ("{} leaks", ""),
    "longest_gap_s": ("longest gap in a stream {} s", ""),
    "gap_p99_s": ("P99 gap of a stream that was hit {} s", ""),
    "pause_p99_s": ("P99 pause {} s", ""),
    "whole_again_s": ("whole again after {} s", ""),
    "label_p99_ms": ("P99 of a role change {} ms", ""),
    "e2e_mean_error": ("relative error of the mean latency {}", ""),
    "ttft_p99_error": ("of P99 TTFT {}", ""),
    "attainment_error": ("of attainment {}", ""),
    "step_error_p99": ("P99 relative error of a step {}", ""),
    "client_lag_p99_ms": ("P99 lag of the client {} ms", ""),
    "stream_cpu_ratio": ("a stream takes {} times the CPU time", ""),
    "request_cpu_ratio": ("a request without a stream {} times", ""),
    "split_added_ttft_p50_ms": ("P50 TTFT {} ms longer", ""),
    "added_p50_ms": ("a pass takes {} ms longer (P50)", ""),
    "added_p99_ms": ("{} ms longer (P99)", ""),
    "mae_survival": ("mean absolute error {} tokens with the survival curve", ""),
    "mae_constant": ("{} with a constant", ""),
}
WORDS = {  # of keys, as people write them
    **{
        word: word.upper()
        for word in ("ttft", "tpot", "slo", "kv", "gpus", "gpu", "p50", "p90", "p99", "pd", "mae", "h100")
    },
    "e2e": "end-to-end",
    "vs": "against",
    "rps": "requests/s",
    "geomean": "(geometric mean)",
    "sglang": "SGLang",
    "req": "requests",
}
UNITS = {"s": "s", "ms": "ms", "us": "us", "gib": "GiB", "gbps": "Gbit/s", "tokens": "tokens", "bytes": "bytes"}
MOST_COLUMNS = 40


def write_bench_page(path: Path, name: str, result: Mapping[str, Any], *, bench: str, picture: Path) -> None:
    """``bench``: which has made the result ``name``. ``picture``: of the same run, shown where it is there."""
    shown = picture.read_bytes() if picture.is_file() else None
    path.write_text(render_page(make_bench_page(name, result, shown, by=bench)), encoding="utf-8")


def make_bench_page(name: str, result: Mapping[str, Any], picture: bytes | None = None, *, by: str = "") -> Page:
    """``result``: as the bench ``by`` has emitted it; without one, the result may name it. ``picture``: a PNG."""
    plain = json.loads(json.dumps(result), parse_constant=lambda _: None)  # what is no number is not known
    bench = BENCHES.get(by or str(plain.get("bench") or name).partition(".")[0])
    question = bench.read_summary().replace("``", "").rstrip(".") if bench is not None else label_key(name).capitalize()
    sections = [
        *_show_picture(picture),
        *_show_paper(plain),
        *_show_results(name, bench, plain),
        *(dataclasses.replace(one, heading=f"Data: {one.heading}", folded=True) for one in _make_sections(plain)),
    ]
    facts = {"bench": f"python -m bench {bench.name}"} if bench is not None else {}
    return Page(str(plain.get("title") or question), facts | _list_facts(plain), list_verdict(plain), sections, plain)


def label_key(key: str) -> str:
    """A key of a result in words."""
    words = [WORDS.get(word, word) for word in re.split(r"[_ ]", key)]
    if len(words) > 1 and words[-1] in UNITS:
        return f"{' '.join(words[:-1])}, {UNITS[words[-1]]}"
    return " ".join(words)


def _list_facts(result: Mapping[str, Any]) -> dict[str, str]:
    known = {**result.get("environment", {}), **result}
    facts = {label_key(key): show_cell(known[key]) for key in CONDITIONS if known.get(key) not in (None, "")}
    workload = result.get("workload")
    facts |= {"workload": show_cell(workload.get("name", NOTHING))} if isinstance(workload, Mapping) else {}
    return facts | ({"setting": result["setting"]} if isinstance(result.get("setting"), str) else {})


def list_verdict(result: Mapping[str, Any]) -> list[str]:
    """The answer in one sentence, then what is wrong with the run."""
    claims = result.get("claims")
    figures = [show_figure(key, result) for key in HEADLINES if is_number(result.get(key))][:MOST_HEADLINES]
    if isinstance(claims, list) and claims:
        held = sum(claim.get("holds") is True for claim in claims)
        open_ = sum(claim.get("holds") is None for claim in claims)
        answer = f"{held} of {len(claims)} statements hold" + (f"; of {open_} no difference is seen." if open_ else ".")
    else:
        said = "; ".join(figures)
        answer = f"{said[:1].upper()}{said[1:]}." if figures else ""
    parts = [answer] if answer else []
    if result.get("valid") is False:
        parts.insert(0, "The run is NOT valid: its figures decide nothing.")
    elif result.get("valid") is True:
        parts.append("The run is valid: all that it checks of itself held.")
    if not result.get("complete", True):
        parts.append("It was interrupted: what had been measured until then follows.")
    for key in COMPLAINTS:
        if isinstance(result.get(key), list):
            parts += [f"{label_key(key)}: {text}" for text in result[key]]
    return parts or ["The answer is in the table."]


def show_figure(key: str, result: Mapping[str, Any]) -> str:
    text, whole = HEADLINES[key]
    of = f" of {show_cell(result[whole])}" if whole and is_number(result.get(whole)) else ""
    return text.format(f"{show_cell(result[key])}{of}")


def _show_picture(picture: bytes | None) -> Iterator[Section]:
    if picture is not None:
        source = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        yield Section("Chart", "As the bench has drawn it, of the same run.", picture=source)


def _show_results(name: str, bench: Bench | None, result: Mapping[str, Any]) -> Iterator[Section]:
    """The tables that docs show of such a result, whose headings are for people."""
    make = bench.pages.get(name) if bench is not None else None
    if make is None:
        return
    try:
        text = make(result)
    except MISFITS:  # of a run that was interrupted
        return
    for number, (before, table) in enumerate(split_tables(text), 1):
        yield Section("Result" if number == 1 else f"Result, table {number}", before, table=table)


def split_tables(text: str) -> Iterator[tuple[str, PageTable]]:
    """Each table of Markdown, and the text before it, without marks."""
    before: list[str] = []
    lines = text.splitlines()
    for head, rule, *rows in _group_lines(lines, before):
        right = [cell.endswith(":") for cell in _split_row(rule)]
        cells = [[_label_cell(_strip_marks(cell)) for cell in _split_row(row)] for row in rows]
        names = [_label_cell(_strip_marks(name)) for name in _split_row(head)]
        headings = [Heading(name, is_text=not is_right) for name, is_right in zip(names, right, strict=True)]
        yield _strip_marks(" ".join(before)), PageTable(headings, [row for row in cells if len(row) == len(headings)])
        before.clear()


def _group_lines(lines: Sequence[str], before: list[str]) -> Iterator[list[str]]:
    """The lines of each table; ``before`` gets those in front of it."""
    table: list[str] = []
    for line in [*lines, ""]:
        if line.startswith("|"):
            table.append(line)
            continue
        if len(table) > 1:
            yield table
        table = []
        if line.strip():
            before.append(line.strip())


def _split_row(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _strip_marks(text: str) -> str:
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text).replace("**", "").replace("`", "")


def _label_cell(text: str) -> str:
    return label_key(text) if KEY.fullmatch(text) else text


def _show_paper(result: Mapping[str, Any]) -> Iterator[Section]:
    """A figure of a paper: its printed numbers beside ours, and its statements."""
    if not isinstance(result.get("claims"), list) or not isinstance(result.get("rows"), list):
        return
    rows = result["rows"]
    printed = [row for row in rows if row.get("paper") is not None]
    for unit in dict.fromkeys(row["unit"] for row in printed):
        caption = "Numbers that the paper prints, and ours. Where the paper shows a curve alone, there is no bar."
        of_unit = [row for row in printed if row["unit"] == unit]
        yield Section(f"The paper beside ours{f', {unit}' if unit else ''}", caption, draw_beside(of_unit))
    marks = {True: "\u2713 holds", False: "\u2717 fails", None: "\u2013 no difference seen"}
    claims = [[marks[claim["holds"]], claim["text"], claim["seen"]] for claim in result["claims"]]
    headings = [Heading(name, is_text=True) for name in ("", "statement of the paper", "seen here")]
    yield Section("Statements", "", table=PageTable(headings, claims))
    if printed:
        names = ("quantity", "paper", "ours", "ours / paper", "why they differ")
        cells = [
            [row["what"], _with_unit(row, "paper"), _with_unit(row, "ours"), show_cell(row["ratio"]), row["sentence"]]
            for row in printed
        ]
        headings = [Heading(name, is_text=name in (names[0], names[-1])) for name in names]
        yield Section("Values", "", table=PageTable(headings, cells))
    if alone := [row for row in rows if row.get("paper") is None]:
        why = "; ".join(dict.fromkeys(row["why"].rstrip(".") for row in alone if row["why"]))
        cells = [[row["what"], _with_unit(row, "ours")] for row in alone]
        table = PageTable([Heading("quantity", is_text=True), Heading("ours")], cells)
        yield Section("Ours alone", f"The paper has no number: {why}.", table=table, folded=bool(printed))


def _with_unit(row: Mapping[str, Any], key: str) -> str:
    return NOTHING if row[key] is None else f"{show_cell(row[key])} {row['unit']}".rstrip()


def draw_beside(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Two bars a quantity: the paper's and ours. The axis is logarithmic where they span more than ``LOG_SPAN``."""
    values = [row[key] for row in rows for key in ("paper", "ours") if is_number(row[key])]
    log = bool(values) and min(values) > 0 and max(values) / min(values) > LOG_SPAN
    names = [row["what"] for row in rows]
    bars = [
        {
            "type": "bar",
            "orientation": "h",
            "name": label,
            "y": ["<br>".join(textwrap.wrap(name, LABEL_CHARS)) for name in names],
            "x": [row[key] for row in rows],
            "marker": {"color": colour},
            "hovertemplate": f"{label}: %{{x:.4g}}<extra></extra>",
        }
        for key, label, colour in (("ours", "ours", COLOURS[0]), ("paper", "the paper", STOCK_COLOUR))
    ]
    height = 110 + 46 * len(rows)
    axes = {
        "xaxis": name_axis(rows[0]["unit"], type="log" if log else "linear"),
        "yaxis": {"automargin": True, "autorange": "reversed"},
    }
    return {"data": bars, "layout": make_layout(height, barmode="group", **axes), "height": height}


def _make_sections(result: Mapping[str, Any]) -> Iterator[Section]:
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


def is_number(value: Any) -> bool:
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
    headings = [Heading(first), *(Heading(label_key(name)) for name in kept)]
    cells = [[label, *(show_cell(row.get(name)) for name in kept)] for label, row in rows.items()]
    note = f" {len(names) - len(kept)} further columns stand in the setting below." if len(names) > len(kept) else ""
    return Section(label_key(title), f"A click on a column's name sorts by it.{note}", table=PageTable(headings, cells))


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
    over = next((name for name in OVER if len({row.get(name) for row in rows if is_number(row.get(name))}) > 1), None)
    if over is None:
        return
    texts = [name for name, value in rows[0].items() if isinstance(value, str) and "commit" not in name]
    for figure in DRAWN:
        points: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if is_number(row.get(over)) and is_number(row.get(figure)):
                label = ", ".join(str(row.get(name)) for name in texts) or title
                points.setdefault(label, []).append((row[over], row[figure]))
        lines = [Line(name, [at for at, _ in pairs], [value for _, value in pairs]) for name, pairs in points.items()]
        if not any(len(line.tried) > 1 for line in lines):
            continue
        shown = lines[:MOST_LINES]
        caption = "A mark is one row of the table below."
        if len(lines) > len(shown):
            caption += f" The first {len(shown)} of {len(lines)} lines."
        drawing = draw_lines(shown, colour_names([line.name for line in shown]), label_key(over), label_key(figure))
        yield Section(f"{label_key(figure)} by {label_key(over)}", caption, drawing)
