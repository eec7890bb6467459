"""``python -m bench fleets policies``: every policy on every named workload, in the simulator.

Two figures a cell, both for stock engines (first come, first served) with the step times of an H100 and Llama-3.1-8B:

* ``capacity``: highest rate at which 90 % of the requests meet both targets, 8 instances, by bisection;
* ``gpu_hours``: least GPU-hours of a fleet with which 99 % do at a fixed rate: as many instances as it takes for
  policies of fixed size, as few at the start as it takes for those that scale.

``static-pd-best`` is the best of all fixed splits, found by trying each: the reference that nobody has in advance.
Scaling policies plan every 6 s and wait 1.8 s for a new instance: a tenth of the usual, as the recorded hours run ten
times as fast.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.bench import Result
from bench.harness.figures import COLOURS, STOCK_COLOUR, panels
from bench.harness.report import emit, environment, show
from bench.harness.steps import Row
from bench.lab import cells
from bench.lab.cells import CellRunner, data_folder
from bench.lab.fleets.capacity import find_best_capacity
from bench.lab.fleets.tables import Table, mark_best
from bench.lab.named_workloads import FLEET_WORKLOADS, WORKLOADS, Workload, available, workload
from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.core.errors import SimError
from pla_sglang.sim.core.experiment import Experiment, ExperimentResult, run_experiment
from pla_sglang.sim.metrics.goodput import LEAST_SPAN_S
from pla_sglang.sim.workload import Trace

BEST_SPLIT = "static-pd-best"
ROLE_SCALERS = ("threshold-scaler", "sla-scaler")  # on a fleet of fixed size they are static-pd
PLACERS = ("round-robin", "least-requests", "least-tokens", "two-choices", "cache-aware", "static-pd", BEST_SPLIT)
SYSTEMS = ("pla", "arrow", "star", "dopd")
COMBINED = "combined"
POLICIES = (*PLACERS, "load-migration", *ROLE_SCALERS, *SYSTEMS, COMBINED, "combined-roles", "combined-scaling")
# The best of 23 splits at every step of a search is an hour's work for what `static-pd` tells nearly as well.
NOT_MEASURED = {"capacity": ROLE_SCALERS, "gpu_hours": (BEST_SPLIT,)}
INSTANCES, INSTANCES_MOST = 8, 24
PLAN_INTERVAL_S, STARTUP_S = 6.0, 1.8
CAPACITY_TARGET, HOURS_TARGET = 0.9, 0.99
REQUESTS, TOLERANCE, FULL_TOLERANCE = 2_000, 0.05, 0.02  # requests: by default; --full: whole traces


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        requests: of each workload at most; None: all.
        full: rates are those of as many requests as arrive in ``LEAST_SPAN_S`` and more, whatever ``requests`` says.
        tolerance: relative width at which a search ends.
    """

    requests: int | None = REQUESTS
    tolerance: float = TOLERANCE
    seed: int = 1
    full: bool = False

    @classmethod
    def of(cls, options: argparse.Namespace) -> Sizes:
        if options.full:
            return cls(options.requests, FULL_TOLERANCE, options.seed, full=True)
        return cls(REQUESTS if options.requests is None else options.requests, TOLERANCE, options.seed)

    def __post_init__(self) -> None:
        if self.requests is not None and self.requests < 1:
            raise ConfigError(f"requests is {self.requests}; allowed: 1 and more")


@dataclasses.dataclass(frozen=True)
class Cell:
    """What one process measures; it reads the workload itself."""

    workload: str
    policy: str
    figure: str  # capacity, gpu_hours
    folder: Path | None
    sizes: Sizes

    @property
    def key(self) -> str:
        sizes = self.sizes
        requests = f"{sizes.requests}{'/full' if sizes.full else ''}"
        return f"{self.figure}/{self.workload}/{self.policy}/{requests}/{sizes.tolerance:g}/{sizes.seed}"

    def experiments(self, load: Workload, instances: int, **limits: Any) -> list[Experiment]:
        """One; of ``BEST_SPLIT`` one for every number of prefill instances."""
        best_split = self.policy == BEST_SPLIT
        return [
            Experiment(
                "static-pd" if best_split else self.policy,
                load.slo,
                instances=instances,
                prefills=prefills,
                seed=self.sizes.seed,
                plan_interval_s=PLAN_INTERVAL_S,
                startup_s=STARTUP_S,
                **limits,
            )
            for prefills in (range(1, instances) if best_split and instances > 1 else [None])
        ]


