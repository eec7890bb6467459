"""The lab's published results are made again from their points; what differs is seen."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from bench.check.consistency import check_file, check_folder
from bench.harness.bench import ROOT
from bench.harness.catalogue import BENCHES
from bench.lab.kept import ratio_problems, unfit_rows
from bench.lab.papers import ratios
from bench.lab.papers.context import Context
from bench.lab.papers.finding import write

RESULTS = ROOT / "bench" / "lab" / "results"


@pytest.fixture
def paper(tmp_path: Path) -> Path:
    """The JSON file of a small run, its points beside it."""
    context = Context(size=0)
    finding = dataclasses.replace(ratios.run(context), name="ratios", title="T")
    write(finding, tmp_path / "papers", {"size": "test", "seed": 1}, context.points)
    return tmp_path / "papers" / "ratios.json"


def test_published_results_follow_from_their_points() -> None:
    """All but those that docs/benchmarks/check.md names."""
    page = (ROOT / "docs" / "benchmarks" / "check.md").read_text(encoding="utf-8")
    section = page.partition("## consistency")[2].partition("\n## ")[0]
    differing = {name for name, verdict in check_folder(RESULTS).items() if verdict.problems}
    assert differing <= set(re.findall(r"`(\w+/[\w-]+)`", section))


def test_a_changed_point_is_noticed(paper: Path) -> None:
    assert check_file(paper).problems == []
    points = paper.with_suffix(".parquet")
    rows = parquet.read_table(points).to_pylist()
    for row in rows:
        row["requests_per_s"] *= 1 + 0.001 * (row["composition"] == "4P/2D")
    parquet.write_table(pa.Table.from_pylist(rows), points)
    problems = check_file(paper).problems
    assert any(text.startswith("rows.1000/150, 20 users: 4P/2D and 2P/3D, throughput, times.ours") for text in problems)


def test_points_of_other_cases_are_noticed(paper: Path) -> None:
    points = paper.with_suffix(".parquet")
    rows = parquet.read_table(points).to_pylist()
    parquet.write_table(pa.Table.from_pylist([rows[0] | {"users": 30}]), points)
    assert "users 30, not 20" in check_file(paper).problems[0]
    parquet.write_table(pa.Table.from_pylist([*rows, *rows]), points)
    assert check_file(paper).problems == ["12 points, 6 are used"]
    parquet.write_table(pa.table({"users": [20]}), points)
    assert "does not say what was measured" in check_file(paper).problems[0]


def test_a_changed_row_is_noticed(tmp_path: Path) -> None:
    result = json.loads((RESULTS / "simulated" / "fleets_forecast.json").read_text(encoding="utf-8"))
    result["forecast_gpu_hours"]["last"]["mooncake_1h"] *= 0.5
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(result), encoding="utf-8")
    assert any(text.startswith("forecast_gpu_hours.last") for text in check_file(changed).differing)


def test_ratios_need_300_seconds_and_a_search_that_found_its_end() -> None:
    assert ratio_problems("ours / theirs", 300.0, at_limit=False) == []
    assert ratio_problems("ours / theirs", 299.0, at_limit=False) == ["ours / theirs: of 299 s of arrivals"]
    assert ratio_problems("ours / theirs", None, at_limit=True) == [
        "ours / theirs: of a search that ended at its limit"
    ]
    ratio = {"what": "ours / theirs", "ours": 2.0, "unit": "", "span_s": None, "at_limit": False}
    rate = {"what": "ours", "ours": 2.0, "unit": "req/s"}
    assert unfit_rows([ratio, rate], [{"tried": None}]) == []  # no rate was searched
    searched = [{"tried": [[1.0, 0.95]]}]
    assert "says not" in unfit_rows([ratio, rate], searched)[0]
    assert unfit_rows([ratio | {"span_s": 400.0}, rate], searched) == []
    assert unfit_rows([ratio | {"ours": None}], searched) == []


def test_the_exit_status_tells(paper: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(RESULTS / "emulated", tmp_path / "emulated", ignore=shutil.ignore_patterns("*.png"))
    arguments = ["--folder", str(tmp_path), "--out", str(tmp_path / "out")]
    assert BENCHES["consistency"].main(arguments) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["files"], last["differing"]) == (len(list(tmp_path.glob("[ep]*/*.json"))), 0)
    record = json.loads(paper.read_text(encoding="utf-8"))
    record["claims"][0]["holds"] = not record["claims"][0]["holds"]
    paper.write_text(json.dumps(record), encoding="utf-8")
    assert BENCHES["consistency"].main(arguments) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(last["differences"]) == ["papers/ratios"]
