"""Forecasters in the whole simulation: DOPD's dispatcher and controller on single requests of a recorded hour.

The hour runs ten times as fast, with the plan's interval and the start-up of instances a tenth of the usual: an hour's
shape with sixty plans in six minutes, for a fleet ten times as large.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.fleets.workloads import RECORDED, Workload, workload
from pla_sglang.metrics.goodput import Served
from pla_sglang.policy.dopd.forecast import Forecaster, Oracle
from pla_sglang.sim.experiment import Experiment, Outcome, run_experiment

TRACES = ("azure_code", "azure_conv")
FORECASTERS = ("last", "peak", "holt_winters", "arima", "oracle")
SPEED = 10.0
INTERVAL_S, STARTUP_S = 60.0 / SPEED, 18.0 / SPEED
INSTANCES = 8
HEADROOMS = (0.7, 0.85, 1.0, 1.2, 1.5, 1.9, 2.4, 3.2, 4.5)
SEED = 1


@dataclasses.dataclass(frozen=True)
class Cell:
    trace: str
    forecaster: str
    target: float
    folder: Path
    requests: int | None


class Scripted:
    """Makes the four forecasters of one run, in the controller's order: input, output, concurrency, rate.

    Each knows the values that will be added to its series; ``rows`` are those of a run with the same arrivals.
    """

    def __init__(self, rows: list[npt.NDArray[np.float64]]) -> None:
        self._rows = iter(rows)

    def __call__(self) -> Forecaster:
        values = next(self._rows)
        return Oracle(lambda index: float(values[min(index, len(values) - 1)]))


def known_future(served: Served, input_tokens: npt.NDArray[np.int64]) -> list[npt.NDArray[np.float64]]:
    """The four series as the controller's meter will see them, from a run that is over.

    Means of lengths only of intervals that have any: the controller adds no others.
    """
    arrived = (served.arrival_s // INTERVAL_S).astype(np.int64)
    ended = (served.finish_s // INTERVAL_S).astype(np.int64)
    count = int(max(arrived.max(), ended.max())) + 1
    edges = np.arange(count + 1) * INTERVAL_S
    # requests in the system over time, integrated: each adds min(finish, edge) - min(arrival, edge)
    area = [float((np.minimum(served.finish_s, edge) - np.minimum(served.arrival_s, edge)).sum()) for edge in edges]
    return [
        _means(arrived, input_tokens, count),
        _means(ended, served.output_tokens, count),
        np.diff(area) / INTERVAL_S,
        np.bincount(arrived, minlength=count) / INTERVAL_S,
    ]


def _means(index: npt.NDArray[np.int64], values: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.float64]:
    sizes = np.bincount(index, minlength=count)
    return (np.bincount(index, weights=values, minlength=count)[sizes > 0] / sizes[sizes > 0]).astype(np.float64)


def cells_of(folder: Path | None, requests: int | None, target: float) -> dict[str, Cell]:
    """By key; none without recorded traces."""
    found = [name for name in TRACES if folder is not None and (folder / RECORDED[name].file).is_file()]
    return {
        f"request/{name}/{forecaster}/{requests}/{target:g}": Cell(name, forecaster, target, folder, requests)
        for name in found
        for forecaster in FORECASTERS
        if folder is not None
    }


def measure_cell(cell: Cell) -> dict[str, Any]:
    """The cheapest of the headrooms that keep the target; without any, the one with the best attainment."""
    found = workload(cell.trace, cell.folder, cell.requests)
    make = _maker(cell.forecaster, found)
    tried = [(headroom, run(found, make(), headroom)) for headroom in HEADROOMS]
    kept = [one for one in tried if one[1].figures.attainment >= cell.target]
    best = max(tried, key=lambda one: one[1].figures.attainment)
    headroom, outcome = min(kept, key=lambda one: one[1].result.gpu_hours) if kept else best
    return {
        "trace": cell.trace,
        "forecaster": cell.forecaster,
        "target": cell.target,
        "headroom": headroom,
        "gpu_hours": outcome.result.gpu_hours,
        "attainment": outcome.figures.attainment,
        "curve": [[h, one.result.gpu_hours, one.figures.attainment] for h, one in tried],
    }


def _maker(forecaster: str, found: Workload) -> Callable[[], str | Callable[[], Forecaster]]:
    if forecaster != "oracle":
        return lambda: forecaster
    reference = run(found, "last", 3.0)
    served = reference.result.served
    assert math.isfinite(served.finish_s.sum()), "the reference run ends every request"
    rows = known_future(served, found.trace.input_tokens)
    return lambda: Scripted(rows)


def run(found: Workload, forecaster: str | Callable[[], Forecaster], headroom: float) -> Outcome:
    experiment = Experiment(
        "dopd",
        found.slo,
        instances=INSTANCES,
        rate_per_s=found.trace.rate_per_s * SPEED,
        plan_interval_s=INTERVAL_S,
        startup_s=STARTUP_S,
        headroom=headroom,
        forecaster=forecaster,
        seed=SEED,
    )
    return run_experiment(experiment, found.trace)
