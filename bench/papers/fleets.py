"""Beyond the papers: the combination against each single system, and what a forecast is worth (``bench/fleets``).

The fleet benches take long and have runs of their own; here they run over the systems alone, by interval alone. Cells
are kept under the names of those benches, so that cells of one serve the other.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from bench.fleets import forecast, policies
from bench.fleets.cells import Store, code_version
from bench.fleets.workloads import available
from bench.papers.charts import bars, draw
from bench.papers.context import Context
from bench.papers.finding import Claim, Finding, Row, number

NOT_PRINTED = "beyond the papers"
COMPARED = (*policies.SYSTEMS, policies.COMBINED)


def run(context: Context) -> Finding:
    with tempfile.TemporaryDirectory() as temporary:
        folder = context.scratch or Path(temporary)
        served = capacities(context, Store(folder / f"fleets_policies_{code_version()}.jsonl"))
        planned = forecasts(context, Store(folder / f"fleets_forecast_{code_version()}.jsonl"))
    ratios = policies.combined_vs_best_single(served)
    hours = forecast.forecast_gpu_hours(planned)
    rates = policies.figure_of(served, "capacity_per_s")
    candidates = [name for name in forecast.CANDIDATES if name in hours]
    return Finding(
        "fleets",
        "Beyond the papers: the combination, and forecasts",
        "bench/fleets, reduced: the first requests of each workload, the systems alone; forecasts by interval",
        [
            *[
                Row(f"{name}: combined / best single system", None, ratio, "", NOT_PRINTED)
                for name, ratio in ratios.items()
            ],
            *[
                Row(f"{trace}: GPU-hours at {forecast.MAIN_TARGET:.0%}, {name}", None, value, "h", NOT_PRINTED)
                for name in candidates
                for trace, value in hours[name].items()
            ],
        ],
        [
            Claim(f"{name}: the combination serves no less than the best single system", ratio >= 0.97, number(ratio))
            for name, ratio in ratios.items()
        ],
        [*({**row} for row in served), *({**row} for row in planned)],
        draw(
            [
                bars(
                    {name: {k: v or 0.0 for k, v in of.items()} for name, of in rates.items()}, y="requests/s at 90 %"
                ),
                bars({name: hours[name] for name in candidates}, y="GPU-hours"),
            ],
            "The combination, and forecasts",
        ),
        {"combined_vs_best_single": ratios, "forecast_gpu_hours": hours},
    )


def capacities(context: Context, store: Store) -> list[dict[str, Any]]:
    names = available(context.data)
    requests = context.pick(60, policies.REQUESTS, None)
    sizes = policies.Sizes(requests, context.pick(0.5, policies.TOLERANCE, 0.02), context.seed)
    total = len(names) * len(COMPARED)
    return policies.measure(
        context.data,
        sizes=sizes,
        workloads=context.pick(names[:1], names, names),
        policies=context.pick(COMPARED[-2:], COMPARED, COMPARED),
        figures=("capacity",),
        store=store,
        jobs=context.jobs,
        done=lambda key: context.progress(len(store.values), total),
    )


def forecasts(context: Context, store: Store) -> list[dict[str, Any]]:
    """Without recorded traces, the series that are generated."""
    limit = context.pick(12, forecast.INTERVALS, None)
    return forecast.measure(context.data, store=store, limit=limit, requests=0, jobs=context.jobs)
