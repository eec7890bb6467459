"""What a planner saw and wanted over time, beside the fleet: the same log as the router's page draws."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pla_sglang.common.legend.colours import PLAN_COLOURS, TARGET_COLOUR
from pla_sglang.common.legend.explanations import PLAN_FIGURES
from pla_sglang.policy.common.plan_log import FleetCount, PlanLog
from pla_sglang.sim.report.figures import MOST_POINTS, cut_digits
from pla_sglang.sim.report.page import Figure
from pla_sglang.sim.report.timelines import axes_of, stack_panels

PANEL_PX = 130
FIRST_PX = 150  # margins and the legend
CAPTION = (
    "Instances, and how many the planner wants, starting ones included. What it looks at: the load of each interval "
    "between two plans, and the largest that it expected for the time after a plan. GPU-hours of all instances so far. "
    "Starts: a mark at the end of each, as high as it took, red if it has failed."
)


def draw_planner(log: PlanLog) -> Figure:
    """Panels over time; ``log`` has a plan."""
    figures = [name for name in PLAN_FIGURES if any(name in plan.look for plan in log.plans)]
    titles = ["instances", *(PLAN_FIGURES[name].replace(", ", ",<br>") for name in figures), "GPU-hours"]
    titles += ["start, s"] if log.starts else []
    data = [*_fleet_lines(log)]
    for panel, name in enumerate(figures, 2):
        data += _load_lines(log, name, panel)
    data += _cost_lines(log, len(figures) + 2)
    height = FIRST_PX + PANEL_PX * len(titles)
    return {"data": data, "layout": stack_panels(tuple(titles), height, rangemode="tozero"), "height": height}


def _line(name: str, at_s: Sequence[float], values: Sequence[float], panel: int, **options: Any) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": cut_digits(at_s),
        "y": cut_digits(values),
        "hovertemplate": f"{name}: %{{y:,}} at %{{x}} s<extra></extra>",
        **axes_of(panel),
        **options,
    }


def _fleet_lines(log: PlanLog) -> Iterator[dict[str, Any]]:
    at_s = [point.at_s for point in log.points]
    for place, name in enumerate(FleetCount._fields):
        counts = [point.counts[place] for point in log.points]
        line = {"color": PLAN_COLOURS[name], "width": 0, "shape": "hv"}
        yield _line(name, at_s, counts, 1, stackgroup="fleet", line=line)
    line = {"color": PLAN_COLOURS["planned"], "width": 1.8, "shape": "hv"}
    yield _line("planned", *_until_end(log, [plan.planned for plan in log.plans]), 1, line=line)


def _load_lines(log: PlanLog, figure: str, panel: int) -> Iterator[dict[str, Any]]:
    """A plan's load is of the time before it, and its forecast of the time after it."""
    looks = [plan.look[figure] for plan in log.plans]
    at_s = [plan.at_s for plan in log.plans]
    loads = [np.nan if look.load is None else look.load for look in looks]
    line = {"color": PLAN_COLOURS["load"], "width": 1.8, "shape": "vh"}
    yield _line("load", *_bridge_gaps(at_s, loads), panel, line=line, legendgroup="load", showlegend=panel == 2)
    if all(look.forecast is None for look in looks):
        return
    expected = [np.nan if look.forecast is None else look.forecast for look in looks]
    line = {"color": PLAN_COLOURS["forecast"], "width": 1.8, "shape": "hv", "dash": "dot"}
    at_s, expected = _until_end(log, expected)
    yield _line("forecast", at_s, expected, panel, line=line, legendgroup="forecast", showlegend=panel == 2)


def _bridge_gaps(at_s: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """Between plans that are far apart idle time was left out (``IdleTime``): all the while it was as before."""
    interval_s = min((after - before for before, after in itertools.pairwise(at_s)), default=0.0)
    times_s, bridged = list(at_s[:1]), list(values[:1])
    for (before_s, value), (after_s, after) in itertools.pairwise(zip(at_s, values, strict=True)):
        if after_s - before_s > 1.5 * interval_s:
            times_s.append(after_s - interval_s)
            bridged.append(value)
        times_s.append(after_s)
        bridged.append(after)
    return times_s, bridged


def _until_end(log: PlanLog, values: list[Any]) -> tuple[list[float], list[Any]]:
    """The times of all plans; the last value holds until the last look at the fleet."""
    at_s = [plan.at_s for plan in log.plans]
    end_s = log.points[-1].at_s if log.points else at_s[-1]
    return [*at_s, max(end_s, at_s[-1])], [*values, values[-1]]


def _cost_lines(log: PlanLog, panel: int) -> Iterator[dict[str, Any]]:
    places = np.unique(np.linspace(0, len(log.points) - 1, min(len(log.points), MOST_POINTS)).round().astype(int))
    points = [log.points[place] for place in places]
    line = {"color": PLAN_COLOURS["ready"], "width": 1.8}
    hours = [point.gpu_hours for point in points]
    yield _line("GPU-hours", [point.at_s for point in points], hours, panel, line=line, showlegend=False)
    if not log.starts:
        return
    marks = {
        "mode": "markers",
        "marker": {
            "size": 6,
            "color": [PLAN_COLOURS["ready"] if one.outcome == "ready" else TARGET_COLOUR for one in log.starts],
        },
        "text": [one.outcome for one in log.starts],
        "hovertemplate": "%{text} after %{y} s, at %{x} s<extra></extra>",
        "showlegend": False,
    }
    took_s = [one.ended_s - one.ordered_s for one in log.starts]
    yield _line("starts", [one.ended_s for one in log.starts], took_s, panel + 1, **marks)
