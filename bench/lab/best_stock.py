"""The best stock configuration of each workload, in hindsight, beside ours and what no scheduler can exceed.

In the simulator, 8 instances: the highest rate at which 90 % and 99 % of the requests meet both targets. Stock: unified
engines with every size of chunks, mixed or not, with decode steps between prefill passes or not, and every static
split, each with every order and router (``fleet_arms.py``). Ours: ``combined`` before temporal engines whose
decodes ride and whose deadlines decide. Neither side knows how long an answer will be.
``--sweep`` finds the best arms by successive halving (``stock_search.py``), with a coarse answer for every workload
after its first round; with ``--go-on`` it begins where the sweep that ``--frontier`` holds was stopped. Without it the
three arms that ``--frontier`` names for each workload and ours are measured again. Every run is kept in ``--out``: a
run of the same code resumes. No ratio is stated for less than 300 s of arrivals. A rate is held where it is held on
``--runs`` parts of the workload.

Beside the rates, by target: P99 of TTFT and TPOT of both at stock's rate, the share of requests that wait more than
``LATE_TIMES`` times their TTFT target, and the device time that is offered over what the fleet has (at least, by
``upper_bound.py``). Figures of several runs are those of the worse one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.bench import ROOT, Result, is_complete, measuring
from bench.harness.figures import COLOURS, STOCK_COLOUR, draw_bars, panels
from bench.harness.report import Cells, emit, environment, markdown, number, say, show
from bench.harness.steps import NoStepError, Row
from bench.lab import cells
from bench.lab.cells import CellRunner, data_folder
from bench.lab.fleet_arms import INSTANCES, OURS, ROUTERS, FleetArm, client_limit_tokens, stock_arms
from bench.lab.named_workloads import WORKLOADS, Workload, available, workload
from bench.lab.rate_bounds import offered_over_capacity, upper_bound_over_span
from bench.lab.stock_frontier import (
    AT_LIMITS,
    OURS_AT_OWN,
    OURS_AT_STOCK,
    STOCK,
    Limit,
    geometric_mean_of_ratios,
    read_limits,
)
from bench.lab.stock_search import (
    TARGETS,
    Course,
    HeldRate,
    Pairs,
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
from pla_sglang.sim.metrics.goodput import LEAST_SPAN_S, late_share
from pla_sglang.sim.workload import Trace

FRONTIER = ROOT / "bench" / "lab" / "results" / "simulated" / "best_stock.json"
ROUNDS = (Round(15.0, 1.25, 4), Round(30.0, 1.1, 3, runs=2), Round(LEAST_SPAN_S, 1.04, 3, runs=2))
ANSWERS_A_SPAN = (
    2.0  # mean answers, at their TPOT target, that fit a span: for half of it the fleet is as full as it gets
)
LATE_TIMES = 5.0  # the TTFT target
ATTAINMENT, TTFT_P99_S, TPOT_P99_S, LATE, OFFERED = FIGURES = (
    "attainment",
    "ttft_p99_s",
    "tpot_p99_s",
    "late_beyond_5x",
    "offered_over_capacity",
)
FAMILIES, COARSE, MEMBERS, LAST = STAGES = ("families", "coarse limits", "members", "limits")  # as ``rounds`` has them
P99_RATIOS = {"P99 TTFT": "p99_ttft_vs_stock", "P99 TPOT": "p99_tpot_vs_stock"}
BOUND, BEST, COMBINED = "upper bound", "best stock", OURS.name


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run; its process reads the workload itself."""

    workload: str
    arm: FleetArm
    round: Round
    rung: int
    run: int
    folder: Path | None

    @property
    def key(self) -> str:
        rate = f"{self.round.step:g}^{self.rung}"
        return f"{self.workload}/{self.arm.name}/{self.round.span_s:g} s/{rate}/run {self.run}"


@functools.lru_cache(maxsize=4)
def part_of(name: str, folder: Path | None, run: int) -> Workload:
    """The workload of a run: of a file from another time on (run 1: from its middle), else drawn anew."""
    if run == 0 or name not in WORKLOADS or not WORKLOADS[name].file:
        return workload(name, folder, seed=1 + run)
    load = workload(name, folder)
    return load.with_trace(begin_later(load.trace, run / (1 + run)), None)


