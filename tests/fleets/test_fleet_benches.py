"""The fleet benches on small sizes: workloads, resumable cells, both tables, and what other benches take from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.fleets import by_request, forecast, policies, publish
from bench.fleets.cells import Store, fill
from bench.fleets.workloads import GENERATED, available, data_folder, workload
from pla_sglang.errors import ConfigError


def test_without_data_the_generated_workloads_are_there() -> None:
    assert available(None) == list(GENERATED)
    for name in GENERATED:
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

    fill({"a": 2, "b": 3}, measure, Store(path))
    path.write_text(path.read_text() + '{"key": "c", "val')
    again = fill({"b": 3, "c": 4, "a": 2}, measure, Store(path))
    assert again == {"b": {"square": 9}, "c": {"square": 16}, "a": {"square": 4}}
    assert measured == [2, 3, 4]
    with pytest.raises(ConfigError, match="jobs is 0"):
        fill({"a": 2}, measure, Store(path), jobs=0)


def test_the_policies_bench_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--workloads", "chat", "--policies", "arrow,static-pd-best,dopd,combined", "--requests", "150"]
    assert policies.main([*flags, "--out", str(tmp_path)]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {row["policy"]: row for row in last["rows"]}
    assert set(rows) == {"arrow", "static-pd-best", "dopd", "combined"}
    assert all(row["capacity_per_s"] > 4 for row in rows.values())
    assert rows["static-pd-best"]["prefills"] in range(1, 8)
    best = max(rows["arrow"]["capacity_per_s"], rows["dopd"]["capacity_per_s"])
    assert last["combined_vs_best_single"] == {"chat": round(rows["combined"]["capacity_per_s"] / best, 4)}
    assert (tmp_path / "fleets_capacity.png").read_bytes().startswith(b"\x89PNG")


def test_bad_flags_end_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert policies.main(["--policies", "nobody", "--out", str(tmp_path)]) == 2
    assert "policy 'nobody' is not known" in capsys.readouterr().err
    assert forecast.main(["--data", str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert by_request.cells_of(None, 10, 0.9) == {}


def test_the_page_has_a_place_for_every_table() -> None:
    page = publish.PAGE.read_text(encoding="utf-8")
    for name in publish.TABLES:
        once = publish.fill(page, name, "| new |")
        assert once.count("| new |") == 1
        assert publish.fill(once, name, "| new |") == once
    with pytest.raises(ValueError, match="no markers for nothing"):
        publish.fill(page, "nothing", "")


def test_tables_mark_the_best_and_leave_out_what_is_not_known() -> None:
    rows = [
        {"workload": "w", "policy": "arrow", "capacity_per_s": 10.0, "gpu_hours": None},
        {"workload": "w", "policy": "star", "capacity_per_s": None, "gpu_hours": 0.25},
        {"workload": "w", "policy": "combined", "capacity_per_s": 12.0, "gpu_hours": 0.2},
    ]
    capacity = publish.policies({"rows": rows}, "capacity_per_s", most=True).splitlines()
    assert capacity[2:] == ["| `arrow` | 10 |", "| `star` | - |", "| `combined` | **12** |"]
    hours = publish.policies({"rows": rows}, "gpu_hours", most=False).splitlines()
    assert hours[2:] == ["| `arrow` | - |", "| `star` | 0.25 |", "| `combined` | **0.2** |"]
    assert policies.combined_vs_best_single(rows) == {"w": 1.2}
    assert policies.combined_vs_best_single(rows[1:]) == {}
