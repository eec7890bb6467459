"""The fleet benches on small sizes: workloads, resumable cells, both tables, and what other benches take from them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from bench.harness.bench import ROOT
from bench.harness.catalogue import BENCHES
from bench.harness.publish import page_of, replace
from bench.harness.report import markdown
from bench.harness.steps import Steps
from bench.lab.cells import CellRunner, data_folder, files_behind
from bench.lab.fleets import policies
from bench.lab.fleets.__main__ import COMMANDS, RESULTS, page_texts
from bench.lab.kept import unfit_capacities
from bench.lab.named_workloads import available, workload
from pla_sglang.common.errors import ConfigError


def test_without_data_the_generated_workloads_are_there() -> None:
    assert available(None) == ["chat", "hol", "star"]
    for name in available(None):
        found = workload(name, None, 200)
        assert 100 < len(found.trace) <= (600 if name == "chat" else 200)
        assert not found.recorded
        assert found.low_per_s < found.steady_per_s < found.high_per_s


def test_what_cannot_be_had_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"workload azure_code needs azure_code_2023\.csv\.gz"):
        workload("azure_code", tmp_path)
    with pytest.raises(ConfigError, match="workload 'x' is not known; allowed: azure_code"):
        workload("x", None)
    with pytest.raises(ConfigError, match="does not exist"):
        data_folder(tmp_path / "none")


def test_a_run_is_resumed_and_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path, measured = tmp_path / "cells.jsonl", []

    def measure(cell: int) -> dict[str, Any]:
        measured.append(cell)
        return {"square": cell * cell}

    CellRunner(Steps(path)).run({"a": 2, "b": 3}, measure)
    path.write_text(path.read_text() + '{"key": "c", "val')
    again = CellRunner(Steps(path)).run({"b": 3, "c": 4, "a": 2}, measure)
    assert again == {"b": {"square": 9}, "c": {"square": 16}, "a": {"square": 4}}
    assert list(again) == ["b", "c", "a"]
    assert measured == [2, 3, 4]
    with pytest.raises(ConfigError, match="jobs is 0"):
        CellRunner(Steps(path), jobs=0).run({"a": 2}, measure)


def test_a_cell_depends_on_what_its_code_imports_and_on_nothing_else(tmp_path: Path) -> None:
    files = {
        "bench/lab/measure.py": "from bench.harness import report\nfrom pla_sglang.sim.core import engine\n",
        "bench/harness/report.py": "import pla_sglang.fleet.router\n",
        "pla_sglang/sim/core/engine.py": "def run():\n    from pla_sglang.profiles import load_profile\n",
        "pla_sglang/sim/core/__init__.py": "",
        "pla_sglang/profiles/__init__.py": "import numpy\n",
        "pla_sglang/profiles/data/h100.json": "{}",
        "pla_sglang/fleet/router/__init__.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    behind = {str(path.relative_to(tmp_path)) for path in files_behind(tmp_path / "bench/lab/measure.py", tmp_path)}
    assert behind == files.keys() - {"bench/harness/report.py", "pla_sglang/fleet/router/__init__.py"}


def square(cell: int) -> dict[str, Any]:
    return {"square": cell * cell}


def test_processes_measure_what_one_does(tmp_path: Path) -> None:
    cells = {str(cell): cell for cell in range(5)}
    seen: list[str] = []
    runner = CellRunner(Steps(tmp_path / "cells.jsonl"), jobs=2, on_done=seen.append)
    assert runner.run(cells, square) == {name: square(cell) for name, cell in cells.items()}
    assert sorted(seen) == list(cells)


def test_the_policies_bench_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--workloads", "chat", "--policies", "arrow,static-pd-best,dopd,combined", "--requests", "150"]
    assert BENCHES["fleets"].main(["policies", *flags, "--out", str(tmp_path)]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {row["policy"]: row for row in last["rows"]}
    assert set(rows) == {"arrow", "static-pd-best", "dopd", "combined"}
    assert all(row["capacity_per_s"] > 4 for row in rows.values())
    assert rows["static-pd-best"]["prefills"] in range(1, 8)
    assert all(row["span_s"] == pytest.approx(450 / row["capacity_per_s"], abs=0.1) for row in rows.values())
    assert last["combined_vs_best_single"] == {}  # of bursts
    assert (tmp_path / "fleets_capacity.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ([], policies.Sizes(2000, 0.05)),
        (["--requests", "60"], policies.Sizes(60, 0.05)),
        (["--full"], policies.Sizes(None, 0.02, full=True)),
        (["--full", "--requests", "60"], policies.Sizes(60, 0.02, full=True)),
    ],
)
def test_full_asks_for_long_runs_whatever_the_requests(flags: list[str], sizes: policies.Sizes) -> None:
    assert policies.Sizes.of(BENCHES["fleets"].parse("policies", *flags)) == sizes


def test_rates_of_full_rest_on_300_s_of_few_requests_repeated() -> None:
    load = dataclasses.replace(workload("hol", None, 60), low_per_s=1.0, high_per_s=4.0)
    sizes = policies.Sizes(60, 0.5, full=True)
    row = policies.find_highest_rate(policies.Cell("hol", "arrow", "capacity", None, sizes), load)
    assert row["capacity_per_s"] >= 1.0
    assert row["span_s"] >= 300.0
    rows = [{"workload": "w", "policy": policy} | row for policy in ("arrow", "combined")]
    result = {"rows": rows, "workloads": {"w": {"requests": 60}}}
    assert unfit_capacities(result | {"combined_vs_best_single": {"w": 1.0}}) == []
    short = [each | {"span_s": 20.0} for each in rows]
    assert len(unfit_capacities(result | {"rows": short, "combined_vs_best_single": {"w": 1.0}})) == 1


def test_bad_flags_end_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert BENCHES["fleets"].main(["policies", "--policies", "nobody", "--out", str(tmp_path)]) == 2
    assert "policy 'nobody' is not known" in capsys.readouterr().err
    assert BENCHES["fleets"].main(["forecast", "--data", str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("marker", [marker for module in COMMANDS.values() for marker in module.PAGES])
def test_the_page_holds_the_results(marker: str) -> None:
    page = page_of(marker, ROOT).read_text(encoding="utf-8")
    assert replace(page, marker, page_texts(RESULTS)[marker]) == page, "run python -m bench fleets publish again"


def test_tables_mark_the_best_and_leave_out_what_is_not_known() -> None:
    rows = [
        {"workload": "w", "policy": "arrow", "capacity_per_s": 10.0, "gpu_hours": None, "span_s": 300.0},
        {"workload": "w", "policy": "star", "capacity_per_s": None, "gpu_hours": 0.25, "span_s": None},
        {"workload": "w", "policy": "combined", "capacity_per_s": 12.0, "gpu_hours": 0.2, "span_s": 300.0},
    ]
    capacity = markdown(*policies.figure_table(rows, "capacity_per_s")).splitlines()
    assert capacity[2:] == ["| `arrow` | 10 |", "| `star` | - |", "| `combined` | **12** |"]
    hours = markdown(*policies.figure_table(rows, "gpu_hours")).splitlines()
    assert hours[2:] == ["| `arrow` | - |", "| `star` | 0.25 |", "| `combined` | **0.2** |"]
    assert policies.combined_vs_best_single(rows) == {"w": 1.2}
    assert policies.combined_vs_best_single(rows[1:]) == {}
    assert policies.combined_vs_best_single([row | {"span_s": 20.0} for row in rows]) == {}


def test_the_kept_ratios_are_those_of_the_kept_rows() -> None:
    result = json.loads((RESULTS / "fleets_policies.json").read_text(encoding="utf-8"))
    assert result["combined_vs_best_single"] == policies.combined_vs_best_single(result["rows"])


def test_a_rate_at_the_end_of_its_search_is_a_lower_bound_and_in_no_ratio() -> None:
    rows = [
        {"workload": "star", "policy": "arrow", "capacity_per_s": 25.0, "span_s": 1800.0},
        {"workload": "star", "policy": "combined", "capacity_per_s": 50.0, "span_s": 1800.0},
        {"workload": "azure_conv", "policy": "arrow", "capacity_per_s": 175.0, "span_s": 300.0},
        {"workload": "azure_conv", "policy": "combined", "capacity_per_s": 350.0, "span_s": 300.0},
    ]
    header, cells = policies.figure_table(rows, "capacity_per_s")
    assert header == ["policy", "star (synthetic)", "azure_conv"]
    assert cells == [["`arrow`", "25", "175"], ["`combined`", "**>= 50**", "**350**"]]
    assert policies.combined_vs_best_single(rows) == {"azure_conv": 2.0}
