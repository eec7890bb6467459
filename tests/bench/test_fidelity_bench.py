"""``fidelity`` from kept steps: keys, a result that its points give again, a page. No engine is started."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest

from bench.check import fidelity as bench
from bench.check.live_case import LiveCase
from bench.harness import fidelity
from bench.harness.catalogue import BENCHES
from bench.harness.cli import slo_of
from bench.harness.steps import Steps

CASES = ("unified-2/fcfs/round-robin/azure_conv/0.8", "1+1/fcfs/static-pd-round-robin/azure_conv/0.5")
LATE_S, ROWS, GAP_S = 0.02, 20, 3.0


def write_trace(path: Path, rows: int) -> None:
    rng = random.Random(1)
    lines = [f"{index * 0.2:.3f},{rng.randrange(50, 2000)},{rng.randrange(2, 60)}" for index in range(rows)]
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *lines]) + "\n", encoding="utf-8")


@pytest.fixture
def kept(tmp_path: Path) -> list[str]:
    """Arguments of a bench whose steps are all finished: live runs that are the simulator's, 20 ms late."""
    write_trace(tmp_path / "trace.csv", ROWS)
    arguments = ["--traces", f"azure_conv={tmp_path / 'trace.csv'}", "--out", str(tmp_path), "--budget-s", "1"]
    arguments += ["--cases", ",".join(CASES)]
    options = BENCHES["fidelity"].parse(*arguments)
    steps = Steps(tmp_path / "fidelity.steps.jsonl")
    for text in CASES:
        case = LiveCase.parse(text)
        for rows, key in ((4, {"lone": case.cluster}), (ROWS, {"case": text})):
            points = {"row": list(map(float, range(rows))), "sent_s": [place * GAP_S for place in range(rows)]}
            points |= {"input_tokens": [400.0] * rows, "output_tokens": [9.0] * rows}
            experiment = bench.experiment_of(case, options)
            host = fidelity.HostKnobs(overlap=True, room_first="+" in text)
            made = fidelity.simulate_points(dataclasses.replace(experiment, host=host), points)
            points |= {f"live_{name}": [at + LATE_S for at in made[f"sim_{name}"]] for name in ("first_s", "finish_s")}
            row = {"points": points, "rate_rps": 5.0, "host_gap_s": 0.0, "host_overhead_share": 0.02}
            row |= {"client_lag_p99_ms": 1.0, "tokens_wrong": 0, "plugin_commit": "abc"}
            steps.add(bench.key_of(options, **key), row)
    return arguments


def test_kept_steps_give_the_result_again(kept: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert BENCHES["fidelity"].main(kept) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    wanted = {f"{prefix}{name}_error" for name in fidelity.GOALS for prefix in ("", "worst_")}
    assert wanted <= set(result)
    assert (result["cases"], result["cases_open"], result["valid"], result["goals_missed"]) == (2, 0, True, [])
    assert result["worst_ttft_mean_error"] < 1e-3, "the constants make up for what was late"
    table = parquet.read_table(tmp_path / "fidelity.parquet").to_pydict()
    for text in CASES:
        rows = [place for place, case in enumerate(table["case"]) if case == text]
        points = {name: list(np.array(values)[rows]) for name, values in table.items() if name != "case"}
        again = fidelity.compare_points(points, slo_of("azure_conv"))
        assert {name: result["by_case"][text][name] for name in again} == again
    page = bench.page(result)
    assert all(text in page for text in CASES)
    assert "Goals missed: none." in page
    assert (tmp_path / "fidelity.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("field", "value"), [("host_overhead_share", 0.051), ("client_lag_p99_ms", 51.0), ("tokens_wrong", 1)]
)
def test_a_live_run_that_cannot_be_trusted(kept: list[str], tmp_path: Path, field: str, value: float) -> None:
    options, case = BENCHES["fidelity"].parse(*kept), LiveCase.parse(CASES[0])
    steps = Steps(tmp_path / "fidelity.steps.jsonl")
    row, lone = (steps.get(bench.key_of(options, **key)) for key in ({"case": case.text}, {"lone": case.cluster}))
    assert row is not None
    assert lone is not None
    trace = bench.cli.read_traces(options.traces)["azure_conv"]
    for changed, valid in ((row, True), ({**row, field: value}, False)):
        judged, _ = bench.compare(case, changed, lone, trace, options)
        assert judged["valid"] == valid
