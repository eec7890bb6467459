"""Steps that survive a stop: what is kept, what runs again, and when no more begin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.harness.steps import NoStepError, Steps
from pla_sglang.common.errors import ConfigError

KEYS = [{"arm": "a", "rate": 1.0}, {"arm": "a", "rate": 2.0}, {"arm": "b", "rate": 1.0}]


def test_finished_steps_are_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "steps.jsonl"
    steps = Steps(path)
    assert steps.open(KEYS) == KEYS
    steps.add(KEYS[1], {"value": 7})
    again = Steps(path)
    assert again.get(KEYS[1]) == {"value": 7}
    assert again.get({"rate": 2.0, "arm": "a"}) == {"value": 7}, "the order of a key's parts does not matter"
    assert again.open(KEYS) == [KEYS[0], KEYS[2]]
    assert again.finished(KEYS) == [(KEYS[1], {"value": 7})]
    with pytest.raises(NoStepError, match="no time was left for a single step"):
        again.finished(KEYS[:1])


def test_a_step_that_runs_again_counts_with_its_last_row(tmp_path: Path) -> None:
    steps = Steps(tmp_path / "x")
    steps.add(KEYS[0], {"valid": False})
    steps.add(KEYS[0], {"valid": True, "second": 1})
    assert Steps(tmp_path / "x").get(KEYS[0]) == {"valid": True, "second": 1}


def test_a_line_cut_short_runs_again_and_a_broken_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    steps = Steps(path)
    for key in KEYS:
        steps.add(key, {"value": 1})
    whole = path.read_text()
    path.write_text(whole[:-9])
    cut = Steps(path)
    assert cut.open(KEYS) == [KEYS[2]]
    cut.add(KEYS[2], {"value": 2})
    assert Steps(path).get(KEYS[2]) == {"value": 2}
    path.write_text("{}\n" + whole)
    with pytest.raises(ConfigError, match="line 1 is no finished step"):
        Steps(path)


def test_a_step_of_another_sglang_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "steps.jsonl"
    Steps(path).add(KEYS[0], {"value": 1})
    monkeypatch.setattr("bench.harness.steps.installed_sglang", lambda: "9.9.9")
    newer = Steps(path)
    assert newer.open(KEYS) == KEYS
    newer.add(KEYS[0], {"value": 2})
    monkeypatch.undo()
    assert Steps(path).get(KEYS[0]) == {"value": 1}


def test_a_step_that_names_no_sglang_is_one_of_0_5_17(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(json.dumps({"key": KEYS[0], "row": {"value": 1}}) + "\n")
    for version, row in (("0.5.17", {"value": 1}), ("0.5.23", None)):
        monkeypatch.setattr("bench.harness.steps.installed_sglang", lambda version=version: version)
        assert Steps(path).get(KEYS[0]) == row


def test_no_step_begins_after_the_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 100.0
    steps = Steps(tmp_path / "x", 10.0, clock=lambda: now_s)
    assert steps.has_time()
    assert steps.has_time(9.9)
    assert not steps.has_time(10.0)
    now_s = 110.0
    assert not steps.has_time()
    assert capsys.readouterr().err.count("the same command goes on") == 1
    assert Steps(tmp_path / "x").has_time(1e9), "without a budget there is always time"
    with pytest.raises(ConfigError, match="--budget-s 0 is out of range"):
        Steps(tmp_path / "x", 0)