def measure_cell(cell: Cell) -> Row:
    """One figure of one policy on one workload. A policy that leaves requests for ever has no figure, and says why."""
    load = workload(cell.workload, cell.folder, cell.sizes.requests, cell.sizes.seed)
    try:
        return find_highest_rate(cell, load) if cell.figure == "capacity" else find_least_hours(cell, load)
    except SimError as error:
        return {"error": str(error)}


def find_highest_rate(cell: Cell, load: Workload) -> Row:
    """Over ``LEAST_SPAN_S`` of arrivals and more, or over the requests that ``Sizes`` allows; ``span_s`` says which."""
    span_s = LEAST_SPAN_S * load.span_times

    def trace_at(rate_per_s: float) -> Trace:
        return load.trace_at(rate_per_s, span_s) if cell.sizes.full else load.trace.at_rate(rate_per_s)

    best = find_best_capacity(
        cell.experiments(load, INSTANCES, instances_min=INSTANCES, instances_max=INSTANCES),
        trace_at,
        low_per_s=load.low_per_s,
        high_per_s=load.high_per_s,
        target=CAPACITY_TARGET,
        tolerance=cell.sizes.tolerance,
    )
    if best is None:
        return {"capacity_per_s": None, "prefills": None, "span_s": None}
    chosen, rate_per_s = best
    span_s = round(len(trace_at(rate_per_s)) / rate_per_s, 1)
    return {"capacity_per_s": rate_per_s, "prefills": chosen.prefills, "span_s": span_s}


def find_least_hours(cell: Cell, load: Workload) -> Row:
    """Bisection over the number of instances at the start; attainment is taken to rise with it."""

    @functools.cache
    def best_of(instances: int) -> ExperimentResult:
        limits = {"rate_per_s": load.steady_per_s, "instances_max": 2 * INSTANCES_MOST}
        runs = [run_experiment(experiment, load.trace) for experiment in cell.experiments(load, instances, **limits)]
        return max(runs, key=lambda run: run.figures.attainment)

    def suffices(instances: int) -> bool:
        return best_of(instances).figures.attainment >= HOURS_TARGET

    if not suffices(INSTANCES_MOST):
        attainment = best_of(INSTANCES_MOST).figures.attainment
        return {"gpu_hours": None, "instances": INSTANCES_MOST, "attainment": attainment}
    least = bisect.bisect_left(range(INSTANCES_MOST), True, lo=1, key=suffices)
    outcome = best_of(least)
    return {"gpu_hours": outcome.result.gpu_hours, "instances": least, "attainment": outcome.figures.attainment}


def measure_policies(
    runner: CellRunner,
    folder: Path | None,
    *,
    sizes: Sizes,
    workloads: Sequence[str],
    policies: Sequence[str],
    figures: Sequence[str],
) -> list[Row]:
    """A row a workload and policy: capacity_per_s, prefills, gpu_hours, instances, attainment.

    ``folder``: with recorded traces, None: generated workloads only. Raises ConfigError for a name that is not known or
    whose trace is not there.
    """
    for name in policies:
        if name not in POLICIES:
            raise ConfigError(f"policy {name!r} is not known; allowed: {', '.join(POLICIES)}")
    for name in workloads:
        workload(name, folder, sizes.requests, sizes.seed)
    wanted = [
        Cell(name, policy, figure, folder, sizes)
        for figure in figures
        for name in workloads
        for policy in policies
        if policy not in NOT_MEASURED[figure]
    ]
    values = runner.run({cell.key: cell for cell in wanted}, measure_cell)
    rows: dict[tuple[str, str], Row] = {}
    for cell in wanted:
        if cell.key in values:
            row = rows.setdefault((cell.workload, cell.policy), {"workload": cell.workload, "policy": cell.policy})
            row.update(values[cell.key])
    return list(rows.values())


def figure_of(
    rows: Sequence[Row], figure: str, *, by: str = "workload", of: str = "policy"
) -> dict[str, dict[str, float | None]]:
    """Workload -> policy -> ``capacity_per_s`` or ``gpu_hours``, or the other way round; None where it has none."""
    values: dict[str, dict[str, float | None]] = {}
    for row in rows:
        values.setdefault(row[by], {})[row[of]] = row.get(figure)
    return values


