"""``bench agentic --live`` without engines: what is started and sent, and what the result says of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.live_stand_ins import LiveStandIns, after_arrival

from bench.harness.catalogue import BENCHES
from bench.harness.replay import Planned, plan
from bench.lab import agentic_live
from bench.lab.fleet_arms import OURS, FleetArm
from bench.lab.highest_rate import LiveArm
from bench.lab.tests.test_agentic_bench import write_sessions

SCALE = 2.0
FEW = (FleetArm("cache-aware", mixed=True, chunk_tokens=2048), FleetArm("least-tokens", mixed=True, chunk_tokens=1024))
FLAGS = ["--live", "--rates", "0.5,1", "--live-span-s", "20", "--instances", "2", "--time-scale", f"{SCALE}", "--json"]
PREFIXES = {"e0": {"predicted_tokens": 60, "hit_tokens": 70, "prompt_tokens": 100}}


def take(stand_ins: LiveStandIns, planned: Sequence[Planned]) -> Sequence[tuple[float, float]]:
    """Stock's jobs take longer."""
    ours = stand_ins.routed[-1][0].policy == OURS.policy
    return after_arrival(planned, SCALE, 0.2, 1.0 if ours else 3.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_sessions(tmp_path / "data")


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> LiveStandIns:
    monkeypatch.setattr(agentic_live, "STOCK_ARMS", FEW)
    monkeypatch.setattr(agentic_live, "choose_startable", lambda load, options, arms, contest: arms[0])
    stand_ins = LiveStandIns(take, time_scale=SCALE)
    stand_ins.prefixes = PREFIXES
    return stand_ins.install(monkeypatch)


def run_bench(folder: Path, out: Path, capsys: Any, *flags: str, status: int = 0) -> dict[str, Any]:
    assert BENCHES["agentic"].main([*FLAGS, "--data", str(folder), "--out", str(out), *flags]) == status
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def test_both_arms_serve_the_same_sessions_in_turns(
    live: LiveStandIns, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_bench(folder, tmp_path, capsys)
    assert [row["contest"] for row in result["rows"]] == [
        f"agentic/{arm}" for arm in ("stock", "ours", "ours", "stock")
    ]
    assert [router.policy for router, _ in live.routed[:2]] == [FEW[0].policy, OURS.policy]
    assert result["best_stock"] == FEW[0].name
    first, second, *_ = result["rows"]
    assert (first["requests"], first["sessions"]) == (second["requests"], second["sessions"])
    rates = [row["rate_rps"] for row in result["rows"]]
    assert rates == pytest.approx([0.5, 0.5, 1.0, 1.0], rel=0.03)
    assert (result["tokens_wrong"], result["valid"], result["prompts_above_window"]) == (0, True, 0)
    assert 0 < result["job_time_p50_ratio"] < 1
    assert result["sim_job_time_p50_ratio"] > 0
    assert result["rate_at_95"] == {"stock": None, "ours": max(rates)}, "stock's answers are too slow"
    assert result["vs_best_stock"] is None
    assert result["predicted_hit_error"] == {"stock": 0.1, "ours": 0.1}
    assert all(0 < result["sim_hit_rate"][side] < 1 for side in ("stock", "ours"))
    assert result["hit_rate"] == {"stock": 0.0, "ours": 0.0}, "the stand-ins say nothing of caches"
    assert (tmp_path / "agentic_live.png").read_bytes().startswith(b"\x89PNG")
    assert f"`{result['best_stock']}` against ours" in agentic_live.page(result)
    started = len(live.clusters)
    again = run_bench(folder, tmp_path, capsys)
    assert (again["rows"], len(live.clusters)) == (result["rows"], started), "finished runs are kept"


def test_prompts_above_the_window_are_left_out_and_counted(
    live: LiveStandIns, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_bench(folder, tmp_path, capsys, "--window-tokens", "8000", "--requests-least", "1", "--rates", "1")
    assert result["prompts_above_window"] > 0
    assert max(row["requests"] for row in result["rows"]) < 36


@pytest.mark.parametrize("fault", [("gap_share", 0.2), ("wrong", 1)])
def test_a_run_that_cannot_be_trusted(
    live: LiveStandIns, folder: Path, tmp_path: Path, capsys: Any, fault: tuple[str, float]
) -> None:
    setattr(live, *fault)
    result = run_bench(folder, tmp_path, capsys, "--rates", "1", status=1)
    assert (result["valid"], result["rate_at_95"]) == (False, {"stock": None, "ours": None})
    assert (result["tokens_wrong"] > 0) == (fault[0] == "wrong")


def test_the_simulator_shares_what_the_prompts_share(folder: Path) -> None:
    """Of a lone session each prompt but the first goes on with prompt and answer before it, up to blocks."""
    options = agentic_live.read_options(BENCHES["agentic"].parse(*FLAGS, "--data", str(folder)))
    load = agentic_live.load_sessions(options)
    contest = agentic_live.SessionContest("x", LiveArm("ours", OURS), load, options)
    run, trace = contest.simulate(0)
    planned = plan(contest.trace_at(0), seed=options.seed)
    assert trace.session is not None
    for request in planned:
        if request.after is not None:
            before = planned[request.after]
            shared = len(before.own_ids) + before.output_tokens - 1
            assert request.own_ids[: len(before.own_ids)] == before.own_ids
            assert int(run.result.hit_tokens[request.index]) in (0, *range(shared - 2 * 64, shared + 1))
    assert run.result.hit_tokens.sum() > 0


@pytest.mark.parametrize(
    ("flags", "named"),
    [(["--rates", "x"], "--rates x"), (["--rates", "0"], "--rates"), (["--time-scale", "0"], "--time")],
)
def test_bad_values_are_named(flags: list[str], named: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert BENCHES["agentic"].main([*FLAGS, "--data", str(folder), *flags]) == 2
    assert named in capsys.readouterr().err
