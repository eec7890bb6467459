"""Fleet plans: forms by name, what no number of instances mends, measured errors, whole plans on small traces."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from support.traces import steady_trace

from bench.check.live_case import LiveCase
from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.registry import POLICIES, policy_names
from pla_sglang.profiles import load_profile
from pla_sglang.profiles.scaled import list_errors
from pla_sglang.sim.core.experiment import Experiment, run_experiment
from pla_sglang.sim.core.upper_bound import least_instances
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.planning import limits
from pla_sglang.sim.planning.forms import OURS, STOCK_FORMS, default_forms, parse_form, parse_forms
from pla_sglang.sim.planning.measured_errors import MEASURED, MeasuredError, bound_attainment_error, find_error
from pla_sglang.sim.planning.plan import check_task, make_plan, plan_form
from pla_sglang.sim.planning.result import FleetRow
from pla_sglang.sim.planning.search import Trial
from pla_sglang.sim.planning.table import cells_of, list_notes, show_plan
from pla_sglang.sim.planning.task import PlanTask
from pla_sglang.sim.planning.words import describe_verdict
from pla_sglang.sim.workload import Trace

SLO = Slo(0.5, 0.05)
BASE = Experiment("round-robin", SLO)
RESULTS = Path(__file__).parents[2] / "bench" / "results"


def task(rate_per_s: float = 20.0, *, target: float = 0.99, **changes: object) -> PlanTask:
    return dataclasses.replace(PlanTask(rate_per_s, SLO, target, 0.1, instances_most=16), **changes)  # type: ignore[arg-type]


# -- forms -------------------------------------------------------------------------------------------------------------


def test_a_form_says_what_it_changes() -> None:
    form = parse_form("least-tokens/mixed/4096/hrrn/h200-llama3.1-8b-tp1", BASE)
    experiment = form.experiment
    assert (experiment.policy, experiment.engine, experiment.chunk_tokens) == ("least-tokens", "hrrn", 4096)
    assert (experiment.mixed, experiment.profile, form.split, form.stock) == (True, "h200-llama3.1-8b-tp1", False, True)
    sized = parse_form("dopd", BASE).of_size(5, None, 12.0)
    assert (sized.instances, sized.instances_min, sized.instances_max, sized.rate_per_s) == (5, 5, 5, 12.0)


def test_default_forms_keep_stock_engines_whatever_ours_are() -> None:
    ours, riding, *stock = default_forms(dataclasses.replace(BASE, engine="hrrn", chunk_tokens=1024))
    assert ((ours.name, riding.name), ours.stock, riding.stock) == (OURS, False, False)
    assert (ours.experiment.engine, ours.experiment.mixed, ours.experiment.deadlines) == ("hrrn", False, "advise")
    engines = riding.experiment
    assert (engines.engine, engines.mixed, engines.deadlines) == ("temporal", True, "decide")
    assert {form.experiment.chunk_tokens for form in (ours, riding)} == {1024}
    assert [form.name for form in stock] == list(STOCK_FORMS)
    assert all(form.stock for form in stock)
    assert [form.experiment.mixed for form in stock] == ["mixed" in name for name in STOCK_FORMS]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["stra"], "--policy 'stra' is not known"),
        (["arrow/fast"], "--compare 'arrow/fast': 'fast' is not known; allowed: mixed, unmixed, split"),
        (["arrow/0"], "--chunk-tokens 0 is out of range"),
        (["combined/split"], "split is for round-robin, least-requests"),
        (["sla-scaler"], "'sla-scaler' adds and removes instances as it sees fit"),
        (["arrow", "dopd", "arrow"], "--compare has 'arrow' twice"),
    ],
)
def test_bad_forms_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_forms(names, BASE)


@pytest.mark.parametrize("policy", [name for name in policy_names() if POLICIES[name].fixed_split])
def test_a_fixed_split_stays_as_it_is(policy: str) -> None:
    form = parse_form(policy, BASE)
    assert form.split
    run = run_experiment(form.of_size(4, 3, 20.0), steady_trace(60)).result
    assert (run.samples.role == run.samples.role[0]).all()
    assert sorted(run.samples.role[0].tolist()).count(run.samples.role[0][0]) == 3


# -- what no size mends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trace", "slo", "message"),
    [
        (
            steady_trace(prompt=500_000),
            SLO,
            r"200 of 200 requests do not fit an instance of h100-llama3.1-8b-tp1, which has 431,316 KV tokens; "
            r"the first, row 0, has 500,040 tokens of prompt and answer: no number of instances mends that",
        ),
        (
            steady_trace(),
            Slo(0.01, 0.05),
            "200 of 200 requests would miss --slo-ttft-ms 10 on an idle instance of h100-llama3.1-8b-tp1; the first, "
            "row 0, has a prompt of 2,000 tokens, whose prefill takes .* ms",
        ),
        (steady_trace(), Slo(0.5, 1e-4), "would miss --slo-tpot-ms 0.1 on an idle instance"),
        (
            steady_trace(prompt=20_000),
            Slo(10, 1),
            "have prompts beyond those that h100-llama3.1-8b-tp1 was made",
        ),
    ],
    ids=["size", "ttft", "tpot", "profile"],
)
def test_a_task_that_no_fleet_can_do_is_refused(trace: Trace, slo: Slo, message: str) -> None:
    form = parse_form("round-robin", dataclasses.replace(BASE, slo=slo))
    with pytest.raises(ConfigError, match=message):
        check_task([form], trace, task())


def test_a_few_requests_in_the_way_are_a_note() -> None:
    trace = steady_trace()
    trace.input_tokens[17] = 500_000
    form = parse_form("round-robin", BASE)
    check_task([form], trace, task(target=0.99))
    [finding] = [found for found in limits.find_unservable(BASE, trace) if "fit" in found.text]
    assert finding.text.startswith("1 of 200 requests does not fit an instance")
    assert "the first, row 17" in finding.text
    with pytest.raises(ConfigError, match="1 in target lets only 0 of them miss"):
        check_task([form], trace, task(target=1.0))


def test_figures_beyond_the_profile_are_given_when_asked_for() -> None:
    base = dataclasses.replace(BASE, slo=Slo(10, 1))
    check_task([parse_form("round-robin", base)], steady_trace(prompt=20_000), task(beyond_profile=True))


def test_a_lone_prefill_takes_what_the_simulator_says() -> None:
    trace = Trace("two", np.array([0.0, 100.0]), np.array([3000, 20_000]), np.array([2, 2]))
    profile = limits.profile_of(BASE)
    expected = run_experiment(dataclasses.replace(BASE, instances=1), trace).result.served.ttft_s()
    assert limits.lone_prefill_s(trace, np.zeros(2, np.int64), profile, chunk_tokens=8192) == pytest.approx(expected)


def test_passes_outside_the_profile_are_named() -> None:
    trial = Trial(1, None, 1.0, 1.0, 1.0, 1, batch_most=700, batch_median=3.0, step_tokens_most=600_000)
    notes = limits.describe_uncovered(BASE, trial)
    assert len(notes) == 2
    assert notes[0].startswith("up to 700 requests in a decode step; h100-llama3.1-8b-tp1 was made from 512 at most")
    [chunk, *_, median] = limits.describe_uncovered(dataclasses.replace(BASE, profile="h100-llama70b-fp8-dopd"), trial)
    assert chunk.startswith("prefill passes of up to 8,192 tokens; h100-llama70b-fp8-dopd was made from 1,700 at most")
    assert median.startswith("3 requests in a decode step (median)")
    [unknown] = limits.describe_uncovered(dataclasses.replace(BASE, profile="linear"), trial)
    assert "does not say which passes it was made from" in unknown


# -- errors of the simulator -------------------------------------------------------------------------------------------


def test_the_errors_are_those_that_were_published() -> None:
    published = json.loads((RESULTS / "emulated" / "fidelity.json").read_text())["by_case"]
    assert {
        case: (round(row["errors"]["attainment"], 4), round(row["errors"]["ttft_p99"], 4), row["valid"])
        for case, row in published.items()
    } == {error.case: (error.attainment, error.ttft_p99, error.valid) for error in MEASURED}
    for error in MEASURED:
        assert error.tpot_p99 == round(published[error.case]["errors"]["tpot_p99"], 4)
        assert LiveCase.parse(error.case)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("least-tokens", "unified-2/fcfs/cache-aware/mooncake/0.5"),
        ("two-choices/temporal", "unified-2/temporal/least-tokens/azure_conv/0.95"),
        ("least-tokens/mixed", "unified-2/mixed/cache-aware/mooncake/0.8"),
        ("least-tokens/mixed/temporal", "unified instances, engine temporal, mixed: not measured"),
        ("static-pd", "1+1/fcfs/static-pd-round-robin/azure_conv/0.8"),
        ("combined", "stateless instances whose roles change: not measured"),
        ("star", "requests that move: not measured"),
        ("combined-scaling", "no live cluster runs this policy"),
    ],
)
def test_the_error_of_a_regime(name: str, known: str) -> None:
    error = find_error(parse_form(name, BASE))
    assert (error.case if isinstance(error, MeasuredError) else error) == known


# -- whole plans -------------------------------------------------------------------------------------------------------


def plan_row(name: str, trace: Trace, asked: PlanTask) -> FleetRow:
    return plan_form(parse_form(name, dataclasses.replace(BASE, slo=asked.slo)), trace, task=asked)


def test_the_answer_keeps_the_target_and_one_fewer_does_not() -> None:
    row = plan_row("least-tokens", steady_trace(), task(60.0))
    assert row.instances is not None
    assert row.instances > 1
    for count, keeps in ((row.instances, True), (row.instances - 1, False)):
        experiment = dataclasses.replace(BASE, policy="least-tokens", instances=count, rate_per_s=60.0)
        outcome = run_experiment(experiment, steady_trace())
        assert (outcome.figures.attainment >= 0.99) is keeps
        assert (row.attainment if keeps else row.one_fewer) == outcome.figures.attainment
    assert row.margin is not None
    assert row.gpu_hours == pytest.approx(row.instances * row.simulated_s / 3600)
    at_knee = dataclasses.replace(experiment, instances=row.instances, rate_per_s=60.0 * (1 + row.margin))
    assert run_experiment(at_knee, steady_trace()).figures.attainment >= 0.99
    assert not row.margin_is_lower_bound
    assert [tried.instances for tried in row.sizes] == sorted({tried.instances for tried in row.sizes})


def test_a_range_follows_from_the_errors_that_are_stated() -> None:
    """Its ends are answers of their own: at the step times of the fastest and the slowest device of the profile."""
    form, trace, wanted = parse_form("round-robin", BASE), steady_trace(), task(60.0)
    row = plan_form(form, trace, task=wanted)
    assert row.instances is not None
    assert row.instances_low is not None
    assert row.instances_high is not None
    assert row.instances_low <= row.instances <= row.instances_high
    profile, off = load_profile(BASE.profile), bound_attainment_error(form)
    assert (profile.fit_error.pass_s, off) == (0.007, 0.0033)
    slowest = dataclasses.replace(BASE, step_error=list_errors(profile)[1], rate_per_s=60.0)
    for count, keeps in ((row.instances_high, True), (row.instances_high - 1, False)):
        outcome = run_experiment(dataclasses.replace(slowest, instances=count), trace)
        assert (outcome.figures.attainment >= 0.99 + off) is (keeps or count > row.instances_high)
    assert dataclasses.replace(row, instances_low=3, instances_high=5).range_text() == "3 to 5"
    assert dataclasses.replace(row, instances_low=3, instances_high=3).range_text() == ""


def test_where_no_number_keeps_the_target_within_the_error_the_range_has_no_end() -> None:
    """A prefill that takes 7 ms more misses a target that the profile's own just keeps."""
    tight = dataclasses.replace(BASE, slo=Slo(0.014, 0.05))
    trace = Trace("even", np.arange(60) * 0.5, np.full(60, 300), np.full(60, 4))
    row = plan_form(parse_form("round-robin", tight), trace, task=dataclasses.replace(task(2.0), slo=tight.slo))
    assert (row.instances, row.instances_high, row.range_text()) == (1, None, "1 to more")


