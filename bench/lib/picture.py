"""A figure as a file: panels side by side in one style, written as PNG."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


@contextlib.contextmanager
def panels(path: Path, count: int = 1, *, size: tuple[float, float], title: str = "") -> Iterator[list[Any]]:
    """Axes to draw on; at the end those with labels get a legend, and the PNG is written.

    A legend that the drawing has made itself, of one panel or of the whole, is left alone. Nothing is written when the
    drawing raises.

    Args:
        path: of the PNG; its folder is made.
        count: of panels, side by side.
        size: width and height of the whole, in inches.
    """
    figure, grid = plt.subplots(1, count, figsize=size, squeeze=False, layout="constrained")
    try:
        yield list(grid[0])
        for axes in grid[0]:
            if not figure.legends and axes.get_legend() is None and axes.get_legend_handles_labels()[1]:
                axes.legend(frameon=False, fontsize=8)
        if title:
            figure.suptitle(title, fontsize=10)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    finally:
        plt.close(figure)
