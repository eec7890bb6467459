"""``bench parity`` on stateless engines without engines: what it starts, when it is valid, and that its load flips."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.live_stand_ins import LiveStandIns, after_arrival

from bench.check import parity as bench
from bench.harness.catalogue import BENCHES
from bench.harness.replay import Planned
from pla_sglang.sim.core import experiment
from pla_sglang.sim.core.parity import Parity
from pla_sglang.sim.workload import Trace

SCALE = 2.0
SMALL = ["--stateless", "2", "--requests", "8", "--json"]


def take(stand_ins: LiveStandIns, planned: Sequence[Planned]) -> Sequence[tuple[float, float]]:
    return after_arrival(planned, SCALE, 0.5, 0.6)


class Recorded:
    """What replays say. ``flips``: all and identical ones by policy."""

    def __init__(self) -> None:
        self.flips = {"arrow": (4, 4), "combined": (9, 9), "combined-roles": (2, 2), "dopd": (1, 1)}

    def replay_file(self, path: Path) -> tuple[None, Parity]:
        policy = path.name.removeprefix("parity-").removesuffix(".jsonl.gz")
        flips, identical = self.flips.get(policy, (0, 0))
        counts = Counter(dispatched=1000)
        return None, Parity(counts, counts - Counter(dispatched=1), flips=flips, flips_identical=identical)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    made = Recorded()
    monkeypatch.setattr(bench, "replay_file", made.replay_file)
    return made


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch, recorded: Recorded) -> LiveStandIns:
    made = LiveStandIns(take, time_scale=SCALE).install(monkeypatch)
    monkeypatch.setattr(bench, "replay", made.replay)
    return made


def run_bench(out: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any], str]:
    status = BENCHES["parity"].main([*SMALL, *flags, "--out", str(out)])
    shown = capsys.readouterr()
    return status, json.loads(shown.out.splitlines()[-1]), shown.out + shown.err


def test_policies_that_change_roles(live: LiveStandIns, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, result, _ = run_bench(tmp_path, capsys)
    assert (status, set(result["by_policy"])) == (0, {"arrow", "dopd", "combined", "combined-roles"})
    assert (result["decisions"], result["failed"], result["tokens_wrong"]) == (4000, 0, 0)
    assert {name: row["flips"] for name, row in result["by_policy"].items()} == {
        "arrow": 4,
        "combined": 9,
        "combined-roles": 2,
        "dopd": 1,
    }
    assert "| `arrow` | 1,000 | 99.90% | 4 | 4 | yes | 0 | 0 |" in bench.page(result)
    router, engines = live.routed[0]
    assert set(engines.values()) == {"stateless"}
    flags = " ".join(router.flags)
    assert "--slo-ttft-ms 1000 --slo-tpot-ms 24" in flags, "the targets are of the device"
    assert "--telemetry" in flags
    assert (tmp_path / "parity_stateless.json").is_file()


@pytest.mark.parametrize("flips", [(0, 0), (2, 1)])
def test_a_policy_without_flips_that_come_out_alike_is_not_valid(
    flips: tuple[int, int],
    live: LiveStandIns,
    recorded: Recorded,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recorded.flips["dopd"] = flips
    status, result, shown = run_bench(tmp_path, capsys, "--policies", "arrow,dopd,round-robin")
    assert status == 1
    assert {name: row["valid"] for name, row in result["by_policy"].items()} == {
        "arrow": True,
        "dopd": False,
        "round-robin": True,
    }
    assert "dopd is not valid" in shown


def test_engines_of_fixed_roles_need_no_flips(
    live: LiveStandIns, recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded.flips["arrow"] = (0, 0)
    flags = ("--stateless", "0", "--policies", "arrow,pla", "--time-scale", f"{SCALE}")
    status, result, _ = run_bench(tmp_path, capsys, *flags)
    assert status == 0
    assert "flips" not in bench.page(result)
    assert set(live.kinds) == {"prefill", "decode"}
    assert "--slo-ttft-ms 3200 --boundary 500" in " ".join(live.routed[1][0].flags)


@pytest.mark.parametrize("policy", bench.CHANGING)
def test_roles_change_under_the_load(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the simulator, with what a router gives its policies; DOPD has one plan before the load ends."""
    make_setup = experiment._setup

    def live_setup(*args: Any) -> Any:
        return dataclasses.replace(make_setup(*args), scales=False, mean_context_tokens=1024.0)

    monkeypatch.setattr(experiment, "_setup", live_setup)
    defaults = bench.STATELESS_DEFAULTS
    planned = bench.turning_workload(defaults["requests"], defaults["rate"] * defaults["time_scale"], seed=0)
    trace = Trace(
        "turning",
        np.array([request.at_s for request in planned]),
        np.array([len(request.own_ids) for request in planned]),
        np.array([request.output_tokens for request in planned]),
    )
    assert planned[-1].at_s > 62.0
    fleet = experiment.Experiment(policy, bench.TIGHT, instances=4, migrates=False, report_interval_s=0.02)
    ran = experiment.run_experiment(fleet, trace)
    assert ran.result.counts["flips"] > 0
    assert ran.figures.attainment > 0.75
