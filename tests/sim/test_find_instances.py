"""``simulate find-instances``: its table and JSON, Ctrl-C, processes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from support.traces import steady_trace, write_plain

from pla_sglang import simulate
from pla_sglang.sim.core.errors import SimError
from pla_sglang.sim.core.experiment import Experiment
from pla_sglang.sim.planning import plan
from pla_sglang.sim.planning.forms import OURS, STOCK_FORMS, FleetForm
from pla_sglang.sim.planning.plan import plan_form
from pla_sglang.sim.planning.result import FleetRow
from pla_sglang.sim.planning.task import PlanTask
from pla_sglang.sim.workload import Trace


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    write_plain(steady_trace(), tmp_path / "t.csv")
    targets = ["--slo-ttft-ms", "500", "--slo-tpot-ms", "50"]
    return ["find-instances", "--trace", str(tmp_path / "t.csv"), *targets]


def test_the_command_shows_a_table_and_keeps_all_of_it(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = ["--rate", "60", "--target", "0.99", "--compare", "least-tokens,least-tokens/split", "--out", str(out)]
    assert simulate.main([*command, *flags]) == 0
    shown, *_, last = capsys.readouterr().out.splitlines()
    assert shown.startswith("t.csv, 200 requests at 60/s, 3 s of arrivals (short span): fewest instances with 0.99")
    result = json.loads(last)
    unified, split = result["plan"]["rows"]
    assert result["complete"] is True
    assert (unified["name"], unified["prefills"]) == ("least-tokens", None)
    assert 1 <= split["prefills"] < split["instances"]
    assert json.loads((out / "summary.json").read_text()) == result


def test_sizes_of_tensor_parallelism_are_recommended_where_several_are_known(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def list_notes(profile: str) -> list[str]:
        flags = ["--rate", "60", "--compare", "round-robin", "--profile", profile]
        assert simulate.main([*command, *flags]) == 0
        notes = json.loads(capsys.readouterr().out.splitlines()[-1])["plan"]["notes"]
        return [note for note in notes if note.startswith("tensor parallelism")]

    [note] = list_notes("h100-llama3.1-8b-tp1")
    assert "of 1, 2, 4" in note
    assert "prefill 1 (" in note
    assert "decode" in note
    assert list_notes("h200-llama3.1-8b-tp1") == []


def test_two_processes_find_what_one_finds(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    plans = []
    for jobs in ("1", "2"):
        assert simulate.main([*command, "--rate", "60", "--compare", "round-robin,two-choices", "--jobs", jobs]) == 0
        plans.append(json.loads(capsys.readouterr().out.splitlines()[-1])["plan"])
    assert plans[0] == plans[1]


def test_without_names_ours_and_stock_fleets_are_compared(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def plan_nothing(forms: list[FleetForm], *_: object, **__: object) -> list[object]:
        asked.extend(form.name for form in forms)
        return []

    monkeypatch.setattr(simulate, "plan_forms", plan_nothing)
    assert simulate.main(command) == 0
    assert simulate.main([*command, "--policy", "arrow"]) == 0
    assert asked == [*OURS, *STOCK_FORMS, "arrow"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["plan"]["rate_per_s"] == pytest.approx(20.0)


def test_an_interrupt_ends_with_the_fleets_that_are_found(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def plan_one(forms: list[FleetForm], trace: Trace, asked: PlanTask, **_: object) -> Iterator[tuple[int, FleetRow]]:
        yield 1, plan_form(forms[1], trace, task=asked)
        raise KeyboardInterrupt

    monkeypatch.setattr(simulate, "plan_forms", plan_one)
    assert simulate.main([*command, "--compare", "round-robin,least-tokens,two-choices"]) == 130
    captured = capsys.readouterr()
    assert captured.err == "simulate: interrupted, 1 of 3 fleets found\n"
    assert "not finished: round-robin, two-choices\n" in captured.out
    result = json.loads(captured.out.splitlines()[-1])
    assert result["complete"] is False
    assert result["plan"]["missing"] == ["round-robin", "two-choices"]
    assert [row["name"] for row in result["plan"]["rows"]] == ["least-tokens"]


def test_a_policy_that_leaves_requests_for_ever_has_a_row_and_status_1(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def get_stuck(experiment: Experiment, trace: Trace) -> NoReturn:
        raise SimError("3 requests can never end")

    monkeypatch.setattr(plan, "run_experiment", get_stuck)
    assert simulate.main([*command, "--policy", "arrow"]) == 1
    assert "arrow: 3 requests can never end" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate", "0"], "--rate 0 is out of range; allowed: above 0 requests/s"),
        (["--target", "1.5"], "--target 1.5 is out of range; allowed: above 0, up to 1"),
        (["--most", "0"], "--most 0 is out of range; allowed: at least 1"),
        (["--beyond-profile", "no"], "--beyond-profile 'no' is not known; allowed: refuse, warn"),
        (["--rates", "5"], "--rates is for run; find-instances takes --rate, --target, --tolerance, --most"),
        (["--low", "5"], "--low is for find-capacity; find-instances takes --rate"),
        (["--instances", "4"], "--instances is for run, find-capacity, lower-bound; find-instances takes --rate"),
        (["--slo-ttft-ms", "10"], "would miss --slo-ttft-ms 10 on an idle instance"),
        (["--kv-capacity-tokens", "100"], "200 of 200 requests do not fit an instance"),
        (["--head", "1"], "has no rate of its own to scale"),
        (["--out", "/nowhere/else"], "--out /nowhere/else: there is no folder /nowhere"),
    ],
)
def test_what_cannot_be_planned_is_named_and_ends_with_2(
    command: list[str], capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert simulate.main([*command, *flags]) == 2
    assert message in capsys.readouterr().err


def test_flags_of_find_instances_are_not_for_a_run(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for flag, commands in (("--most", "find-instances"), ("--tolerance", "find-capacity, find-instances")):
        assert simulate.main([*command[1:], flag, "1"]) == 2
        assert f"{flag} is for {commands}; run takes --rates" in capsys.readouterr().err
