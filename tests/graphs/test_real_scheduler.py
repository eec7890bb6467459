"""Graphs under SGLang's own scheduler, radix cache, KV pool and sampler: greedy answers must be those without graphs.

One process an arm, as a process has one scheduler. No HTTP, and one rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.forked_servers import ForkParent
from support.tiny_model import make_tiny_model

from pla_sglang.plugin.config import PlaConfig

pytestmark = pytest.mark.e2e

RunArm = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), dtype="float32")


@pytest.fixture(scope="module")
def run_arm(model: Path, fork_parent: ForkParent, tmp_path_factory: pytest.TempPathFactory) -> RunArm:
    """The answers and the state of the graphs of a scheduler with these fields of its configuration."""
    folder = tmp_path_factory.mktemp("arms")

    def run(**options: Any) -> dict[str, Any]:
        done = fork_parent.run_program("support.graph_arm", [str(model), json.dumps(options)], folder)
        assert done.returncode == 0, done.stdout[-3000:]
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    return run


@pytest.fixture(scope="module")
def stock(run_arm: RunArm) -> list[list[list[int]]]:
    result = run_arm()
    assert result["graphs"] == {}
    answers: list[list[list[int]]] = result["answers"]
    return answers


def test_variable_length_graphs_captured_at_start(run_arm: RunArm, stock: list[list[list[int]]]) -> None:
    result = run_arm(graph_layout="varlen", graph_capture_budget_s=2.0)
    assert result["answers"] == stock
    state = result["graphs"]
    assert state["reasons"]["replayed"] > 0
    assert state["reasons"]["long_request"] > 0
    assert state["captures"] == len(state["captured"]) > 0
    assert 0 < state["padded_tokens"] < state["real_tokens"]


def test_scheduling_and_graphs_together(run_arm: RunArm, stock: list[list[list[int]]]) -> None:
    options = {"graph_layout": "varlen", "graph_capture_budget_s": 1.0, "prefill_disagg": "temporal"}
    result = run_arm(**options)
    assert result["answers"] == stock
    assert result["graphs"]["reasons"]["replayed"] > 0


def test_auto_takes_graphs_that_pay(run_arm: RunArm, stock: list[list[list[int]]]) -> None:
    result = run_arm(prefill_disagg="temporal", graph_capture_budget_s=1.0, pays=True)
    assert result["answers"] == stock
    state = result["graphs"]
    assert state["reasons"]["replayed"] > 0
    assert all(time_ms > 0 for time_ms in state["host_ms_a_pass"].values())


def test_auto_leaves_graphs_that_do_not_pay(run_arm: RunArm, stock: list[list[list[int]]]) -> None:
    result = run_arm(prefill_disagg="temporal", pays=False)
    assert result["answers"] == stock
    assert result["graphs"] == {}
    (reason,) = result["refused"]
    assert "a pass takes the host" in reason


def test_auto_without_temporal_scheduling_or_a_gpu_is_off() -> None:
    assert not PlaConfig().graphs
    assert PlaConfig(prefill_disagg="temporal").for_device("cuda").graphs
    assert not PlaConfig(prefill_disagg="temporal").for_device("cpu").graphs
    assert PlaConfig(graph_layout="grid").for_device("cpu").graphs


def test_grid_captures_what_is_missed_under_a_small_budget(run_arm: RunArm, stock: list[list[list[int]]]) -> None:
    """Nothing at start; room for a few graphs, none for three of 128 tokens, so that idle captures make others go."""
    result = run_arm(graph_layout="grid", graph_capture_budget_s=0.0, graph_budget_gb=0.004)
    assert result["answers"] == stock
    state = result["graphs"]
    assert state["start_ended_by"] == "time_budget"
    assert state["captures"] > 0
    assert state["evictions"] + sum(state["failures"].values()) > 0, "the budget never mattered"
    assert state["memory_bytes"] <= 0.004 * (1 << 30)
    assert state["reasons"]["not_captured"] > 0
