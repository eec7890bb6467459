"""The best stock configuration of each workload, in hindsight, beside ours and what no scheduler can exceed.

In the simulator, 8 instances: the highest rate at which 90 % and 99 % of the requests meet both targets. Stock: unified
engines with every size of chunks, mixed or not, and every static split, each with every order and router
(``sim/fleet_arms.py``). Ours: ``combined`` before temporal engines whose decodes ride and whose deadlines decide.
``--sweep`` finds the best arms by successive halving (``stock_search.py``), with a coarse answer for every workload
after its first round; with ``--go-on`` it begins where the sweep that ``--frontier`` holds was stopped. Without it the
three arms that ``--frontier`` names for each workload and ours are measured again. Every run is kept in ``--out``: a
run of the same code resumes. No ratio is stated for less than 300 s of arrivals.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.bench import ROOT, Result, is_complete, measuring
from bench.harness.figures import COLOURS, STOCK_COLOUR, draw_bars, panels
from bench.harness.report import Cells, emit, environment, markdown, number, say, show
from bench.harness.steps import NoStepError, Row
from bench.lab import cells
from bench.lab.cells import CellRunner, data_folder
from bench.lab.named_workloads import WORKLOADS, available, workload
from bench.lab.stock_frontier import Limit, geometric_mean_of_ratios, read_limits
from bench.lab.stock_search import (
    TARGETS,
    Course,
    HeldRate,
    Round,
    RoundResult,
    race_families,
    race_members,
    search_limits,
)
from pla_sglang.common.errors import ConfigError
from pla_sglang.profiles import load_profile
from pla_sglang.sim.core.errors import SimError
from pla_sglang.sim.core.experiment import run_experiment
from pla_sglang.sim.core.fleet_arms import INSTANCES, OURS, ROUTERS, FleetArm, client_limit_tokens, stock_arms
from pla_sglang.sim.core.upper_bound import upper_bound_over_span
from pla_sglang.sim.metrics.goodput import LEAST_SPAN_S

FRONTIER = ROOT / "bench" / "lab" / "results" / "simulated" / "best_stock.json"
ROUNDS = (Round(15.0, 1.25, 4), Round(30.0, 1.1, 3), Round(LEAST_SPAN_S, 1.04, 3))
FAMILIES, COARSE, MEMBERS, LAST = STAGES = ("families", "coarse limits", "members", "limits")  # as ``rounds`` has them
BOUND, BEST, COMBINED = "upper bound", "best stock", OURS.name


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run; its process reads the workload itself."""

    workload: str
    arm: FleetArm
    round: Round
    rung: int
    folder: Path | None

    @property
    def key(self) -> str:
        return f"{self.workload}/{self.arm.name}/{self.round.span_s:g} s/{self.round.step:g}^{self.rung}"


def measure_cell(cell: Cell) -> Row:
    """An arm that leaves requests for ever has an attainment of 0, and says why."""
    load = workload(cell.workload, cell.folder)
    trace = load.trace_at(cell.round.ladder.rate_per_s(cell.rung), cell.round.span_s)
    try:
        limit_tokens = client_limit_tokens(load.trace)
        figures = run_experiment(cell.arm.experiment(load.slo, limit_tokens=limit_tokens), trace).figures
    except SimError as error:
        return {"attainment": 0.0, "error": str(error)}
    return {"attainment": figures.attainment, "ttft_p99_s": figures.ttft_p99_s, "tpot_p99_s": figures.tpot_p99_s}


