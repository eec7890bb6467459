"""Pictures of the scripts: lines, bars, one look. Returns PNG bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench.lib.plot import COLOURS

Line = tuple[Sequence[float], Sequence[float]]  # x, y
Panel = Callable[[Any], None]  # draws on the axes it is given


def draw(panels: Sequence[Panel], title: str) -> bytes:
    """One axes a panel, side by side; four a row at most."""
    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(4.4 * columns, 3.4 * rows), squeeze=False, layout="constrained")
    for axes, panel in zip(grid.flat, panels, strict=False):
        panel(axes)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(title, fontsize=10)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=90, metadata={"Software": None})
    plt.close(figure)
    return out.getvalue()


def lines(
    data: Mapping[str, Line], *, x: str, y: str, log_x: bool = False, log_y: bool = False, mark: float | None = None
) -> Panel:
    """A panel with one line a name; ``mark``: a horizontal line (a target, a value of the paper)."""

    def panel(axes: Any) -> None:
        for place, (name, (xs, ys)) in enumerate(data.items()):
            axes.plot(xs, ys, marker="o", markersize=3, linewidth=1.2, label=name, color=COLOURS[place % len(COLOURS)])
        if mark is not None:
            axes.axhline(mark, color="#7f7f7f", linestyle="--", linewidth=1)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        if log_x:
            axes.set_xscale("log", base=2)
        if log_y:
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
        if data:
            axes.legend(fontsize=7, frameon=False)

    return panel


def bars(groups: Mapping[str, Mapping[str, float]], *, y: str) -> Panel:
    """A panel with a cluster of bars a group, one bar a name."""

    def panel(axes: Any) -> None:
        names = list(dict.fromkeys(name for values in groups.values() for name in values))
        width = 0.8 / max(1, len(names))
        for place, name in enumerate(names):
            at = [group + place * width for group in range(len(groups))]
            heights = [values.get(name, float("nan")) for values in groups.values()]
            axes.bar(at, heights, width=width, label=name, color=COLOURS[place % len(COLOURS)])
        axes.set_xticks([group + 0.4 - width / 2 for group in range(len(groups))], list(groups), fontsize=8)
        axes.set_ylabel(y)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize=7, frameon=False)

    return panel
