"""Planners in the simulator: limits, roles of newcomers, start-up times, and the command line."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.sim import Script, profile, simulation, trace
from support.traces import write_plain

from pla_sglang import simulate
from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.common.plan_log import FleetCount, Forecast, Plan, PlanLog
from pla_sglang.policy.interface.decisions import FleetAction, ScaleTo
from pla_sglang.policy.interface.fleet import FleetView, Role
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.sim.core.config import InstanceSpec
from pla_sglang.sim.core.experiment import Experiment, ExperimentResult, run_experiment
from pla_sglang.sim.core.samples import GONE, ROLE_ORDER
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.report.planner_timeline import draw_planner
from pla_sglang.sim.report.run_page import make_run_page
from pla_sglang.sim.workload import Arrivals, Trace, generated_trace, length_model

SLO = Slo(2.0, 0.1)
PROFILE, GPUS = "h100-llama3.1-70b-fp8-tp2", 2
HAND = profile(token_s=1e-3, decode_base_s=0.01)


def surge() -> Trace:
    """A quiet minute, a busy one and two quiet ones: 2, 30 and 2 requests a second."""
    rng, parts = random.Random(3), []
    for start_s, seconds, rate_per_s in ((0.0, 60, 2.0), (60.0, 60, 30.0), (120.0, 120, 2.0)):
        lengths = length_model("lmsys_first_turn_prompt"), length_model("sharegpt4_output")
        part = generated_trace(round(rate_per_s * seconds), Arrivals(rate_per_s, rng), *lengths)
        inside = part.arrival_s < seconds
        parts.append((start_s + part.arrival_s[inside], part.input_tokens[inside], part.output_tokens[inside]))
    return Trace("surge", *(np.concatenate(column) for column in zip(*parts, strict=True)))


def plan(policy: str, planner: str, trace: Trace | None = None, **changes: Any) -> ExperimentResult:
    settings: dict[str, Any] = {"instances": 2, "instances_max": 8, "plan_interval_s": 5.0, "startup_s": 10.0}
    settings |= {"forecaster": "holt_winters"}  # arima takes longer to fit than all else here
    return run_experiment(
        Experiment(policy, SLO, planner=planner, profile=PROFILE, **settings | changes), trace or SURGE
    )


SURGE = surge()


def ready_counts(outcome: ExperimentResult) -> list[int]:
    return [int(count) for count in (outcome.result.samples.role != GONE).sum(axis=1)]


@pytest.mark.parametrize("planner", ["dopd", "sla"])
@pytest.mark.parametrize("policy", ["combined", "dopd", "least-tokens", "static-pd"])
def test_a_fleet_grows_for_a_surge_and_shrinks_after_it(policy: str, planner: str) -> None:
    outcome = plan(policy, planner)
    counts, ready = outcome.result.counts, ready_counts(outcome)
    assert counts["finished"] == len(SURGE)
    assert counts["scale_outs"] >= 1
    assert counts["scale_ins"] >= 1
    assert 2 <= min(ready) < max(ready) <= 8
    assert outcome.result.gpu_hours < GPUS * max(ready) * outcome.result.end_s / 3600


def test_the_log_of_the_planner_agrees_with_the_run() -> None:
    outcome = plan("combined", "dopd")
    result, log = outcome.result, outcome.result.plans
    assert [plan.at_s for plan in log.plans] == pytest.approx([5.0 * (1 + place) for place in range(len(log.plans))])
    assert [round(one.ended_s - one.ordered_s, 6) for one in log.starts] == [10.0] * result.counts["scale_outs"]
    assert {one.outcome for one in log.starts} == {"ready"}
    points = list(log.points)
    for at_s, ready in zip(result.samples.at_s, ready_counts(outcome), strict=True):
        before = [point for point in points if point.at_s < at_s]
        if before and before[-1].counts == points[min(len(before), len(points) - 1)].counts:
            assert before[-1].counts.ready == ready
    assert points[-1].gpu_hours == pytest.approx(result.gpu_hours)
    assert max(one.planned for one in log.plans) == max(point.counts.ready + point.counts.starting for point in points)
    assert all(one.gpu_hours <= later.gpu_hours for one, later in itertools.pairwise(points))


def test_the_page_has_a_planner_only_where_there_is_one() -> None:
    def headings(outcome: ExperimentResult) -> set[str]:
        return {section.heading for section in make_run_page([outcome], SURGE, {}, target=0.9).sections}

    assert "Planner: combined" in headings(plan("combined", "threshold"))
    assert "Planner: dopd" not in headings(run_experiment(Experiment("round-robin", SLO, profile=PROFILE), SURGE))
    assert "Planner: dopd" in headings(run_experiment(Experiment("dopd", SLO, profile=PROFILE, instances=2), SURGE))


def test_over_idle_time_that_was_left_out_the_load_stays_what_it_was() -> None:
    log = PlanLog()
    for at_s, load in ((10.0, 4.0), (20.0, 0.0), (3600.0, 6.0), (3610.0, 2.0)):
        log.plans.append(Plan(at_s, 2, {"requests": Forecast(load, None)}))
    log.note_fleet(FleetCount(2, 0, 0), 1.0, 3610.0)
    [load] = [line for line in draw_planner(log)["data"] if line["name"] == "load"]
    assert list(zip(load["x"], load["y"], strict=True)) == [(10, 4), (20, 0), (3590, 0), (3600, 6), (3610, 2)]


@pytest.mark.parametrize("planner", ["dopd", "sla", "threshold"])
def test_over_a_gap_of_days_the_fleet_is_at_its_floor_and_grows_again_after_it(planner: str) -> None:
    gap_s = 3 * 86_400.0
    columns = (SURGE.arrival_s, SURGE.input_tokens, SURGE.output_tokens)
    arrival_s, *lengths = (np.concatenate([column, column]) for column in columns)
    arrival_s[len(SURGE) :] += gap_s
    knobs = ("threshold.high=0.2", "threshold.low=0.01", "threshold.cool_down_s=5") if planner == "threshold" else ()
    result = plan("combined", planner, Trace("two", arrival_s, *lengths), policy_knobs=knobs).result
    assert result.counts["finished"] == 2 * len(SURGE)
    before = [point.counts for point in result.plans.points if point.at_s <= gap_s]
    assert before[-1] == FleetCount(2, 0, 0)
    for begin_s in (0.0, gap_s):
        assert any(begin_s < start.ordered_s < begin_s + 300.0 for start in result.plans.starts)
    assert result.gpu_hours == pytest.approx(2 * GPUS * gap_s / 3600, rel=0.02)


def test_thresholds_count_the_backlog() -> None:
    knobs = ("threshold.high=0.2", "threshold.low=0.01", "threshold.cool_down_s=5")
    outcome = plan("combined", "threshold", policy_knobs=knobs)  # so low that 2,000 requests reach it
    assert outcome.result.counts["scale_outs"] >= 1
    assert outcome.result.reasons["baseline.utilisation_high"] >= 1


def test_equal_limits_leave_the_fleet_as_it_is() -> None:
    outcome = plan("combined", "dopd", instances_min=2, instances_max=2)
    assert set(ready_counts(outcome)) == {2}
    assert outcome.result.counts["scale_outs"] == outcome.result.counts["scale_ins"] == 0


def test_no_planner_is_the_default() -> None:
    few = SURGE.head(200)
    runs = [
        run_experiment(Experiment("combined", SLO, instances=2, **chosen), few) for chosen in ({}, {"planner": "none"})
    ]
    assert runs[0].result.digest() == runs[1].result.digest()
    with pytest.raises(ConfigError, match="--planner 'x' is not known; allowed: none, dopd, threshold, sla"):
        Experiment("combined", SLO, planner="x")


def test_newcomers_of_a_split_get_the_role_that_it_lacks() -> None:
    outcome = plan("dopd", "sla", instances=4, prefills=1)
    seen = {ROLE_ORDER[code] for row in outcome.result.samples.role for code in row if code != GONE}
    assert Role.MIXED not in seen
    assert {Role.PREFILL, Role.DECODE} <= seen


def test_start_up_times_are_told_and_newcomers_are_cold() -> None:
    seen: list[tuple[float | None, list[float]]] = []

    def out(view: FleetView) -> list[FleetAction]:
        return [ScaleTo(Role.MIXED, 2, FleetReason.DOPD_TOTAL, start=1)]

    def look(view: FleetView) -> list[FleetAction]:
        seen.append((view.startup_s, [one.ready_s for one in view.instances]))
        return []

    rows = trace((0.0, 100, 11), (9.0, 100, 11))
    one = simulation(
        rows, [InstanceSpec(HAND)], controllers=[Script((0.5, out), (1.0, look), (6.0, look))], startup_s=4.0
    )
    one.run()
    never = float("-inf")
    assert seen[0] == (4.0, [never, never]), "those at the start have started before"
    assert seen[1] == (pytest.approx(4.0), [never, pytest.approx(4.5)])


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    write_plain(SURGE, path)
    targets = ["--trace", str(path), "--slo-ttft-ms", "1000", "--slo-tpot-ms", "50", "--json"]
    flags = [
        "--profile",
        PROFILE,
        "--planner",
        "dopd",
        "--instances",
        "2",
        "--plan-interval-s",
        "5",
        "--startup-s",
        "10",
        "--forecaster",
        "last",
    ]
    tuned = ["--policy-knob", "dopd.down_intervals=1"]
    assert simulate.main([*targets, "--policy", "least-tokens", *flags, *tuned]) == 0
    run = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"][0]
    assert (run["policy"], run["planner"]) == ("least-tokens", "dopd")
    assert run["counts"]["scale_outs"] >= 1
    assert simulate.main(["find-instances", *targets, "--planner", "dopd"]) == 2
    assert "--planner is for run, find-capacity" in capsys.readouterr().err
    assert simulate.main([*targets, "--policy", "least-tokens", *tuned]) == 2
    assert "not known to the policy" in capsys.readouterr().err
