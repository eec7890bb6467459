"""The page of a bench: from every result that is kept here, and through ``--page``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.harness.bench_page import draw_points, flatten_figures, group_columns, make_bench_page, show_cell
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
    assert page.verdict[0].startswith("The run is valid" if result.get("valid") else "The run ")
    shown = {key for section in page.sections for key in (section.heading, section.caption)}
    for key, value in result.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            assert key.replace("_", " ") in shown
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
        "gain": 1.25,
        "problems": ["one arm failed"],
        "figures": {"stock": {"ttft_s": {"p50": SPREAD}, "n": 3}, "ours": {"n": 4}},
        "short": {"stock": 1.0, "ours": float("nan")},
        "long": {"stock": 2.0, "ours": 3.0},
        "rows": points,
        "by_start": [[1], [2]],
        "environment": {"hardware": "a <cpu>"},
    }
    page = make_bench_page("x", result, PNG)
    assert page.verdict == ["The run is NOT valid.", "gain 1.25.", "problems: one arm failed"]
    assert page.facts == {"hardware": "a <cpu>"}
    sections = {section.heading: section for section in page.sections}
    assert list(sections) == ["Picture", "figures", "attainment by rate rps", "rows", "short, long", "Not drawn"]
    table = sections["figures"].table
    assert table is not None
    assert [heading.name for heading in table.headings] == ["arm", "ttft s p50", "n"]
    assert table.rows == [["stock", "1.5 (1 .. 2.25)", "3"], ["ours", "-", "4"]]
    table = sections["short, long"].table
    assert table is not None
    assert table.rows == [["stock", "1", "2"], ["ours", "-", "3"]]
    figure = sections["attainment by rate rps"].figure
    assert figure is not None
    assert [(line["name"], line["x"], line["y"]) for line in figure["data"]] == [
        ("<a>", [1.0, 2.0], [1.0, 0.9]),
        ("b", [1.0, 2.0], [1.0, 0.9]),
    ]
    assert "by_start" in sections["Not drawn"].caption
    text = render_page(page)
    assert "a &lt;cpu&gt;" in text
    assert "<a>" not in text.partition('id="plotly"')[0].replace("\\u003ca>", "")
    assert 'src="data:image/png;base64,' in text


def test_shapes() -> None:
    assert flatten_figures({"a": {"b": {"c": 1}, "d": SPREAD}, "e": [1, 2], "f": [{}]}) == {
        "a b c": 1,
        "a d": SPREAD,
        "e": [1, 2],
        "f": "1 entries",
    }
    assert group_columns({"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"z": 1}, "d": 4, "e": {"x": [1]}}) == [
        ["a", "b"],
        ["c"],
    ]
    assert [show_cell(value) for value in (None, True, 1234, 0.123456, "x", [])] == [
        "-",
        "True",
        "1,234",
        "0.1235",
        "x",
        "-",
    ]
    assert list(draw_points("rows", [{"policy": "a", "rate_rps": 1.0, "attainment": 1.0}])) == []  # a point is no line


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
    assert "Bench padding" in page.read_text()
    assert f"page: {page}" in capsys.readouterr().out
    assert bench.main([]) == 0  # the page of an earlier run is not written again
    assert bench.main(["--page", str(tmp_path)]) == 2
    assert "--page" in capsys.readouterr().err
    monkeypatch.setattr(bench.load_module(), "run", lambda options: 0)
    assert bench.main(["--page", str(page)]) == 0
    assert "no page" in capsys.readouterr().err
