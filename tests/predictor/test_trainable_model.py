"""From a model on a real engine to a predictor: the answers' lengths can be learned, and are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.countdown_model import make_countdown_model, write_prompts


def predictor(*arguments: object) -> dict[str, float]:
    """What a command prints at its end."""
    command = [sys.executable, "-m", "pla_sglang.predictor", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.e2e
def test_lengths_that_a_model_knows_are_learned_from_its_states(tmp_path: Path) -> None:
    model, rows = make_countdown_model(tmp_path / "model"), tmp_path / "rows"
    prompts = write_prompts(tmp_path / "prompts.jsonl", 250)
    engine = ["--at-once", 32, "--skip-tokenizer-init", "--random-seed", 0]
    told = predictor(
        *("collect", "--model-path", model, "--data", prompts, "--out", rows),
        *("--every-steps", 5, "--max-new-tokens", 1000, *engine),
    )
    assert (told["requests"], told["refused_requests"]) == (250, 0)
    assert told["cut_requests"] <= 2
    small = ["--widths", "256,64,16", "--learning-rate", 0.001, "--device", "cpu"]
    figures = predictor("train", "--data", rows, "--out", tmp_path / "model.predictor", *small)
    assert figures["mae"] <= 0.85 * figures["mae_survival"]
    assert figures["mae"] < figures["mae_prompt_only"]
