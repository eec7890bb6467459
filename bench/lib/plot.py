"""The picture of a comparison: TTFT distributions per class, and how each round came out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter

from bench.lib.stats import KINDS, Runs, per_round, ttfts_s
from pla_sglang.metrics.latency import ecdf, spread

# Okabe-Ito: told apart by colour-blind readers too. Stock is grey: it is the background of the comparison.
STOCK_COLOUR = "#7f7f7f"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def arm_colours(arms: Sequence[str]) -> dict[str, str]:
    others = [arm for arm in arms if arm != "stock"]
    colours = {arm: COLOURS[index % len(COLOURS)] for index, arm in enumerate(others)}
    return {arm: colours.get(arm, STOCK_COLOUR) for arm in arms}


def seconds(value: float, _position: object = None) -> str:
    return f"{value * 1e3:.0f} ms" if value < 0.9995 else f"{value:g} s"


def log_seconds(axis: Any, low: float, high: float) -> None:
    """A logarithmic time axis with readable marks at 1, 2 and 5 of each decade (fewer if it spans many)."""
    axis.set_major_formatter(FuncFormatter(seconds))
    axis.set_minor_formatter(NullFormatter())
    steps = (1, 2, 5) if high / low < 300 else (1, 3)
    marks = [step * 10.0**power for power in range(-4, 5) for step in steps]
    axis.set_ticks([mark for mark in marks if low <= mark <= high])


def plot_comparison(runs: Runs, path: Path, *, title: str, solo_s: dict[str, float] | None = None) -> None:
    """One panel per class that occurs with the distribution over all rounds, and one with the p99 of every round."""
    kinds = [kind for kind in KINDS if any(ttfts_s(run, kind) for of_arm in runs.values() for run in of_arm)]
    colours = arm_colours(list(runs))
    figure, axes = plt.subplots(1, len(kinds) + 1, figsize=(4.6 * (len(kinds) + 1), 4.4), layout="constrained")
    for panel, kind in zip(axes, kinds, strict=False):
        _plot_ecdf(panel, runs, kind, colours, (solo_s or {}).get(kind))
    _plot_rounds(axes[-1], runs, kinds[0], colours)
    figure.suptitle(title, fontsize=10)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(8, len(labels)), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _plot_ecdf(panel: Any, runs: Runs, kind: str, colours: dict[str, str], solo_s: float | None) -> None:
    everything: list[float] = []
    for arm, of_arm in runs.items():
        values, shares = ecdf([value for run in of_arm for value in ttfts_s(run, kind)])
        if values:
            panel.step([values[0], *values], [0, *shares], where="post", color=colours[arm], label=arm, linewidth=2)
            everything += values
    if solo_s is not None:
        panel.axvline(solo_s, color="#222222", linestyle=":", linewidth=1.2, label="alone on an idle server")
        everything.append(solo_s)
    low, high = min(everything) * 0.8, max(everything) * 1.25
    panel.set_xscale("log")
    panel.set_xlim(low, high)
    log_seconds(panel.xaxis, low, high)
    panel.set_ylim(0, 1.02)
    panel.set_title(f"{kind} prompts", fontsize=11)
    panel.set_xlabel("time to first token")
    panel.set_ylabel("share of requests")
    panel.grid(alpha=0.3)


def _plot_rounds(panel: Any, runs: Runs, kind: str, colours: dict[str, str]) -> None:
    """Every round as a dot, its neighbours in time side by side, the median as a bar."""
    everything: list[float] = []
    for column, (arm, of_arm) in enumerate(runs.items()):
        values = per_round(of_arm, kind, "p99")
        if not values:
            continue
        offsets = [column + 0.24 * ((index + 0.5) / len(values) * 2 - 1) for index in range(len(values))]
        panel.scatter(offsets, values, s=34, color=colours[arm], alpha=0.85, zorder=3)
        middle = spread(values).median
        panel.hlines(middle, column - 0.34, column + 0.34, color=colours[arm], linewidth=2.5)
        above = {"textcoords": "offset points", "xytext": (0, 7), "ha": "center", "va": "bottom", "fontsize": 9}
        panel.annotate(f"median {seconds(float(f'{middle:.3g}'))}", (column, max(values)), **above)
        everything += values
    low, high = min(everything) * 0.6, max(everything) * 1.6
    panel.set_yscale("log")
    panel.set_ylim(low, high)
    log_seconds(panel.yaxis, low, high)
    panel.set_xlim(-0.6, len(runs) - 0.4)
    panel.set_xticks(range(len(runs)), list(runs), rotation=20 if len(runs) > 3 else 0)
    panel.set_title(f"p99 of {kind} prompts, every round", fontsize=11)
    panel.grid(alpha=0.3, axis="y")
