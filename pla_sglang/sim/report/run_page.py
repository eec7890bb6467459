"""The page of ``simulate``: runs of one or several policies at one or several rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pla_sglang.common.legend.explanations import ENGINE_PREFIX, explain_reason
from pla_sglang.policy.common.fleet_policy import NO_PLANNER
from pla_sglang.sim.core.experiment import Experiment, ExperimentResult
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.report.columns import columns_of, show_number
from pla_sglang.sim.report.figures import (
    Line,
    colour_names,
    draw_distributions,
    draw_lines,
    draw_reasons,
    rank_reasons,
)
from pla_sglang.sim.report.page import Heading, Page, PageTable, Section
from pla_sglang.sim.report.planner_timeline import CAPTION, draw_planner
from pla_sglang.sim.report.slow_requests import MOST, draw_stages, find_slow_requests, make_slow_table
from pla_sglang.sim.report.timelines import MOST_INSTANCES, bin_samples, draw_instances, draw_pools
from pla_sglang.sim.report.verdict import (
    describe_runs,
    describe_targets,
    find_best,
    find_knees,
    group_by_policy,
    show_share,
)
from pla_sglang.sim.workload.trace import Trace

SPAN_S = 60.0  # below this, a trace is described in seconds


def make_run_page(
    outcomes: Sequence[ExperimentResult], trace: Trace, setting: Mapping[str, Any], *, target: float
) -> Page:
    """``outcomes``: one run or more, of one trace, fleet and targets. ``target``: share of requests to keep."""
    experiment = outcomes[0].experiment
    groups = group_by_policy(outcomes)
    facts = {
        **describe_setting(trace, experiment, target),
        "policies": ", ".join(groups),
        "rates": f"{', '.join(dict.fromkeys(show_number(run.rate_per_s) for run in outcomes))} requests/s",
    }
    colours = colour_names(groups)
    sections = [
        *_rate_sections(outcomes, colours, target),
        _table_section(outcomes),
        *_latency_sections([runs[-1] for runs in groups.values()], colours, experiment.slo),
    ]
    best = find_best(outcomes, target)
    for policy, runs in sorted(groups.items(), key=lambda item: item[0] != best):
        sections += _policy_sections(runs[-1], trace, folded=policy != best)
    return Page(f"Simulation of {trace.name}", facts, describe_runs(outcomes, target), sections, setting)


def describe_setting(trace: Trace, experiment: Experiment, target: float) -> dict[str, str]:
    """Trace, fleet, profile and targets, for the box at the top."""
    split = "" if experiment.prefills is None else f", {experiment.prefills} of them for prefill"
    mixed = ", decodes join prefill passes" if experiment.mixed else ""
    return {
        "trace": f"{trace.name}: {len(trace):,} requests, {describe_span(trace.span_s)} as recorded",
        "prompt, answer": describe_lengths(trace),
        "fleet": f"{experiment.instances} instances{split}",
        "engines": f"{experiment.engine}, chunks of {experiment.chunk_tokens:,} tokens{mixed}",
        "profile": experiment.profile,
        "targets": describe_targets(experiment.slo, target),
    }


def describe_lengths(trace: Trace) -> str:
    return f"{trace.input_tokens.mean():,.0f} and {trace.output_tokens.mean():,.0f} tokens on average"


def describe_span(span_s: float) -> str:
    return f"{span_s:.3g} s" if span_s < SPAN_S else f"{span_s / 60:.3g} min"


def _rate_sections(
    outcomes: Sequence[ExperimentResult], colours: Mapping[str, str], target: float
) -> Iterator[Section]:
    """Nothing with one rate: a point is no curve."""
    if len({run.rate_per_s for run in outcomes}) < 2:
        return
    knees = {knee.policy: knee.held_per_s for knee in find_knees(outcomes, target)}
    for figure, heading, label, level in (
        ("attainment", "Attainment by rate", "share of requests in target", target),
        ("goodput_per_s", "Goodput by rate", "requests/s in target", None),
    ):
        lines = [
            Line(
                policy,
                [run.rate_per_s for run in runs],
                [getattr(run.figures, figure) for run in runs],
                knees[policy],
            )
            for policy, runs in group_by_policy(outcomes).items()
        ]
        wanted = f" The dotted line: the wanted {show_share(target)}." if level is not None else ""
        caption = f"A mark is one run.{wanted} A star: the knee, the highest rate up to which every run keeps it."
        yield Section(heading, caption, draw_lines(lines, colours, "requests/s", label, target=level))


def _table_section(outcomes: Sequence[ExperimentResult]) -> Section:
    columns = columns_of(outcomes)
    headings = [Heading(column.name, column.legend) for column in columns]
    rows = [[column.show(run) for column in columns] for run in outcomes]
    return Section("All runs", "A click on a column's name sorts by it.", table=PageTable(headings, rows))


def _latency_sections(runs: Sequence[ExperimentResult], colours: Mapping[str, str], slo: Slo) -> Iterator[Section]:
    rates = ", ".join(f"{run.experiment.policy} at {show_number(run.rate_per_s)}" for run in runs)
    for what, name, target_s in (
        ("TTFT", "time to the first token", slo.ttft_s),
        ("TPOT", "time per token", slo.tpot_s),
    ):
        seconds = {run.experiment.policy: getattr(run.result.served, f"{what.lower()}_s")() for run in runs}
        caption = (
            f"Share of the requests with a {what} that was at most so long. Each policy's highest rate "
            f"({rates} requests/s). The dotted line: the target."
        )
        yield Section(f"Distribution of the {name}", caption, draw_distributions(seconds, colours, what, target_s))


def _policy_sections(run: ExperimentResult, trace: Trace, *, folded: bool) -> Iterator[Section]:
    """What one policy did at its highest rate."""
    policy = run.experiment.policy
    where = f"{policy} at {show_number(run.rate_per_s)} requests/s, its highest rate."
    yield from _timeline_sections(run, where, folded=folded)
    yield from _planner_sections(run, where, folded=folded)
    engine = {ENGINE_PREFIX + name: count for name, count in run.result.pass_reasons.items()}
    if reasons := {**run.result.reasons, **engine}:
        caption = (
            f"{where} Reasons of the fleet's policy and, with '{ENGINE_PREFIX}' in front, of the engines'. "
            "What one means stands beside the mouse, and in the table."
        )
        table = make_reason_table(reasons)
        yield Section(f"Decisions by reason: {policy}", caption, draw_reasons(reasons), table, folded)
    slow = find_slow_requests(run, trace)
    if not slow:
        yield Section(f"Slowest requests: {policy}", f"{where} Every request met both targets.", folded=folded)
        return
    caption = (
        f"{where} Of the requests that missed a target, those that missed it most (at most {MOST}), and where their "
        "time went."
    )
    yield Section(f"Slowest requests: {policy}", caption, draw_stages(slow), make_slow_table(slow), folded)


def _timeline_sections(run: ExperimentResult, where: str, *, folded: bool) -> Iterator[Section]:
    """Nothing for a run that has ended before the first sample."""
    policy, binned = run.experiment.policy, bin_samples(run.result.samples)
    if not len(binned.at_s):
        return
    caption = f"{where} How many instances each pool has, and the load per instance of each pool. {binned.note}"
    yield Section(f"Pools over time: {policy}", caption, draw_pools(binned), folded=folded)
    if binned.role.shape[1] <= MOST_INSTANCES:
        caption = f"{where} A row is an instance: its role, what waits there, what decodes there. {binned.note}"
        yield Section(f"Instances over time: {policy}", caption, draw_instances(binned), folded=folded)


def _planner_sections(run: ExperimentResult, where: str, *, folded: bool) -> Iterator[Section]:
    """Where there is a planner, or a policy has scaled the fleet by itself."""
    experiment, result = run.experiment, run.result
    scaled = result.counts["scale_outs"] + result.counts["scale_ins"] > 0
    if result.plans.plans and (scaled or experiment.planner != NO_PLANNER):
        caption = f"{where} {CAPTION}"
        yield Section(f"Planner: {experiment.policy}", caption, draw_planner(result.plans), folded=folded)


def make_reason_table(counts: Mapping[str, int]) -> PageTable:
    total = sum(counts.values())
    headings = [Heading("reason"), Heading("decisions"), Heading("share"), Heading("what it means", is_text=True)]
    rows = [[name, f"{count:,}", f"{count / total:.2%}", explain_reason(name)] for name, count in rank_reasons(counts)]
    return PageTable(headings, rows)
