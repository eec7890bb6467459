"""Digests of simulator runs: equal for equal code, and a difference is the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import compare_digests
import pytest

from pla_sglang.sim.core.experiment import ENGINES


def test_a_difference_is_shown_and_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_digests, "list_runs", lambda data: [("round-robin", "fcfs", "star", data)])
    before = tmp_path / "before.json"
    assert compare_digests.main(["--out", str(before)]) == 0
    assert compare_digests.main(["--against", str(before)]) == 0
    changed = json.loads(before.read_text())
    changed["round-robin/fcfs/star"]["digest"] = "another"
    before.write_text(json.dumps(changed))
    assert compare_digests.main(["--against", str(before)]) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["differ"], last["compared"]) == (["round-robin/fcfs/star"], 1)


def test_a_folder_without_the_traces_is_refused(tmp_path: Path) -> None:
    assert compare_digests.main(["--data", str(tmp_path)]) == 2


def test_every_policy_is_run() -> None:
    runs = compare_digests.list_runs(None)
    assert {run[0] for run in runs} == set(compare_digests.policy_names())
    assert {run[1] for run in runs} <= set(ENGINES)
