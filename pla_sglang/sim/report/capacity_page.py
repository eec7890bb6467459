"""The page of ``simulate find-capacity``: attainment at every rate that was tried, and the highest that keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pla_sglang.sim.core.experiment import Experiment
from pla_sglang.sim.metrics.goodput import Capacity
from pla_sglang.sim.report.columns import NOTHING
from pla_sglang.sim.report.figures import Line, colour_names, draw_attainment
from pla_sglang.sim.report.page import Heading, Page, PageTable, Section
from pla_sglang.sim.report.run_page import describe_setting
from pla_sglang.sim.report.verdict import describe_capacities, list_short_spans, show_share
from pla_sglang.sim.workload.trace import Trace

CLIP = 1.3  # times the answer: what lies beyond is the search's way to it
HEADINGS = (
    Heading("policy"),
    Heading("held, 1/s", "the highest rate that was tried and kept the target; -: none"),
    Heading("failed, 1/s", "the lowest rate that was tried and did not; -: none"),
    Heading("runs", "rates that were tried"),
    Heading(
        "span, s", "of the arrivals at the rate held; below 300 s it is a burst, no ratio of rates is to be trusted"
    ),
)


def make_capacity_page(
    capacities: Mapping[str, Capacity],
    trace: Trace,
    experiment: Experiment,
    setting: Mapping[str, Any],
    *,
    target: float,
) -> Page:
    """``capacities`` by policy, one at least, found for the fleet of ``experiment``."""
    facts = {**describe_setting(trace, experiment, target), "policies": ", ".join(capacities)}
    colours = colour_names(capacities)
    lines = [
        Line(
            policy,
            [rate_per_s for rate_per_s, _ in capacity.tried],
            [attainment for _, attainment in capacity.tried],
            capacity.held_per_s,
        )
        for policy, capacity in capacities.items()
    ]
    caption = (
        f"A mark is one run. The dotted line: the wanted {show_share(target)}. A star: the highest rate that kept it."
    )
    rates = [rate_per_s for line in lines for rate_per_s in line.tried]
    held = [capacity.held_per_s for capacity in capacities.values() if capacity.held_per_s is not None]
    most = min(max(rates), CLIP * max(held)) if held else max(rates)
    figure = draw_attainment(lines, colours, "requests/s", target=target, requests=len(trace), most=most)
    rows = [
        [
            policy,
            _show_rate(capacity.held_per_s),
            _show_rate(capacity.failed_per_s),
            str(len(capacity.tried)),
            _show_rate(capacity.span_s),
        ]
        for policy, capacity in capacities.items()
    ]
    sections = [
        Section("Attainment by rate", caption, figure),
        Section("Rates found", "A click on a column's name sorts by it.", table=PageTable(HEADINGS, rows)),
    ]
    title = f"Highest rates for {trace.name}"
    verdict = [*describe_capacities(capacities, target), *list_short_spans(capacities)]
    return Page(title, facts, verdict, sections, setting)


def _show_rate(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3g}"
