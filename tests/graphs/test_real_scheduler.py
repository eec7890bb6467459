"""Graphs under SGLang's own scheduler, radix cache, KV pool and sampler: greedy answers must be those without graphs.

One process an arm, as a process has one scheduler. No HTTP, and one rank.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pla_sglang.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.e2e

# Answers of several batches: single requests, mixed lengths, cached prefixes, more than one pass, one that is too long.
ARM = """
import json, sys
from pla_sglang.config import PlaConfig
from pla_sglang.testing.steps import Stepper

model, options = sys.argv[1], json.loads(sys.argv[2])
flags = ["--model-path", model, "--device", "cpu", "--chunked-prefill-size", "512", "--log-level", "error"]
stepper = Stepper(flags, PlaConfig(**options))
answers = []
batches = [[5], [1], [8, 17, 30, 2], [20] * 12, [40, 1, 2, 3, 70], [300, 7], [9] * 3, [200, 5]]
prompts = [[stepper.tokens(length) for length in lengths] for lengths in batches]
for _ in range(4):
    for batch in prompts:
        answers.append(stepper.answers(batch, 4))
    for _ in range(8):
        stepper.idle()
    # The next turn of everybody: a history in the prefix cache, partly computed in graphs, and a few new tokens.
    prompts = [[prompt + stepper.tokens(3 + len(prompt) % 7) for prompt in batch] for batch in prompts]
print(json.dumps({"answers": answers, "graphs": stepper.graphs["ours"]}))
"""


def run_arm(model: Path, **options: Any) -> dict[str, Any]:
    command = [sys.executable, "-c", ARM, str(model), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), dtype="float32")


@pytest.fixture(scope="module")
def stock(model: Path) -> list[list[list[int]]]:
    result = run_arm(model)
    assert result["graphs"] == {}
    answers: list[list[list[int]]] = result["answers"]
    return answers


def test_variable_length_graphs_captured_at_start(model: Path, stock: list[list[list[int]]]) -> None:
    result = run_arm(model, graph_layout="varlen", graph_capture_budget_s=2.0)
    assert result["answers"] == stock
    state = result["graphs"]
    assert state["reasons"]["replayed"] > 0
    assert state["reasons"]["long_request"] > 0
    assert state["captures"] == len(state["captured"]) > 0
    assert 0 < state["padded_tokens"] < state["real_tokens"]


def test_scheduling_and_graphs_together(model: Path, stock: list[list[list[int]]]) -> None:
    options = {"graph_layout": "varlen", "graph_capture_budget_s": 1.0, "prefill_disagg": "temporal"}
    result = run_arm(model, **options)
    assert result["answers"] == stock
    assert result["graphs"]["reasons"]["replayed"] > 0


def test_grid_captures_what_is_missed_under_a_small_budget(model: Path, stock: list[list[list[int]]]) -> None:
    """Nothing at start; room for a few graphs, so that idle captures make others go."""
    result = run_arm(model, graph_layout="grid", graph_capture_budget_s=0.0, graph_budget_gb=0.003)
    assert result["answers"] == stock
    state = result["graphs"]
    assert state["start_ended_by"] == "time_budget"
    assert state["captures"] > 0
    assert state["evictions"] + state["failures"] > 0, "the budget never mattered"
    assert state["memory_bytes"] <= 0.003 * (1 << 30)
    assert state["reasons"]["not_captured"] > 0
