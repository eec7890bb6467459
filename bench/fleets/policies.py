"""``python -m bench.fleets.policies``: every policy on every named workload, in the simulator.

Two figures a cell, both for stock engines (first come, first served) with the step times of an H100 and Llama-3.1-8B:

* ``capacity``: highest rate at which 90 % of the requests meet both targets, 8 instances, by bisection;
* ``gpu_hours``: least GPU-hours of a fleet with which 99 % do at a fixed rate: as many instances as it takes for
  policies of fixed size, as few at the start as it takes for those that scale.

``static-pd-best`` is the best of all fixed splits, found by trying each: the reference that nobody has in advance.
Scaling policies plan every 6 s and wait 1.8 s for a new instance: a tenth of the usual, as the recorded hours run ten
times as fast.

For other benches: ``measure(folder, ...)`` gives the rows, ``combined_vs_best_single(rows)`` the capacity of the
combination over that of the best single system (``pla``, ``arrow``, ``star``, ``dopd``), by workload.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.fleets.cells import Store, code_version, fill
from bench.fleets.picture import capacity_picture
from bench.fleets.workloads import Workload, available, data_folder, workload
from bench.lib.report import emit, environment, progress_bar, say, stdout
from pla_sglang.errors import ConfigError
from pla_sglang.metrics.goodput import find_capacity
from pla_sglang.sim.errors import SimError
from pla_sglang.sim.experiment import Experiment, Outcome, run_experiment

BASELINES = (
    "round-robin",
    "least-requests",
    "least-tokens",
    "two-choices",
    "cache-aware",
    "static-pd",
    "static-pd-best",
    "load-migration",
    "threshold-scaler",
    "sla-scaler",
)
SYSTEMS = ("pla", "arrow", "star", "dopd")
COMBINED = "combined"
OURS = (COMBINED, "combined-roles", "combined-scaling")
POLICIES = (*BASELINES, *SYSTEMS, *OURS)
ROLE_SCALERS = ("threshold-scaler", "sla-scaler")  # on a fleet of fixed size they are static-pd
BEST_SPLIT = "static-pd-best"
# The best of 23 splits at every step of a search is an hour's work for what `static-pd` tells nearly as well.
NOT_MEASURED = {"capacity": ROLE_SCALERS, "gpu_hours": (BEST_SPLIT,)}
INSTANCES = 8
INSTANCES_MOST = 24
PLAN_INTERVAL_S = 6.0
STARTUP_S = 1.8
CAPACITY_TARGET, HOURS_TARGET = 0.9, 0.99
REQUESTS, TOLERANCE = 2_000, 0.05  # by default; --full: whole traces and 2 %

Row = dict[str, Any]  # workload, policy, capacity_per_s, gpu_hours, instances, attainment


@dataclasses.dataclass(frozen=True)
class Sizes:
    """``requests``: of each workload at most; None: all. ``tolerance``: relative width at which a search ends."""

    requests: int | None = REQUESTS
    tolerance: float = TOLERANCE
    seed: int = 1

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
        return f"{self.figure}/{self.workload}/{self.policy}/{sizes.requests}/{sizes.tolerance:g}/{sizes.seed}"


def measure_cell(cell: Cell) -> dict[str, Any]:
    """One figure of one policy on one workload. A policy that leaves requests for ever has no figure, and says why."""
    found = workload(cell.workload, cell.folder, cell.sizes.requests, cell.sizes.seed)
    try:
        return (_capacity if cell.figure == "capacity" else _gpu_hours)(found, cell.policy, cell.sizes)
    except SimError as error:
        return {"error": str(error)}


def _experiment(found: Workload, policy: str, sizes: Sizes, instances: int, **changes: Any) -> Experiment:
    name = "static-pd" if policy == BEST_SPLIT else policy
    return Experiment(
        name,
        found.slo,
        instances=instances,
        seed=sizes.seed,
        plan_interval_s=PLAN_INTERVAL_S,
        startup_s=STARTUP_S,
        **changes,
    )


def _splits(policy: str, instances: int) -> list[int | None]:
    """Numbers of prefill instances to try; None: the policy's own."""
    return list(range(1, instances)) if policy == BEST_SPLIT and instances > 1 else [None]


