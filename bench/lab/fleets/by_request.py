"""Forecasters in the whole simulation: DOPD's dispatcher and controller on single requests of a recorded hour.

The hour runs ten times as fast, with the plan's interval and the start-up of instances a tenth of the usual: an hour's
shape with sixty plans in six minutes, for a fleet ten times as large.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.harness.steps import Row
from bench.lab.named_workloads import WORKLOADS, Workload, workload
from pla_sglang.policy.common.forecast import Forecaster, KnownSeries, LastValue
from pla_sglang.sim.core.experiment import Experiment, ExperimentResult, run_experiment

TRACES = ("azure_code", "azure_conv")
FORECASTERS = ("last", "peak", "holt_winters", "arima", "oracle")
SPEED = 10.0
INTERVAL_S, STARTUP_S = 60.0 / SPEED, 18.0 / SPEED
INSTANCES = 8
HEADROOMS = (0.7, 0.85, 1.0, 1.2, 1.5, 1.9, 2.4, 3.2, 4.5)
SEED = 1

MakeForecaster = Callable[[], Forecaster]


@dataclasses.dataclass(frozen=True)
class Cell:
    trace: str
    forecaster: str
    target: float
    folder: Path | None
    requests: int | None


def cells_of(folder: Path | None, requests: int | None, target: float) -> dict[str, Cell]:
    """By key; none without recorded traces."""
    return {
        f"request/{name}/{forecaster}/{requests}/{target:g}": Cell(name, forecaster, target, folder, requests)
        for name in TRACES
        if WORKLOADS[name].is_in(folder)
        for forecaster in FORECASTERS
    }


def measure_cell(cell: Cell) -> Row:
    """The cheapest of the headrooms that keep the target; without any, the one with the best attainment."""
    load = workload(cell.trace, cell.folder, cell.requests)
    known: list[Recorder] = []
    if cell.forecaster == "oracle":  # from a run with more than enough instances
        served = run_dopd(load, lambda: Recorder(known), 3.0).result.served
        assert math.isfinite(served.finish_s.sum()), "the reference run ends every request"
    curve = []
    for headroom in HEADROOMS:
        outcome = run_dopd(load, script_forecasters(known) if known else cell.forecaster, headroom)
        curve.append((headroom, outcome.result.gpu_hours, outcome.figures.attainment))
    kept = [tried for tried in curve if tried[2] >= cell.target]
    chosen = min(kept, key=lambda tried: tried[1]) if kept else max(curve, key=lambda tried: tried[2])
    return {
        "trace": cell.trace,
        "forecaster": cell.forecaster,
        "target": cell.target,
        **dict(zip(("headroom", "gpu_hours", "attainment"), chosen, strict=True)),
        "curve": curve,
    }


def run_dopd(load: Workload, forecaster: str | MakeForecaster, headroom: float) -> ExperimentResult:
    experiment = Experiment(
        "dopd",
        load.slo,
        instances=INSTANCES,
        rate_per_s=load.trace.rate_per_s * SPEED,
        plan_interval_s=INTERVAL_S,
        startup_s=STARTUP_S,
        headroom=headroom,
        forecaster=forecaster,
        seed=SEED,
    )
    return run_experiment(experiment, load.trace)


class Recorder(LastValue):
    """Keeps what the controller has added to one series; a run makes four of them and adds each to ``recorders``."""

    def __init__(self, recorders: list[Recorder]) -> None:
        super().__init__()
        self.values: list[float] = []
        recorders.append(self)

    def add(self, value: float) -> None:
        super().add(value)
        self.values.append(value)


def script_forecasters(recorders: Sequence[Recorder]) -> MakeForecaster:
    """Makes the four forecasters of one run, in the controller's order: input, output, concurrency, rate.

    Each knows the values that will be added to its series: those of a run with the same arrivals.
    """
    remaining = iter(recorders)

    def make() -> Forecaster:
        values = next(remaining).values
        return KnownSeries(lambda index: values[min(index, len(values) - 1)])

    return make
