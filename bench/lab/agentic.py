"""Recorded agent sessions: the highest rate of the best stock arm and of ours, their latencies, and how long jobs take.

In the simulator, 8 instances: sessions and stock arms of ``agent_sessions``. The arms race on a coarse ladder of rates
over ``--race-span-s``; the best ``--keep`` and ours are searched on the fine one over ``--span-s``, for 90, 95 and 99 %
of the requests in target. Rates are requests/s.

A rate is held where it is held with each of ``--seeds``: sessions in another order, at other Poisson starts. Figures of
several seeds are those of the worse one. Every run is kept in ``--out``: a run of the same code resumes. Nothing is
generated, so no token can be wrong: ``tokens_wrong`` is null.

``--live``: on emulated engines instead, at given rates (``agentic_live``); the flags under "live" are for that.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.bench import Result, is_complete, measuring
from bench.harness.figures import COLOURS, STOCK_COLOUR, draw_bars, panels
from bench.harness.report import Cells, emit, environment, markdown, number, say, show
from bench.harness.steps import NoStepError, Row
from bench.lab import agentic_live, cells
from bench.lab.agent_sessions import (
    ATTAINMENT,
    HIT_ERROR,
    HIT_RATE,
    JOB_P50_S,
    NAME,
    STOCK_ARMS,
    TTFT_P50_S,
    TTFT_P99_S,
    figures_of,
    sessions_of,
)
from bench.lab.cells import CellRunner, data_folder
from bench.lab.fleet_arms import INSTANCES, OURS, FleetArm, client_limit_tokens
from bench.lab.halving import Ladder, Place, race_arms, search_rungs
from pla_sglang.common.checks import require
from pla_sglang.sim.core.errors import SimError
from pla_sglang.sim.core.experiment import run_experiment
from pla_sglang.sim.metrics.goodput import LEAST_SPAN_S

TARGETS = (0.9, 0.95, 0.99)
RACED = 0.95  # of them: the arms race for it, and the figures beside the rates are at it
IDLE_PER_S = 0.5  # requests/s that leave the fleet nearly idle
FLAGS = ("span_s", "race_span_s", "step", "race_step", "low_per_s", "high_per_s", "start_per_s", "seeds", "keep")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run; its process reads the sessions itself.

    Attributes:
        rate_per_s: of requests.
        span_s: of arrivals.
        seed: of the starts of sessions.
    """

    arm: FleetArm
    rate_per_s: float
    span_s: float
    seed: int
    folder: Path | None

    @property
    def key(self) -> str:
        return f"{self.arm.name}/{self.span_s:g} s/{self.rate_per_s:.6g} per s/seed {self.seed}"


def measure_cell(cell: Cell) -> Row:
    """Its figures. An arm that leaves requests for ever has an attainment of 0, and says why."""
    load = sessions_of(cell.folder, cell.seed)
    trace = load.trace_at(cell.rate_per_s, cell.span_s)
    experiment = cell.arm.experiment(load.slo, load.profile, limit_tokens=client_limit_tokens(load.trace))
    try:
        run = run_experiment(experiment, trace)
    except SimError as error:
        return {ATTAINMENT: 0.0, "error": str(error)}
    return figures_of(run, trace)


def worse_of(rows: Sequence[Row], figure: str) -> float | None:
    """Of the runs of several seeds; None where one of them has none."""
    values = [row.get(figure) for row in rows]
    known = [value for value in values if value is not None]
    return (min if figure in (ATTAINMENT, HIT_RATE) else max)(known) if known and len(known) == len(values) else None