def _capacity(found: Workload, policy: str, sizes: Sizes) -> dict[str, Any]:
    def attainment(rate: float, prefills: int | None) -> float:
        limits = {"instances_min": INSTANCES, "instances_max": INSTANCES}
        changes = {"rate_per_s": rate, "prefills": prefills, **limits}
        one = _experiment(found, policy, sizes, INSTANCES, **changes)
        return run_experiment(one, found.trace).figures.attainment

    best: float | None = None
    chosen: int | None = None
    for prefills in _splits(policy, INSTANCES):
        low = best or found.low_per_s
        if best is not None and (best >= found.high_per_s or attainment(best, prefills) < CAPACITY_TARGET):
            continue  # cannot be, or is not, better than the best so far
        held = find_capacity(
            functools.partial(_with_split, attainment, prefills),
            low_per_s=low,
            high_per_s=found.high_per_s,
            target=CAPACITY_TARGET,
            tolerance=sizes.tolerance,
        ).held_per_s
        if held is not None and (best is None or held > best):
            best, chosen = held, prefills
    return {"capacity_per_s": best, "prefills": chosen}


def _with_split(attainment: Callable[[float, int | None], float], prefills: int | None, rate: float) -> float:
    return attainment(rate, prefills)


def _gpu_hours(found: Workload, policy: str, sizes: Sizes) -> dict[str, Any]:
    """Bisection over the number of instances at the start; attainment is taken to rise with it."""

    def best_of(instances: int) -> Outcome:
        runs = [
            run_experiment(
                _experiment(
                    found,
                    policy,
                    sizes,
                    instances,
                    rate_per_s=found.steady_per_s,
                    prefills=prefills,
                    instances_max=2 * INSTANCES_MOST,
                ),
                found.trace,
            )
            for prefills in _splits(policy, instances)
        ]
        return max(runs, key=lambda run: run.figures.attainment)

    low, high = 0, INSTANCES_MOST  # low is not enough, high is, unless nothing is
    outcome = best_of(high)
    if outcome.figures.attainment < HOURS_TARGET:
        return {"gpu_hours": None, "instances": high, "attainment": outcome.figures.attainment}
    while high - low > 1:
        middle = (low + high) // 2
        tried = best_of(middle)
        if tried.figures.attainment >= HOURS_TARGET:
            high, outcome = middle, tried
        else:
            low = middle
    return {"gpu_hours": outcome.result.gpu_hours, "instances": high, "attainment": outcome.figures.attainment}


def measure(
    folder: Path | None,
    *,
    sizes: Sizes | None = None,
    workloads: Sequence[str] | None = None,
    policies: Sequence[str] = POLICIES,
    figures: Sequence[str] = ("capacity", "gpu_hours"),
    store: Store,
    jobs: int = 1,
    done: Callable[[str], None] = lambda key: None,
) -> list[Row]:
    """A row a workload and policy. ``folder``: with recorded traces, None: generated workloads only.

    Raises ConfigError for a name that is not known or whose trace is not there.
    """
    sizes = sizes or Sizes()
    names = list(workloads or available(folder))
    for name in policies:
        if name not in POLICIES:
            raise ConfigError(f"policy {name!r} is not known; allowed: {', '.join(POLICIES)}")
    for name in names:
        workload(name, folder, sizes.requests, sizes.seed)
    cells = [
        Cell(name, policy, figure, folder, sizes)
        for figure in figures
        for name in names
        for policy in policies
        if policy not in NOT_MEASURED[figure]
    ]
    values = fill({cell.key: cell for cell in cells}, measure_cell, store, jobs=jobs, done=done)
    rows: dict[tuple[str, str], Row] = {}
    for cell in cells:
        row = rows.setdefault((cell.workload, cell.policy), {"workload": cell.workload, "policy": cell.policy})
        row.update(values[cell.key])
    return list(rows.values())


def figure_of(rows: Sequence[Row], figure: str) -> dict[str, dict[str, float | None]]:
    """workload -> policy -> value of ``capacity_per_s`` or ``gpu_hours``; None where there is none."""
    found: dict[str, dict[str, float | None]] = {}
    for row in rows:
        found.setdefault(row["workload"], {})[row["policy"]] = row.get(figure)
    return found


