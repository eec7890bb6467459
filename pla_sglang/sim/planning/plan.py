"""A plan: for each form of a fleet the least number of instances that keeps the targets, and what that is worth."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from pla_sglang.common.errors import ConfigError
from pla_sglang.profiles import StepProfile, load_profile
from pla_sglang.profiles.scaled import StepError, list_errors
from pla_sglang.sim.core.engine_knobs import AnswerCaching
from pla_sglang.sim.core.errors import SimError
from pla_sglang.sim.core.experiment import Experiment, ExperimentResult, run_experiment
from pla_sglang.sim.core.sweep import measure_on_trace
from pla_sglang.sim.core.upper_bound import least_instances
from pla_sglang.sim.metrics.goodput import LEAST_SPAN_S, Capacity, find_capacity
from pla_sglang.sim.planning import limits
from pla_sglang.sim.planning.forms import FleetForm
from pla_sglang.sim.planning.measured_errors import MeasuredError, bound_attainment_error, find_error
from pla_sglang.sim.planning.result import FleetRow, PlanResult, RateTried, SizeTried
from pla_sglang.sim.planning.search import Least, SizeSearch, Trial
from pla_sglang.sim.planning.start_lines import list_start_lines
from pla_sglang.sim.planning.task import PlanTask
from pla_sglang.sim.planning.tensor_parallel import describe_sizes
from pla_sglang.sim.planning.words import describe_error, describe_problem, describe_row, describe_too_few
from pla_sglang.sim.workload.trace import Trace

HIGH_TIMES = 4  # as many instances: what so large a fleet does not keep, it misses for another reason than its size
BELOW = 16  # numbers of instances under an answer that are run too; as many as splits of a number (``search.py``)
MARGIN_MOST = 8.0  # times the rate: where the search for the knee ends
Tell = Callable[[str], None]  # what is under way


def plan_forms(
    forms: Sequence[FleetForm], trace: Trace, task: PlanTask, *, jobs: int = 1, tell: Tell | None = None
) -> Iterator[tuple[int, FleetRow]]:
    """Place and answer of each form, as they end. ``tell`` is for one job only; others cannot reach it."""
    plan = functools.partial(plan_form, task=task, tell=tell if jobs == 1 else None)
    return measure_on_trace(plan, forms, trace, jobs=jobs)


def make_plan(
    forms: Sequence[FleetForm], rows: Sequence[FleetRow | None], *, trace: Trace, task: PlanTask
) -> PlanResult:
    """Out of the answers to these forms; None for one that was not finished."""
    span_s = trace.at_rate(task.rate_per_s).span_s
    notes = []
    if span_s < LEAST_SPAN_S:
        notes.append(
            f"short span: {span_s:.0f} s of arrivals at this rate, of {LEAST_SPAN_S:.0f} s for a steady load; "
            "one burst more or less may change the answer"
        )
    for name in dict.fromkeys(form.experiment.profile for form in forms):
        profile = load_profile(name)
        notes.append(f"step times of {profile.name}: {profile.source}")
        notes.append(f"ranges: {describe_error(profile)}")
    notes += describe_sizes([form.experiment.profile for form in forms], trace, task.slo)
    plan = PlanResult(
        trace=trace.name,
        requests=len(trace),
        rate_per_s=task.rate_per_s,
        span_s=span_s,
        ttft_slo_s=task.slo.ttft_s,
        tpot_slo_s=task.slo.tpot_s,
        target=task.target,
        tolerance=task.tolerance,
        rows=rank_rows(row for row in rows if row is not None),
        notes=tuple(notes),
        missing=tuple(form.name for form, row in zip(forms, rows, strict=True) if row is None),
        output_tokens_per_s=task.rate_per_s * float(trace.output_tokens.mean()),
        gpu_hour_price=task.gpu_hour_price,
    )
    best = plan.best
    chosen = [form for form in forms if best is not None and form.name == best.name]
    start = [line for form in chosen if best is not None for line in list_start_lines(form, best)]
    return dataclasses.replace(plan, start=tuple(start))


def check_task(forms: Sequence[FleetForm], trace: Trace, task: PlanTask) -> None:
    """Raises ConfigError where no form can have an answer: which requests are in the way, and why."""
    problems = [describe_problem(form.experiment, trace, task) for form in forms]
    if problems and all(problems):
        raise ConfigError(problems[0])


def plan_form(form: FleetForm, trace: Trace, *, task: PlanTask, tell: Tell | None = None) -> FleetRow:
    """The answer for one form. Raises ConfigError for what does not fit together."""
    experiment, profile = form.experiment, limits.profile_of(form.experiment)
    row = FleetRow(
        name=form.name,
        policy=experiment.policy,
        engine=experiment.engine,
        profile=profile.name,
        chunk_tokens=experiment.chunk_tokens,
        mixed=experiment.mixed,
        stock=form.stock,
        gpus_per_instance=profile.gpus,
    )
    problem = describe_problem(experiment, trace, task)
    if problem:
        return dataclasses.replace(row, problem=problem)

    def run(instances: int, prefills: int | None) -> Trial:
        if tell is not None:
            split = "" if prefills is None else f" ({prefills}+{instances - prefills})"
            tell(f"{form.name}: {instances}{split} instances")
        result = run_experiment(form.of_size(instances, prefills, task.rate_per_s), trace)
        return summarise_run(result, instances, prefills)

    search = SizeSearch(run, target=task.target, split=form.split)
    try:
        start = least_possible(experiment, profile, trace=trace, task=task)
        least = search.find_least(start, task.instances_most, below=BELOW)
        if least.trial is None:
            return dataclasses.replace(row, problem=describe_too_few(search, task), sizes=list_sizes(search))
        knee = find_knee(form, least.trial, trace=trace, task=task, tell=tell)
    except SimError as error:
        return dataclasses.replace(row, problem=str(error), stuck=True, sizes=list_sizes(search))
    row = fill_row(row, form, least, knee=knee, search=search, trace=trace)
    return find_range(row, form, trace=trace, task=task, tell=tell)


def find_range(row: FleetRow, form: FleetForm, *, trace: Trace, task: PlanTask, tell: Tell | None) -> FleetRow:
    """``row`` with the fewest instances at both ends of what profile and simulator state of their errors."""
    assert row.instances is not None
    off = bound_attainment_error(form)
    fastest, slowest = list_errors(load_profile(form.experiment.profile))
    low = _find_least(form, row.instances, fastest, trace, dataclasses.replace(task, target=task.target - off), tell)
    strict = dataclasses.replace(task, target=min(1.0, task.target + off), instances_most=HIGH_TIMES * row.instances)
    high = _find_least(form, row.instances, slowest, trace, strict, tell)
    return dataclasses.replace(
        row,
        instances_low=row.instances if low is None else min(low, row.instances),
        instances_high=None if high is None else max(high, row.instances),
    )


def _find_least(
    form: FleetForm, start: int, error: StepError, trace: Trace, task: PlanTask, tell: Tell | None
) -> int | None:
    """None where none does, or a policy leaves requests behind."""
    experiment = dataclasses.replace(form.experiment, step_error=error)
    off = dataclasses.replace(form, experiment=experiment)
    if describe_problem(experiment, trace, dataclasses.replace(task, beyond_profile=True)):
        return None

    def run(instances: int, prefills: int | None) -> Trial:
        if tell is not None:
            tell(f"{form.name}: {instances} instances, within the profile's error")
        result = run_experiment(off.of_size(instances, prefills, task.rate_per_s), trace)
        return summarise_run(result, instances, prefills)

    try:
        least = SizeSearch(run, target=task.target, split=form.split).find_least(start, task.instances_most)
    except SimError:
        return None
    return None if least.trial is None else least.trial.instances


def rank_rows(rows: Iterable[FleetRow]) -> tuple[FleetRow, ...]:
    """The smallest fleet first, then by margin; those without an answer last, as they came."""
    return tuple(sorted(rows, key=lambda row: (row.gpus is None, row.gpus or 0, -(row.margin or 0.0))))


def fill_row(
    row: FleetRow, form: FleetForm, least: Least, *, knee: Capacity, search: SizeSearch, trace: Trace
) -> FleetRow:
    """With the answer."""
    trial = least.trial
    assert trial is not None
    assert knee.held_per_s is not None, "the rate asked for is kept"
    error = find_error(form)
    rate_per_s = min(rate for rate, _ in knee.tried)
    return dataclasses.replace(
        row,
        instances=trial.instances,
        prefills=trial.prefills,
        attainment=trial.attainment,
        one_fewer=None if least.one_fewer is None else least.one_fewer.attainment,
        gpu_hours=trial.gpu_hours,
        simulated_s=trial.simulated_s,
        margin=knee.held_per_s / rate_per_s - 1,
        margin_is_lower_bound=knee.failed_per_s is None,
        monotone=least.monotone,
        measured_error=error if isinstance(error, MeasuredError) else None,
        notes=tuple(describe_row(form, least, error=error, trace=trace)),
        sizes=list_sizes(search),
        rates=tuple(RateTried(rate, attainment) for rate, attainment in sorted(knee.tried)),
    )


def summarise_run(result: ExperimentResult, instances: int, prefills: int | None) -> Trial:
    run, figures = result.result, result.figures
    batches = run.samples.running[run.samples.running > 0]
    return Trial(
        instances=instances,
        prefills=prefills,
        attainment=figures.attainment,
        ttft_attainment=figures.ttft_attainment,
        tpot_attainment=figures.tpot_attainment,
        started=run.samples.role.shape[1],
        simulated_s=run.end_s,
        gpu_hours=run.gpu_hours,
        batch_most=int(batches.max(initial=0)),
        batch_median=float(np.median(batches)) if len(batches) else 0.0,
        step_tokens_most=int(run.samples.context_tokens.max(initial=0)),
    )


def least_possible(experiment: Experiment, profile: StepProfile, *, trace: Trace, task: PlanTask) -> int:
    """No scheduler keeps the target with fewer (``upper_bound.py``); 1 where that proof does not hold."""
    if experiment.answers is not AnswerCaching.DROPPED:
        return 1
    arrivals = trace.at_rate(task.rate_per_s)
    return least_instances(arrivals, task.slo, profile, target=task.target, most=task.instances_most)


def find_knee(form: FleetForm, trial: Trial, *, trace: Trace, task: PlanTask, tell: Tell | None) -> Capacity:
    """The highest rate that this fleet keeps, from the rate asked for, which it does keep."""

    def attainment_at(rate_per_s: float) -> float:
        if rate_per_s == task.rate_per_s:
            return trial.attainment
        if tell is not None:
            tell(f"{form.name}: {trial.instances} instances at {rate_per_s:.3g}/s")
        experiment = form.of_size(trial.instances, trial.prefills, rate_per_s)
        return run_experiment(experiment, trace).figures.attainment

    return find_capacity(
        attainment_at,
        low_per_s=task.rate_per_s,
        high_per_s=MARGIN_MOST * task.rate_per_s,
        target=task.target,
        tolerance=task.tolerance,
        start_per_s=task.rate_per_s,
    )


def list_sizes(search: SizeSearch) -> tuple[SizeTried, ...]:
    trials = sorted(search.trials.values(), key=lambda trial: (trial.instances, trial.prefills or 0))
    return tuple(SizeTried(trial.instances, trial.prefills, trial.attainment) for trial in trials)
