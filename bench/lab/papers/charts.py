"""Pictures of the scripts: curves and bars, drawn from the points of a finding."""

from __future__ import annotations

import functools
import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bench.harness.figures import COLOURS, draw_bars, panels
from bench.lab.papers.finding import Picture, Point

Curve = tuple[Sequence[float], Sequence[float]]  # x, y
Panel = Callable[[Any], None]  # draws on the axes it is given
PER_ROW = 4


def draw(drawn: Sequence[Panel], title: str, *, columns: int = PER_ROW) -> Picture:
    """What draws a PNG with one axes a panel, side by side, at most ``columns`` a row."""
    return functools.partial(draw_panels, drawn, title, columns)


def draw_panels(drawn: Sequence[Panel], title: str, columns: int) -> bytes:
    out = io.BytesIO()
    columns = min(len(drawn), columns)
    rows = -(-len(drawn) // columns)
    with panels(out, len(drawn), size=(4.4 * columns, 3.4 * rows), title=title, columns=columns) as grid:
        for axes, panel in zip(grid, drawn, strict=True):
            panel(axes)
    return out.getvalue()


def lines(
    data: Mapping[str, Curve], *, x: str, y: str, log_x: bool = False, log_y: bool = False, mark: float | None = None
) -> Panel:
    """A panel with one line a name; ``mark``: a horizontal line (a target, a value of the paper).

    Times of first tokens span decades, so they stand on a logarithmic axis; those of later ones begin at zero.
    """
    log_y = log_y or "TTFT" in y

    def panel(axes: Any) -> None:
        for place, (name, (xs, ys)) in enumerate(data.items()):
            shown = [math.nan if log_y and value <= 0 else value for value in ys]
            colour = COLOURS[place % len(COLOURS)]
            axes.plot(xs, shown, marker="o", markersize=3, linewidth=1.2, label=name, color=colour)
        if mark is not None:
            axes.axhline(mark, color="#7f7f7f", linestyle="--", linewidth=1)
        axes.set(xlabel=x, ylabel=y)
        if log_x:
            axes.set_xscale("log", base=2)
        if log_y:
            axes.set_yscale("log")
        elif "TPOT" in y:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)

    return panel


def curves(
    points: Sequence[Point],
    fields: Mapping[str, str],
    *,
    x: str,
    by: str,
    label: str,
    each: str = "",
    marks: Mapping[str, float] = MappingProxyType({}),
    **looks: Any,
) -> list[Panel]:
    """A panel for each of ``fields`` (label -> field) over the field ``x``, a curve for each value of ``by``.

    ``each``: the same for each value of this field, which ``label``, of the x axis, shows as ``{}``. Where points share
    an x, their median counts. ``marks``: the ``mark`` of a panel by its label; ``looks``: as for ``lines``.
    """
    drawn = []
    for value in dict.fromkeys(point.get(each) for point in points):
        for name, field in fields.items():
            values: dict[str, dict[float, list[float]]] = {}
            for point in points:
                if point.get(each) == value and point.get(x) is not None and point.get(field) is not None:
                    values.setdefault(str(point[by]), {}).setdefault(point[x], []).append(point[field])
            data = {curve: (list(of), [statistics.median(ys) for ys in of.values()]) for curve, of in values.items()}
            of_panel: dict[str, Any] = looks | ({"mark": marks[name]} if name in marks else {})
            drawn.append(lines(data, x=label.format(value), y=name, **of_panel))
    return drawn


def bars(groups: Mapping[str, Mapping[str, float]], *, y: str) -> Panel:

    def panel(axes: Any) -> None:
        draw_bars(axes, groups)
        axes.set_ylabel(y)

    return panel
