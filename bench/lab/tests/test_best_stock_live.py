"""``best_stock_live`` without engines: the steps, searches, figures and page of a run whose servers are stand-ins.

Rows of a live run are made by the bench's own code, from answers that come as late as each case says.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.harness import live_fleet
from bench.harness.arms import INTERVAL
from bench.harness.catalogue import BENCHES
from bench.harness.replay import Planned, Record
from bench.lab import best_stock_live as bench
from bench.lab import startable
from bench.lab.fleet_arms import CHUNKS_TOKENS, FleetArm
from bench.lab.highest_rate import Contest, LiveArm
from pla_sglang.sim import chain

STOCK = FleetArm("least-tokens", mixed=True, chunk_tokens=1024)
SCALE, SPAN_S, STEP = 4.0, 4.0, 1.5
SMALL = ["--workloads", "hol", "--instances", "2", "--span-s", f"{SPAN_S}", "--step", f"{STEP}", "--budget-s", "9000"]


class Servers:
    """Stand-ins for a cluster and a router; an answer is in time up to ``bears_per_s`` requests/s of device time.

    Attributes:
        clusters, routers: arguments of each start.
        gap_s: host time of a device a run.
    """

    def __init__(self, bears_per_s: float) -> None:
        self.bears_per_s, self.gap_s, self.wrong = bears_per_s, 0.04, 0
        self.clusters: list[Sequence[str]] = []
        self.routers: list[Any] = []
        self._busy_s = 0.0

    @contextlib.contextmanager
    def running_cluster(self, arguments: Sequence[str], out: Path, name: str) -> Iterator[dict[str, Any]]:
        self.clusters.append(list(arguments))
        yield {"instances": [{"name": "e0", "kind": "unified", "url": "http://nowhere"}]}

    @contextlib.contextmanager
    def running_router(self, router: Any, described: dict[str, Any], log: Path) -> Iterator[str]:
        self.routers.append(router)
        yield "http://router"

    def read_devices(self, described: dict[str, Any]) -> dict[str, dict[str, float]]:
        self._busy_s += 1.0
        return {"e0": {"busy_s": self._busy_s, "host_gap_s": self.gap_s * self._busy_s, "steps": 100 * self._busy_s}}

    def replay(self, url: str, planned: list[Planned], *, timeout_s: float) -> list[Record]:
        late = len(planned) / SPAN_S > self.bears_per_s
        records = []
        for one in planned:
            first_s = one.at_s + SCALE * (40.0 if late else 0.5)
            right = chain.expected(one.own_ids, one.output_tokens + 1).tokens
            answer = Record(sent_s=one.at_s, token_s=[first_s], done_s=first_s + SCALE, planned=one, due_s=one.at_s)
            answer.prompt_ids, answer.output_ids = one.own_ids, tuple(right[self.wrong :])
            records.append(answer)
        return records


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    made = Servers(bears_per_s=4.0)
    monkeypatch.setattr(live_fleet, "replay", made.replay)
    for name in ("running_cluster", "running_router", "read_devices"):
        monkeypatch.setattr(live_fleet.servers, name, getattr(made, name))
    monkeypatch.setattr(live_fleet.servers, "flush_cache", lambda url: None)
    monkeypatch.setattr(live_fleet.servers, "fetch", lambda url: {"flips": 0} if url.endswith("/pla/state") else {})
    monkeypatch.setattr(bench, "choose_startable", lambda load, options: STOCK)
    monkeypatch.setattr(bench, "find_lacking", lambda flags: ["--prefill-decode-interval"])
    return made


def run_bench(out: Path, capsys: pytest.CaptureFixture[str], *flags: str, status: int = 0) -> dict[str, Any]:
    assert BENCHES["best_stock_live"].main([*SMALL, *flags, "--out", str(out)]) == status
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def test_both_arms_take_turns_and_each_gets_a_rate(
    servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_bench(tmp_path, capsys, "--turns", "9")
    held = result["rate_at_90"]["hol"]
    assert held["stock"] == held["ours"] == pytest.approx(STEP**3)  # 3.4/s; the next rung is above 4/s
    assert (result["vs_best_stock"], result["bracketed"]) == ({"hol": 1.0}, {"hol": {"stock": True, "ours": True}})
    assert (result["tokens_wrong"], result["valid"]) == (0, True)
    simulated = result["sim_rate_at_90"]["hol"]
    assert result["sim_vs_best_stock"]["hol"] == simulated["ours"] / simulated["stock"]
    first = next(row["rate_rps"] for row in result["rows"] if row["contest"] == "hol/ours")
    assert first == pytest.approx(simulated["ours"], rel=0.2)  # of a trace of so few requests
    stock, ours = servers.clusters[0], servers.clusters[1]
    assert [router.policy for router in servers.routers[:2]] == ["least-tokens", "combined"]
    assert "--prefill-disagg" not in stock
    assert "--enable-mixed-chunk" in set(stock) & set(ours)
    for flags, wanted in ((stock, ("--chunked-prefill-size", "1024")), (ours, ("--pla-slo-ttft-ms", "16000"))):
        assert flags[flags.index(wanted[0]) + 1] == wanted[1]
    assert servers.routers[1].flags[-2:] == ("--slo-tpot-ms", "400")
    page = bench.page(result)
    assert "hol: `least-tokens/unified/mixed/1024/fcfs` 3.38/s, ours 3.38/s: 1 x" in page
    assert (tmp_path / "best_stock_live.png").stat().st_size > 5000


def test_a_claim_takes_a_run_of_each_arm_at_another_target(
    servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Contest, "search_simulated", lambda contest: 2)
    flags = ["--target", "0.99", "--claim", "2", "--turns", "1", "--step", "1.5"]

    def bears(trace_rate: float) -> dict[str, Any]:
        servers.bears_per_s = trace_rate
        return run_bench(tmp_path / f"{trace_rate}", capsys, *flags)

    assert {row["contest"]: row["rung"] for row in bears(1e9)["rows"]} == {"hol/stock": 3, "hol/ours": 5}
    neither = bears(0.1)
    assert (neither["rate_at_99"]["hol"]["ours"], neither["vs_best_stock_at_least"]) == (None, {"hol": None})
    late = neither["rows"][0] | {"contest": "hol/stock", "live_attainment": 0.985}
    held = neither["rows"][1] | {"contest": "hol/ours", "live_attainment": 0.995}
    shown = neither | {"rows": [late, held]} | bench.highest_rate.rates_of(neither | {"rows": [late, held]})
    ratios = bench.ratios_of(shown)
    assert ratios["vs_best_stock_at_least"]["hol"] == pytest.approx(1.5**2)
    assert ratios["vs_best_stock"] == {"hol": None}, "nobody knows what stock holds"
    assert "at least 2.25 x" in bench.page(shown | ratios)


def test_a_rate_that_is_not_bracketed_gives_no_ratio_where_it_is_stocks(
    servers: Servers, tmp_path: Path, capsys: Any
) -> None:
    servers.bears_per_s = 1e9
    result = run_bench(tmp_path, capsys, "--turns", "2")
    assert result["bracketed"]["hol"] == {"stock": False, "ours": False}
    assert result["rate_at_90"]["hol"]["stock"] > 0
    assert result["vs_best_stock"] == {"hol": None}


@pytest.mark.parametrize("fault", ["gap_s", "wrong"])
def test_runs_that_cannot_be_trusted(servers: Servers, tmp_path: Path, capsys: Any, fault: str) -> None:
    setattr(servers, fault, 1)
    result = run_bench(tmp_path, capsys, "--turns", "1", status=1)
    assert not result["valid"]
    assert (result["tokens_wrong"] > 0) == (fault == "wrong")


def test_stock_is_the_arm_that_bears_most_of_those_that_can_be_started(capsys: pytest.CaptureFixture[str]) -> None:
    options = BENCHES["best_stock_live"].parse("--span-s", "60", "--step", "1.2")
    load = bench.load_workload("hol", options)
    arms = (FleetArm("least-tokens", chunk_tokens=512), FleetArm("round-robin", chunk_tokens=8192), STOCK)
    chosen = startable.choose_startable(load, options, arms)
    bears = {arm: Contest("x", LiveArm(arm.name, arm), load, options).search_simulated() or -99 for arm in arms}
    assert bears[chosen] == max(bears.values()) > min(bears.values())
    assert f"of 3 stock arms that can be started the best one simulated is {chosen.name}" in capsys.readouterr().err


def test_a_race_over_shorter_runs_leaves_a_few_for_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    spans_s: list[float] = []

    def race(load: Any, options: Any, arms: Any, *, keep: int, contest: Any) -> list[FleetArm]:
        spans_s.append(options.span_s)
        assert len(arms) == (2 if len(spans_s) > 1 else 3)
        return list(arms)[::-1]

    monkeypatch.setattr(startable, "race", race)
    monkeypatch.setattr(startable, "KEEP", 2)
    arms = [FleetArm("least-tokens", chunk_tokens=chunk_tokens) for chunk_tokens in (512, 1024, 2048)]
    options = BENCHES["best_stock_live"].parse("--span-s", "60", "--race-span-s", "20")
    assert startable.choose_startable(bench.load_workload("hol", options), options, arms) == arms[1]
    assert spans_s == [20.0, 60.0]


@pytest.mark.parametrize("orders", [("fcfs",), ("fcfs", "shortest-prefill-first", "hrrn")])
def test_all_arms_that_can_be_started_race(
    orders: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(startable, "has_order", orders.__contains__)
    arms = startable.startable_arms()
    assert len(arms) == len(set(arms)) == 4 * len(CHUNKS_TOKENS) * len(orders)
    assert {(arm.order, arm.prefills) for arm in arms} == {(order, 0) for order in orders}
    assert ("without" in capsys.readouterr().err) == (len(orders) == 1)


def test_stock_races_with_pauses_for_decodes_too_and_its_better_arm_counts(
    servers: Servers, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "find_lacking", lambda flags: [])
    result = run_bench(tmp_path, capsys, "--turns", "9")
    assert list(result["rate_at_90"]["hol"]) == ["stock", "ours", "stock-interval"]
    first, _, paused = servers.clusters[:3]
    assert " ".join(INTERVAL) in " ".join(paused)
    assert "--prefill-decode-interval" not in first
    assert "with `--prefill-decode-interval 2" in bench.page(result)
    held = {"stock": 2.0, "ours": 3.0, "stock-interval": 4.0}
    figures = {"target": 0.9, **{f"{what}_at_90": {"hol": held} for what in ("rate", "missed", "sim_rate")}}
    closed = dict.fromkeys(held, True)
    assert bench.ratios_of(figures | {"bracketed": {"hol": closed}})["vs_best_stock"] == {"hol": 0.75}
    missing = closed | {"stock-interval": False}
    assert bench.ratios_of(figures | {"bracketed": {"hol": missing}})["vs_best_stock"] == {"hol": None}
    order = LiveArm("x", FleetArm("least-tokens", order="hrrn"))
    options = BENCHES["best_stock_live"].parse()
    assert Contest("x", order, bench.load_workload("hol", options), options).engine_flags()[-2:] == [
        "--schedule-policy",
        "hrrn",
    ]
