"""Figures of runs as plain dictionaries in plotly's form. Numbers are cut to four digits: a page is read by people."""

from __future__ import annotations

import dataclasses
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


NINES = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999)


def draw_attainment(
    lines: Sequence[Line], colours: Mapping[str, str], over: str, *, target: float, requests: int, most: float
) -> Figure:
    """Share of requests in target, over rates or sizes up to ``most``; each step up is a tenth of the misses.

    The best that can be told of ``requests`` is that less than one of them misses: there stand shares of 1.
    """
    top = count_nines(1.0, requests)
    drawn = [
        dataclasses.replace(line, values=[count_nines(share, requests) for share in line.values]) for line in lines
    ]
    label = "share of requests in target"
    figure = draw_lines(drawn, colours, over, label, target=count_nines(target, requests))
    for line, trace in zip(lines, [one for one in figure["data"] if one["mode"] == "lines+markers"], strict=True):
        trace["customdata"] = [f"{share:.4%}" for _, share in sorted(zip(line.tried, line.values, strict=True))]
        trace["hovertemplate"] = f"{line.name}<br>%{{x}} {over}<br>{label}: %{{customdata}}<extra></extra>"
    shown = [share for share in NINES if count_nines(share, requests) < 0.9 * top]
    ticks = [*(count_nines(share, requests) for share in shown), top]
    texts = [*(f"{share:g}" for share in shown), "1"]
    values = [value for line in drawn for at, value in zip(line.tried, line.values, strict=True) if at <= most]
    low = min([*values, count_nines(target, requests)])
    figure["layout"]["yaxis"] |= {"tickvals": ticks, "ticktext": texts, "range": [low - 0.1, top + 0.15]}
    least = min((at for line in lines for at in line.tried), default=0.0)
    figure["layout"]["xaxis"] |= {"range": [least - 0.05 * (most - least), most]}
    return figure


def count_nines(share: float, requests: int) -> float:
    """1 for 0.9, 2 for 0.99; no more than a miss of half of one request."""
    return -math.log10(max(1 - share, 0.5 / requests))


@dataclass(frozen=True, slots=True)
class Bar:
    """A number of GPUs, and between which numbers it lies; ``high``: None: nobody knows."""

    name: str
    value: float
    low: float
    high: float | None


def draw_bars(bars: Sequence[Bar], colours: Mapping[str, str], over: str) -> Figure:
    """The first one on top, solid; whiskers from low to high. Without a high the whisker goes to the edge."""
    edge = 1.1 * max(max(bar.value, bar.high or 0.0) for bar in bars)
    highs = [edge if bar.high is None else bar.high for bar in bars]
    ranges = [f"{bar.low:g} to {'more' if bar.high is None else f'{bar.high:g}'}" for bar in bars]
    data = {
        "type": "bar",
        "orientation": "h",
        "y": [bar.name for bar in bars],
        "x": [bar.value for bar in bars],
        "text": [f"{bar.value:g}" for bar in bars],
        "textposition": "inside",
        "insidetextanchor": "start",
        "marker": {"color": [colours[bar.name] for bar in bars], "opacity": [1.0, *[0.55] * (len(bars) - 1)]},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [high - bar.value for bar, high in zip(bars, highs, strict=True)],
            "arrayminus": [bar.value - bar.low for bar in bars],
            "color": REASON_COLOUR,
            "thickness": 2,
        },
        "customdata": ranges,
        "hovertemplate": f"%{{y}}: %{{x}} {over}, %{{customdata}} within the error<extra></extra>",
    }
    height = 90 + 34 * len(bars)
    axes = {
        "xaxis": name_axis(over, range=[0, edge], **({"dtick": 1} if edge <= MOST_TICKS else {})),
        "yaxis": {"automargin": True, "autorange": "reversed"},
    }
    return {"data": [data], "layout": make_layout(height, showlegend=False, **axes), "height": height}


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
        "xaxis": name_axis(what, type="log", **tick_times(seconds.values())),
        "yaxis": name_axis("share of requests", range=[0, 1.02], tickformat=".0%"),
    }
    shapes = [shape] if math.isfinite(target_s) else []
    return {"data": data, "layout": make_layout(shapes=shapes, **axes), "height": HEIGHT}


def tick_times(columns: Iterable[Floats]) -> dict[str, Any]:
    """Ticks of a logarithmic axis of seconds: 10 ms, 100 ms, 1 s."""
    known = [values[np.isfinite(values) & (values > 0)] for values in columns]
    ends = [float(end) for values in known if len(values) for end in (values.min(), values.max())]
    if not ends:
        return {}
    exponents = range(math.floor(math.log10(min(ends))), math.ceil(math.log10(max(ends))) + 1)
    factors = (1, 2, 5) if len(exponents) <= 3 else (1, 3) if len(exponents) <= 4 else (1,)
    at_s = [factor * 10.0**exponent for exponent in exponents for factor in factors]
    return {"tickvals": at_s, "ticktext": [name_time(one) for one in at_s]}


def name_time(time_s: float) -> str:
    """Such as ``10 ms`` and ``2 s``."""
    return f"{time_s:g} s" if time_s >= 1 else f"{1e3 * time_s:g} ms"


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