def test_the_verdict_says_where_the_difference_is_within_the_error() -> None:
    forms = [parse_form(name, BASE) for name in ("combined", "round-robin")]
    ours = dataclasses.replace(row_of("combined", 4, stock=False), instances_low=4, instances_high=5)
    near = dataclasses.replace(row_of("round-robin", 5, stock=True), instances_low=5, instances_high=7)
    far = dataclasses.replace(near, instances=6, instances_low=6)
    for stock, within in ((near, True), (far, False)):
        made = make_plan(forms, [ours, stock], trace=steady_trace(), task=task())
        assert "with 4 instances, 4 to 5 within the error" in describe_verdict(made)
        assert ("the difference is within the error" in describe_verdict(made)) is within


def test_what_a_fleet_costs_is_told_where_a_gpu_has_a_price(capsys: pytest.CaptureFixture[str]) -> None:
    forms = [parse_form("combined", BASE)]
    trace = steady_trace()
    made = make_plan(forms, [row_of("combined", 4, stock=False, gpus=2)], trace=trace, task=task(gpu_hour_price=2.5))
    cells = cells_of(made.rows[0], 20.0, made.output_tokens_per_s, 2.5)
    tokens_per_s = 20.0 * float(trace.output_tokens.mean())
    assert cells[3:7] == ["2.5", f"{tokens_per_s / 8:,.0f}", "20", f"{20 / (3600 * tokens_per_s) * 1e6:.3g}"]
    show_plan(made, Console(width=160))
    assert "at 2.5 a GPU hour" in capsys.readouterr().out