def combined_vs_best_single(rows: Sequence[Row]) -> dict[str, float]:
    """Workload -> capacity of ``combined`` over that of the best of ``SYSTEMS``; above 1: the combination wins.

    Workloads for which one of the two is not known are left out.
    """
    ratios = {}
    for name, by_policy in figure_of(rows, "capacity_per_s").items():
        single = [value for system in SYSTEMS if (value := by_policy.get(system)) is not None]
        mine = by_policy.get(COMBINED)
        if single and mine is not None:
            ratios[name] = round(mine / max(single), 4)
    return ratios


def print_table(rows: Sequence[Row], figure: str, title: str) -> None:
    found = figure_of(rows, figure)
    shown = Table(title=title, title_justify="left")
    shown.add_column("policy")
    for name in found:
        shown.add_column(name, justify="right")
    for policy in dict.fromkeys(row["policy"] for row in rows):
        shown.add_row(policy, *(_cell(by_policy, policy) for by_policy in found.values()))
    stdout.print(shown)


def _cell(by_policy: Mapping[str, float | None], policy: str) -> str:
    value = by_policy.get(policy)
    return "-" if value is None else f"{value:.3g}"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.fleets.policies", description=(__doc__ or "").split("\n\n")[0])
    made.add_argument("--data", type=Path, help="folder with recorded traces (docs/fleets.md)")
    made.add_argument("--workloads", help="names with commas between; default: all that can be had")
    made.add_argument("--policies", default=",".join(POLICIES), help="names with commas between")
    made.add_argument("--figures", default="capacity,gpu_hours")
    made.add_argument("--requests", type=int, default=REQUESTS, help="of each workload at most")
    made.add_argument("--full", action="store_true", help="whole traces, searches to 2 %%")
    made.add_argument("--jobs", type=int, default=1, help="processes")
    made.add_argument("--fresh", action="store_true", help="measure again what an earlier run of this code has found")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--out", type=Path, default=Path("bench_out"))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2 for a bad value."""
    args = parser().parse_args(argv)
    sizes = Sizes(None, 0.02, args.seed) if args.full else Sizes(args.requests, TOLERANCE, args.seed)
    about = environment()
    try:
        folder = data_folder(args.data)
        names = args.workloads.split(",") if args.workloads else available(folder)
        policies, figures = args.policies.split(","), args.figures.split(",")
        store = Store(args.out / f"fleets_policies_{code_version()}.jsonl", fresh=args.fresh)
        with progress_bar("cells", len(names) * len(policies) * len(figures)) as advance:

            def done(key: str) -> None:
                advance()
                say(f"{key}: {store.values[key]}")

            rows = measure(
                folder,
                sizes=sizes,
                workloads=names,
                policies=policies,
                figures=figures,
                store=store,
                jobs=args.jobs,
                done=done,
            )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if "capacity" in figures:
        print_table(rows, "capacity_per_s", f"requests/s with {CAPACITY_TARGET:.0%} in target, {INSTANCES} instances")
        capacity_picture(figure_of(rows, "capacity_per_s"), args.out / "fleets_capacity.png")
    if "gpu_hours" in figures:
        print_table(rows, "gpu_hours", f"GPU-hours with {HOURS_TARGET:.0%} in target")
    emit(
        {
            "bench": "fleets.policies",
            "combined_vs_best_single": combined_vs_best_single(rows),
            "rows": rows,
            "seed": args.seed,
            "sizes": dataclasses.asdict(sizes),
            "workloads": {name: _about(workload(name, folder, sizes.requests, sizes.seed)) for name in names},
            "environment": about,
        },
        args.out,
        "fleets_policies",
    )
    return 0


def _about(found: Workload) -> dict[str, Any]:
    return {
        "requests": len(found.trace),
        "recorded": found.recorded,
        "ttft_slo_s": found.slo.ttft_s,
        "tpot_slo_s": found.slo.tpot_s,
        "steady_per_s": found.steady_per_s,
    }


if __name__ == "__main__":
    sys.exit(main())