@dataclasses.dataclass
class Search:
    """The race, the rates and the rows so far: what an interruption leaves."""

    runner: CellRunner
    folder: Path | None
    options: argparse.Namespace
    race: list[Place[FleetArm]] = dataclasses.field(default_factory=list)
    rates: dict[float, dict[FleetArm, float | None]] = dataclasses.field(default_factory=dict)
    rows: dict[Cell, Row] = dataclasses.field(default_factory=dict)  # over ``--span-s``

    def go(self) -> None:
        """Raises KeyboardInterrupt where it was interrupted."""
        self.race_stock()
        arms = [place.arm for place in self.race[: self.options.keep]]
        for target in sorted(TARGETS, key=lambda target: target != RACED):  # what is asked for first
            self.search([*arms, OURS], target)
        beside = [self.best_stock, OURS]
        self.measure(beside, IDLE_PER_S)
        if (rate_per_s := self.rates[RACED][self.best_stock]) is not None:
            self.measure(beside, rate_per_s)

    @property
    def best_stock(self) -> FleetArm:
        """At the target of the race; of equal ones that which raced better."""
        rates = {arm: rate_per_s for arm, rate_per_s in self.rates[RACED].items() if arm != OURS}
        return max(rates, key=lambda arm: rates[arm] or 0.0)

    def race_stock(self) -> None:
        """On the coarse ladder, with the first seed."""
        options, ladder = self.options, Ladder(self.options.race_step)

        def measure(pairs: Sequence[tuple[FleetArm, int]]) -> dict[tuple[FleetArm, int], float]:
            cell_of = {
                (arm, rung): Cell(arm, ladder.rate_per_s(rung), options.race_span_s, 1, self.folder)
                for arm, rung in pairs
            }
            rows = self._measure(list(cell_of.values()))
            return {pair: rows[cell][ATTAINMENT] for pair, cell in cell_of.items()}

        start = ladder.rung_of(options.start_per_s)
        self.race = race_arms(STOCK_ARMS, measure, start_rung=start, target=RACED, keep=options.keep)

    def search(self, arms: Sequence[FleetArm], target: float) -> None:
        """The rate of each arm, from the one at which the best of the race was held."""
        options, ladder = self.options, Ladder(self.options.step)

        def measure(pairs: Sequence[tuple[FleetArm, int]]) -> dict[tuple[FleetArm, int], float]:
            attainments = dict.fromkeys(pairs, 1.0)
            for seed in self.seeds:  # a miss with one of them is a miss
                left = [pair for pair, attainment in attainments.items() if attainment >= target]
                cell_of = {(arm, rung): self._cell(arm, ladder.rate_per_s(rung), seed) for arm, rung in left}
                self.rows |= (rows := self._measure(list(cell_of.values())))
                for pair, cell in cell_of.items():
                    attainments[pair] = min(attainments[pair], rows[cell][ATTAINMENT])
            return attainments

        held = self.race[0].held_rung
        known_per_s = options.start_per_s if held is None else Ladder(options.race_step).rate_per_s(held)
        lowest, failed = (ladder.rung_of(rate_per_s) for rate_per_s in (options.low_per_s, options.high_per_s))
        starts = dict.fromkeys(arms, ladder.rung_of(known_per_s))
        found = search_rungs(starts, measure, target=target, lowest=lowest, failed=failed)
        self.rates[target] = {arm: None if rung is None else ladder.rate_per_s(rung) for arm, rung in found.items()}
        say(f"{target:.0%}: " + ", ".join(f"{arm.name} {number(rate)}/s" for arm, rate in self.rates[target].items()))

    def measure(self, arms: Sequence[FleetArm], rate_per_s: float) -> None:
        """With all seeds."""
        self.rows |= self._measure([self._cell(arm, rate_per_s, seed) for arm in arms for seed in self.seeds])

    def rows_at(self, arm: FleetArm, rate_per_s: float | None) -> list[Row]:
        """By seed; empty unless all have run."""
        wanted = [] if rate_per_s is None else [self._cell(arm, rate_per_s, seed) for seed in self.seeds]
        return [self.rows[cell] for cell in wanted] if all(cell in self.rows for cell in wanted) else []

    @property
    def seeds(self) -> range:
        return range(1, self.options.seeds + 1)

    def _cell(self, arm: FleetArm, rate_per_s: float, seed: int) -> Cell:
        return Cell(arm, rate_per_s, self.options.span_s, seed, self.folder)

    def _measure(self, wanted: Sequence[Cell]) -> dict[Cell, Row]:
        """Raises KeyboardInterrupt where it was interrupted."""
        rows: Mapping[str, Row] = {}
        with contextlib.suppress(NoStepError):  # interrupted: what was found before is shown all the same
            rows = self.runner.run({cell.key: cell for cell in wanted}, measure_cell)
        if not is_complete():
            raise KeyboardInterrupt
        return {cell: rows[cell.key] for cell in wanted}