def test_no_scheduler_needs_fewer_than_the_bound() -> None:
    row = plan_row("round-robin", steady_trace(), task(60.0))
    bound = least_instances(steady_trace().at_rate(60.0), SLO, limits.profile_of(BASE), target=0.99, most=16)
    assert row.instances is not None
    assert 1 <= bound <= row.instances
    assert least_instances(steady_trace().at_rate(6000.0), SLO, limits.profile_of(BASE), target=0.99, most=3) == 3


def test_gpu_hours_count_every_gpu_of_an_instance() -> None:
    row = plan_row("round-robin/h200-llama3.1-70b-tp4", steady_trace(60), task(2.0))
    assert row.gpus_per_instance == 4
    assert row.gpu_hours == pytest.approx(4 * (row.instances or 0) * (row.simulated_s or 0) / 3600)


def test_too_few_instances_are_a_problem_in_words() -> None:
    row = plan_row("round-robin", steady_trace(), task(400.0, instances_most=2))
    assert row.instances is None
    assert "2 instances keep" in row.problem
    assert "--most 2 allows no more" in row.problem


def test_a_short_span_is_noted_and_a_long_one_is_not() -> None:
    forms = [parse_form("round-robin", BASE)]
    for count, short in ((200, True), (6002, False)):
        made = make_plan(forms, [None], trace=steady_trace(count), task=task())
        assert made.short_span is short
        assert any(note.startswith("short span: ") for note in made.notes) is short
        assert made.missing == ("round-robin",)


