"""Results of ``simulate`` as tables on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from pla_sglang.common.console import TableConsole
from pla_sglang.profiles import load_profile
from pla_sglang.sim.core.experiment import Experiment, ExperimentResult
from pla_sglang.sim.metrics.goodput import Capacity
from pla_sglang.sim.report.columns import Column, columns_of, count_refused
from pla_sglang.sim.report.verdict import describe_capacities, describe_targets, list_short_spans
from pla_sglang.sim.workload.trace import Trace


def show_runs(outcomes: Sequence[ExperimentResult], trace: Trace, *, verbose: bool) -> None:
    """The table of runs, in the width that there is, and what it leaves out."""
    experiment = outcomes[0].experiment
    console = TableConsole(200)
    title = f"{trace.name}: {len(trace)} requests, {experiment.instances} x {experiment.profile}"
    shown = columns_of(outcomes, verbose=verbose)
    left_out: list[str] = []
    table = make_table(title, shown, outcomes)
    while not console.fits(table) and (rank := max(column.rank for column in shown)):
        left_out = [column.name for column in shown if column.rank >= rank] + left_out
        kept = [column.narrow if column.rank >= rank else column for column in shown]
        shown = [column for column in kept if column is not None]
        table = make_table(title, shown, outcomes)
    console.print(table)
    if left_out:
        print(f"not shown at {console.width} columns: {'; '.join(left_out)}")
    if most := max(map(count_refused, outcomes)):
        print(describe_refused(most, experiment, trace))


def make_table(title: str, columns: Sequence[Column], outcomes: Sequence[ExperimentResult]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column.name, justify="right")
    for outcome in outcomes:
        table.add_row(*(column.show(outcome) for column in columns))
    return table


def describe_refused(count: int, experiment: Experiment, trace: Trace) -> str:
    """Why requests were refused, by the largest of them."""
    tokens = trace.input_tokens + trace.output_tokens
    row = int(tokens.argmax())
    holds = experiment.kv_capacity_tokens or load_profile(experiment.profile).kv_capacity_tokens
    return (
        f"{count:,} of {len(trace):,} requests fit no instance, and miss their targets: request {row} has "
        f"{trace.input_tokens[row]:,} + {trace.output_tokens[row]:,} tokens, an instance holds {holds:,}"
    )


def show_capacities(capacities: Mapping[str, Capacity], trace: Trace, experiment: Experiment, target: float) -> None:
    fleet = f"{experiment.instances} x {experiment.profile}, {describe_targets(experiment.slo, target)}"
    table = Table(title=f"{trace.name}: highest rate with {target:.0%} of requests in target")
    for name in ("policy", "held, 1/s", "failed, 1/s", "runs"):
        table.add_column(name, justify="right")
    for policy, capacity in capacities.items():
        table.add_row(policy, _rate(capacity.held_per_s), _rate(capacity.failed_per_s), str(len(capacity.tried)))
    console = TableConsole(120)
    console.print(table)
    texts = [*describe_capacities(capacities, target), *list_short_spans(capacities)]
    console.print(f"{fleet}.", *texts, sep="\n", markup=False)


def _rate(rate_per_s: float | None) -> str:
    return "none" if rate_per_s is None else f"{rate_per_s:.3g}"
