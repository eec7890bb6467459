"""The best stock arm of a workload: a whole sweep in small, what is kept of it, and what its table says."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.harness.catalogue import BENCHES
from bench.harness.steps import Steps
from bench.lab import best_stock
from bench.lab.cells import CellRunner
from bench.lab.fleet_arms import OURS, FleetArm, read_arm, stock_arms
from bench.lab.stock_frontier import Limit, best_stock_arm, read_limits
from bench.lab.stock_search import HeldRate, Round
from pla_sglang.sim.workload import Trace

FEW = [
    FleetArm(router, prefills, mixed, chunk_tokens, order)
    for router in ("least-tokens", "round-robin")
    for prefills, mixed, chunk_tokens in ((0, False, 8192), (0, True, 4096), (0, True, 8192), (5, False, 8192))
    for order in ("fcfs", "hrrn")
]
SMALL = ["--workloads", "hol", "--spans-s", "4,4,8", "--steps", "2,1.6,1.3", "--keep", "2,2,2", "--runs", "1,1,2"]


@pytest.fixture(autouse=True)
def few_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_stock, "stock_arms", lambda routers: FEW)


def run_bench(out: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert BENCHES["best_stock"].main([*SMALL, *flags, "--out", str(out)]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def run_no_race(*args: Any) -> Any:
    raise AssertionError("a race that the kept file has is not run again")


def test_a_sweep_ends_with_the_best_stock_arm_and_the_default_form_measures_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    swept = run_bench(tmp_path, capsys, "--sweep")
    limits = read_limits(tmp_path / "best_stock.json")
    assert list(limits) == [("hol", 0.9), ("hol", 0.99)]
    for (_, target), limit in limits.items():
        assert limit.best.arm in FEW
        assert limit.best.rate_per_s is not None
        assert (limit.target, limit.span_s, limit.step) == (target, 8.0, 1.3)
        assert limit.upper_bound_per_s is not None
        assert max(limit.best.rate_per_s, limit.ours_per_s or 0.0) <= 1.3 * limit.upper_bound_per_s
    assert swept["best_stock_arm"]["hol"] == best_stock_arm(tmp_path / "best_stock.json", "hol").name
    assert swept["combined_vs_best_stock"] == {"hol": None}  # 8 s are a burst
    for of_target, limit in zip((swept, swept["at_99"]), limits.values(), strict=True):
        assert set(limit.at_limits) == {"stock", "ours_at_stock", *(["ours"] if limit.ours_per_s else [])}
        stock, ours = (of_target["ttft_p99_s"]["hol"][what] for what in ("stock", "ours_at_stock"))
        assert of_target["p99_ttft_vs_stock"]["hol"] == pytest.approx(ours / stock)
        assert of_target["attainment"]["hol"]["stock"] >= limit.target, "on both runs"
        assert 0.0 <= of_target["late_beyond_5x"]["hol"]["stock"] <= 1.0 - limit.target
        assert of_target["offered_over_capacity"]["hol"]["stock"] > 0.0
    rows = swept["rounds"]["hol"]
    assert [(row["stage"], row["span_s"]) for row in rows] == [
        *zip(best_stock.STAGES, (4.0, 4.0, 4.0, 8.0), strict=True)
    ]
    assert (tmp_path / "best_stock.png").read_bytes().startswith(b"\x89PNG")
    again = run_bench(tmp_path, capsys, "--frontier", str(tmp_path / "best_stock.json"), "--fresh")
    assert again["best_stock_rps"] == swept["best_stock_rps"]
    assert again["combined_rps"] == swept["combined_rps"]
    assert again["rounds"] == swept["rounds"]  # what chose the arms is kept

    stopped = tmp_path / "stopped.json"
    stopped.write_text(json.dumps({**swept, "rounds": {"hol": rows[:3]}}), encoding="utf-8")
    monkeypatch.setattr(best_stock, "race_families", run_no_race)
    monkeypatch.setattr(best_stock, "race_members", run_no_race)
    went_on = run_bench(tmp_path, capsys, "--sweep", "--go-on", "--frontier", str(stopped))
    for key in ("best_stock_rps", "best_stock_arm", "combined_rps", "rounds"):
        assert went_on[key] == swept[key]


def test_an_interrupted_sweep_keeps_its_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def measure(cell: best_stock.Cell) -> dict[str, float]:
        if len(measured) == 12:
            raise KeyboardInterrupt
        measured.append(cell.key)
        return {"attainment": 0.5}

    monkeypatch.setattr(best_stock, "measure_cell", measure)
    assert BENCHES["best_stock"].main([*SMALL, "--sweep", "--out", str(tmp_path)]) == 130
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["complete"] is False
    kept = (tmp_path / "best_stock.steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"]["cell"] for line in kept] == measured


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--spans-s", "4,4"], "need 3 numbers each"),
        (["--steps", "2,x,1.3"], "is not valid"),
        (["--keep", "0,1,1"], "keep"),
        (["--runs", "1,1,0"], "runs"),
        (["--routers", "arrow"], "router 'arrow' is not known"),
        (["--frontier", "none.json"], "none.json is no frontier"),
    ],
)
def test_bad_flags_end_with_2(
    flags: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(best_stock, "stock_arms", stock_arms)
    assert BENCHES["best_stock"].main([*SMALL, *flags, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_a_run_that_misses_is_not_repeated_and_the_worse_of_two_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[tuple[str, int]] = []
    attainments = {("missed", 0): 0.5, ("held", 0): 0.98, ("held", 1): 0.91}

    def measure(cell: best_stock.Cell) -> dict[str, float]:
        ran.append((cell.arm.policy, cell.run))
        return {"attainment": attainments[ran[-1]], "ttft_p99_s": 1.0 + cell.run}

    monkeypatch.setattr(best_stock, "measure_cell", measure)
    search = best_stock.Search(CellRunner(Steps(tmp_path / "steps.jsonl"), on_done=lambda name: None), None)
    course = search.course("hol", Round(4.0, 1.1, 1, runs=2))
    arms = [FleetArm("missed"), FleetArm("held")]
    found = course.measure([(arm, 3) for arm in arms], target=0.9)
    assert {arm.policy: attainment for (arm, _), attainment in found.items()} == {"missed": 0.5, "held": 0.91}
    assert ran == [("missed", 0), ("held", 0), ("held", 1)]
    worse = best_stock.worse_of([{"attainment": 0.98, "ttft_p99_s": 1.0}, {"attainment": 0.91, "ttft_p99_s": 2.0}])
    assert (worse["attainment"], worse["ttft_p99_s"], worse["tpot_p99_s"]) == (0.91, 2.0, None)


def test_spans_are_as_long_as_the_answers_ask_for(tmp_path: Path) -> None:
    search = best_stock.Search(CellRunner(Steps(tmp_path / "steps.jsonl")), None)
    load = best_stock.workload("star", None)
    answers_s = best_stock.ANSWERS_A_SPAN * load.trace.output_tokens.mean() * load.slo.tpot_s
    assert search.course("star", Round(15.0, 1.25, 4)).round.span_s == pytest.approx(answers_s)
    assert search.course("star", Round(300.0, 1.25, 4)).round.span_s == 300.0 * load.span_times


def test_another_run_has_other_requests_of_the_same_workload(tmp_path: Path) -> None:
    one, other = (best_stock.part_of("chat", None, run) for run in (0, 1))
    assert one.slo == other.slo
    assert one.trace.input_tokens[:50].tolist() != other.trace.input_tokens[:50].tolist()
    file = best_stock.WORKLOADS["azure_code"].file.removesuffix(".gz")
    rows = [f"{row},{100 + row},{10 + row}" for row in range(6)]
    (tmp_path / file).write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]))
    (tmp_path / f"{file}.gz").write_bytes(gzip.compress((tmp_path / file).read_bytes()))
    turned = best_stock.part_of("azure_code", tmp_path, 1).trace
    assert turned.input_tokens.tolist() == [103, 104, 105, 100, 101, 102]
    assert turned.arrival_s.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_sessions_stay_whole_where_a_trace_begins_later() -> None:
    sessions = np.array([0, 0, 1, 0, 1, 2])
    trace = Trace("t", np.arange(6.0), np.arange(1, 7), np.ones(6, np.int64), session=sessions)
    later = best_stock.begin_later(trace, 0.4)  # from 2 s on, when session 1 starts
    assert later.session is not None
    assert later.session.tolist() == [1, 1, 2, 0, 0, 0]
    assert later.arrival_s.tolist() == [0.0, 2.0, 3.0, 4.0, 5.0, 7.0]


def test_the_table_states_ratios_only_where_runs_are_long_enough() -> None:
    arm = FleetArm("least-tokens", mixed=True, chunk_tokens=2048)
    limits = {
        ("azure_code", 0.9): Limit("azure_code", 0.9, 300.0, 1.04, [HeldRate(arm, 137.0)], 117.0, 254.0, 400.0),
        ("hol", 0.9): Limit("hol", 0.9, 30.0, 1.1, [HeldRate(arm, 10.0)], 12.0, 20.0, 100.0),
    }
    of_target = best_stock.figures_at(limits, 0.9)
    assert of_target["combined_vs_best_stock"] == {"azure_code": pytest.approx(117 / 137), "hol": None}
    assert of_target["combined_vs_best_stock_geomean"] == pytest.approx(117 / 137)
    _, rows = best_stock.table(of_target)
    name = "`least-tokens/unified/mixed/2048/fcfs`"
    assert rows == [
        ["azure_code", name, "137", "117", "254", "0.854 x", "300"],
        ["hol (synthetic)", name, "10", "12", "20", "-", "30"],
    ]


def test_the_kept_frontier_names_arms_of_stock_and_its_figures_follow_from_its_limits() -> None:
    result = json.loads(best_stock.FRONTIER.read_text(encoding="utf-8"))
    limits = read_limits(best_stock.FRONTIER)
    assert {name for name, _ in limits} <= set(best_stock.WORKLOADS)
    assert all(held.arm in stock_arms() for limit in limits.values() for held in limit.stock)
    assert read_arm(OURS.as_json()) == OURS
    for target, shown in ((0.9, result), (0.99, result["at_99"])):
        assert best_stock.figures_at(limits, target) == {
            key: shown[key] for key in best_stock.figures_at(limits, target)
        }