def begin_later(trace: Trace, share: float) -> Trace:
    """From this share of its span on, and then what came before it; sessions stay whole."""
    start_s = trace.arrival_s if trace.session is None else trace.start_s()
    gap_s = trace.span_s / max(1, len(trace) - 1)
    before = start_s < trace.arrival_s[0] + share * trace.span_s
    arrival_s = trace.arrival_s + before * (trace.span_s + gap_s)
    return trace.with_arrivals(arrival_s - arrival_s.min())


def measure_cell(cell: Cell) -> Row:
    """``FIGURES``. An arm that leaves requests for ever has an attainment of 0, and says why."""
    load = part_of(cell.workload, cell.folder, cell.run)
    trace = load.trace_at(cell.round.ladder.rate_per_s(cell.rung), cell.round.span_s)
    experiment = cell.arm.experiment(load.slo, load.profile, limit_tokens=client_limit_tokens(load.trace))
    try:
        run = run_experiment(experiment, trace)
    except SimError as error:
        return {ATTAINMENT: 0.0, "error": str(error)}
    figures = run.figures
    return {
        ATTAINMENT: figures.attainment,
        TTFT_P99_S: finite(figures.ttft_p99_s),
        TPOT_P99_S: finite(figures.tpot_p99_s),
        LATE: late_share(run.result.served, load.slo, LATE_TIMES),
        OFFERED: finite(offered_over_capacity(trace, load_profile(experiment.profile), instances=INSTANCES)),
    }


def finite(value: float) -> float | None:
    """None where it is no number, which JSON does not have."""
    return value if math.isfinite(value) else None


def worse_of(rows: Sequence[Row], figures: Sequence[str] = FIGURES) -> dict[str, float | None]:
    """Of several runs, by figure; None where one of them has none."""
    worse: dict[str, float | None] = {}
    for figure in figures:
        values = [row[figure] for row in rows if row.get(figure) is not None]
        worse[figure] = (min if figure == ATTAINMENT else max)(values) if len(values) == len(rows) else None
    return worse


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
        load = workload(name, self.folder)
        answer_s = float(load.trace.output_tokens.mean()) * load.slo.tpot_s if math.isfinite(load.slo.tpot_s) else 0.0
        this_round = this_round.lengthened(load.span_times, ANSWERS_A_SPAN * answer_s)

        def measure(pairs: Pairs, *, target: float) -> dict[tuple[FleetArm, int], float]:
            attainments = dict.fromkeys(pairs, 1.0)
            for run in range(this_round.runs):
                left = [pair for pair in attainments if attainments[pair] >= target]
                rows = self._measure([Cell(name, arm, this_round, rung, run, self.folder) for arm, rung in left])
                for pair, row in zip(left, rows, strict=True):
                    attainments[pair] = min(attainments[pair], row[ATTAINMENT])
            return attainments

        bounds = {target: self._bound(name, target, this_round) for target in TARGETS}
        return Course(this_round, measure, bounds, load.high_per_s)

    def _measure(self, cells: Sequence[Cell]) -> list[Row]:
        """Raises KeyboardInterrupt where it was interrupted."""
        rows: Mapping[str, Row] = {}
        with contextlib.suppress(NoStepError):  # interrupted: the limits of earlier searches are shown all the same
            rows = self.runner.run({cell.key: cell for cell in cells}, measure_cell)
        if not is_complete():
            raise KeyboardInterrupt
        return [rows[cell.key] for cell in cells]

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
            at_limits = self._at_limits(name, course, best[0], ours[target])
            limit = Limit(name, target, span_s, step, best, ours[target], finite(bound), course.high_per_s, at_limits)
            self.limits[name, target] = limit
            rates = f"{best[0].arm.name} {number(best[0].rate_per_s)}/s, {COMBINED} {number(ours[target])}/s"
            say(f"{name} at {target:.0%}: {rates}")

    def _at_limits(
        self, name: str, course: Course, best: HeldRate, ours_per_s: float | None
    ) -> dict[str, dict[str, float | None]]:
        """``FIGURES`` by the names of ``AT_LIMITS``, of those whose rate is known."""
        wanted = zip(AT_LIMITS, (best.arm, OURS, OURS), (best.rate_per_s, best.rate_per_s, ours_per_s), strict=True)
        cells = {
            what: [
                Cell(name, arm, course.round, course.rung_of(rate_per_s), run, self.folder)
                for run in range(course.round.runs)
            ]
            for what, arm, rate_per_s in wanted
            if rate_per_s is not None
        }
        if not cells:
            return {}
        self._measure([cell for of_what in cells.values() for cell in of_what])
        return {what: worse_of(self._measure(of_what)) for what, of_what in cells.items()}

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
            "runs": result.round.runs,
            "ran": result.ran,
            "left": left,
        }
        others = [known for known in self.rounds.get(name, []) if known["stage"] != stage]
        self.rounds[name] = sorted([*others, row], key=lambda known: STAGES.index(known["stage"]))

    def _bound(self, name: str, target: float, this_round: Round) -> float:
        """On what arrives at each rate, as the arms are measured; of the runs the least, as all have to hold."""
        loads = [part_of(name, self.folder, run) for run in range(this_round.runs)]
        profile = load_profile(OURS.experiment(loads[0].slo, loads[0].profile).profile)
        return min(
            upper_bound_over_span(
                functools.partial(load.trace_at, span_s=this_round.span_s),
                load.slo,
                profile,
                instances=INSTANCES,
                target=target,
                most_per_s=load.high_per_s,
            )
            for load in loads
        )