def row_of(name: str, instances: int, *, stock: bool, gpus: int = 1, notes: tuple[str, ...] = ()) -> FleetRow:
    return FleetRow(name, name, "fcfs", "p", 8192, False, stock, gpus, instances, margin=0.1, notes=notes)


def test_the_verdict_names_the_best_of_both_sides() -> None:
    forms = [parse_form(name, BASE) for name in ("combined", "round-robin", "least-tokens")]
    rows = [row_of("combined", 9, stock=False), row_of("round-robin", 12, stock=True)]
    rows.append(row_of("least-tokens", 8, stock=True, notes=("a note",)))
    made = make_plan(forms, rows, trace=steady_trace(), task=task())
    assert (
        describe_verdict(made) == "least-tokens keeps 0.99 at 20 requests/s with 8 instances; combined with 9 instances"
    )
    assert "least-tokens: a note" in list(list_notes(made))
    two_gpus = [rows[0], row_of("least-tokens", 8, stock=True, gpus=2)]
    made = make_plan(forms[:2], two_gpus, trace=steady_trace(), task=task())
    assert describe_verdict(made).startswith("combined keeps 0.99 at 20 requests/s with 9 instances; the best stock")
    assert json.dumps(made.as_json(), allow_nan=False)
    made = make_plan(forms[:2], [rows[0], None], trace=steady_trace(), task=task())
    assert describe_verdict(made) == "combined keeps 0.99 at 20 requests/s with 9 instances"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("simulated/find_instances_*.json")), ids=lambda path: path.stem)
def test_the_examples_of_the_page_are_the_runs_that_were_kept(path: Path) -> None:
    """The first trace with a table of some columns, the other in a sentence."""
    kept = json.loads(path.read_text())
    page = (RESULTS.parents[1] / "docs" / "benchmarks" / "planning.md").read_text()
    assert path.name in page
    for fields in kept["plan"]["rows"]:
        error = fields.pop("measured_error")
        row = FleetRow(**fields, measured_error=MeasuredError(**error) if error else None)
        cells = cells_of(row, kept["plan"]["rate_per_s"], 1.0)
        if path.stem == "find_instances_azure_code":
            between = row.range_text() or row.instances_low
            assert f"| `{row.name}` | {cells[0]} | {between} | {' | '.join(cells[5:8])} |" in page
        else:
            assert row.instances == (5 if row.prefills else 4), row.name
        assert (row.attainment or 0) >= 0.99 > (row.one_fewer or 0)
