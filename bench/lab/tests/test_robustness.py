"""The bench of constants: which there are, what they are changed to, what its figures say; on two tiny workloads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.harness.catalogue import BENCHES
from bench.lab import robustness
from bench.lab.fleet_arms import OURS
from bench.lab.robustness import Constant, change, figures_of, find_constants, page
from pla_sglang.sim.metrics.goodput import Slo

TINY = ["--workloads", "hol,chat", "--span-times", "0.03"]


def run_bench(out: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert BENCHES["robustness"].main([*TINY, *flags, "--out", str(out)]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("slo.token_share", Constant(0.6, 0.3, 1.0)),  # no more than allowed
        ("slo.short_steps", Constant(2, 1, 4)),
        ("slo.infeasible_age_s", Constant(30.0, 15.0, 60.0)),  # of the form, not of the field
        ("long_prompts.margin", Constant(1.5, 1.25, 2.0)),  # a factor
        ("cost.memory_share", Constant(0.9, 0.45, 1.0)),
        ("dopd.local_max_tokens", Constant(2048, 1024, 4096)),
        ("move_gain", Constant(1.0, 0.5, 2.0)),
    ],
)
def test_constants_are_halved_and_doubled_within_what_is_allowed(name: str, values: Constant) -> None:
    assert find_constants()[name] == values


def test_each_constant_can_be_set_to_either_value() -> None:
    constants = find_constants()
    assert "awd.wait_min_s" not in constants, "half of 0 is 0"
    experiment = OURS.experiment(Slo(2.0, 0.05))
    for name, constant in constants.items():
        changed = change(experiment, ((name, constant.half),)), change(experiment, ((name, constant.double),))
        assert changed[0] != experiment or constant.half == constant.default
        assert changed[1] != experiment or constant.double == constant.default


def test_figures_are_ratios_to_the_default() -> None:
    attainment = {"one": 0.8, "two": 0.5}
    changed = {
        "nothing": {"half": attainment, "double": {"one": 0.8004, "two": 0.5}},
        "much": {"half": {"one": 0.2, "two": 0.5}, "double": {"one": 0.8, "two": 0.6}},
    }
    figures = figures_of(attainment, changed)
    assert (figures["moves_nothing"], figures["moves_much"]) == (["nothing"], ["much"])
    much = figures["figures"]["much"]
    assert much["geomean_half"] == pytest.approx(0.5)
    assert much["geomean_double"] == pytest.approx(1.2**0.5)
    assert (much["worst"], much["worst_workload"], much["below"]) == (pytest.approx(0.25), "one", ["one"])
    assert much["best"] == pytest.approx(1.2)


def test_a_part_that_rests_is_measured_once_and_a_run_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(robustness, "RESTING", ("arrow",))
    result = run_bench(tmp_path, capsys, "--constants", "slo.short_steps,slo.slower,arrow")
    kept = [json.loads(line) for line in (tmp_path / "robustness.steps.jsonl").read_text().splitlines()]
    names = [line["key"]["cell"] for line in kept]
    assert sum("slo." in name for name in names) == 2 * 2 * 2
    assert sum("arrow." in name for name in names) == 2 * 2, "no instance has a role, so that its flips decide nothing"
    assert set(result["settings"]) == {"hol", "chat"}
    assert set(result["figures"]) == {one for one in find_constants() if one.startswith("arrow.")} | {
        "slo.short_steps",
        "slo.slower",
    }
    assert set(result["moves_nothing"]) >= {"arrow.idle_s", "arrow.low_load"}
    assert {key: result[key] for key in ("figures", "moves_nothing", "moves_much")} == robustness.figures_again(result)
    assert "`arrow.idle_s`" in page(result)
    monkeypatch.setattr(robustness, "run_experiment", None)  # nothing is left to measure
    assert (
        run_bench(tmp_path, capsys, "--constants", "slo.short_steps,slo.slower,arrow")["figures"] == result["figures"]
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--constants", "slo.none"], "--constants 'slo.none' is not known; allowed: "),
        (["--workloads", "none"], "--workloads 'none' is not known; allowed: azure_code"),
        (["--span-times", "0"], "--span-times 0.0 is out of range; allowed: above 0"),
    ],
)
def test_bad_flags_end_with_2(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert BENCHES["robustness"].main([*TINY, *flags]) == 2
    assert message in capsys.readouterr().err