@dataclasses.dataclass
class Search:
    """The rounds of all workloads; ``limits`` and ``rounds`` are what is known so far.

    Attributes:
        rounds: by workload, a row for each of ``STAGES`` that has ended. A race that has its row is not run again.
    """

    runner: CellRunner
    folder: Path | None
    limits: dict[tuple[str, float], Limit] = dataclasses.field(default_factory=dict)
    rounds: dict[str, list[Row]] = dataclasses.field(default_factory=dict)

    def course(self, name: str, this_round: Round) -> Course:
        """A round on a workload, as long as its answers ask for."""
        this_round = this_round.times(WORKLOADS[name].span_times)

        def measure(pairs: Sequence[tuple[FleetArm, int]]) -> dict[tuple[FleetArm, int], float]:
            wanted = {pair: Cell(name, pair[0], this_round, pair[1], self.folder) for pair in pairs}
            rows: Mapping[str, Row] = {}
            with contextlib.suppress(NoStepError):  # interrupted: the limits of earlier searches are shown all the same
                rows = self.runner.run({cell.key: cell for cell in wanted.values()}, measure_cell)
            if not is_complete():
                raise KeyboardInterrupt
            return {pair: rows[cell.key]["attainment"] for pair, cell in wanted.items()}

        bounds = {target: self._bound(name, target, this_round.span_s) for target in TARGETS}
        return Course(this_round, measure, bounds, WORKLOADS[name].high_per_s)

    def sweep(self, names: Sequence[str], arms: Sequence[FleetArm], rounds: Sequence[Round]) -> None:
        """Round 0 for all workloads, with the limits of its winner; then the others, workload by workload."""
        families: dict[str, RoundResult] = {}
        for name in names:
            course = self.course(name, rounds[0])
            families[name] = self._race(name, FAMILIES, functools.partial(race_families, course, arms))
            if self._row(name, COARSE) is None:
                self.search(name, course, dict.fromkeys(TARGETS, families[name].best[min(TARGETS)][:1]), COARSE)
        for name in names:
            course, before = self.course(name, rounds[1]), families[name]
            members = self._race(name, MEMBERS, functools.partial(race_members, course, arms, before))
            self.search(name, self.course(name, rounds[2]), members.best)

    def search(self, name: str, course: Course, arms: Mapping[float, Sequence[HeldRate]], stage: str = LAST) -> None:
        """The limits of these arms by target, and of ours."""
        result, ours = search_limits(course, arms)
        self._note(name, stage, result)
        for target, best in result.best.items():
            span_s, step, bound = course.round.span_s, course.round.step, course.bounds_per_s[target]
            limit = Limit(name, target, span_s, step, best, ours[target], bound, course.high_per_s)
            self.limits[name, target] = limit
            rates = f"{best[0].arm.name} {number(best[0].rate_per_s)}/s, {COMBINED} {number(ours[target])}/s"
            say(f"{name} at {target:.0%}: {rates}")

    def _race(self, name: str, stage: str, run: Callable[[], RoundResult]) -> RoundResult:
        """From its row, where it has one: with the rate of the best arm known, for searches to begin at."""
        row = self._row(name, stage)
        if row is None:
            result = run()
            self._note(name, stage, result)
            return result
        arms = {arm.name: arm for arm in stock_arms(ROUTERS)}
        best = {
            float(target): [HeldRate(arms[left], self.limits[name, float(target)].best.rate_per_s) for left in names]
            for target, names in row["left"].items()
        }
        return RoundResult(Round(row["span_s"], row["step"], max(map(len, best.values()))), row["ran"], best)

    def _row(self, name: str, stage: str) -> Row | None:
        return next((row for row in self.rounds.get(name, []) if row["stage"] == stage), None)

    def _note(self, name: str, stage: str, result: RoundResult) -> None:
        """The row of this stage, in place of an earlier one."""
        left = {f"{target:g}": [held.arm.name for held in best] for target, best in result.best.items()}
        row = {
            "stage": stage,
            "span_s": result.round.span_s,
            "step": result.round.step,
            "ran": result.ran,
            "left": left,
        }
        others = [known for known in self.rounds.get(name, []) if known["stage"] != stage]
        self.rounds[name] = sorted([*others, row], key=lambda known: STAGES.index(known["stage"]))

    def _bound(self, name: str, target: float, span_s: float) -> float:
        """On what arrives in ``span_s`` at each rate, as the arms are measured."""
        load, profile = workload(name, self.folder), load_profile(OURS.experiment(WORKLOADS[name].slo).profile)
        return upper_bound_over_span(
            lambda rate_per_s: load.trace_at(rate_per_s, span_s),
            load.slo,
            profile,
            instances=INSTANCES,
            target=target,
            most_per_s=load.high_per_s,
        )


def figures_at(limits: Mapping[tuple[str, float], Limit], target: float) -> Row:
    """By workload, at one target."""
    chosen = {name: limit for (name, share), limit in limits.items() if share == target}
    ratio = geometric_mean_of_ratios(limits, target)
    return {
        "best_stock_rps": {name: limit.best.rate_per_s for name, limit in chosen.items()},
        "best_stock_arm": {name: limit.best.arm.name for name, limit in chosen.items()},
        "combined_rps": {name: limit.ours_per_s for name, limit in chosen.items()},
        "upper_bound_rps": {name: limit.upper_bound_per_s for name, limit in chosen.items()},
        "combined_vs_best_stock": {name: limit.ours_vs_stock for name, limit in chosen.items()},
        "combined_vs_best_stock_geomean": ratio,
        "span_s": {name: limit.span_s for name, limit in chosen.items()},
        "target": target,
    }


def table(of_target: Mapping[str, Any]) -> Cells:
    """A row a workload, requests/s."""
    names = of_target["best_stock_rps"]
    shown = [[of_target[key][name] for key in ("best_stock_rps", "combined_rps", "upper_bound_rps")] for name in names]
    header = [
        "workload",
        "best stock arm",
        "its rate",
        f"`{COMBINED}`",
        "no scheduler above",
        "ours / stock",
        "span, s",
    ]
    rows = [
        [
            name if WORKLOADS[name].recorded else f"{name} (synthetic)",
            f"`{of_target['best_stock_arm'][name]}`",
            *map(number, rates),
            number(of_target["combined_vs_best_stock"][name], "x"),
            f"{of_target['span_s'][name]:g}",
        ]
        for name, rates in zip(names, shown, strict=True)
    ]
    return header, rows


