"""``bench stateless`` without engines: what is started, what is compared, what is kept, what counts as valid."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.live_stand_ins import LiveStandIns, after_arrival
from support.router_scene import run as run_scene
from support.router_scene import scene

from bench.check.consistency import AGAIN
from bench.cost import stateless as bench
from bench.harness import servers
from bench.harness.catalogue import BENCHES
from bench.harness.replay import Planned
from pla_sglang.testing.server import ServerError

SCALE, SLOWER = 2.0, 1.1


def take(stand_ins: LiveStandIns, planned: Sequence[Planned]) -> Sequence[tuple[float, float]]:
    slower = SLOWER if "stateless" in stand_ins.kinds else 1.0
    return after_arrival(planned, SCALE, 0.2 * slower, 1.2 * slower)


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> LiveStandIns:
    return LiveStandIns(take, time_scale=SCALE).install(monkeypatch)


def run_bench(
    out: Path, capsys: pytest.CaptureFixture[str], *flags: str, status: int = 0, rounds: int = 2
) -> dict[str, Any]:
    small = ["--requests", "10", "--rounds", f"{rounds}", "--time-scale", f"{SCALE}", "--out", f"{out}", "--json"]
    assert BENCHES["stateless"].main([*small, *flags]) == status
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def test_both_comparisons(live: LiveStandIns, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_bench(tmp_path, capsys)
    for name in ("ttft_ratio", "tpot_ratio", "pd_ttft_ratio", "pd_tpot_ratio"):
        assert result[name] == pytest.approx(SLOWER)
        assert result["spreads"][name]["rounds"] == 2
    assert 0.9 < result["throughput_ratio"] < 1
    assert (result["tokens_wrong"], result["valid"], result["runs_open"]) == (0, True, 0)
    assert result["ready_s"] > 0
    assert result["pss_gib"] > 0
    assert result["ready_s_of_8"] is None
    kinds = [(router.policy, sorted(set(behind.values())), len(behind)) for router, behind in live.routed]
    whole = [("round-robin", ["stateless"], 2)] * 2 + [("round-robin", ["unified"], 2)] * 2
    assert kinds[:8] == whole + whole[::-1], "the arms take turns"
    labels, pairs = ("minimal-load", ["stateless"], 4), ("minimal-load", ["decode", "prefill"], 4)
    assert kinds[8:] == [labels, labels, pairs, pairs, labels, labels], "one router is for the start"
    assert len(live.clusters) == 5
    assert result == result | dict(AGAIN["stateless"](result))
    page = bench.page(result)
    assert "`ttft_ratio` 1.1x (1.1 .. 1.1)" in page
    assert "4 engines: ready with all connections after" in page


def test_finished_runs_are_kept_and_eight_can_be_added(live: LiveStandIns, tmp_path: Path, capsys: Any) -> None:
    first = run_bench(tmp_path, capsys, rounds=1)
    started = len(live.clusters)
    again = run_bench(tmp_path, capsys, "--eight", rounds=1)
    assert len(live.clusters) == started + 1
    assert live.clusters[-1][live.clusters[-1].index("--stateless") + 1] == "8"
    assert again["ready_s_of_8"] > 0
    assert {key: again[key] for key in ("rows", "spreads", "ready_s")} == {
        key: first[key] for key in ("rows", "spreads", "ready_s")
    }
    assert "8 engines:" in bench.page(again)


@pytest.mark.parametrize(("fault", "value"), [("gap_share", 0.25), ("wrong", 1)])
def test_a_run_that_cannot_be_trusted(
    live: LiveStandIns, tmp_path: Path, capsys: Any, fault: str, value: float
) -> None:
    setattr(live, fault, value)
    result = run_bench(tmp_path, capsys, rounds=1, status=1)
    assert not result["valid"]
    assert (result["tokens_wrong"] > 0) == (fault == "wrong")


def test_a_round_that_only_one_arm_has_had_is_not_compared() -> None:
    row = {"arm": "stateless", "load": "paced", "round": 0, "ttft_s": 1.0, "tpot_s": 1.0, "tokens_per_s": 1.0}
    result = bench.compare_rounds([row, row | {"round": 1}, row | {"arm": "unified", "ttft_s": 0.5}])
    assert result["spreads"]["ttft_ratio"] == {"median": 2.0, "low": 2.0, "high": 2.0, "rounds": 1}
    assert set(result["spreads"]) == {"ttft_ratio", "tpot_ratio"}
    assert (result["ttft_ratio"], result["throughput_ratio"]) == (2.0, None)


def test_a_router_is_waited_for_until_its_instances_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are those of a control plane before fakes of instances."""
    answers: list[Any] = []

    async def ask_twice() -> None:
        async with scene(["stateless", "stateless", "prefill", "decode"]) as made:

            def peers() -> list[dict[int, str]]:
                rows = made.admin("GET", "/workers")[1]["workers"]
                return [row["peers"] or {} for row in rows if row["kind"] == "stateless"]

            await made.until(lambda: all(len(of) == 2 and set(of.values()) == {"ready"} for of in peers()))
            answers.append(made.admin("GET", "/workers")[1])

    run_scene(ask_twice)
    monkeypatch.setattr(servers, "fetch", lambda url: answers[-1])
    servers.wait_until_paired("http://router")
    warming = json.loads(json.dumps(answers[0]))
    next(row for row in warming["workers"] if row["kind"] == "stateless")["peers"] = {"1": "warming", "2": "ready"}
    untold = json.loads(json.dumps(answers[0]))
    next(row for row in untold["workers"] if row["kind"] == "stateless")["peers"] = None
    monkeypatch.setattr(servers, "PAIRED_S", 0.0)
    for other in (warming, untold):
        answers.append(other)
        with pytest.raises(ServerError, match="not connected to each other"):
            servers.wait_until_paired("http://router")