# -- result ------------------------------------------------------------------------------------------------------------


def sum_up(search: Search) -> Row:
    """Raises NoStepError without a rate for the target of the race."""
    if RACED not in search.rates:
        raise NoStepError("no rate is known yet; what was measured is kept")
    stock, rates, options = search.best_stock, search.rates[RACED], search.options
    stock_per_s, sides = rates[stock], {"stock": stock, "ours": OURS}
    at_stock = {side: search.rows_at(arm, stock_per_s) for side, arm in sides.items()}
    idle = {side: search.rows_at(arm, IDLE_PER_S) for side, arm in sides.items()}
    rows = [
        {"arm": cell.arm.name, "rate_per_s": cell.rate_per_s, "seed": cell.seed, **row}
        for cell, row in sorted(search.rows.items(), key=lambda item: (item[0].arm.name, item[0].rate_per_s))
    ]
    return {
        "sessions": len(sessions_of(search.folder, 1).trace.session_starts()),
        **{
            f"rate_at_{100 * target:.0f}": {arm.name: rate for arm, rate in of.items()}
            for target, of in sorted(search.rates.items())
        },
        "best_stock": stock.name,
        "vs_best_stock": ratio_of_rates(rates[OURS], stock_per_s, options),
        "job_time_p50_ratio": job_ratio(at_stock["ours"], at_stock["stock"]),
        "hit_rate": {side: worse_of(of, HIT_RATE) for side, of in at_stock.items()},
        "predicted_hit_error": {side: worse_of(of, HIT_ERROR) for side, of in at_stock.items()},
        "at_stock": {
            side: {figure: worse_of(of, figure) for figure in (ATTAINMENT, TTFT_P50_S, TTFT_P99_S)}
            for side, of in at_stock.items()
        },
        "tokens_wrong": None,
        "idle": {"rate_per_s": IDLE_PER_S}
        | {
            side: {figure: worse_of(of, figure) for figure in (TTFT_P50_S, TTFT_P99_S, ATTAINMENT)}
            for side, of in idle.items()
        },
        "race": [
            {"arm": place.arm.name, "held_rung": place.held_rung, "attainment": place.attainment}
            for place in search.race
        ],
        "rows": rows,
    }


def ratio_of_rates(ours: float | None, stock: float | None, options: argparse.Namespace) -> float | None:
    """None for short spans, and where a search ended at a bound."""
    highest = options.high_per_s / options.step**1.5
    if ours is None or stock is None or options.span_s < LEAST_SPAN_S or max(ours, stock) >= highest:
        return None
    return ours / stock


def job_ratio(ours: Sequence[Row], stock: Sequence[Row]) -> float | None:
    """Ours over stock's with the same sessions: the larger of the seeds. None where a run has no job time."""
    pairs = [(one.get(JOB_P50_S), other.get(JOB_P50_S)) for one, other in zip(ours, stock, strict=False)]
    ratios = [one / other for one, other in pairs if one is not None and other]
    return max(ratios) if ratios and len(ratios) == len(pairs) else None


def table(result: Result) -> Cells:
    """The best stock arm and ours: rates, then figures."""
    header = ["arm", *(f"{100 * target:.0f} %, requests/s" for target in TARGETS)]
    header += [f"TTFT p50 at {IDLE_PER_S:g}/s, s", "p99, s", "hit rate at stock's rate", "predicted hit error"]
    rows = []
    for side, name in (("stock", result["best_stock"]), ("ours", OURS.name)):
        rates = [result.get(f"rate_at_{100 * target:.0f}", {}).get(name) for target in TARGETS]
        values = [*rates, result["idle"][side][TTFT_P50_S], result["idle"][side][TTFT_P99_S]]
        values += [result["hit_rate"][side], result["predicted_hit_error"][side]]
        rows.append([f"`{name}`", *map(number, values)])
    return header, rows


