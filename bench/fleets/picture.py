"""Pictures of the fleet benches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench.lib.plot import COLOURS, STOCK_COLOUR

HIGHLIGHT = COLOURS[1]


def capacity_picture(by_workload: Mapping[str, Mapping[str, float | None]], path: Path) -> None:
    """A panel a workload: bars of the highest rate, best on top; the combination in colour."""
    columns = min(4, len(by_workload))
    lines = -(-len(by_workload) // columns)
    most = max(len(by_policy) for by_policy in by_workload.values())
    size = (4.2 * columns, (0.24 * most + 0.9) * lines)
    figure, grid = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    for axes in list(grid.flat)[len(by_workload) :]:
        axes.set_visible(False)
    for axes, (name, by_policy) in zip(grid.flat, by_workload.items(), strict=False):
        ordered = sorted(by_policy.items(), key=lambda item: item[1] or 0.0)
        colours = [HIGHLIGHT if policy.startswith("combined") else STOCK_COLOUR for policy, _ in ordered]
        axes.barh([policy for policy, _ in ordered], [value or 0.0 for _, value in ordered], color=colours)
        axes.set_title(name, fontsize=10)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3, axis="x")
    figure.supxlabel("highest rate with 90 % of requests in target, requests/s", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def forecast_picture(by_forecaster: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Bars by trace, GPU-hours over those of the oracle: what not knowing the future costs."""
    oracle = by_forecaster.get("oracle", {})
    names = [name for name in by_forecaster if name != "oracle"]
    width = 0.8 / max(1, len(names))
    figure, axes = plt.subplots(figsize=(max(6.0, 1.7 * len(oracle)), 4.2), layout="constrained")
    for place, name in enumerate(names):
        points = [
            (column, by_forecaster[name][trace] / hours)
            for column, (trace, hours) in enumerate(oracle.items())
            if trace in by_forecaster[name]
        ]
        offset = (place - (len(names) - 1) / 2) * width
        colour = STOCK_COLOUR if name == "fixed" else COLOURS[place % len(COLOURS)]
        axes.bar(
            [column + offset for column, _ in points], [ratio for _, ratio in points], width, color=colour, label=name
        )
    axes.axhline(1.0, color="#222222", linewidth=1)
    axes.set_yscale("log")
    axes.set_xticks(range(len(oracle)), list(oracle), rotation=20, fontsize=8)
    axes.set_ylabel("GPU-hours, oracle = 1")
    axes.set_title("GPU-hours at equal attainment, by forecaster", fontsize=10)
    axes.grid(alpha=0.3, axis="y", which="both")
    axes.legend(fontsize=8, ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
