"""``python -m bench.fleets.forecast``: does a forecast save GPU-hours at equal SLO attainment? (Dynamo issue #14238)

DOPD's controller plans every interval from a forecast of the load. Each forecaster gets the headroom (a factor on its
forecast) and the floor (instances that are always kept) with which it keeps the attainment target at the least cost;
then GPU-hours are compared. ``fixed`` is the smallest fleet that never changes, ``oracle`` knows the coming interval.
``_raw``: without DOPD's running correction of forecasts. Two levels:

* by interval, for traces with days or hours: the controller itself on recorded counts (``planning.py``);
* by request, for two of the hours: the whole simulation, policy ``dopd``, ten times as fast (``by_request.py``).

For other benches: ``measure(folder, ...)`` gives the rows, ``forecast_gpu_hours(rows)`` the GPU-hours by forecaster and
trace, ``winner(rows)`` the forecaster that the planner should use.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench.fleets import by_request
from bench.fleets.cells import Store, code_version, fill
from bench.fleets.picture import forecast_picture
from bench.fleets.planning import History, Setting, cheapest, fixed_fleet, forecasts, perfect, planner_for
from bench.fleets.series import LoadSeries, series
from bench.fleets.workloads import data_folder
from bench.lib.report import emit, environment, progress_bar, say, stdout
from pla_sglang.errors import ConfigError
from pla_sglang.policy.dopd.arima import ArimaForecaster
from pla_sglang.policy.dopd.forecast import Forecaster, HoltWinters, HoltWintersKnobs, LastValue, RecentPeak
from pla_sglang.policy.dopd.load import LoadSample
from pla_sglang.policy.registry import FORECASTERS as REGISTERED

BUSY_INSTANCES = 12.0  # the mean load keeps so many busy, so that one more or less is a matter of per cent
TARGETS = (0.95, 0.99)
MAIN_TARGET = 0.99
REQUEST_TARGET = 0.95
DAY_HOURS = 24
INTERVALS = 14 * DAY_HOURS  # by default, the last ones of each series

Row = dict[str, Any]  # level, trace, forecaster, target, gpu_hours, headroom, attainment, error


def daily() -> HoltWinters:
    """With a season of a day, for hourly series."""
    return HoltWinters(HoltWintersKnobs(season=DAY_HOURS))


FORECASTERS: Mapping[str, tuple[Callable[[], Forecaster], bool]] = {  # with its maker: corrected as in the product?
    "last": (LastValue, True),
    "last_raw": (LastValue, False),
    "peak": (RecentPeak, True),
    "peak_raw": (RecentPeak, False),
    "holt_winters": (HoltWinters, True),
    "holt_winters_daily": (daily, True),
    "arima": (ArimaForecaster, True),
    "arima_raw": (ArimaForecaster, False),
}
ORACLE, FIXED = "oracle", "fixed"
CANDIDATES = REGISTERED  # what ``Setup.forecaster`` knows by name


@dataclasses.dataclass(frozen=True)
class Cell:
    """One forecaster on one series; ``samples`` are scaled already."""

    trace: str
    forecaster: str
    interval_s: float
    samples: tuple[LoadSample, ...]


def measure_cell(cell: Cell) -> dict[str, Any]:
    """The cheapest setting by target, and the forecast's error."""
    history = History.of(cell.samples, cell.interval_s)
    if cell.forecaster == FIXED:
        fixed = {target: fixed_fleet(history, target) for target in TARGETS}
        return {"error": None, "by_target": {f"{t:g}": _told(Setting(0.0, n, bill)) for t, (bill, n) in fixed.items()}}
    if cell.forecaster == ORACLE:
        expected = perfect(cell.samples)
    else:
        make, corrected = FORECASTERS[cell.forecaster]
        expected = forecasts(cell.samples, make, corrected=corrected)
    found = {f"{target:g}": _told(cheapest(history, expected, target)) for target in TARGETS}
    return {"error": relative_error(cell.samples, expected), "by_target": found}


def _told(setting: Setting) -> dict[str, Any]:
    return {"headroom": round(setting.headroom, 3), "floor": setting.floor, **dataclasses.asdict(setting.bill)}


def relative_error(samples: Sequence[LoadSample], expected: Sequence[LoadSample | None]) -> float | None:
    """Sum of absolute errors of the arrival rate over the sum of the rates (WAPE); None without any forecast."""
    pairs = [
        (sample.rate_per_s, one.rate_per_s) for sample, one in zip(samples, expected, strict=False) if one is not None
    ]
    total = sum(actual for actual, _ in pairs)
    return sum(abs(actual - guess) for actual, guess in pairs) / total if total else None


def cells_of(found: Sequence[LoadSeries], names: Sequence[str], limit: int | None) -> dict[str, Cell]:
    """By key. ``limit``: the last intervals of each series, None: all."""
    cells = {}
    for one in (whole.last(limit) for whole in found):
        planner = planner_for(one.interval_s)
        samples = tuple(one.samples(planner, BUSY_INSTANCES))
        for name in names:
            if name == "holt_winters_daily" and one.interval_s < 3600:
                continue  # an hour has no days
            cells[f"{one.name}/{name}/{limit}"] = Cell(one.name, name, one.interval_s, samples)
    return cells


