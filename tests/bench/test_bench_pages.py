"""The page of a bench: from every result that is kept here, and through ``--page``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.harness.bench_page import (
    label_key,
    make_bench_page,
    split_tables,
)
from bench.harness.catalogue import BENCHES
from bench.harness.report import emit
from pla_sglang.sim.report.page import render_page

ROOT = Path(__file__).parents[2]
KEPT = sorted((ROOT / "bench/results").rglob("*.json"))
SPREAD = {"median": 1.5, "low": 1, "high": 2.25}
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_every_kept_result_becomes_a_page(path: Path) -> None:
    result = json.loads(path.read_text())
    page = make_bench_page(path.stem, result)
    assert page.verdict, "a page has an answer"
    assert page.title[0].isupper(), "the question of its bench"
    data = {section.heading for section in page.sections if section.folded}
    for key, value in result.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            assert f"Data: {label_key(key)}" in data
    raw = re.compile(r"[a-z0-9]+(_[a-z0-9]+)+")
    for section in page.sections:
        for heading in () if section.table is None else section.table.headings:
            assert not raw.fullmatch(heading.name), "a key is no heading"
    for section in page.sections:
        if section.table is not None:
            assert all(len(row) == len(section.table.headings) for row in section.table.rows)
    json.dumps([section.figure for section in page.sections], allow_nan=False)


def test_arms_points_and_the_rest_have_their_places() -> None:
    points = [
        {"policy": policy, "rate_rps": rate, "attainment": value, "plugin_commit": f"c{rate}"}
        for policy in ("<a>", "b")
        for rate, value in ((2.0, 0.9), (1.0, 1.0))
    ]
    result: dict[str, Any] = {
        "valid": False,
        "failed": 1,
        "requests": 9,
        "problems": ["one arm failed"],
        "figures": {"stock": {"ttft_s": {"p50": SPREAD}, "n": 3}, "ours": {"n": 4}},
        "short": {"stock": 1.0, "ours": float("nan")},
        "long": {"stock": 2.0, "ours": 3.0},
        "rows": points,
        "by_start": [[1], [2]],
        "environment": {"hardware": "a <cpu>"},
    }
    page = make_bench_page("x", result, PNG)
    assert page.verdict == [
        "The run is NOT valid: its figures decide nothing.",
        "1 of 9 requests failed.",
        "problems: one arm failed",
    ]
    assert page.facts == {"hardware": "a <cpu>"}
    sections = {section.heading: section for section in page.sections}
    data = ("figures", "attainment by rate requests/s", "rows", "short, long", "Not drawn")
    assert list(sections) == ["Chart", *(f"Data: {name}" for name in data)]
    assert [section.folded for section in page.sections] == [False, True, True, True, True, True]
    table = sections["Data: figures"].table
    assert table is not None
    assert [heading.name for heading in table.headings] == ["arm", "TTFT s P50", "n"]
    assert table.rows == [["stock", "1.5 (1 .. 2.25)", "3"], ["ours", "-", "4"]]
    table = sections["Data: short, long"].table
    assert table is not None
    assert table.rows == [["stock", "1", "2"], ["ours", "-", "3"]]
    figure = sections["Data: attainment by rate requests/s"].figure
    assert figure is not None
    assert [(line["name"], line["x"], line["y"]) for line in figure["data"]] == [
        ("<a>", [1.0, 2.0], [1.0, 0.9]),
        ("b", [1.0, 2.0], [1.0, 0.9]),
    ]
    assert "by_start" in sections["Data: Not drawn"].caption
    text = render_page(page)
    assert "a &lt;cpu&gt;" in text
    assert "<a>" not in text.partition('id="plotly"')[0].replace("\\u003ca>", "")
    assert 'src="data:image/png;base64,' in text


def test_the_tables_of_docs_stand_on_the_page_without_marks() -> None:
    tables = ["| figure | value |\n| --- | ---: |\n| `tokens_wrong` | **0** |", "| a | b |\n|---|---|\n| c | d |"]
    text = "\n\nOf [all](x.md):\n\n".join(tables)
    [(_, first), (before, second)] = split_tables(text)
    assert [(heading.name, heading.is_text) for heading in first.headings] == [("figure", True), ("value", False)]
    assert (first.rows, before, second.rows) == ([["tokens wrong", "0"]], "Of all:", [["c", "d"]])
    result = json.loads((ROOT / "bench/results/emulated/survive.json").read_text())
    shown = make_bench_page("survive", result).sections[0]
    assert (shown.heading, shown.folded) == ("Result", False)


def test_a_figure_of_a_paper_has_the_paper_beside_ours_and_its_statements() -> None:
    rows = [
        {"what": "a", "paper": 2.0, "ours": 1.0, "unit": "s", "why": "x", "ratio": 0.5, "sentence": "x"},
        {"what": "b", "paper": 3.0, "ours": None, "unit": "", "why": "y", "ratio": None, "sentence": "y"},
        {"what": "c", "paper": None, "ours": 4.0, "unit": "", "why": "a curve.", "ratio": None, "sentence": "a curve."},
    ]
    claims = [{"text": str(holds), "holds": holds, "seen": "1"} for holds in (True, False, None)]
    result = {"title": "Arrow, Figure 9", "setting": "8 GPUs", "rows": rows, "claims": claims}
    page = make_bench_page("papers", result, PNG)
    assert (page.title, page.facts["setting"]) == ("Arrow, Figure 9", "8 GPUs")
    assert page.verdict == ["1 of 3 statements hold; of 1 no difference is seen."]
    sections = {section.heading: section for section in page.sections if not section.heading.startswith("Data")}
    assert list(sections) == [
        *("Chart", "The paper beside ours, s", "The paper beside ours", "Statements", "Values", "Ours alone"),
    ]
    table = sections["Statements"].table
    assert table is not None
    assert [row[0][0] for row in table.rows] == ["\u2713", "\u2717", "\u2013"]
    figure = sections["The paper beside ours, s"].figure
    assert figure is not None
    assert [bar["x"] for bar in figure["data"]] == [[1.0], [2.0]]
    json.dumps([section.figure for section in page.sections], allow_nan=False)


def test_the_flag_of_every_bench(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = BENCHES["padding"]
    page = tmp_path / "page.html"

    def run(options: Any) -> int:
        emit({"bench": "padding", "figures": {"ours": {"n": 1}}}, "padding", tmp_path)
        return 0

    monkeypatch.setattr(bench.load_module(), "run", run)
    assert bench.main(["--page", str(page)]) == 0
    assert "<h1>Tokens that graph layouts compute" in page.read_text()
    assert f"page: {page}" in capsys.readouterr().out
    assert bench.main([]) == 0  # the page of an earlier run is not written again
    assert bench.main(["--page", str(tmp_path)]) == 2
    assert "--page" in capsys.readouterr().err
    monkeypatch.setattr(bench.load_module(), "run", lambda options: 0)
    assert bench.main(["--page", str(page)]) == 0
    assert "no page" in capsys.readouterr().err
