"""``python -m bench fleets forecast``: does a forecast save GPU-hours at equal SLO attainment? (Dynamo issue #14238)

DOPD's controller plans every interval from a forecast of the load. Each forecaster gets the headroom (a factor on its
forecast) and the floor (instances that are always kept) with which it keeps the attainment target at the least cost;
then GPU-hours are compared. ``fixed`` is the smallest fleet that never changes, ``oracle`` knows the coming interval.
``_raw``: without DOPD's running correction of forecasts. The controller runs on counts by interval of traces that have
days or hours (``interval_plans.py``); on their requests it runs in ``python -m bench elastic_recorded``.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.harness.bench import is_complete
from bench.harness.figures import STOCK_COLOUR, draw_bars, panels
from bench.harness.report import emit, environment, show, stdout
from bench.harness.steps import Row
from bench.lab import cells
from bench.lab.cells import CellRunner, data_folder
from bench.lab.fleets import interval_plans
from bench.lab.fleets.interval_plans import Forecasts, History, cheapest, fixed_fleet, lower_bound_hours, planner_for
from bench.lab.fleets.load_series import LoadSeries, read_series
from bench.lab.fleets.tables import Table, mark_best
from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.common.arima import ArimaForecaster
from pla_sglang.policy.common.forecast import Forecaster, HoltWinters, HoltWintersKnobs, LastValue, RecentPeak
from pla_sglang.policy.common.load_meter import LoadSample
from pla_sglang.policy.registry import FORECASTERS as CANDIDATES  # what ``Setup.forecaster`` knows by name

BUSY_INSTANCES = 12.0  # the mean load keeps so many busy, so that one more or less is a matter of per cent
TARGETS = (0.95, 0.99)
MAIN_TARGET = 0.99
DAY_HOURS = 24
INTERVALS = 14 * DAY_HOURS  # by default, the last ones of each series
FORECASTERS: Mapping[str, tuple[Callable[[], Forecaster], bool]] = {  # with its maker: corrected as in the product?
    "last": (LastValue, True),
    "last_raw": (LastValue, False),
    "peak": (RecentPeak, True),
    "peak_raw": (RecentPeak, False),
    "holt_winters": (HoltWinters, True),
    "holt_winters_daily": (lambda: HoltWinters(HoltWintersKnobs(season=DAY_HOURS)), True),
    "arima": (ArimaForecaster, True),
    "arima_raw": (ArimaForecaster, False),
    "judged": (CANDIDATES["judged"], True),
}
ORACLE, FIXED = "oracle", "fixed"
MEASURED = (*FORECASTERS, ORACLE, FIXED)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One forecaster on one series; ``samples`` are scaled already."""

    trace: str
    forecaster: str
    interval_s: float
    samples: tuple[LoadSample, ...]


def cells_of(whole_series: Sequence[LoadSeries], limit: int | None) -> dict[str, Cell]:
    """By key. ``limit``: the last intervals of each series, None: all."""
    by_key = {}
    for load in (whole.last(limit) for whole in whole_series):
        samples = tuple(load.samples(planner_for(load.interval_s), BUSY_INSTANCES))
        for name in MEASURED:
            if name != "holt_winters_daily" or load.interval_s >= 3600:  # an hour has no days
                by_key[f"{load.name}/{name}/{limit}"] = Cell(load.name, name, load.interval_s, samples)
    return by_key


def measure_cell(cell: Cell) -> Row:
    """The cheapest setting by target, and the forecast's error."""
    history = History.of(cell.samples, cell.interval_s)
    if cell.forecaster == FIXED:
        error, bills = None, [fixed_fleet(history, target) for target in TARGETS]
    else:
        if cell.forecaster == ORACLE:
            expected = interval_plans.perfect(cell.samples)
        else:
            make, corrected = FORECASTERS[cell.forecaster]
            expected = interval_plans.forecasts(cell.samples, make, corrected=corrected)
        error = relative_error(cell.samples, expected)
        bills = [cheapest(history, expected, target) for target in TARGETS]
    by_target = {
        f"{target:g}": {**dataclasses.asdict(bill), "lower_bound_gpu_hours": lower_bound_hours(history, target)}
        for target, bill in zip(TARGETS, bills, strict=True)
    }
    return {"error": error, "by_target": by_target}


def relative_error(samples: Sequence[LoadSample], expected: Forecasts) -> float | None:
    """Sum of absolute errors of the arrival rate over the sum of the rates (WAPE); None without any forecast."""
    pairs = [
        (sample.rate_per_s, forecast.rate_per_s)
        for sample, forecast in zip(samples, expected, strict=False)
        if forecast is not None
    ]
    total = sum(actual for actual, _ in pairs)
    return sum(abs(actual - guess) for actual, guess in pairs) / total if total else None