def page(result: Result) -> str:
    parts = []
    for of_target in (result, result["at_99"]):
        mean = number(of_target["combined_vs_best_stock_geomean"])
        known = sum(ratio is not None for ratio in of_target["combined_vs_best_stock"].values())
        verdict = f"Geometric mean of the {known} ratios: {mean}." if known else "No run is long enough for a ratio."
        parts += [f"With {of_target['target']:.0%} in target:", markdown(*table(of_target), right=range(2, 7)), verdict]
    return "\n\n".join(parts)


def plot(by_target: Sequence[Row], path: Path) -> None:
    """A panel a target: rates over the upper bound, by workload."""
    colours = {BEST: STOCK_COLOUR, COMBINED: COLOURS[1]}
    with panels(path, len(by_target), size=(11.0, 4.0)) as grid:
        for panel, of_target in zip(grid, by_target, strict=True):
            bounds, sources = of_target["upper_bound_rps"], {BEST: "best_stock_rps", COMBINED: "combined_rps"}
            groups = {
                name: {label: (of_target[key][name] or 0.0) / bound for label, key in sources.items()}
                for name, bound in bounds.items()
            }
            draw_bars(panel, groups, colours=colours, rotation=30)
            panel.set(title=f"{of_target['target']:.0%} in target", ylabel=f"rate over the {BOUND}", ylim=(0, 1))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cells.add_arguments(parser)
    parser.add_argument("--workloads", help="names with commas between; default: all that can be had")
    parser.add_argument("--sweep", action="store_true", help="find the best stock arms; hours")
    parser.add_argument(
        "--go-on", action="store_true", help="of the sweep: take its races from --frontier where it has them"
    )
    parser.add_argument("--routers", default=",".join(ROUTERS), help="of the sweep, with commas between")
    parser.add_argument(
        "--frontier", type=Path, default=FRONTIER, help="with the best stock arms, to measure again or to go on from"
    )
    parser.add_argument("--spans-s", default=",".join(f"{each.span_s:g}" for each in ROUNDS), help="of the rounds")
    parser.add_argument("--steps", default=",".join(f"{each.step:g}" for each in ROUNDS), help="of rates, by round")
    parser.add_argument("--keep", default=",".join(str(each.keep) for each in ROUNDS), help="arms left, by round")


def rounds_of(options: argparse.Namespace) -> list[Round]:
    """Raises ConfigError unless there are three numbers each."""
    columns = [text.split(",") for text in (options.spans_s, options.steps, options.keep)]
    if {len(column) for column in columns} != {len(ROUNDS)}:
        raise ConfigError(f"--spans-s, --steps and --keep need {len(ROUNDS)} numbers each, got {columns}")
    try:
        return [Round(float(span_s), float(step), int(keep)) for span_s, step, keep in zip(*columns, strict=True)]
    except ValueError as error:
        raise ConfigError(f"--spans-s, --steps or --keep is not valid: {error}") from None


def read_rounds(path: Path) -> dict[str, list[Row]]:
    """By workload, of a file that ``read_limits`` takes."""
    rounds: dict[str, list[Row]] = json.loads(path.read_text(encoding="utf-8"))["rounds"]
    return rounds


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError, NoStepError."""
    about, folder, rounds = environment(), data_folder(options.data), rounds_of(options)
    arms = stock_arms(options.routers.split(","))
    names = options.workloads.split(",") if options.workloads else available(folder)
    search = Search(cells.make_runner(options, "best_stock"), folder)
    if options.go_on or not options.sweep:
        known, search.rounds = read_limits(options.frontier), read_rounds(options.frontier)
    with measuring():
        if options.sweep:
            search.limits.update(known if options.go_on else {})
            search.sweep(names, arms, rounds)
        else:
            for name in names:
                if (name, max(TARGETS)) not in known:
                    raise ConfigError(f"{options.frontier} has no {name}; run --sweep --workloads {name} first")
                best = {target: known[name, target].stock for target in TARGETS}
                search.search(name, search.course(name, rounds[-1]), best)
    if not search.limits:
        raise NoStepError("no workload has a limit yet; what was measured is kept")
    main, other = (figures_at(search.limits, target) for target in TARGETS)
    for of_target in (main, other):
        show(f"requests/s with {of_target['target']:.0%} in target", *table(of_target))
    plot((main, other), options.out / "best_stock.png")
    result: Result = {
        "bench": "best_stock",
        **main,
        "at_99": other,
        "limits": [limit.as_json() for limit in search.limits.values()],
        "rounds": search.rounds,
        "instances": INSTANCES,
        "stock_arms": len(arms),
        "environment": about,
    }
    emit(result, "best_stock", options.out)
    return 0


PAGES = {"best_stock": page}
