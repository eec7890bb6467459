"""Decisions by policy and kind, and the share that came out the same in the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44")


def plot_parity(by_policy: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(by_policy)
    figure, axes = plt.subplots(figsize=(8, 0.45 * len(names) + 1.4), constrained_layout=True)
    left = [0] * len(names)
    kinds = sorted({kind for one in by_policy.values() for kind in one["by_kind"]})
    for kind, colour in zip(kinds, COLOURS, strict=False):
        counts = [by_policy[name]["by_kind"].get(kind, 0) for name in names]
        axes.barh(names, counts, left=left, label=kind, color=colour)
        left = [below + more for below, more in zip(left, counts, strict=True)]
    for row, (name, total) in enumerate(zip(names, left, strict=True)):
        axes.annotate(f" {by_policy[name]['identical_share']:.2%} identical", (total, row), va="center", fontsize=8)
    axes.margins(x=0.25)
    axes.invert_yaxis()
    axes.set_xlabel("live decisions, replayed in the simulator")
    axes.legend(loc="lower right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