def measure_forecasts(runner: CellRunner, folder: Path | None, *, limit: int | None) -> list[Row]:
    """Rows: trace, forecaster, target, gpu_hours, headroom, attainment, error."""
    cells_by_key = cells_of(read_series(folder), limit)
    return [
        {
            "trace": cells_by_key[key].trace,
            "forecaster": cells_by_key[key].forecaster,
            "target": float(target),
            "error": value["error"],
            **bill,
        }
        for key, value in runner.run(cells_by_key, measure_cell).items()
        for target, bill in value["by_target"].items()
    ]


def forecast_gpu_hours(rows: Sequence[Row], target: float = MAIN_TARGET) -> dict[str, dict[str, float]]:
    """Forecaster -> trace -> GPU-hours with ``target`` attainment kept.

    A forecaster that keeps it with no headroom at all has no entry for that trace.
    """
    hours: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["target"] == target and row["attainment"] >= target:
            hours.setdefault(row["forecaster"], {})[row["trace"]] = round(row["gpu_hours"], 4)
    return hours


def winner(rows: Sequence[Row], target: float = MAIN_TARGET) -> str:
    """The candidate with the least GPU-hours: least geometric mean over the traces.

    Where it does not keep the target, an operator would go back to the fixed fleet: those hours count.
    Raises ConfigError without any row of a candidate.
    """
    hours = forecast_gpu_hours(rows, target)
    fixed = hours.get(FIXED, {})
    known = sorted(name for name in CANDIDATES if name in hours)
    if not known or not fixed:
        raise ConfigError("no forecaster was measured beside the fixed fleet; nothing to choose from")
    return min(known, key=lambda name: statistics.geometric_mean((fixed | hours[name])[trace] for trace in fixed))


def hours_table(rows: Sequence[Row], target: float) -> Table:
    """GPU-hours by forecaster and trace; the least but the oracle's is bold."""

    def text(hours: float, trace: str) -> str:
        return f"{hours:,.1f}" if hours >= 10 else f"{hours:.3f}"

    return mark_best("forecaster", forecast_gpu_hours(rows, target), best=min, text=text, bound=ORACLE)


PAGES = {  # marker -> field that it shows, table
    "fleets-forecast_99": ("gpu_hours", lambda rows: hours_table(rows, 0.99)),
    "fleets-forecast_95": ("gpu_hours", lambda rows: hours_table(rows, 0.95)),
}


def plot_forecasts(by_forecaster: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Bars by trace, GPU-hours over those of the oracle: what not knowing the future costs."""
    oracle = by_forecaster.get(ORACLE, {})
    others = {name: by_trace for name, by_trace in by_forecaster.items() if name != ORACLE}
    groups = {
        trace: {name: by_trace[trace] / hours for name, by_trace in others.items() if trace in by_trace}
        for trace, hours in oracle.items()
    }
    title = "GPU-hours at equal attainment, by forecaster"
    with panels(path, size=(max(6.0, 1.7 * len(oracle)), 4.2), title=title) as (axes,):
        draw_bars(axes, groups, colours={FIXED: STOCK_COLOUR}, rotation=20)
        axes.axhline(1.0, color="#222222", linewidth=1)
        axes.set(yscale="log", ylabel="GPU-hours, oracle = 1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cells.add_arguments(parser)
    parser.add_argument("--intervals", type=int, default=INTERVALS, help="the last ones of each series")
    parser.add_argument("--full", action="store_true", help="all intervals")


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError, NoStepError."""
    about, folder = environment(), data_folder(options.data)
    limit = None if options.full else options.intervals
    runner = cells.make_runner(options, "fleets_forecast")
    rows = measure_forecasts(runner, folder, limit=limit)
    for target in TARGETS:
        show(f"GPU-hours with {target:.0%} of requests served in time", *hours_table(rows, target))
    hours = forecast_gpu_hours(rows)
    plot_forecasts(hours, options.out / "fleets_forecast.png")
    best = winner(rows) if is_complete() else None
    stdout.print(f"fewest GPU-hours at equal attainment: {best}")
    result = {
        "bench": "fleets.forecast",
        "forecast_gpu_hours": hours,
        "winner": best,
        "rows": rows,
        "intervals": limit,
        "environment": about,
    }
    emit(result, "fleets_forecast", options.out)
    return 0
