"""Published results are made again from their points; what differs is seen."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from bench.check.consistency import check_file, check_folder, differences
from bench.harness.bench import ROOT
from bench.harness.catalogue import BENCHES

RESULTS = ROOT / "bench" / "results"


def test_published_results_follow_from_their_points() -> None:
    """All but those that docs/benchmarks/check.md names."""
    page = (ROOT / "docs" / "benchmarks" / "check.md").read_text(encoding="utf-8")
    section = page.partition("## consistency")[2].partition("\n## ")[0]
    differing = {name for name, verdict in check_folder(RESULTS).items() if verdict.problems}
    assert differing <= set(re.findall(r"`(\w+/[\w-]+)`", section))


@pytest.mark.parametrize(
    ("name", "path", "problem"),
    [
        ("cpu/hol", ("figures", "ours", "short_ttft_s", "p99_rounds", 0), "figures.ours.short_ttft_s.p99"),
        ("cpu/hol", ("ratios", "ours", "throughput_ratio", "median"), "throughput_ratio"),
        ("emulated/verified", ("groups", 0, "tokens_verified"), "tokens_verified"),
        ("emulated/parity", ("by_policy", "pla", "identical"), "identical_share"),
        ("emulated/spatial-pd", ("arms", "dp", "violation_rate"), "violation_rate.dp"),
    ],
)
def test_a_changed_row_or_round_is_noticed(
    name: str, path: tuple[str | int, ...], problem: str, tmp_path: Path
) -> None:
    result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    at = result
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] *= 0.5
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(result), encoding="utf-8")
    assert any(text.startswith(problem) for text in check_file(changed).differing)


def test_the_exit_status_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(RESULTS / "cpu", tmp_path / "cpu", ignore=shutil.ignore_patterns("*.png"))
    arguments = ["--folder", str(tmp_path), "--out", str(tmp_path / "out")]
    assert BENCHES["consistency"].main(arguments) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["files"], last["differing"]) == (len(list(tmp_path.glob("cpu/*.json"))), 0)
    assert "cpu/padding" in last["without_points"]
    changed = tmp_path / "cpu" / "abort_storm.json"
    result = json.loads(changed.read_text(encoding="utf-8"))
    changed.write_text(json.dumps(result | {"aborted": result["aborted"] + 1}), encoding="utf-8")
    assert BENCHES["consistency"].main(arguments) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(last["differences"]) == ["cpu/abort_storm"]


def test_differences_name_the_place() -> None:
    published = {"rows": {"a": 1.0, "b": [1, 2]}}
    assert list(differences(published, {"rows": {"a": 1.0 + 1e-9, "b": [1, 2]}})) == []
    assert list(differences(published, {"rows": {"a": 1.1, "b": [1]}})) == [
        "rows.a: 1.0, again 1.1",
        "rows.b: 2 entries, again 1",
    ]
