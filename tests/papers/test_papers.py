"""Each script at its smallest size, and the paper's numbers in them against the text of the scripts' own tables."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bench.papers.context import Context
from bench.papers.figures import FIGURES, named, script
from bench.papers.finding import Claim, Finding, Row, ordered
from bench.papers.output import BEGIN, END, markdown, with_table, write
from pla_sglang.errors import ConfigError

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("name", FIGURES)
def test_each_script_runs(name: str, tmp_path: Path) -> None:
    finding = script(name)(Context(size=0))
    assert finding.name == name
    assert finding.rows
    assert finding.points
    assert finding.picture.startswith(PNG)
    for row in finding.rows:
        assert row.paper is not None or row.ours is not None, row.what
        assert row.why, f"{row.what}: no sentence for where it differs"
    write(finding, tmp_path, {"size": "test"})
    record = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    assert record["rows"][0]["what"] == finding.rows[0].what
    assert (tmp_path / f"{name}.parquet").stat().st_size > 0
    assert markdown([record]).count("\n| ") == len(finding.rows) + 2


def test_the_docs_hold_the_results() -> None:
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs" / "papers.md").read_text(encoding="utf-8")
    assert with_table(page, root / "bench" / "results" / "papers", list(FIGURES)) == page


def test_named() -> None:
    assert named(["all"]) == list(FIGURES)
    assert named(["theory", "arrow_fig7"]) == ["arrow_fig7", "theory"]
    with pytest.raises(ConfigError, match="is not known; allowed: all, arrow_fig7"):
        named(["arrow_fig6"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 3}, "size is 3"),
        ({"jobs": 0}, "jobs is 0"),
        ({"data": Path("no/such/folder")}, "is not a folder"),
    ],
)
def test_bad_options(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Context(**values)  # type: ignore[arg-type]


def test_a_folder_without_the_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no azure_code_2023"):
        script("arrow_fig9")(Context(tmp_path, size=0))


@pytest.mark.parametrize(
    ("row", "ratio", "sentence"),
    [
        (Row("same", 2.0, 2.1, why="w"), 1.05, ""),
        (Row("other", 2.0, 4.0, why="w"), 2.0, "w"),
        (Row("not printed", None, 4.0, why="w"), None, "w"),
        (Row("not to be had", 2.0, None, why="w"), None, "w"),
        (Row("not finite", 2.0, float("nan"), why="w"), None, "w"),
        (Row("zero", 0.0, 1.0, why="w"), None, "w"),
    ],
)
def test_rows(row: Row, ratio: float | None, sentence: str) -> None:
    assert row.ratio == (None if ratio is None else pytest.approx(ratio))
    assert row.sentence == sentence


def test_ordered() -> None:
    assert ordered({"a": 3.0, "b": 2.0, "c": 2.0})[0]
    assert not ordered({"a": 3.0, "b": 2.0, "c": 2.1})[0]
    assert ordered({"a": 3.0, "b": 2.0, "c": 2.1}, slack=0.06)[0]
    assert ordered({"a": 1.0, "b": 2.0}, falling=False) == (True, "a 1, b 2")
    assert not ordered({"a": 1.0, "b": float("nan")})[0]


def test_files_hold_no_number_that_json_does_not_know(tmp_path: Path) -> None:
    finding = Finding(
        "x", "T", "s", [Row("r", 1.0, float("inf"), why="w")], [Claim("c", True)], [{"a": float("nan")}, {"b": 1}], PNG
    )
    write(finding, tmp_path, {})
    record = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert record["rows"][0]["ours"] is None
    page = with_table(f"head\n{BEGIN}\nold\n{END}\ntail", tmp_path, ["x", "missing"])
    assert page.startswith("head\n")
    assert page.endswith("\ntail")
    assert "| r | 1 | - | - | w |" in page
    assert "old" not in page
    assert with_table(page, tmp_path, ["x", "missing"]) == page


def test_the_same_seed_gives_the_same_finding() -> None:
    one, two = (script("pla_fig5")(Context(size=0, seed=3)) for _ in range(2))
    assert dataclasses.replace(one, picture=b"") == dataclasses.replace(two, picture=b"")
