"""Figures as files: panels in one style, written as PNG. matplotlib loads with the first one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from bench.harness.latency import ecdf
from pla_sglang.common.legend.colours import COLOURS, STOCK_COLOUR


@contextlib.contextmanager
def panels(
    target: Path | BinaryIO,
    count: int = 1,
    *,
    size: tuple[float, float],
    title: str = "",
    columns: int | None = None,
) -> Iterator[list[Any]]:
    """Axes to draw on; at the end those with labels get a legend, and the PNG is written.

    A legend that the drawing has made itself, of one panel or of the whole, is left alone. Nothing is written when the
    drawing raises. ``target``: its folder is made; ``size``: of the whole, in inches; ``columns``: panels side by side.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = columns or count
    figure, grid = plt.subplots(-(-count // columns), columns, figsize=size, squeeze=False, layout="constrained")
    try:
        axes = list(grid.flat)
        for unused in axes[count:]:
            unused.set_visible(False)
        yield axes[:count]
        for panel in axes[:count]:
            if not figure.legends and panel.get_legend() is None and panel.get_legend_handles_labels()[1]:
                panel.legend(frameon=False, fontsize=8)
        if title:
            figure.suptitle(title, fontsize=10)
        if isinstance(target, Path):
            target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=130, format="png")
    finally:
        plt.close(figure)


def draw_bars(
    panel: Any,
    groups: Mapping[str, Mapping[str, float]],
    *,
    colours: Mapping[str, str] | None = None,
    rotation: float = 0,
) -> None:
    """A cluster of bars a group, one bar a name; a name that a group lacks has no bar there.

    ``colours``: of names, the others take the palette's in turn; ``rotation``: of the groups' labels, in degrees.
    """
    names = list(dict.fromkeys(name for values in groups.values() for name in values))
    width = 0.8 / max(1, len(names))
    for place, name in enumerate(names):
        colour = (colours or {}).get(name, COLOURS[place % len(COLOURS)])
        offset = (place - (len(names) - 1) / 2) * width
        bars = [(column + offset, values[name]) for column, values in enumerate(groups.values()) if name in values]
        panel.bar([at for at, _ in bars], [height for _, height in bars], width, label=name, color=colour)
    ends = {"rotation": rotation, "ha": "right"} if rotation else {}
    panel.set_xticks(range(len(groups)), list(groups), fontsize=8, **ends)
    panel.grid(axis="y", alpha=0.3)


def arm_colours(arms: Sequence[str]) -> dict[str, str]:
    others = [arm for arm in arms if arm != "stock"]
    colours = {arm: COLOURS[index % len(COLOURS)] for index, arm in enumerate(others)}
    return {arm: colours.get(arm, STOCK_COLOUR) for arm in arms}


def format_seconds(value: float, _position: object = None) -> str:
    return f"{float(f'{value * 1e3:.3g}'):g} ms" if value < 0.9995 else f"{value:g} s"


def log_seconds(axis: Any, low: float, high: float) -> None:
    """A logarithmic time axis with readable marks at 1, 2 and 5 of each decade (fewer if it spans many).

    Of a span that holds at most one of these, at even distances.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    axis.set_major_formatter(FuncFormatter(format_seconds))
    axis.set_minor_formatter(NullFormatter())
    steps = (1, 2, 5) if high / low < 300 else (1, 3)
    marks: Sequence[float] = [step * 10.0**power for power in range(-4, 5) for step in steps]
    if sum(low <= mark <= high for mark in marks) < 2:
        marks = MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(low, high)
    axis.set_ticks([mark for mark in marks if low <= mark <= high])


def draw_ecdf(panel: Any, samples_s: Mapping[str, Sequence[float]], kind: str, *, solo_s: float | None = None) -> None:
    """Distribution of the TTFTs of one class by arm, on a logarithmic time axis; ``solo_s``: that of a lone request."""
    colours = arm_colours(list(samples_s))
    shown: list[float] = [] if solo_s is None else [solo_s]
    for arm, samples in samples_s.items():
        values, shares = ecdf(samples)
        if values:
            panel.step([values[0], *values], [0, *shares], where="post", color=colours[arm], label=arm, linewidth=2)
            shown += values
    if solo_s is not None:
        panel.axvline(solo_s, color="#222222", linestyle=":", linewidth=1.2, label="alone on an idle server")
    low, high = min(shown) * 0.8, max(shown) * 1.25
    panel.set(xscale="log", xlim=(low, high), ylim=(0, 1.02), xlabel=f"time to first token, {kind} prompts")
    log_seconds(panel.xaxis, low, high)
    panel.set_ylabel("share of requests")
    panel.grid(alpha=0.3)
