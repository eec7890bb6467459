"""The page of ``simulate lower-bound``: the bounds, and the curve of instances behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pla_sglang.common.legend.colours import PLAN_COLOURS, POLICY_COLOURS, TARGET_COLOUR
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.planning.lower_bound import BoundResult
from pla_sglang.sim.planning.lower_bound_table import describe_answer, list_rows
from pla_sglang.sim.planning.planned_fleet import PlannedFleet
from pla_sglang.sim.report.figures import HEIGHT, cut_digits, make_layout, name_axis
from pla_sglang.sim.report.page import Figure, Heading, Page, PageTable, Section
from pla_sglang.sim.report.run_page import describe_lengths
from pla_sglang.sim.report.verdict import describe_targets
from pla_sglang.sim.workload.trace import Trace

HEADINGS = (
    Heading("bound"),
    Heading("GPU h"),
    Heading("of fixed", "share of the constant fleet's GPU hours"),
    Heading("mean instances", "from the first arrival to the last answer"),
    Heading("what it is", is_text=True),
)
CAPTION = (
    "Mean instances by bins, of one way to pay as little as the bound. Its area, and start-ups, are the bound. An "
    "autoscaler may be below the line at one time and above it at another. The dotted line: the smallest constant "
    "fleet."
)
PLANNED = " The thin line: all instances of the simulated planner, starting and draining ones included."


def make_lower_bound_page(
    bound: BoundResult, trace: Trace, setting: Mapping[str, Any], planned: PlannedFleet | None = None
) -> Page:
    """``planned``: a fleet to be drawn beside the bound."""
    facts = {
        "trace": f"{bound.trace}: {bound.requests:,} requests, {bound.span_s:,.0f} s of arrivals",
        "prompt, answer": describe_lengths(trace),
        "targets": describe_targets(Slo(bound.ttft_slo_s, bound.tpot_slo_s), bound.target),
        "kept": f"{bound.kept:,} requests; {bound.infeasible:,} cannot be kept by anybody",
        "profile": bound.profile,
    }
    answer = describe_answer(bound)
    sections = [
        Section("Instances over time", CAPTION + PLANNED * (planned is not None), draw_replicas(bound, planned)),
        Section("Bounds", table=PageTable(HEADINGS, list(list_rows(bound, planned)))),
    ]
    if bound.notes:
        notes = PageTable([Heading("note", is_text=True)], [[note] for note in bound.notes])
        sections.append(Section("What to know beside the figures", table=notes))
    return Page(f"Lower bound for {bound.trace}", facts, [f"{answer[0].upper()}{answer[1:]}."], sections, setting)


def draw_replicas(bound: BoundResult, planned: PlannedFleet | None = None) -> Figure:
    """Steps over time, and the constant fleet."""
    lines = [{**_steps("lower bound", bound.curve(), POLICY_COLOURS[0], 1.8), "fill": "tozeroy"}]
    if planned is not None:
        lines.append(_steps(planned.name, planned.points, PLAN_COLOURS["ready"], 1.2))
    level = {"color": TARGET_COLOUR, "dash": "dot", "width": 1.5}
    peak = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": bound.peak_replicas, "y1": bound.peak_replicas}
    axes: dict[str, Any] = {"xaxis": name_axis("s"), "yaxis": name_axis("instances", rangemode="tozero")}
    return {"data": lines, "layout": make_layout(shapes=[{**peak, "line": level}], **axes), "height": HEIGHT}


def _steps(name: str, points: Sequence[tuple[float, float]], colour: str, width: float) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [round(at_s, 3) for at_s, _ in points],
        "y": cut_digits(count for _, count in points),
        "line": {"color": colour, "shape": "hv", "width": width},
        "hovertemplate": f"{name}: %{{y}} instances from %{{x}} s<extra></extra>",
    }