def combined_vs_best_single(rows: Sequence[Row]) -> dict[str, float]:
    """Workload -> capacity of ``combined`` over that of the best of ``SYSTEMS``; above 1: the combination wins.

    Workloads for which one of the two is not known, or only a lower bound, or of a burst, are left out.
    """
    ratios = {}
    long_enough = [row for row in rows if (row.get("span_s") or 0.0) >= LEAST_SPAN_S]
    for name, by_policy in figure_of(long_enough, "capacity_per_s").items():
        single = [value for system in SYSTEMS if (value := by_policy.get(system)) is not None]
        combined = by_policy.get(COMBINED)
        if single and combined is not None and not is_search_end(name, max(combined, *single)):
            ratios[name] = round(combined / max(single), 4)
    return ratios


def is_search_end(name: str, rate_per_s: float) -> bool:
    return name in WORKLOADS and rate_per_s >= WORKLOADS[name].high_per_s


def figure_table(rows: Sequence[Row], figure: str) -> Table:
    """A row a policy, a column a workload; the best of a column is bold. ``>=``: the upper end of a search."""
    rates = figure == "capacity_per_s"

    def text(value: float, name: str) -> str:
        return f"{'>= ' if rates and is_search_end(name, value) else ''}{value:.3g}"

    values = figure_of(rows, figure, by="policy", of="workload")
    return mark_best("policy", values, best=max if rates else min, text=text)


PAGES = {  # marker -> field that it shows, table
    "fleets-capacity": ("capacity_per_s", lambda rows: figure_table(rows, "capacity_per_s")),
    "fleets-gpu_hours": ("gpu_hours", lambda rows: figure_table(rows, "gpu_hours")),
}


def plot_capacities(by_workload: Mapping[str, Mapping[str, float | None]], path: Path) -> None:
    """A panel a workload: bars of the highest rate, best on top; the combination in colour."""
    columns = min(4, len(by_workload))
    most = max(map(len, by_workload.values()))
    size = (4.2 * columns, (0.24 * most + 0.9) * -(-len(by_workload) // columns))
    title = "highest rate with 90 % of requests in target, requests/s"
    with panels(path, len(by_workload), size=size, title=title, columns=columns) as grid:
        for axes, (name, by_policy) in zip(grid, by_workload.items(), strict=True):
            policies = sorted(by_policy, key=lambda policy: by_policy[policy] or 0.0)
            colours = [COLOURS[1] if policy.startswith(COMBINED) else STOCK_COLOUR for policy in policies]
            axes.barh(policies, [by_policy[policy] or 0.0 for policy in policies], color=colours)
            axes.set_title(name, fontsize=10)
            axes.tick_params(labelsize=8)
            axes.grid(alpha=0.3, axis="x")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cells.add_arguments(parser)
    parser.add_argument("--workloads", help="names with commas between; default: all that can be had")
    parser.add_argument("--policies", default=",".join(POLICIES), help="names with commas between")
    parser.add_argument("--figures", default="capacity,gpu_hours")
    parser.add_argument(
        "--requests", type=int, help=f"of each workload at most; default: {REQUESTS:,}, with --full all"
    )
    parser.add_argument(
        "--full", action="store_true", help="whole traces, rates over at least 300 s of arrivals and to 2 %%; hours"
    )
    parser.add_argument("--seed", type=int, default=1)


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError, NoStepError."""
    about, folder = environment(), data_folder(options.data)
    sizes = Sizes.of(options)
    names = options.workloads.split(",") if options.workloads else available(folder, FLEET_WORKLOADS)
    policies, figures = options.policies.split(","), options.figures.split(",")
    runner = cells.make_runner(options, "fleets_policies")
    rows = measure_policies(runner, folder, sizes=sizes, workloads=names, policies=policies, figures=figures)
    if "capacity" in figures:
        title = f"requests/s with {CAPACITY_TARGET:.0%} in target, {INSTANCES} instances"
        show(title, *figure_table(rows, "capacity_per_s"))
        plot_capacities(figure_of(rows, "capacity_per_s"), options.out / "fleets_capacity.png")
    if "gpu_hours" in figures:
        show(f"GPU-hours with {HOURS_TARGET:.0%} in target", *figure_table(rows, "gpu_hours"))
    result: Result = {
        "bench": "fleets.policies",
        "combined_vs_best_single": combined_vs_best_single(rows),
        "rows": rows,
        "seed": options.seed,
        "sizes": dataclasses.asdict(sizes),
        "workloads": {name: workload(name, folder, sizes.requests, options.seed).describe() for name in names},
        "environment": about,
    }
    emit(result, "fleets_policies", options.out)
    return 0
