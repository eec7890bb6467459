"""The bench of the bound on deferrals, on a tiny frontier: what it measures, what its table says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.harness.catalogue import BENCHES
from bench.lab import tail
from bench.lab.best_stock import FRONTIER
from bench.lab.stock_frontier import STOCK
from bench.lab.tail import ATTAINMENT, FIGURES, LATE, TTFT_P99_S, page, worse_of


@pytest.fixture(name="frontier")
def make_frontier(tmp_path: Path) -> Path:
    """Of ``hol`` alone, over 20 s."""
    limits = json.loads(FRONTIER.read_text(encoding="utf-8"))["limits"]
    short = [{**one, "span_s": 20.0} for one in limits if one["workload"] == "hol"]
    path = tmp_path / "frontier.json"
    path.write_text(json.dumps({"limits": short}), encoding="utf-8")
    return path


def test_both_operating_points_beside_stock_and_a_run_resumes(
    frontier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--workloads", "hol", "--targets", "0.9", "--values", "0,3", "--frontier", str(frontier)]

    def run_bench() -> dict[str, Any]:
        assert BENCHES["tail"].main([*flags, "--out", str(tmp_path)]) == 0
        result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return result

    result = run_bench()
    (row,) = result["rows"]
    assert list(row["figures"]) == [STOCK, "0", "3"]
    assert all(0 < of_one[ATTAINMENT] <= 1 for of_one in row["figures"].values())
    assert "| hol | 90% |" in page(result)
    monkeypatch.setattr(tail, "run_experiment", None)  # nothing is left to measure
    assert run_bench()["rows"] == result["rows"]


def test_of_several_runs_the_worse_figures_count() -> None:
    first = {ATTAINMENT: 0.9, TTFT_P99_S: 2.0, LATE: 0.0}
    assert worse_of([first, {ATTAINMENT: 0.8, TTFT_P99_S: 1.0, LATE: 0.1}], FIGURES) == {
        ATTAINMENT: 0.8,
        TTFT_P99_S: 2.0,
        LATE: 0.1,
    }
    assert worse_of([first, {ATTAINMENT: 0.0, TTFT_P99_S: None, LATE: 1.0}], FIGURES)[TTFT_P99_S] is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--values", "0,many"], "--values '0,many' is not valid; allowed: numbers"),
        (["--values", "inf"], "--values 'inf' is not valid"),
        (["--workloads", "star"], "has none of these workloads"),
    ],
)
def test_bad_flags_end_with_2(
    flags: list[str], message: str, frontier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert BENCHES["tail"].main([*flags, "--frontier", str(frontier)]) == 2
    assert message in capsys.readouterr().err
