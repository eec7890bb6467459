"""The bench of recorded agent sessions on a few made-up ones: a whole run in small, and what is kept of it."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.harness.catalogue import BENCHES
from bench.lab import agentic
from bench.lab.fleet_arms import OURS, FleetArm
from bench.lab.named_workloads import WORKLOADS
from pla_sglang.sim.core.experiment import run_experiment

FEW = (FleetArm("cache-aware", mixed=True, chunk_tokens=2048), FleetArm("round-robin", mixed=True, chunk_tokens=2048))
SMALL = ["--span-s", "60", "--race-span-s", "30", "--step", "1.5", "--race-step", "2", "--keep", "1"]


def write_sessions(data: Path) -> Path:
    """A data folder with six sessions of six requests; each prompt goes on with the one before it."""
    rows = []
    for session in range(6):
        requests = [
            {
                "t": 3.0 * turn,
                "type": "n",
                "in": 64 * (64 + 32 * turn + 8 * session),
                "out": 20,
                "think_time": 2.0 if turn else None,
                "api_time": 1.0,
                "hash_runs": [[0, 64 + 32 * turn + 8 * session]],
            }
            for turn in range(6)
        ]
        rows.append({"id": str(session), "block_size": 64, "hash_id_scope": "local", "requests": requests})
    data.mkdir()
    text = "\n".join(map(json.dumps, rows))
    (data / WORKLOADS[agentic.NAME].file).write_bytes(gzip.compress(text.encode()))
    return data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_sessions(tmp_path / "data")


@pytest.fixture(autouse=True)
def few_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agentic, "STOCK_ARMS", FEW)


def run_bench(folder: Path, out: Path, capsys: pytest.CaptureFixture[str], status: int = 0) -> dict[str, Any]:
    arguments = [*SMALL, "--data", str(folder), "--out", str(out), "--high-per-s", "40"]
    assert BENCHES["agentic"].main(arguments) == status
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def test_a_run_has_the_rates_of_stock_and_ours_and_is_not_run_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_bench(folder, tmp_path, capsys)
    assert result["sessions"] == 6
    assert result["best_stock"] in {arm.name for arm in FEW}
    names = {result["best_stock"], OURS.name}
    rates = [result[f"rate_at_{share}"] for share in (90, 95, 99)]
    assert all(set(of) == names for of in rates)
    for name in names:
        assert rates[0][name] >= rates[1][name] >= rates[2][name] > 0
    assert result["vs_best_stock"] is None, "60 s are a burst"
    assert result["tokens_wrong"] is None
    assert result["job_time_p50_ratio"] > 0
    for side in ("stock", "ours"):
        assert 0 < result["hit_rate"][side] < 1
        assert 0 <= result["predicted_hit_error"][side] < 1
        assert 0 < result["idle"][side]["ttft_p50_s"] <= result["idle"][side]["ttft_p99_s"]
    assert {row["seed"] for row in result["rows"]} == {1, 2}
    assert (tmp_path / "agentic.png").read_bytes().startswith(b"\x89PNG")
    assert f"`{result['best_stock']}`" in agentic.page(result)
    kept = (tmp_path / "agentic.steps.jsonl").read_text(encoding="utf-8")
    again = run_bench(folder, tmp_path, capsys)
    assert {key: again[key] for key in result if key != "environment"} == {
        key: result[key] for key in result if key != "environment"
    }
    assert (tmp_path / "agentic.steps.jsonl").read_text(encoding="utf-8") == kept


def test_a_rate_that_one_seed_misses_is_not_held_and_an_interruption_leaves_what_is_known(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(cell: agentic.Cell) -> dict[str, float]:
        if cell.rate_per_s == agentic.IDLE_PER_S:
            raise KeyboardInterrupt
        bears_per_s = 8.0 if cell.seed == 1 else 4.0
        return {"attainment": 1.0 if cell.rate_per_s <= bears_per_s else 0.5}

    monkeypatch.setattr(agentic, "measure_cell", measure)
    result = run_bench(folder, tmp_path, capsys, status=130)
    assert list(result["rate_at_95"].values()) == pytest.approx([1.5**3, 1.5**3])
    assert (result["complete"], result["job_time_p50_ratio"]) == (False, None)
    assert result["idle"]["ours"]["ttft_p50_s"] is None


def test_seeds_draw_the_starts_of_whole_sessions(folder: Path) -> None:
    one, other = (agentic.sessions_of(folder, seed).trace for seed in (1, 2))
    assert one.session is not None
    assert other.session is not None
    assert one.session.tolist() != other.session.tolist()
    for trace in (one, other):
        after_s = trace.arrival_s - trace.start_s()
        assert trace.arrival_s[0] == 0.0
        for session in range(6):
            assert after_s[trace.session == session].tolist() == pytest.approx([0.0, 3.0, 6.0, 9.0, 12.0, 15.0])


def test_hits_are_the_tokens_that_were_not_computed(folder: Path) -> None:
    """One session alone on one instance: all but the new blocks of each prompt, rounded to blocks of the trace."""
    load = agentic.sessions_of(folder, 1)
    assert load.trace.session is not None
    trace = load.trace.take(np.flatnonzero(load.trace.session == 0))
    trace = dataclasses.replace(trace, arrival_s=trace.arrival_s - trace.arrival_s[0])
    row = agentic.figures_of(run_experiment(FEW[0].experiment(load.slo), trace), trace)
    blocks = [(tokens - 1) // 512 for tokens in trace.input_tokens.tolist()]
    before = [0, *(tokens // 512 for tokens in trace.input_tokens.tolist()[:-1])]
    hits = 512 * sum(min(pair) for pair in zip(blocks, before, strict=True))
    assert row["hit_rate"] == pytest.approx(hits / trace.input_tokens.sum())
    assert row["predicted_hit_error"] == 0.0
    assert (row["requests"], row["sessions"]) == (6, 1)


def test_a_ratio_needs_a_long_span_and_searches_that_ended_within_their_bounds() -> None:
    options = BENCHES["agentic"].parse()
    assert agentic.ratio_of_rates(2.0, 1.0, options) == 2.0
    assert agentic.ratio_of_rates(None, 1.0, options) is None
    assert agentic.ratio_of_rates(options.high_per_s / options.step, 1.0, options) is None
    assert agentic.ratio_of_rates(2.0, 1.0, BENCHES["agentic"].parse("--span-s", "60")) is None


def test_without_the_sessions_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert BENCHES["agentic"].main(["--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert WORKLOADS[agentic.NAME].file in capsys.readouterr().err
