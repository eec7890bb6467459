"""Each script at its smallest size, and the frame around them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import bench.papers.__main__ as papers
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
    page = markdown([record])
    assert all(f"| {row.what} |" in page for row in finding.rows if row.paper is not None)


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
    page = with_table(f"head\n{BEGIN}\nstale\n{END}\ntail", tmp_path, ["x", "missing"])
    assert page.startswith("head\n")
    assert page.endswith("\ntail")
    assert "| r | 1 | - | - | w |" in page
    assert "stale" not in page
    assert with_table(page, tmp_path, ["x", "missing"]) == page


def test_the_same_seed_gives_the_same_finding() -> None:
    one, two = (script("pla_fig5")(Context(size=0, seed=3)) for _ in range(2))
    assert dataclasses.replace(one, picture=b"") == dataclasses.replace(two, picture=b"")


def test_a_run_can_be_resumed_and_ends_with_the_keys_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def fake(name: str) -> Callable[[Context], Finding]:
        def run(context: Context) -> Finding:
            calls.append(name)
            rows = [Row("r", 1.0, 2.0, why="w")]
            return Finding(name, "T", "s", rows, [Claim("c", name != "theory")], [{"a": 1}], PNG, {f"{name}_key": 1.5})

        return run

    monkeypatch.setattr(papers, "script", fake)
    monkeypatch.delenv("PLA_BENCH_DATA", raising=False)
    arguments = ["theory", "pla_fig5", "--resume", "--out", str(tmp_path)]
    assert papers.main(arguments) == 0
    assert papers.main(arguments) == 0
    assert calls == ["pla_fig5", "theory"]
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["theory_key"] == last["pla_fig5_key"] == 1.5
    assert last["claims_that_fail"] == ["theory: c"]
    assert last["traces"] == "generated"
    assert papers.main([*arguments, "--seed", "2"]) == 0  # another setting is measured anew
    assert calls == ["pla_fig5", "theory"] * 2


def test_bad_names_and_folders_end_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert papers.main(["nonsense"]) == 2
    assert papers.main(["theory", "--data", "no/such/folder"]) == 2
    assert "does not exist" in capsys.readouterr().err
