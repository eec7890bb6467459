"""What the bound on deferrals costs and gives: P99 TTFT and the share in target, by ``slo.fcfs_times``.

In the simulator, 8 instances in the default form, at the rates and beside the best arms of stock that ``--frontier``
names for 90 % and 99 % in target. ``fcfs_times`` of 0, the default, is one operating point: as many in target as
possible, and some wait for long. 10 is the other one. More on request. Figures are of the worse of ``--runs`` runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.bench import Result, is_complete
from bench.harness.report import Cells, emit, environment, markdown, number, show
from bench.harness.steps import NoStepError, Row
from bench.lab import cells
from bench.lab.best_stock import ATTAINMENT, FRONTIER, LATE, LATE_TIMES, TTFT_P99_S, finite, part_of, worse_of
from bench.lab.cells import data_folder
from bench.lab.fleet_arms import INSTANCES, OURS, FleetArm, client_limit_tokens
from bench.lab.named_workloads import available
from bench.lab.stock_frontier import STOCK, Limit, read_limits
from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.core.errors import SimError
from pla_sglang.sim.core.experiment import run_experiment
from pla_sglang.sim.metrics.goodput import late_share

FIGURES = (ATTAINMENT, TTFT_P99_S, LATE)
OFF, BOUND = 0.0, 10.0  # a tenth of what can be served is what the second may take


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run. ``fcfs_times``: None where the arm is stock's."""

    workload: str
    arm: FleetArm
    rate_per_s: float
    span_s: float
    run: int
    folder: Path | None
    fcfs_times: float | None = None

    @property
    def key(self) -> str:
        bound = "" if self.fcfs_times is None else f"/{self.fcfs_times:g}"
        return f"{self.workload}/{self.arm.name}{bound}/{self.rate_per_s:g} per s/{self.span_s:g} s/run {self.run}"


def measure_cell(cell: Cell) -> Row:
    """Share in target, P99 TTFT, and who waits for more than ``LATE_TIMES`` TTFT targets."""
    load = part_of(cell.workload, cell.folder, cell.run)
    experiment = cell.arm.experiment(load.slo, load.profile, limit_tokens=client_limit_tokens(load.trace))
    if cell.fcfs_times is not None:
        experiment = dataclasses.replace(experiment, engine_knobs=(f"slo.fcfs_times={cell.fcfs_times:g}",))
    try:
        run = run_experiment(experiment, load.trace_at(cell.rate_per_s, cell.span_s))
    except SimError as error:
        return {ATTAINMENT: 0.0, TTFT_P99_S: None, LATE: 1.0, "error": str(error)}
    return {
        ATTAINMENT: run.figures.attainment,
        TTFT_P99_S: finite(run.figures.ttft_p99_s),
        LATE: late_share(run.result.served, load.slo, LATE_TIMES),
    }


def cells_of(limit: Limit, values: Sequence[float], runs: int, folder: Path | None) -> dict[str, list[Cell]]:
    """The runs of stock's best arm, and of ours by value, all at stock's rate."""
    best = limit.best
    if best.rate_per_s is None:
        raise ConfigError(f"stock holds {limit.target:.0%} of {limit.workload} at no rate; choose other --workloads")
    whole = Cell(limit.workload, best.arm, best.rate_per_s, limit.span_s, 0, folder)
    arms = {STOCK: whole} | {f"{one:g}": dataclasses.replace(whole, arm=OURS, fcfs_times=one) for one in values}
    return {name: [dataclasses.replace(cell, run=run) for run in range(runs)] for name, cell in arms.items()}


def table(result: Mapping[str, Any]) -> Cells:
    """A row a workload and target: each figure of stock, and of ours by value."""
    names = [STOCK, *(f"{one:g}" for one in result["values"])]
    header = ["workload", "target", "requests/s"]
    header += [
        f"{what}: {name}" for what in ("in target", "P99 TTFT, s", f"later than {LATE_TIMES:g} x") for name in names
    ]
    rows = []
    for one in result["rows"]:
        of_names = [one["figures"][name] for name in names]
        shown = [f"{row[ATTAINMENT]:.3f}" for row in of_names]
        shown += ["never" if row[TTFT_P99_S] is None else number(row[TTFT_P99_S]) for row in of_names]
        shown += [f"{100 * row[LATE]:.2f} %" for row in of_names]
        rows.append([one["workload"], f"{one['target']:.0%}", number(one["rate_per_s"]), *shown])
    return header, rows


def page(result: Result) -> str:
    foot = f"Runs a row: {result['runs']}; of several the worse. Commit {result['environment']['plugin_commit']}."
    return "\n\n".join([markdown(*table(result), right=range(1, 40)), foot])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cells.add_arguments(parser)
    parser.add_argument("--workloads", help="names with commas between; default: all that can be had")
    parser.add_argument("--values", default=f"{OFF:g},{BOUND:g}", help="of slo.fcfs_times, with commas between")
    parser.add_argument("--targets", default="0.9,0.99", help="shares in target whose rates are taken")
    parser.add_argument("--runs", type=int, default=1, help="of each, on other parts of the workload")
    parser.add_argument("--frontier", type=Path, default=FRONTIER, help="with the best stock arms")


def read_numbers(flag: str, text: str) -> list[float]:
    """Raises ConfigError."""
    try:
        numbers = [float(one) for one in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)):
        raise ConfigError(f"{flag} {text!r} is not valid; allowed: numbers with commas between")
    return numbers


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError, NoStepError."""
    about, folder, limits = environment(), data_folder(options.data), read_limits(options.frontier)
    values, targets = read_numbers("--values", options.values), read_numbers("--targets", options.targets)
    names = options.workloads.split(",") if options.workloads else available(folder)
    wanted = {
        (name, target): cells_of(limits[name, target], values, options.runs, folder)
        for name, target in itertools.product(names, targets)
        if (name, target) in limits
    }
    if not wanted:
        raise ConfigError(f"{options.frontier} has none of these workloads at these targets")
    named = {cell.key: cell for of_one in wanted.values() for runs in of_one.values() for cell in runs}
    measured = cells.make_runner(options, "tail").run(named, measure_cell)
    if not is_complete():
        raise NoStepError("not all is measured yet; what was measured is kept")
    result: dict[str, Any] = {
        "bench": "tail",
        "rows": [
            {
                "workload": name,
                "target": target,
                "rate_per_s": limits[name, target].best.rate_per_s,
                "span_s": limits[name, target].span_s,
                "stock_arm": limits[name, target].best.arm.name,
                "figures": {
                    arm: worse_of([measured[cell.key] for cell in runs], FIGURES) for arm, runs in of_one.items()
                },
            }
            for (name, target), of_one in wanted.items()
        ],
        "values": values,
        "runs": options.runs,
        "instances": INSTANCES,
        "environment": about,
    }
    show("by slo.fcfs_times, at stock's rate", *table(result))
    emit(result, "tail", options.out)
    return 0


PAGES = {"tail": page}
