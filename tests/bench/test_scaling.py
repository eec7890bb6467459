"""The bench of fleets that grow and shrink: its clusters, what is summed up, and when it is right."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

import pytest

from bench.check import scaling
from bench.check.scaling import AIM_S, LOCAL, RAY, cluster_flags, is_right, page, sum_up
from pla_sglang.launch_router import read_config


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    scaling.add_arguments(parser)
    return parser.parse_args(given)


@pytest.mark.parametrize("actuator", [LOCAL, RAY])
def test_the_router_takes_its_flags(actuator: str) -> None:
    flags = cluster_flags(actuator, options("--time-scale", "2"), "127.0.0.1:1")
    assert ("--ray-address" in flags) is (actuator == RAY)
    [router] = [flag.removeprefix("--router-args=") for flag in flags if flag.startswith("--router-args=")]
    control = read_config([*shlex.split(router), "--planner-dry-run"])[0].control
    assert (control.scaling.planner, control.scaling.instances_max) == ("threshold", 2)
    assert control.slo_ttft_s == pytest.approx(2 * scaling.TARGET_S), "the router's targets are wall time"


def round_of(**changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(("streams", "completed", "tokens"), 100)
    row |= {"first_token_s": 9.0, "startup_s": 8.0, "empty_s": 0.3, "streams_here": 50, "streams_begun": 104}
    return row | {"streams_left": 104, "tokens_wrong": 0, "aborted": 0, "errors": []} | changes


@pytest.mark.parametrize(
    ("name", "changes", "right"),
    [
        ("all well", {}, True),
        ("a stream failed", {"completed": 99}, False),
        ("a token was wrong", {"tokens_wrong": 1}, False),
        ("something was aborted", {"aborted": 1.0}, False),
        ("it was not empty in time", {"empty_s": AIM_S + 0.1}, False),
    ],
)
def test_medians_and_the_worst_and_what_is_right(name: str, changes: dict[str, Any], right: bool) -> None:
    row = sum_up([round_of(), round_of(first_token_s=20.0, streams_here=52), round_of(**changes)])
    assert row["first_token_s"] == 9.0
    assert row["first_token_s_worst"] == 20.0
    assert row["streams_here"] == 50
    assert is_right(row) is right, name
    result = {**vars(options()), "actuators": {LOCAL: row}, "environment": {"hardware": "h", "plugin_commit": "c"}}
    assert f"| `{LOCAL}` | 3 | 9 | 20 | 8 | 0.3 |" in page(result | {"sglang": "0"})
