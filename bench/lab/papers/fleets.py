"""Beyond the papers: the combination against each single system, and what a forecast is worth.

The benches of ``bench/lab/fleets`` take long and have runs of their own; here they run over the systems alone, by
interval alone. Cells are kept under the names of those benches, so that cells of one serve the other.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

from bench.harness.steps import Row as Cell
from bench.harness.steps import Steps
from bench.lab.cells import CellRunner
from bench.lab.fleets import forecast, policies
from bench.lab.named_workloads import FLEET_WORKLOADS, available
from bench.lab.papers.charts import bars, draw
from bench.lab.papers.context import Context
from bench.lab.papers.finding import Claim, Finding, Row, number

POLICIES, FORECASTS = "fleets_policies", "fleets_forecast"  # names of their cells' files
NOT_PRINTED = "beyond the papers"
COMPARED = (*policies.SYSTEMS, policies.COMBINED)


def run(context: Context) -> Finding:
    with tempfile.TemporaryDirectory() as temporary:
        folder = context.scratch or Path(temporary)
        served, planned = (  # one after the other: each has processes of its own
            context.measure(measure_table, [table], folder=folder, context=context)[table]
            for table in (POLICIES, FORECASTS)
        )
    ratios = policies.combined_vs_best_single(served)
    hours = forecast.forecast_gpu_hours(planned)
    shown_hours = {name: hours[name] for name in forecast.CANDIDATES if name in hours}
    rates = {
        name: {policy: rate or 0.0 for policy, rate in by_policy.items()}
        for name, by_policy in policies.figure_of(served, "capacity_per_s").items()
    }
    panels = [bars(rates, y="requests/s at 90 %"), bars(shown_hours, y="GPU-hours")]
    rows = [Row(f"{of}: combined / best single system", None, ratio, "", NOT_PRINTED) for of, ratio in ratios.items()]
    rows += [
        Row(f"{trace}: GPU-hours at {forecast.MAIN_TARGET:.0%}, {name}", None, value, "h", NOT_PRINTED)
        for name, by_trace in shown_hours.items()
        for trace, value in by_trace.items()
    ]
    claims = [
        Claim(f"{name}: the combination serves no less than the best single system", ratio >= 0.97, number(ratio))
        for name, ratio in ratios.items()
    ]
    setting = "bench/fleets, reduced: the first requests of each workload, the systems alone; forecasts by interval"
    picture = draw(panels, "The combination, and forecasts")
    keys = {"combined_vs_best_single": ratios, "forecast_gpu_hours": hours}
    return Finding(setting, rows, claims, [*served, *planned], picture, keys)


def measure_table(table: str, *, folder: Path, context: Context) -> list[Cell]:
    """Without recorded traces, forecasts are of the series that are generated."""
    kept = folder / f"{table}.steps.jsonl"
    if table == POLICIES:
        return capacities(context, kept)
    limit = context.pick(12, forecast.INTERVALS, None)
    return forecast.measure_forecasts(CellRunner(Steps(kept), context.jobs), context.data, limit=limit)


def capacities(context: Context, kept: Path) -> list[Cell]:
    names = available(context.data, FLEET_WORKLOADS)[: context.pick(1, None, None)]
    systems = context.pick(COMPARED[-2:], COMPARED, COMPARED)
    total, count = len(names) * len(systems), itertools.count(1)
    sizes = context.pick(
        policies.Sizes(60, 0.5, context.seed),
        policies.Sizes(seed=context.seed),
        policies.Sizes(None, policies.FULL_TOLERANCE, context.seed, full=True),
    )
    return policies.measure_policies(
        CellRunner(Steps(kept), context.jobs, lambda cell: context.progress(next(count), total)),
        context.data,
        sizes=sizes,
        workloads=names,
        policies=systems,
        figures=("capacity",),
    )