def measure(
    folder: Path | None,
    *,
    store: Store,
    names: Sequence[str] = (*FORECASTERS, ORACLE, FIXED),
    limit: int | None = None,
    requests: int | None = 0,
    jobs: int = 1,
    done: Callable[[str], None] = lambda key: None,
) -> list[Row]:
    """Rows of both levels. ``requests``: of each simulated hour at most; 0: no simulation, None: whole hours."""
    cells = cells_of(series(folder), names, limit)
    values = fill(cells, measure_cell, store, jobs=jobs, done=done)
    rows = [
        {
            "level": "interval",
            "trace": cell.trace,
            "forecaster": cell.forecaster,
            "target": float(target),
            "error": values[key]["error"],
            **bill,
        }
        for key, cell in cells.items()
        for target, bill in values[key]["by_target"].items()
    ]
    if requests != 0:
        simulated = by_request.cells_of(folder, requests, REQUEST_TARGET)
        found = fill(simulated, by_request.measure_cell, store, jobs=jobs, done=done)
        rows += [{"level": "request", "error": None, **found[key]} for key in simulated]
    return rows


def forecast_gpu_hours(rows: Sequence[Row], target: float = MAIN_TARGET) -> dict[str, dict[str, float]]:
    """Forecaster -> trace -> GPU-hours with ``target`` attainment kept (by request: with ``REQUEST_TARGET``).

    A forecaster that keeps it with no headroom at all has no entry for that trace.
    """
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        wanted = target if row["level"] == "interval" else row["target"]
        if row["target"] == wanted and row["attainment"] >= wanted:
            found.setdefault(row["forecaster"], {})[row["trace"]] = round(row["gpu_hours"], 4)
    return found


def winner(rows: Sequence[Row], target: float = MAIN_TARGET) -> str:
    """The candidate with the least GPU-hours by interval: least geometric mean over the traces.

    Where it does not keep the target, an operator would go back to the fixed fleet: those hours count.
    Raises ConfigError without any row of a candidate.
    """
    hours = forecast_gpu_hours([row for row in rows if row["level"] == "interval"], target)
    fixed = hours.get(FIXED, {})
    known = [name for name in CANDIDATES if name in hours]
    if not known or not fixed:
        raise ConfigError("no forecaster was measured beside the fixed fleet; nothing to choose from")

    def mean_log(name: str) -> float:
        return float(np.mean([math.log(hours[name].get(trace, fixed[trace])) for trace in fixed]))

    return min(known, key=lambda name: (mean_log(name), name))


def print_table(rows: Sequence[Row], target: float) -> None:
    hours = forecast_gpu_hours(rows, target)
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    shown = Table(title=f"GPU-hours with {target:.0%} of requests served in time", title_justify="left")
    for name in ("forecaster", *traces):
        shown.add_column(name, justify="right")
    for name, by_trace in hours.items():
        shown.add_row(name, *(f"{by_trace[trace]:.1f}" if trace in by_trace else "-" for trace in traces))
    stdout.print(shown)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.fleets.forecast", description=(__doc__ or "").split("\n\n")[0])
    made.add_argument("--data", type=Path, help="folder with recorded traces (docs/fleets.md)")
    made.add_argument("--requests", type=int, default=3000, help="of each simulated hour at most; 0: no simulation")
    made.add_argument("--intervals", type=int, default=INTERVALS, help="the last ones of each series")
    made.add_argument("--full", action="store_true", help="all intervals and all requests")
    made.add_argument("--jobs", type=int, default=1, help="processes")
    made.add_argument("--fresh", action="store_true", help="measure again what an earlier run of this code has found")
    made.add_argument("--out", type=Path, default=Path("bench_out"))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2 for a bad value."""
    args = parser().parse_args(argv)
    about = environment()
    limit, requests = (None, None) if args.full else (args.intervals, args.requests)
    try:
        folder = data_folder(args.data)
        store = Store(args.out / f"fleets_forecast_{code_version()}.jsonl", fresh=args.fresh)
        total = len(cells_of(series(folder), (*FORECASTERS, ORACLE, FIXED), limit))
        with progress_bar("forecasters", total) as advance:

            def done(key: str) -> None:
                advance()
                say(key)

            rows = measure(folder, store=store, limit=limit, requests=requests, jobs=args.jobs, done=done)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for target in TARGETS:
        print_table(rows, target)
    forecast_picture(forecast_gpu_hours(rows), args.out / "fleets_forecast.png")
    best = winner(rows)
    stdout.print(f"fewest GPU-hours at equal attainment: {best}")
    result = {
        "bench": "fleets.forecast",
        "forecast_gpu_hours": forecast_gpu_hours(rows),
        "winner": best,
        "rows": rows,
        "intervals": limit,
        "requests": requests,
        "seed": by_request.SEED,
        "environment": about,
    }
    emit(result, args.out, "fleets_forecast")
    return 0


if __name__ == "__main__":
    sys.exit(main())
