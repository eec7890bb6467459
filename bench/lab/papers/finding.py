"""What one figure or table comes to: paper values beside ours, statements that must hold, points, and a picture.

Shown as tables for people, written as files (JSON, parquet, PNG), and as the sections of bench/lab/docs/papers.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness import report
from bench.harness.report import number as number
from bench.harness.report import stdout
from bench.lab.papers.points import Point as Point
from bench.lab.papers.points import write_points

CLOSE = 0.1  # values whose ratio is nearer to 1 than this need no explanation
NEAR = 0.25  # in the summary, a ratio is near 1 within this: papers print two digits of what they measured once
MOST_FAIL = 0.5  # share of what holds and is near, below which a figure does not reproduce
SHOWN_ALONE = 3  # values without a printed one; more of them are for the picture
SHOWN_HELD = 6  # statements that hold; more of them are counted. What fails is always listed
Picture = Callable[[], bytes]  # draws a PNG
Record = Mapping[str, Any]  # a finding as JSON


@dataclasses.dataclass(frozen=True)
class Row:
    """One value of the paper beside ours.

    Attributes:
        what: the quantity, with its setting.
        paper: printed in the paper; None where it shows a curve without numbers.
        ours: of this run; None where it cannot be had here.
        unit: of both; "" for ratios.
        why: what explains a difference. Shown where the two differ by more than ``CLOSE``, or where one is missing.
        span_s, at_limit: of a ratio of searched rates: seconds of arrivals of the shortest run behind it, and whether a
            search ended at its limit (``python -m bench consistency``).
    """

    what: str
    paper: float | None
    ours: float | None
    unit: str = ""
    why: str = ""
    span_s: float | None = None
    at_limit: bool = False

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's; None where one of them is missing, not finite, or the paper's is 0."""
        if self.paper is None or self.ours is None or not self.paper or not math.isfinite(self.ours):
            return None
        return self.ours / self.paper

    @property
    def sentence(self) -> str:
        return self.why if self.ratio is None or abs(self.ratio - 1) > CLOSE else ""


@dataclasses.dataclass(frozen=True)
class Claim:
    """A statement of the paper or the issue, and whether this run bears it out. ``seen`` are the figures behind it.

    ``holds`` is None where the run shows no difference: an interval over seeds includes zero.
    """

    text: str
    holds: bool | None
    seen: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one script.

    Attributes:
        setting: fleet, profile, workload, in words.
        rows, claims: see above.
        points: what the picture shows, one flat record a point.
        picture: draws it.
        keys: what the script adds to the JSON object of ``all``.
        name, title: of the script, as on the command line, and of paper and figure; from the list of figures.
    """

    setting: str
    rows: Sequence[Row]
    claims: Sequence[Claim]
    points: Sequence[Point]
    picture: Picture
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    name: str = ""
    title: str = ""

    def as_json(self) -> dict[str, Any]:
        """Everything but points and picture; infinity and NaN become null."""
        rows = [{**dataclasses.asdict(row), "ratio": row.ratio, "sentence": row.sentence} for row in self.rows]
        return {
            "name": self.name,
            "title": self.title,
            "setting": self.setting,
            "rows": [{key: finite(value) for key, value in row.items()} for row in rows],
            "claims": [dataclasses.asdict(claim) for claim in self.claims],
            "keys": dict(self.keys),
        }


def points_of(results: Mapping[Any, Any], *names: str, value: str = "value") -> list[Point]:
    """One flat record a case: the case itself, as ``names`` name its parts, and the fields of its result.

    ``value`` names a result that is a plain number.
    """
    points = []
    for case, result in results.items():
        if not isinstance(result, dict):
            result = {value: result} if isinstance(result, int | float) else dataclasses.asdict(result)
        parts = case if isinstance(case, tuple) else (case,)
        points.append(dict(zip(names, parts, strict=True)) | result)
    return points


def finite(value: Any) -> Any:
    """``value``; None in place of infinity and NaN, which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def listed(values: Mapping[Any, float | None]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in values.items())


def ordered(values: Mapping[str, float], *, falling: bool = True) -> tuple[bool, str]:
    """Tells whether the values fall (or rise) in the order given; equal ones may follow each other."""
    sign = 1 if falling else -1
    pairs = itertools.pairwise(values.values())
    return all(sign * (later - earlier) <= 0 for earlier, later in pairs), listed(values)


# -- for people ------------------------------------------------------------------------------------------------------


def _cells(row: Record) -> list[str]:
    compared = [number(row[key], row["unit"]) for key in ("paper", "ours")]
    return [row["what"], *compared, number(row["ratio"]), row["sentence"]]


def _claims(record: Record, fails: str) -> list[str]:
    verdicts = {True: "holds", False: fails, None: "no difference seen"}
    return [f"{verdicts[of['holds']]}: {of['text']} ({of['seen']})" for of in record["claims"]]


def show(record: Record) -> None:
    """Paper value, our value, ratio, and a sentence where they differ; then what had to hold."""
    header = ("quantity", "paper", "ours", "ratio", "")
    report.show(f"{record['title']}: {record['setting']}", header, list(map(_cells, record["rows"])))
    for claim in _claims(record, "FAILS"):
        stdout.print(f"  {claim}", soft_wrap=True)


