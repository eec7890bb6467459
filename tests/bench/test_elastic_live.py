"""The live half of the bench of fleets that grow and shrink: its router's flags, its hours, its comparison."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path
from typing import Any

import pytest

from bench.compare import elastic_live
from bench.compare.elastic import Figures, SimulatedFleets, make_day
from bench.compare.elastic_live import FIXED, InstanceHours, choose_fixed, compare, page, router_flags
from pla_sglang.common.errors import ConfigError
from pla_sglang.launch_router import read_config
from pla_sglang.testing.server import ServerError


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    elastic_live.add_arguments(parser)
    return parser.parse_args(given)


def test_the_router_takes_the_flags_of_an_arm() -> None:
    flags = router_flags("dopd", Path("fleet.state.json"), options("--time-scale", "4", "--instances-max", "6"))
    control = read_config(flags)[0].control
    assert (control.scaling.planner, control.scaling.instances_max) == ("dopd", 6)
    assert control.slo_ttft_s == pytest.approx(4 * elastic_live.SLO.ttft_s), "the router's targets are wall time"
    assert not read_config(router_flags("", Path("x"), options()))[0].control.scaling.plans


def test_hours_are_those_of_the_instances_that_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, done = [2, 2, 0, 3, 3], threading.Event()

    def fetch(url: str) -> dict[str, Any]:
        if len(counts) == 1:
            done.set()
        if not counts[0]:
            counts.pop(0)
            raise ServerError("a look that fails")
        return {"workers": [{}] * (counts.pop(0) if len(counts) > 1 else counts[0])}

    monkeypatch.setattr(elastic_live, "LOOK_S", 0.01)
    monkeypatch.setattr(elastic_live.servers, "fetch", fetch)
    with InstanceHours("http://router") as counted:
        assert done.wait(20.0)
    assert counted.most == 3
    assert counted.hours > 0


def row(hours: float, sim_hours: float) -> dict[str, Any]:
    return {
        "gpu_hours": hours,
        "sim_gpu_hours": sim_hours,
        "attainment": 0.99,
        "sim_attainment": 1.0,
        "aborted": 0,
        "tokens_wrong": 0,
        "requests": 10,
        "tokens_verified": 100,
        "ttft_p99_s": 1.0,
        "most_instances": 4,
        "starts": {"ready": 2},
        "startup_s": None if hours == 4.0 else 2.0,
    }


def test_arms_are_compared_with_the_fixed_fleet() -> None:
    arms = {FIXED: row(4.0, 2.0), "combined+dopd": row(2.0, 1.5)}
    compare(arms)
    assert arms["combined+dopd"]["gpu_hours_vs_fixed"] == 0.5
    assert arms["combined+dopd"]["sim_gpu_hours_vs_fixed"] == 0.75
    settings = dict.fromkeys(elastic_live.SETTINGS, 1.0) | {"profile": "p"}
    text = page({"arms": arms, **settings, "environment": {"plugin_commit": "abc"}})
    assert "| `combined+dopd` | 2.00 | 0.50 | 0.75 |" in text
    assert "2 x 2.0" in text


@pytest.mark.parametrize("found", [None, elastic_live.MOST_LIVE + 1])
def test_a_day_that_needs_too_many_instances_is_refused(found: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedFleets, "run_arm", lambda self, name: Figures(1.0, 1.0))
    monkeypatch.setattr(SimulatedFleets, "smallest_fixed", lambda self, attainment: found)
    with pytest.raises(ConfigError, match="--rate 22 needs"):
        choose_fixed("combined+sla", make_day(1.0, 20.0, seed=1), options())