def figures_at(limits: Mapping[tuple[str, float], Limit], target: float) -> Row:
    """By workload, at one target."""
    chosen = {name: limit for (name, share), limit in limits.items() if share == target}
    ratio = geometric_mean_of_ratios(limits, target)
    at_limits = {name: limit.at_limits for name, limit in chosen.items() if limit.at_limits}
    return {
        "best_stock_rps": {name: limit.best.rate_per_s for name, limit in chosen.items()},
        "best_stock_arm": {name: limit.best.arm.name for name, limit in chosen.items()},
        "combined_rps": {name: limit.ours_per_s for name, limit in chosen.items()},
        "upper_bound_rps": {name: limit.upper_bound_per_s for name, limit in chosen.items()},
        "combined_vs_best_stock": {name: limit.ours_vs_stock for name, limit in chosen.items()},
        "combined_vs_best_stock_geomean": ratio,
        "span_s": {name: limit.span_s for name, limit in chosen.items()},
        "target": target,
        **(beside_rates(at_limits) if at_limits else {}),
    }


def beside_rates(at_limits: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> Row:
    """By figure, workload and the names of ``AT_LIMITS``; ``p99_..._vs_stock`` is ours over stock's, at its rate."""

    def ratio(figure: str, of: Mapping[str, Mapping[str, float | None]]) -> float | None:
        ours, stock = (of.get(what, {}).get(figure) for what in (OURS_AT_STOCK, STOCK))
        return None if ours is None or not stock else ours / stock

    figures = {
        figure: {name: {what: row[figure] for what, row in of.items()} for name, of in at_limits.items()}
        for figure in FIGURES
    }
    ratios = {
        key: {name: ratio(figure, of) for name, of in at_limits.items()}
        for key, figure in (("p99_ttft_vs_stock", TTFT_P99_S), ("p99_tpot_vs_stock", TPOT_P99_S))
    }
    return {**figures, **ratios}


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
            name if name in WORKLOADS and WORKLOADS[name].recorded else f"{name} (synthetic)",
            f"`{of_target['best_stock_arm'][name]}`",
            *map(number, rates),
            number(of_target["combined_vs_best_stock"][name], "x"),
            f"{of_target['span_s'][name]:g}",
        ]
        for name, rates in zip(names, shown, strict=True)
    ]
    return header, rows


