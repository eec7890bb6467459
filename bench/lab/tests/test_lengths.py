"""The bench of lengths: what it learns from, what it compares, what its page shows."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from bench.harness.catalogue import BENCHES
from bench.lab.lengths import STAR, Answers, Points, answers_of, figures_of, page, predict_by_prompt


def test_points_lie_on_each_answer_from_its_start() -> None:
    points = Points.of(Answers(np.array([5, 6]), np.array([41, 20])), 20)
    assert points.request.tolist() == [0, 0, 0, 1]
    assert points.generated.tolist() == [0.0, 20.0, 40.0, 0.0]
    assert points.rest.tolist() == [41.0, 21.0, 1.0, 20.0]


def test_a_prediction_by_prompt_is_made_once() -> None:
    learned = Answers(np.repeat([10, 1000], 50), np.repeat([100, 300], 50))
    points = Points.of(Answers(np.array([10, 1000]), np.array([200, 200])), 150)
    assert predict_by_prompt(learned, points).tolist() == [100.0, 1.0, 300.0, 150.0]


def test_the_targets_hold_on_the_lengths_of_star() -> None:
    """At most half of the best constant's error, and after 500 ended requests at most 1.1 times the final one."""
    options = argparse.Namespace(learn=4096)
    figures = figures_of(answers_of(STAR, None, options, seed=7), 4096, 100)
    assert figures["to_constant"] <= 0.50
    assert figures["early_to_final"] <= 1.1
    assert figures["mae_survival"] < figures["mae_prompt_only"]
    assert figures["unknown_share"] == 0.0


def test_a_run_without_recordings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--sources", STAR, "--learn", "1000", "--every", "200", "--seeds", "1", "--out", str(tmp_path)]
    assert BENCHES["lengths"].main(flags) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["mae"] == result["mae_survival"] < result["mae_constant"] < result["mae_prompt_only"]
    assert result["overhead_share"] is None
    assert set(result["mae_by_generated"]["0"]) == {"constant", "prompt_only", "survival"}
    assert "| star |" in page(result)


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--sources", "x"], "--sources 'x' is not known"), (["--learn", "10"], "--learn 10 is out of range")],
)
def test_bad_flags_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert BENCHES["lengths"].main(flags) == 2
    assert message in capsys.readouterr().err
