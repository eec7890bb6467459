"""A plan in words: why there is no answer, what to know beside one, and the sentence on top of all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pla_sglang.profiles import StepProfile
from pla_sglang.sim.core.experiment import Experiment
from pla_sglang.sim.planning import limits
from pla_sglang.sim.planning.forms import FleetForm
from pla_sglang.sim.planning.measured_errors import MeasuredError
from pla_sglang.sim.planning.result import FleetRow, PlanResult, find_smallest
from pla_sglang.sim.planning.search import Least, SizeSearch
from pla_sglang.sim.planning.task import PlanTask
from pla_sglang.sim.workload.trace import Trace


def describe_problem(experiment: Experiment, trace: Trace, task: PlanTask) -> str:
    """Why there can be no answer, or none that the profile bears out; empty: there may be one."""
    spare = limits.count_spare(len(trace), task.target)
    left = f"{task.target:g} in target lets only {spare:,} of them miss theirs"
    unservable = limits.find_unservable(experiment, trace)
    missed = np.any([finding.rows for finding in unservable], axis=0) if unservable else np.zeros(len(trace), bool)
    if missed.sum() > spare:
        worst = max(unservable, key=lambda finding: finding.count)
        return f"{worst.text}: no number of instances mends that; {left}"
    for finding in limits.find_uncovered(experiment, trace):
        if finding.count > spare and not task.beyond_profile:
            return f"{finding.text}: no promise, as {left}; --beyond-profile warn gives the figures all the same"
    return ""


def describe_error(profile: StepProfile) -> str:
    """What an answer's range follows from."""
    stated = profile.fit_error
    besides = f", and up to {1e3 * stated.pass_s:g} ms more a pass" if stated.pass_s else ""
    return (
        f"step times of {profile.name} off by {stated.prefill_mean:.1%} in prefill and {stated.decode_mean:.1%} in "
        f"decode, the mean errors of its fit{besides}; attainment off by what was measured of the simulator"
    )


def describe_too_few(search: SizeSearch, task: PlanTask) -> str:
    best = max(search.trials.values(), key=lambda trial: (trial.instances, trial.attainment))
    return (
        f"{best.instances} instances keep {best.attainment:.4f}, the target is {task.target:g}; "
        f"--most {task.instances_most} allows no more"
    )


def describe_row(form: FleetForm, least: Least, *, error: MeasuredError | str, trace: Trace) -> Iterator[str]:
    """What the reader of an answer has to know beside the figures."""
    trial = least.trial
    assert trial is not None
    experiment = form.experiment
    for finding in (*limits.find_unservable(experiment, trace), *limits.find_uncovered(experiment, trace)):
        yield finding.text
    yield from limits.describe_uncovered(experiment, trial)
    if not least.monotone:
        yield f"not monotone: with {trial.instances + 1} instances the target is missed; plan with a reserve"
    if least.splits_left:
        yield f"{least.splits_left} splits of {trial.instances - 1} instances were not tried"
    if isinstance(error, str):
        yield f"the simulator's error here is not known ({error})"
    elif error.attainment > 0:
        yield (
            f"the simulator was {error.attainment:.3f} too good where it was compared with live engines ({error.case})"
        )


def describe_verdict(plan: PlanResult) -> str:
    """One sentence: the smallest fleet, and how the best stock one compares."""
    best = plan.best
    if best is None:
        return "no fleet that was tried keeps the target"
    stock, ours = (find_smallest(row for row in plan.rows if row.stock == is_stock) for is_stock in (True, False))
    sentence = f"{best.name} keeps {plan.target:g} at {plan.rate_per_s:.3g} requests/s with {_count(best)}"
    if stock is not None and not best.stock:
        return f"{sentence}; the best stock fleet, {stock.name}, with {_count(stock)}{_overlap(best, stock)}"
    if ours is not None and best.stock:
        return f"{sentence}; {ours.name} with {_count(ours)}{_overlap(best, ours)}"
    return sentence


def is_within_error(plan: PlanResult) -> bool:
    """The smallest fleet and the best one of the other side have GPUs in common within their ranges."""
    best = plan.best
    others = find_smallest(row for row in plan.rows if best is not None and row.stock != best.stock)
    return best is not None and others is not None and bool(_overlap(best, others))


def _overlap(best: FleetRow, other: FleetRow) -> str:
    if best.gpus_low is None or other.gpus_low is None:
        return ""
    known = best.gpus_high is not None and other.gpus_low > best.gpus_high
    return "" if known else ". Their ranges overlap: the difference is within the error"


def _count(row: FleetRow) -> str:
    assert row.instances is not None
    split = "" if row.prefills is None else f" ({row.prefills}+{row.instances - row.prefills})"
    text = row.range_text()
    between = f", {text} within the error" if text else ""
    return f"{row.instances} instance{'s' * (row.instances > 1)}{split}{between}"
