"""The bench of what lengths gain: its requests, its arms, its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.harness.catalogue import BENCHES
from bench.lab.length_gains import ARMS, EXACT, NONE, SETTINGS, TAILS, Setting, compare, make_trace, page


@pytest.mark.parametrize("tail", TAILS)
def test_all_tails_have_about_the_same_mean(tail: str) -> None:
    answers = make_trace(Setting("moves", 2.0, tail), 4000, 8, seed=1).output_tokens
    assert 850 < answers.mean() < 1050
    assert answers.min() >= 1
    assert answers.max() <= 4096


def test_arms_are_compared_seed_by_seed() -> None:
    none = [{"in_target": 0.8, "p99_tpot_ms": 100.0}, {"in_target": 0.9, "p99_tpot_ms": 50.0}]
    exact = [{"in_target": 0.9, "p99_tpot_ms": 50.0}, {"in_target": 1.0, "p99_tpot_ms": 25.0}]
    change = compare({NONE: none, EXACT: exact}, EXACT)
    assert change["points"] == pytest.approx(10.0)
    assert change["half"] == pytest.approx(0.0, abs=1e-9)
    assert change["tpot"] == pytest.approx(0.5)


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--uses", "reserve", "--requests", "30", "--seeds", "1", "--divide", "64", "--out", str(tmp_path)]
    assert BENCHES["length_gains"].main(flags) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    wanted = [setting.name for setting in SETTINGS if setting.use == "reserve"]
    assert [one["name"] for one in result["settings"]] == wanted
    assert all(set(one["arms"]) == set(ARMS) for one in result["settings"])
    assert "| reserve, 3.5/s, 32K, no clip |" in page(result)
    assert (tmp_path / "length_gains.png").is_file()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--uses", "x"], "--uses 'x' is not known"),
        (["--workloads", "star"], "--workloads 'star' is not known; allowed: NAME:REQUESTS_PER_S"),
        (["--seeds", "0"], "--seeds 0 is out of range"),
    ],
)
def test_bad_flags_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert BENCHES["length_gains"].main(flags) == 2
    assert message in capsys.readouterr().err
