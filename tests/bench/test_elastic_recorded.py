"""The bench of recorded hours: one row a trace and forecaster, all from the same fixed fleet."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.traces import write_plain

from bench.compare import elastic_recorded
from bench.harness.catalogue import BENCHES
from pla_sglang.sim.workload import Trace


def test_a_recorded_hour_stands_beside_a_fixed_fleet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrivals, lengths = np.arange(200) * 0.7, np.full(200, 200)
    path = tmp_path / elastic_recorded.TRACES["azure_conv"][0]
    write_plain(Trace("t", arrivals, lengths, lengths // 4), path)
    flags = [
        "--data",
        str(tmp_path),
        "--traces",
        "azure_conv",
        "--rate",
        "4",
        "--startup-s",
        "5",
        "--instances-min",
        "1",
    ]
    assert BENCHES["elastic_recorded"].main([*flags, "--out", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["trace"], row["forecaster"]) for row in result["rows"]] == [
        ("azure_conv", name) for name in elastic_recorded.FORECASTERS
    ]
    for row in result["rows"]:
        assert 0 < row["lower_bound_gpu_hours"] <= row["gpu_hours"]
        assert result["gpu_hours_vs_fixed"][f"azure_conv/{row['forecaster']}"] == row["gpu_hours_vs_fixed"] > 0
    assert "`judged`" in elastic_recorded.page(result)