def page(result: Result) -> str:
    ratios = [number(result[key], "x") for key in ("vs_best_stock", "job_time_p50_ratio")]
    first = f"At 95 % ours / stock: {ratios[0]}. Median job time at stock's rate, ours / stock: {ratios[1]}."
    conditions = (
        f"{result['sessions']} sessions, {result['instances']} instances, {result['span_s']:g} s of arrivals, "
        f"steps of {result['step']:g}, {result['seeds']} seeds, commit {result['environment']['plugin_commit']}."
    )
    return "\n\n".join([markdown(*table(result), right=True), first, conditions])


PAGES = {NAME: page, agentic_live.NAME: agentic_live.page}


def plot(result: Result, path: Path) -> None:
    """Rates by target and arm, and P99 of TTFT over the rate: at each the worse of its seeds."""
    names = [result["best_stock"], OURS.name]
    colours = dict(zip(names, (STOCK_COLOUR, COLOURS[0]), strict=True))
    groups = {
        f"{100 * target:.0f} %": {name: of[name] or 0.0 for name in of}
        for target in TARGETS
        if (of := result.get(f"rate_at_{100 * target:.0f}"))
    }
    others = [name for of in groups.values() for name in of if name not in colours]
    with panels(path, 2, size=(12.0, 4.5), title="recorded agent sessions") as (bars, curve):
        draw_bars(bars, groups, colours=colours | dict(zip(dict.fromkeys(others), COLOURS[1:], strict=False)))
        bars.set(ylabel="requests/s", xlabel="share of requests in target")
        for name in names:
            worst: dict[float, float] = {}
            for row in result["rows"]:
                if row["arm"] == name and row.get(TTFT_P99_S) is not None:
                    rate_per_s = row["rate_per_s"]
                    worst[rate_per_s] = max(worst.get(rate_per_s, 0.0), row[TTFT_P99_S])
            curve.plot(sorted(worst), [worst[rate] for rate in sorted(worst)], "o-", color=colours[name], label=name)
        curve.set(xlabel="requests/s", ylabel="P99 TTFT, s", yscale="log")
        curve.grid(alpha=0.3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cells.add_arguments(parser)
    parser.add_argument("--span-s", type=float, default=6000.0, help="of arrivals")
    parser.add_argument("--race-span-s", type=float, default=3000.0, help="of arrivals, while the stock arms race")
    parser.add_argument("--step", type=float, default=1.05, help="from one rate to the next")
    parser.add_argument("--race-step", type=float, default=1.25, help="the same, while the stock arms race")
    parser.add_argument("--low-per-s", type=float, default=0.25, help="lowest rate, requests/s")
    parser.add_argument("--high-per-s", type=float, default=6.0, help="a rate that no arm keeps, requests/s")
    parser.add_argument("--start-per-s", type=float, default=1.0, help="where the race begins, requests/s")
    parser.add_argument("--seeds", type=int, default=2, help="of the starts of sessions; a rate is held with all")
    parser.add_argument("--keep", type=int, default=2, help="stock arms that are searched after the race")
    parser.add_argument("--live", action="store_true", help="emulated engines instead of the simulator")
    agentic_live.add_arguments(parser.add_argument_group("live"))


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError, NoStepError; live ServerError too."""
    if options.live:
        return agentic_live.run(options)
    for flag, least in (("seeds", 1), ("keep", 1)):
        require(f"--{flag}", getattr(options, flag), least)
    for flag in ("span_s", "race_span_s", "low_per_s", "start_per_s"):
        require(f"--{flag.replace('_', '-')}", getattr(options, flag), 0, above=True)
    require("--high-per-s", options.high_per_s, options.low_per_s * options.step, above=True)
    about, folder = environment(), data_folder(options.data)
    sessions_of(folder, 1)  # a folder without the sessions is an error at once
    search = Search(cells.make_runner(options, NAME), folder, options)
    with measuring():
        search.go()
    result: dict[str, Any] = {
        "bench": NAME,
        **sum_up(search),
        "instances": INSTANCES,
        **{flag: getattr(options, flag) for flag in FLAGS},
        "environment": about,
    }
    show("recorded agent sessions", *table(result))
    plot(result, options.out / f"{NAME}.png")
    emit(result, NAME, options.out)
    return 0
