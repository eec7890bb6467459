"""``bench star`` without engines: what is started, what is sent and counted, what is compared, what counts as valid."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.live_stand_ins import LiveStandIns, after_arrival

from bench.harness.catalogue import BENCHES
from bench.harness.replay import Planned, Record
from bench.lab import star as bench
from bench.lab.kept import AGAIN
from bench.lab.star import Arm
from pla_sglang.launch_router import BENCH_VARIABLE
from pla_sglang.profiles import load_profile

SCALE, PROFILE = 2.0, "h100-qwen2.5-14b-tp1"
FLAGS = ["--requests", "12", "--rate", "4", "--divide", "64", "--time-scale", f"{SCALE}", "--json"]
SLOW_S, FAST_S = 3.0, 1.2  # to the last token, without and with moves


def moves(stand_ins: LiveStandIns) -> bool:
    flags = stand_ins.routed[-1][0].flags
    return flags[flags.index("--migration") + 1] == "on"


class StarStandIns(LiveStandIns):
    """Without moves, each engine throws 5 requests out in each run; with them, none, and there are 7 moves."""

    def __init__(self) -> None:
        super().__init__(take, time_scale=SCALE, profile=PROFILE)
        self.limits: list[int] = []
        self.roles: list[str] = []
        self._thrown_out = 0

    def replay_stated(self, url: str, planned: list[Planned], *, timeout_s: float, limit: int) -> list[Record]:
        self.limits.append(limit)
        self._thrown_out += 0 if moves(self) else 5
        return self.replay(url, planned, timeout_s=timeout_s)

    def fetch_any(self, url: str, body: Any = None) -> Any:
        if url.endswith("/workers"):
            return {"workers": [{"number": number} for number in range(4)]}
        if "/role" in url:
            self.roles.append(f"{url.split('/')[-2]} {body['role']}")
            return {}
        retracted = f'sglang:num_retracted_requests_total{{model_name="x"}} {self._thrown_out}.0\n'
        moved = (
            'pla_router_migrations_total{how="pull",reason="a"} 4.0\n'
            'pla_router_migrations_total{how="pull",reason="b"} 3.0\n'
        )
        series = retracted if self._thrown_out else "# nothing yet\n"
        return series + (moved if self.routed and moves(self) else "")


def take(stand_ins: LiveStandIns, planned: Sequence[Planned]) -> Sequence[tuple[float, float]]:
    return after_arrival(planned, SCALE, 0.2, FAST_S if moves(stand_ins) else SLOW_S)


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> StarStandIns:
    stand_ins = StarStandIns()
    stand_ins.install(monkeypatch)
    monkeypatch.setenv(BENCH_VARIABLE, "1")  # as for the processes that stand-ins are for
    monkeypatch.setattr(bench, "fetch", stand_ins.fetch_any)
    monkeypatch.setattr(bench, "replay_stated", stand_ins.replay_stated)
    return stand_ins


def run_bench(out: Path, capsys: pytest.CaptureFixture[str], *flags: str, status: int = 0) -> dict[str, Any]:
    assert BENCHES["star"].main([*FLAGS, "--out", str(out), *flags]) == status
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def test_both_layouts(live: StarStandIns, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_bench(tmp_path, capsys, "--arms", ",".join(bench.ARMS))
    names = [f"{layout}/{arm}" for layout in ("split", "united") for arm in bench.ARMS]
    assert list(result["arms"]) == names
    for layout in ("split", "united"):
        none, current = (result["arms"][f"{layout}/{arm}"] for arm in ("none", "current"))
        assert (none["oom"], none["moves"], none["requests"]) == (20, 0, 12)  # of four engines
        assert (current["oom"], current["moves"]) == (0, 7)
        assert none["sim_p99_tpot_ms"] > 0
        assert (none["sim_moves"], result["oom_ratio"][f"{layout}/current"]) == (0, 0.0)
        assert result["p99_tpot_reduction"][f"{layout}/oracle"] == pytest.approx(1 - (FAST_S - 0.2) / (SLOW_S - 0.2))
    assert live.roles == ["0 prefill", "1 decode", "2 decode", "3 decode"] * 4, "in the split layout only"
    policies = [router.policy for router, _ in live.routed]
    assert policies == ["star-no-prediction", "star-no-prediction", "star", "star", *["combined"] * 4]
    lengths = [router.flags[router.flags.index("--lengths") + 1] for router, _ in live.routed]
    assert lengths == ["none", "none", "survival", "stated"] * 2
    assert live.limits == [32_768 // 64 + 1] * 8
    [flags] = live.clusters
    tokens = str(load_profile(PROFILE).kv_capacity_tokens // 64)
    assert flags[flags.index("--max-total-tokens") + 1] == tokens
    assert flags[flags.index("--num-reserved-decode-tokens") + 1] == "10"
    assert "--pla-telemetry" in flags
    assert result == result | dict(AGAIN["star"](result))
    page = bench.page(result)
    assert "`split/current` against `none`: 0 of the requests thrown out" in page
    assert "P99 TPOT lower by 64% (simulated " in page
    assert (tmp_path / "star.png").exists()
    assert run_bench(tmp_path, capsys, "--arms", ",".join(bench.ARMS)) == result
    assert len(live.clusters) == 1, "finished runs are kept"


def test_rounds_have_requests_of_their_own_and_take_turns(
    live: StarStandIns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_bench(tmp_path, capsys, "--layouts", "split", "--rounds", "2")
    assert [moves_of["moves"] for moves_of in result["arms"].values()] == [0, 14]
    assert result["arms"]["split/none"]["requests"] == 24
    order = [router.flags[router.flags.index("--migration") + 1] for router, _ in live.routed]
    assert order == ["off", "on", "on", "off"]


@pytest.mark.parametrize(("fault", "value"), [("gap_share", 0.25), ("wrong", 1)])
def test_a_run_that_cannot_be_trusted(
    fault: str, value: float, live: StarStandIns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setattr(live, fault, value)
    result = run_bench(tmp_path, capsys, "--layouts", "split", status=1)
    assert not result["valid"]
    assert (result["tokens_wrong"] > 0) == (fault == "wrong")


def test_a_time_that_is_too_short(live: StarStandIns, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert BENCHES["star"].main([*FLAGS, "--out", str(tmp_path), "--budget-s", "5"]) != 0
    assert "no time was left for a single step" in capsys.readouterr().err
    assert live.clusters == []


@pytest.mark.parametrize(
    "flags",
    [
        *(["--instances", "2"], ["--rate", "0"], ["--reserve", "2"], ["--requests", "1"], ["--divide", "0"]),
        *(["--target-oom", "0"], ["--max-rate", "0"]),
    ],
)
def test_bad_numbers(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert BENCHES["star"].main([*flags, "--out", str(tmp_path)]) == 2
    assert " ".join(flags) in capsys.readouterr().err


def test_bad_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert BENCHES["star"].main(["--rate", "4", "--arms", "none,all", "--out", str(tmp_path)]) == 2
    assert "--arms 'all' is not known; allowed: none, current, survival, oracle" in capsys.readouterr().err


def test_the_rate_is_the_lowest_that_throws_enough_out(monkeypatch: pytest.MonkeyPatch) -> None:
    options = BENCHES["star"].parse("--target-oom", "10", "--requests", "4")
    asked = []

    def simulate(arm: Arm, trace: Any, options: Any) -> dict[str, Any]:
        asked.append((arm.name, trace.rate_per_s))
        return {"oom": round(4 * trace.rate_per_s)}

    monkeypatch.setattr(bench, "simulate", simulate)
    rate = bench.choose_rate("split", options)
    assert rate == pytest.approx(max(at for _, at in asked))
    assert 10 / 4 - 0.2 < rate < 10 / 4 * bench.RATE_STEP
    assert {name for name, _ in asked} == {"split/none"}
    monkeypatch.setattr(bench, "simulate", lambda arm, trace, options: {"oom": 3 if trace.rate_per_s < 2 else 1})
    assert bench.choose_rate("split", options) == 1.0, "where none throws as many out"


def test_the_search_ends_before_all_caches_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet that never throws enough out is not driven into saturation."""
    asked = []

    def simulate(arm: Arm, trace: Any, options: Any) -> dict[str, Any]:
        asked.append(trace.rate_per_s)
        return {"oom": round(trace.rate_per_s)}

    monkeypatch.setattr(bench, "simulate", simulate)
    for flags, most_rps in (((), 3.0), (("--instances", "8", "--divide", "16"), 12.0), (("--max-rate", "0.5"), 0.5)):
        asked.clear()
        rate = bench.choose_rate("united", BENCHES["star"].parse("--requests", "40", *flags))
        assert max(asked) <= most_rps * (1 + 1e-9)
        assert most_rps / bench.RATE_STEP < max(asked) * (1 + 1e-9)
        assert round(rate) == round(max(asked)), "where none throws most"


def test_the_split_needs_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "simulate", lambda arm, trace, options: pytest.fail("it is known"))
    assert bench.choose_rate("split", BENCHES["star"].parse()) == 2.0
    assert bench.choose_rate("split", BENCHES["star"].parse("--instances", "8", "--divide", "16")) == 8.0
    assert bench.choose_rate("united", BENCHES["star"].parse("--rate", "7")) == 7.0


def test_the_simulated_fleet_runs_full_without_moves_only() -> None:
    options = BENCHES["star"].parse("--requests", "300", "--seed", "1")
    trace = bench.make_trace(options, 2.3, 1)
    assert (trace.output_tokens.max(), bench.limit_of(options)) == (32_675 // 8, 4097)
    rows = {arm: bench.simulate(Arm("split", arm), trace, options) for arm in ("none", "current")}
    assert rows["none"]["moves"] == 0
    assert rows["current"]["moves"] > 10
    assert rows["none"]["oom"] > rows["current"]["oom"]
    assert 25 > rows["none"]["p99_tpot_ms"] > rows["current"]["p99_tpot_ms"], (
        "nobody waits for room after a first token"
    )
