"""``bench arrow`` without engines: its arms, what they are started as, rates, ratios, the workload that turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.live_stand_ins import LiveStandIns, after_arrival

from bench.harness.catalogue import BENCHES
from bench.harness.replay import Planned
from bench.lab import arrow as bench
from bench.lab.fleet_arms import FleetArm
from bench.lab.kept import AGAIN

SCALE, STEP = 4.0, 1.5
STOCK = FleetArm("least-tokens", mixed=True, chunk_tokens=1024)
SMALL = [
    "--instances",
    "2",
    "--requests",
    "12",
    "--step",
    f"{STEP}",
    "--turns",
    "12",
    "--budget-s",
    "99999",
    "--json",
    "--time-scale",
    f"{SCALE}",
]
# requests/s that arms bear, by kind and policy
BEARS = {("stateless", "combined"): 8.0, ("stateless", "arrow"): 5.5, ("stateless", "minimal-load"): 3.4}
STOCK_BEARS = {"unified": 4.0, "decode": 2.3}


def take(stand_ins: LiveStandIns, planned: Sequence[Planned]) -> Sequence[tuple[float, float]]:
    router, kind = stand_ins.routed[-1][0], stand_ins.kinds[-1]
    bears = BEARS.get((kind, router.policy), STOCK_BEARS.get(kind))
    assert bears is not None
    rate = (len(planned) - 1) / (planned[-1].at_s - planned[0].at_s) * SCALE
    return after_arrival(planned, SCALE, *((40.0, 41.0) if rate > bears else (0.5, 0.6)))


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> LiveStandIns:
    monkeypatch.setattr(bench, "choose_startable", lambda load, options: STOCK)
    return LiveStandIns(take, time_scale=SCALE).install(monkeypatch)


def run_bench(out: Path, capsys: pytest.CaptureFixture[str], *flags: str, status: int = 0) -> dict[str, Any]:
    assert BENCHES["arrow"].main([*SMALL, *flags, "--out", str(out)]) == status
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def flag_after(flags: Sequence[str], name: str) -> str:
    return flags[flags.index(name) + 1]


def test_each_arm_gets_a_rate_and_ratios_are_of_them(
    live: LiveStandIns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_bench(tmp_path, capsys, "--workloads", "hol")
    held = {"minimal-load": 3, "arrow": 4, "combined": 5, "stock": 3, "pairs": 2}
    held |= {arm.name: 2 for arm in bench.PAIR_ARMS if bench.has_router(arm)}
    assert result["rate_at_90"]["hol"] == {name: pytest.approx(STEP**rung) for name, rung in held.items()}
    assert result["vs_best_stock"]["hol"] == pytest.approx(STEP**2)
    assert (result["vs_minload"]["hol"], result["arrow_vs_minload"]["hol"]) == pytest.approx((STEP**2, STEP))
    assert set(result["sim_rate_at_90"]["hol"]) == set(held)
    assert (result["requests"], result["turning_vs_best_fixed"], result["arms_open"]) == (12, None, 0)
    assert result["profiles"] == {"hol": "h100-llama3.1-8b-tp1"}
    assert {row["requests"] for row in result["rows"]} == {12}
    assert (result["valid"], result["tokens_wrong"]) == (True, 0)
    minload, arrow, combined, stock, pairs = live.clusters[:5]
    assert all(flag_after(flags, "--stateless") == "2" for flags in (minload, arrow, combined))
    assert flag_after(combined, "--prefill-disagg") == "temporal"
    for flags in (minload, arrow):  # section 5.4 of Arrow: decodes first, chunked prefills in the same batch
        assert "--enable-mixed-chunk" in flags
        assert flag_after(flags, "--chunked-prefill-size") == "2048"
        assert not {"--prefill-disagg", "--schedule-policy"} & set(flags)
    assert (flag_after(stock, "--unified"), flag_after(stock, "--chunked-prefill-size")) == ("2", "1024")
    assert (flag_after(pairs, "--prefill"), flag_after(pairs, "--decode")) == ("1", "1")
    assert result == result | dict(AGAIN["arrow"](result))
    page = bench.page(result)
    assert "vs_best_stock 2.25 x" in page
    assert {row["flips"] for row in result["rows"] if not row["contest"].endswith("sglang")} == {live.flips}
    assert "| flips |" in page
    started = len(live.clusters)
    assert run_bench(tmp_path, capsys, "--workloads", "hol")["rows"] == result["rows"]
    assert len(live.clusters) == started, "finished runs are kept"


def test_decodes_placed_late(live: LiveStandIns, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_bench(tmp_path, capsys, "--workloads", "hol", "--late", "--turns", "1")
    assert list(result["rate_at_90"]["hol"])[3:5] == ["minimal-load-late", "arrow-late"]
    flags_of = [" ".join(router.flags) for router, _ in live.routed]
    assert ["--place-decode prefilled" in flags for flags in flags_of[:6]] == [False] * 3 + [True] * 2 + [False]
    assert [router.policy for router, _ in live.routed[3:5]] == ["minimal-load", "arrow"]


def test_a_ratio_needs_a_missed_rate_of_what_is_below_the_line(
    live: LiveStandIns, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STOCK_BEARS, "unified", 1e9)
    result = run_bench(tmp_path, capsys, "--workloads", "hol", "--turns", "2")
    assert not result["bracketed"]["hol"]["stock"]
    assert result["vs_best_stock"]["hol"] is None
    assert result["arms_open"] > 0


@pytest.mark.parametrize(
    ("missed", "best"),
    [
        ({"a": 9.0, "b": 9.0}, 6.0),
        ({"a": 9.0, "b": 4.0}, 6.0),
        ({"a": 9.0, "b": 13.5}, None),  # b may hold 9
        ({"a": 9.0, "b": None}, None),
        ({"a": 13.5, "b": 9.0}, None),
    ],
)
def test_the_best_is_known_once_no_arm_can_bear_more(missed: dict[str, float | None], best: float | None) -> None:
    known = bench.Known({"a": 6.0, "b": 2.7}, missed, STEP)
    assert known.best_of("a", "b", "not there") == best
    assert bench.Known({"a": None}, {"a": 1.0}, STEP).best_of("a") is None


def test_a_run_that_is_not_valid_says_nothing_and_can_be_measured_again(
    live: LiveStandIns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live.gap_share = 0.3
    spoiled = run_bench(tmp_path, capsys, "--workloads", "hol", status=1)
    arms = len(spoiled["arms"])
    assert set(spoiled["rate_at_90"]["hol"].values()) == {None}
    assert (len(spoiled["rows"]), spoiled["arms_open"], len(live.clusters)) == (arms, arms, arms)
    live.gap_share = 0.02
    assert run_bench(tmp_path, capsys, "--workloads", "hol", status=1)["rows"] == spoiled["rows"]
    again = run_bench(tmp_path, capsys, "--workloads", "hol", "--retry-invalid")
    assert (again["valid"], again["arms_open"]) == (True, 0)


def test_the_workload_that_turns(live: LiveStandIns, tmp_path: Path, capsys: Any) -> None:
    result = run_bench(tmp_path, capsys, "--turning")
    unified = [f"unified-{chunk_tokens}" for chunk_tokens in (512, 1024, 2048, 4096, 8192)]
    held, missed = result["rate_at_90"]["turning"], result["missed_at_90"]["turning"]
    assert list(held) == [*unified, "1+1", "temporal", "combined"]
    assert result["turning_vs_best_fixed"] == result["turning_vs_fixed_ours"] == pytest.approx(STEP**2)
    assert {arm: missed[arm] for arm in unified} == {arm: pytest.approx(STEP**4) for arm in unified}
    assert missed["1+1"] <= STEP**4, "it cannot bear more than the best of them, and is not asked again"
    assert (result["arms_open"], result["valid"]) == (0, True)
    temporal = live.clusters[6]
    assert (flag_after(temporal, "--unified"), flag_after(temporal, "--prefill-disagg")) == ("2", "temporal")
    assert (result["vs_best_stock"], result["arrow_vs_minload"]) == ({}, {})
    assert "turning_vs_best_fixed 2.25 x" in bench.page(result)
    assert held["1+1"] is None
    assert f"`1+1` below {missed['1+1']:.3g}/s" in bench.page(result)
    assert not (tmp_path / "arrow.json").exists(), "another result than that of the traces"
    assert (tmp_path / "arrow_turning.json").is_file()


def test_the_mix_turns_and_every_split_is_fixed() -> None:
    trace = bench.make_turning(300, seed=1).trace
    prompts, answers = trace.input_tokens, trace.output_tokens
    assert prompts[:100].min() >= 3000 > 500 >= prompts[100:200].max()
    assert answers[:100].max() <= 64 < 200 <= answers[100:200].min()
    assert {bool(tokens > 500) for tokens in prompts[200:]} == {True, False}
    assert [arm.name for arm in bench.fixed_arms(4)[5:]] == ["1+3", "2+2", "3+1"]
    assert bench.fixed_arms(4)[7].counts(4) == {"prefill": 3, "decode": 1}


def test_bad_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert BENCHES["arrow"].main(["--requests", "2", "--out", str(tmp_path)]) == 2
    assert "--requests 2 is out of range; allowed: at least 3" in capsys.readouterr().err
