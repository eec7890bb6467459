"""Figures of runs as plain dictionaries in plotly's form. Numbers are cut to four digits: a page is read by people."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pla_sglang.common.legend.colours import POLICY_COLOURS, REASON_COLOUR, TARGET_COLOUR
from pla_sglang.common.legend.explanations import explain_reason
from pla_sglang.sim.metrics.goodput import Floats
from pla_sglang.sim.report.page import Figure

HEIGHT = 380  # pixels
MARGIN = {"l": 60, "r": 15, "t": 30, "b": 45}
LEGEND = {"orientation": "h", "traceorder": "normal", "y": 1.02, "yanchor": "bottom", "x": 0}
MOST_POINTS = 240  # of one line
MOST_REASONS = 20
HOVER_CHARS = 55
MOST_TICKS = 20
WHOLE = ("instances",)  # axes whose values are counts
MARKS = ("circle", "square", "diamond", "triangle-up", "cross", "x")


@dataclass(frozen=True, slots=True)
class Line:
    """What was tried, rates or sizes of fleets, and a figure for each; ``knee``: the one that a star marks."""

    name: str
    tried: Sequence[float]
    values: Sequence[float]
    knee: float | None = None


def cut_digits(values: Iterable[float]) -> list[float | None]:
    """Four significant digits; None for what is no number."""
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in map(float, values)]


def wrap_hover(text: str) -> str:
    """Lines that fit a box beside the mouse."""
    return "<br>".join(textwrap.wrap(text, HOVER_CHARS))


def name_axis(title: str, **options: Any) -> dict[str, Any]:
    return {"title": {"text": title}, "automargin": True, **options}


def make_layout(height: int = HEIGHT, **options: Any) -> dict[str, Any]:
    return {"height": height, "margin": MARGIN, "legend": LEGEND, "hovermode": "closest", **options}


def colour_names(names: Iterable[str]) -> dict[str, str]:
    """A colour for each policy, the same in all figures of a page."""
    return {name: POLICY_COLOURS[place % len(POLICY_COLOURS)] for place, name in enumerate(dict.fromkeys(names))}


def draw_attainment(lines: Sequence[Line], colours: Mapping[str, str], over: str, *, target: float) -> Figure:
    """Share of requests in target, over rates or sizes."""
    return draw_lines(lines, colours, over, "share of requests in target", target=target)


def draw_lines(
    lines: Sequence[Line], colours: Mapping[str, str], over: str, label: str, *, target: float | None = None
) -> Figure:
    """A line a policy. Stars: the knees; the line across: ``target``.

    Shares begin where the lowest of them needs it, so that 0.97 and 0.99 can be told apart; without a target, at zero.
    """
    data: list[dict[str, Any]] = []
    for place, line in enumerate(lines):
        order = np.argsort(line.tried)
        at, values = np.asarray(line.tried)[order], np.asarray(line.values)[order]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": line.name,
                "x": cut_digits(at),
                "y": cut_digits(values),
                "line": {"color": colours[line.name]},
                "marker": {"symbol": MARKS[place % len(MARKS)], "size": 8},
                "hovertemplate": f"{line.name}<br>%{{x}} {over}<br>{label}: %{{y}}<extra></extra>",
            }
        )
        data += _mark_knee(line, colours[line.name], over)
    shapes = [] if target is None else [_level(target)]
    tried = [value for line in lines for value in line.tried]
    whole = over in WHOLE and max(tried, default=0) - min(tried, default=0) <= MOST_TICKS
    axes: dict[str, Any] = {
        "xaxis": name_axis(over, **({"dtick": 1} if whole else {})),
        "yaxis": name_axis(label, rangemode="normal" if target is not None else "tozero"),
    }
    return {"data": data, "layout": make_layout(shapes=shapes, **axes), "height": HEIGHT}


def _mark_knee(line: Line, colour: str, over: str) -> list[dict[str, Any]]:
    value = None if line.knee is None else dict(zip(line.tried, line.values, strict=True)).get(line.knee)
    if value is None:
        return []
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": f"knee of {line.name}",
            "showlegend": False,
            "x": [line.knee],
            "y": cut_digits([value]),
            "marker": {"symbol": "star", "size": 17, "color": colour, "line": {"width": 1, "color": "#ffffff"}},
            "hovertemplate": f"knee of {line.name}: %{{x}} {over}<extra></extra>",
        }
    ]


def _level(value: float) -> dict[str, Any]:
    line = {"color": TARGET_COLOUR, "dash": "dot", "width": 1.5}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value, "line": line}


def draw_distributions(seconds: Mapping[str, Floats], colours: Mapping[str, str], what: str, target_s: float) -> Figure:
    """Share of requests that were at most so late, a line a policy, and the target."""
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": cut_digits(at_s),
            "y": cut_digits(shares),
            "line": {"color": colours[name]},
            "hovertemplate": f"{name}: %{{y:.1%}} within %{{x}} s<extra></extra>",
        }
        for name, values in seconds.items()
        for at_s, shares in [thin_distribution(values)]
    ]
    line = {"color": TARGET_COLOUR, "dash": "dot", "width": 1.5}
    shape = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": target_s, "x1": target_s, "line": line}
    axes: dict[str, Any] = {
        "xaxis": name_axis(f"{what}, s", type="log"),
        "yaxis": name_axis("share of requests", range=[0, 1.02], tickformat=".0%"),
    }
    shapes = [shape] if math.isfinite(target_s) else []
    return {"data": data, "layout": make_layout(shapes=shapes, **axes), "height": HEIGHT}


def thin_distribution(values: Floats) -> tuple[Floats, Floats]:
    """Values that are numbers, in order, and the share of them at or below each; the largest of many are kept."""
    known = np.sort(values[np.isfinite(values)])
    count = len(known)
    if not count:
        return known, known
    places = np.unique(np.linspace(0, count - 1, min(count, MOST_POINTS)).round().astype(int))
    return known[places], (places + 1) / count


def draw_reasons(counts: Mapping[str, int]) -> Figure:
    """The most frequent reasons as bars, with their sentences beside the mouse."""
    ranked = rank_reasons(counts)[:MOST_REASONS][::-1]
    total = sum(counts.values())
    height = 90 + 24 * len(ranked)
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": [name for name, _ in ranked],
        "x": [count for _, count in ranked],
        "text": [f"{count:,}" for _, count in ranked],
        "textposition": "auto",
        "cliponaxis": False,
        "marker": {"color": REASON_COLOUR},
        "customdata": [[wrap_hover(explain_reason(name)), count / total] for name, count in ranked],
        "hovertemplate": "<b>%{y}</b>: %{x:,} (%{customdata[1]:.1%})<br>%{customdata[0]}<extra></extra>",
    }
    axes = {"xaxis": name_axis("decisions"), "yaxis": {"automargin": True}}
    return {"data": [bars], "layout": make_layout(height, **axes), "height": height}


def rank_reasons(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """The most frequent first."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