def section(record: Record) -> str:
    """Of one figure: its picture, the table of paper against ours, what only we have, the claims."""
    picture = f"![{record['title']}](../results/papers/{record['name']}.png)"
    lines = [f"### {record['title']}", "", *_wrap(record["setting"] + "."), "", picture, ""]
    table, marks = _compared([row for row in record["rows"] if row["paper"] is not None])
    lines += table
    alone: dict[str, list[str]] = {}  # by reason
    for row in record["rows"]:
        if row["paper"] is None:
            alone.setdefault(row["why"], []).append(f"{row['what']} {number(row['ours'], row['unit'])}")
    for why, values in alone.items():
        shown = "; ".join(values)
        if len(values) > SHOWN_ALONE:
            shown = f"{len(values)} values, in `{record['name']}.json`"
        lines += [*_wrap(f"Ours alone {marks.get(why, '(' + why.rstrip('.') + ')')}: {shown}."), ""]
    return "\n".join([*lines, *_judged(record)]).rstrip()


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, 118)


def _compared(rows: Sequence[Record]) -> tuple[list[str], dict[str, str]]:
    """The values that the paper prints beside ours, with each reason once below the table; and the marks of these."""
    if not rows:
        return [], {}
    cells = [_cells(row) for row in rows]
    reasons = {reason: f"({at})" for at, reason in enumerate(dict.fromkeys(row[-1] for row in cells if row[-1]), 1)}
    header = ("quantity", "paper", "ours", "ratio", "why")
    table = [[*row, reasons.get(reason, "")] for *row, reason in cells]
    lines = [report.markdown(header, table, right=(1, 2, 3)), ""]
    if reasons:
        lines += [*_wrap(" ".join(f"{mark} {reason}" for reason, mark in reasons.items())), ""]
    return lines, reasons


def _judged(record: Record) -> list[str]:
    """What fails, what holds, and of how much no difference is seen."""
    by_verdict = {holds: [of for of in record["claims"] if of["holds"] is holds] for holds in (True, False, None)}
    few_hold = len(by_verdict[True]) <= SHOWN_HELD
    listed_ones = [of for of in record["claims"] if of["holds"] is False or (of["holds"] and few_hold)]
    lines = [f"* {claim}" for claim in _claims({"claims": listed_ones}, "**fails**")]
    where = f"in `{record['name']}.json`"
    if not few_hold:
        lines += [f"* holds: {_count(len(by_verdict[True]))}, {where}"]
    if by_verdict[None]:
        lines += [f"* no difference seen: {_count(len(by_verdict[None]))}, {where}"]
    return lines


def _count(statements: int) -> str:
    return f"{statements} statement{'s' if statements > 1 else ''}"


def sections(folder: Path, order: Sequence[str]) -> str:
    """The sections of the results in ``folder``, in this order; scripts without a result are left out."""
    paths = [folder / f"{name}.json" for name in order]
    return "\n\n".join(section(json.loads(path.read_text(encoding="utf-8"))) for path in paths if path.is_file())


def summary(folder: Path, order: Sequence[str]) -> str:
    """One table of the results in ``folder``: each figure, whether it reproduces, and by how much."""
    paths = [folder / f"{name}.json" for name in order]
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.is_file()]
    header = ("figure", "reproduces", "statements that hold", "ours / paper")
    return report.markdown(header, [_summarize(record) for record in records])


def _summarize(record: Record) -> list[str]:
    """A figure reproduces where every statement holds and every ratio is near 1; it does not where most of both fail.

    A statement of which no difference is seen does not hold.
    """
    held = [claim["holds"] is True for claim in record["claims"]]
    ratios = [row["ratio"] for row in record["rows"] if row["ratio"] is not None]
    near = [abs(ratio - 1) <= NEAR for ratio in ratios]
    tests = [sum(which) / len(which) for which in (held, near) if which]
    share = sum(tests) / len(tests) if tests else 0.0
    verdict = "yes" if share == 1 else "in part" if share >= MOST_FAIL else "no"
    span = "no number in the paper"
    if len(ratios) == 1:
        span = number(ratios[0])
    elif ratios:
        span = f"{number(min(ratios))} to {number(max(ratios))}, median {number(statistics.median(ratios))}"
    title = record["title"]
    anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    statements = f"{sum(held)} of {len(held)}" if held else "-"
    return [f"[{title}](#{anchor})", verdict if tests else "-", statements, span]


def write(finding: Finding, folder: Path, about: Mapping[str, Any], points: Sequence[Point]) -> Record:
    """``name.json``, ``name.parquet``, ``name.png``. Returns the record that the JSON file holds.

    ``points``: of everything measured, from which the finding was made (``Context.points``).
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / finding.name
    record = {**finding.as_json(), "about": dict(about)}
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    stem.with_suffix(".png").write_bytes(finding.picture())
    write_points(points, stem.with_suffix(".parquet"))
    return record