def table_beside(of_target: Mapping[str, Any]) -> Cells:
    """A row a workload: both at stock's rate, and how much is offered at either's own."""
    header = [
        "workload",
        "in target: stock",
        "ours",
        "P99 TTFT, s: stock",
        "ours",
        "ours / stock",
        "P99 TPOT, ms: stock",
        "ours",
        f"later than {LATE_TIMES:g} x: stock",
        "ours",
        "at our own rate",
        "offered / capacity: stock's rate",
        "ours",
    ]
    rows = []
    for name, ratio in of_target["p99_ttft_vs_stock"].items():

        def cells(figure: str, *whats: str, name: str = name, times: float = 1.0, unit: str = "") -> list[str]:
            values = [of_target[figure][name].get(what) for what in whats]
            return [number(None if value is None else times * value, unit) for value in values]

        rows.append(
            [
                name,
                *cells(ATTAINMENT, STOCK, OURS_AT_STOCK, times=100, unit="%"),
                *cells(TTFT_P99_S, STOCK, OURS_AT_STOCK),
                number(ratio, "x"),
                *cells(TPOT_P99_S, STOCK, OURS_AT_STOCK, times=1e3),
                *cells(LATE, *AT_LIMITS, times=100, unit="%"),
                *cells(OFFERED, STOCK, OURS_AT_OWN),
            ]
        )
    return header, rows


def page(result: Result) -> str:
    parts = []
    for of_target in (result, result["at_99"]):
        mean = number(of_target["combined_vs_best_stock_geomean"])
        known = sum(ratio is not None for ratio in of_target["combined_vs_best_stock"].values())
        verdict = f"Geometric mean of the {known} ratios: {mean}." if known else "No run is long enough for a ratio."
        parts += [f"With {of_target['target']:.0%} in target:", markdown(*table(of_target), right=range(2, 7)), verdict]
        if OFFERED in of_target:
            parts += ["Both at the rate of stock's best arm:", markdown(*table_beside(of_target), right=True)]
    return "\n\n".join(parts)


def plot(by_target: Sequence[Row], path: Path) -> None:
    """A panel a target: rates over the upper bound, by workload; and below it how late the latest are."""
    colours = {BEST: STOCK_COLOUR, COMBINED: COLOURS[1]}
    known = [of_target for of_target in by_target if OFFERED in of_target]
    size = (11.0, 8.0 if known else 4.0)
    with panels(path, len(by_target) + len(known), size=size, columns=len(by_target)) as grid:
        for panel, of_target in zip(grid, by_target, strict=False):
            sources = {BEST: "best_stock_rps", COMBINED: "combined_rps"}
            bounds = {name: bound for name, bound in of_target["upper_bound_rps"].items() if bound is not None}
            groups = {
                name: {label: (of_target[key][name] or 0.0) / bound for label, key in sources.items()}
                for name, bound in bounds.items()
            }
            draw_bars(panel, groups, colours=colours, rotation=30)
            panel.set(title=f"{of_target['target']:.0%} in target", ylabel=f"rate over the {BOUND}", ylim=(0, 1))
        for panel, of_target in zip(grid[len(by_target) :], known, strict=True):
            groups = {
                name: {label: of_target[key][name] for label, key in P99_RATIOS.items() if of_target[key][name]}
                for name in of_target[OFFERED]
            }
            draw_bars(panel, groups, colours=dict(zip(P99_RATIOS, COLOURS[2:], strict=False)), rotation=30)
            panel.axhline(1.0, color="#222222", linewidth=0.8)
            panel.set(title=f"at stock's rate, {of_target['target']:.0%}", ylabel="ours over stock's")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cells.add_arguments(parser)
    parser.add_argument(
        "--workloads", help="names with commas between, unseen-SEED among them; default: all named ones that can be had"
    )
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
    parser.add_argument("--runs", default=",".join(str(each.runs) for each in ROUNDS), help="of a rate, by round")


def rounds_of(options: argparse.Namespace) -> list[Round]:
    """Raises ConfigError unless there are three numbers each."""
    columns = [text.split(",") for text in (options.spans_s, options.steps, options.keep, options.runs)]
    if {len(column) for column in columns} != {len(ROUNDS)}:
        raise ConfigError(f"--spans-s, --steps, --keep and --runs need {len(ROUNDS)} numbers each, got {columns}")
    try:
        return [
            Round(float(span_s), float(step), int(keep), int(runs))
            for span_s, step, keep, runs in zip(*columns, strict=True)
        ]
    except ValueError as error:
        raise ConfigError(f"--spans-s, --steps, --keep or --runs is not valid: {error}") from None


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
        if OFFERED in of_target:
            show("both at the rate of stock's best arm", *table_beside(of_target))
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
