"""``python -m bench.fleets.publish bench_out``: the tables of docs/fleets.md from the results of the fleet benches.

What stands between ``<!-- fleets:NAME -->`` and ``<!-- /fleets:NAME -->`` is replaced. Results and pictures are copied
to ``bench/results/simulated``, so that every figure on the page can be looked up.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.fleets.forecast import forecast_gpu_hours
from bench.fleets.policies import combined_vs_best_single, figure_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "fleets.md"
RESULTS = ROOT / "bench" / "results" / "simulated"
Result = Mapping[str, Any]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; all columns but the first to the right."""
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def policies(result: Result, figure: str, *, most: bool) -> str:
    """A row a policy, a column a workload; the best of a column is bold."""
    found = figure_of(result["rows"], figure)
    choose = max if most else min
    best = {
        name: choose((value for value in by_policy.values() if value is not None), default=None)
        for name, by_policy in found.items()
    }

    def cell(name: str, policy: str) -> str:
        value = found[name].get(policy)
        text = "-" if value is None else f"{value:.3g}"
        return f"**{text}**" if value is not None and value == best[name] else text

    names = dict.fromkeys(row["policy"] for row in result["rows"])
    return table(["policy", *found], [[f"`{policy}`", *(cell(name, policy) for name in found)] for policy in names])


def ratios(result: Result) -> str:
    found = combined_vs_best_single(result["rows"])
    return table(["", *found], [["`combined` / best single system", *(f"{value:.3f}" for value in found.values())]])


def forecasts(result: Result, target: float) -> str:
    """GPU-hours by forecaster and trace; the least but the oracle's is bold."""
    hours = forecast_gpu_hours(result["rows"], target)
    traces = list(dict.fromkeys(trace for by_trace in hours.values() for trace in by_trace))
    best = {trace: min(of[trace] for name, of in hours.items() if name != "oracle" and trace in of) for trace in traces}

    def cell(name: str, trace: str) -> str:
        value = hours[name].get(trace)
        text = "-" if value is None else f"{value:,.1f}" if value >= 10 else f"{value:.3f}"
        return f"**{text}**" if name != "oracle" and value == best[trace] else text

    return table(["forecaster", *traces], [[f"`{name}`", *(cell(name, trace) for trace in traces)] for name in hours])


def steadiness(result: Result) -> str:
    rows = [
        [
            f"`{row['policy']}`",
            f"{row['rate_per_s']:g}",
            f"{row['attainment']:.3f}",
            str(row["flips"]),
            str(row["late_flips"]),
            "-" if row["last_flip_s"] is None else f"{row['last_flip_s']:.0f}",
        ]
        for row in result["rows"]
    ]
    return table(["policy", "requests/s", "attainment", "flips in 2 h", "in the second hour", "last one at, s"], rows)


TABLES: dict[str, tuple[str, Callable[[Result], str]]] = {  # marker -> result file, its text
    "capacity": ("fleets_policies", lambda result: policies(result, "capacity_per_s", most=True)),
    "gpu_hours": ("fleets_policies", lambda result: policies(result, "gpu_hours", most=False)),
    "ratios": ("fleets_policies", ratios),
    "forecast_99": ("fleets_forecast", lambda result: forecasts(result, 0.99)),
    "forecast_95": ("fleets_forecast", lambda result: forecasts(result, 0.95)),
    "steadiness": ("fleets_steadiness", steadiness),
}


def fill(page: str, name: str, text: str) -> str:
    """Raises ValueError where the page has no such markers."""
    pattern = re.compile(rf"(<!-- fleets:{name} -->\n).*?(<!-- /fleets:{name} -->)", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"no markers for {name}")
    return pattern.sub(lambda found: f"{found[1]}{text}\n{found[2]}", page)


def main(argv: Sequence[str] | None = None) -> int:
    folder = Path((argv or sys.argv[1:] or ["bench_out"])[0])
    page = PAGE.read_text(encoding="utf-8")
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name, (file, make) in TABLES.items():
        path = folder / f"{file}.json"
        result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        if result is None or (name == "gpu_hours" and not any("gpu_hours" in row for row in result["rows"])):
            continue  # not measured: what the page says stays
        page = fill(page, name, make(result))
        print(f"{name}: from {path}")
    for path in [*folder.glob("fleets_*.json"), *folder.glob("fleets_*.png")]:
        shutil.copy(path, RESULTS / path.name)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
