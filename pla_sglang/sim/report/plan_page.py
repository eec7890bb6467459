"""The page of ``simulate find-instances``: the fewest instances of each fleet, and every size and rate tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.planning.result import FleetRow, PlanResult
from pla_sglang.sim.planning.table import list_notes
from pla_sglang.sim.planning.words import describe_verdict
from pla_sglang.sim.report.columns import NOTHING
from pla_sglang.sim.report.figures import Line, colour_names, draw_attainment
from pla_sglang.sim.report.page import Heading, Page, PageTable, Section
from pla_sglang.sim.report.run_page import describe_lengths
from pla_sglang.sim.report.verdict import describe_targets, show_share
from pla_sglang.sim.workload.trace import Trace

HEADINGS = (
    Heading("fleet", "policy, and for stock engines their order and chunks"),
    Heading("instances", "the fewest that keep the target; of a split prefill + decode; none: see the notes"),
    Heading("GPUs", "of these instances"),
    Heading("attainment", "share of requests in target with these instances"),
    Heading("one fewer", "the same with one instance less"),
    Heading("GPU h", "of all GPUs, from the first arrival to the last answer"),
    Heading("margin", "highest rate that these instances keep over the rate asked for, less 1"),
    Heading("error", "attainment simulated less live, where that was measured in this regime (bench fidelity)"),
    Heading("profile", "step times that the fleet was simulated with"),
)


def make_plan_page(plan: PlanResult, trace: Trace, setting: Mapping[str, Any]) -> Page:
    """``plan``: with one row at least."""
    fleets = [row.name for row in plan.rows]
    facts = {
        "trace": f"{plan.trace}: {plan.requests:,} requests, {plan.span_s:,.0f} s of arrivals at this rate",
        "prompt, answer": describe_lengths(trace),
        "rate": f"{plan.rate_per_s:.4g} requests/s",
        "targets": describe_targets(Slo(plan.ttft_slo_s, plan.tpot_slo_s), plan.target),
        "fleets": ", ".join(fleets),
        "profiles": ", ".join(dict.fromkeys(row.profile for row in plan.rows)),
    }
    sections = [*_table_sections(plan), *_search_sections(plan, colour_names(fleets))]
    missing = [f"Not finished: {', '.join(plan.missing)}."] if plan.missing else []
    verdict = [f"{describe_verdict(plan)}.", *missing]
    return Page(f"Instances for {plan.trace}", facts, verdict, sections, setting)


def _table_sections(plan: PlanResult) -> Iterator[Section]:
    rows = [_show_row(row) for row in plan.rows]
    yield Section("Fewest instances", "A click on a column's name sorts by it.", table=PageTable(HEADINGS, rows))
    if notes := list(list_notes(plan)):
        yield Section(
            "What to know beside the figures", table=PageTable([Heading("note", is_text=True)], [[n] for n in notes])
        )


def _show_row(row: FleetRow) -> list[str]:
    if row.instances is None:
        return [row.name, "none", *[NOTHING] * 6, row.profile]
    split = "" if row.prefills is None else f" ({row.prefills}+{row.instances - row.prefills})"
    margin = NOTHING if row.margin is None else f"{row.margin:+.0%}{' or more' * row.margin_is_lower_bound}"
    return [
        row.name,
        f"{row.instances}{split}",
        str(row.instances * row.gpus_per_instance),
        NOTHING if row.attainment is None else show_share(row.attainment),
        NOTHING if row.one_fewer is None else show_share(row.one_fewer),
        NOTHING if row.gpu_hours is None else f"{row.gpu_hours:.3g}",
        margin,
        NOTHING if row.measured_error is None else f"{row.measured_error.attainment:+.3f}",
        row.profile,
    ]


def _search_sections(plan: PlanResult, colours: Mapping[str, str]) -> Iterator[Section]:
    """Attainment by size, the best split of each; and by rate with the size found."""
    wanted = f"The dotted line: the wanted {show_share(plan.target)}."
    sizes = []
    for row in plan.rows:
        best: dict[float, float] = {}
        for tried in row.sizes:
            best[tried.instances] = max(tried.attainment, best.get(tried.instances, 0.0))
        sizes.append(Line(row.name, list(best), list(best.values()), row.instances))
    caption = f"At the rate asked for. A mark is the best split of that size that was run. {wanted} A star: the answer."
    figure = draw_attainment(sizes, colours, "instances", target=plan.target)
    yield Section("Attainment by number of instances", caption, figure)
    rates = [
        Line(row.name, [tried.rate_per_s for tried in row.rates], [tried.attainment for tried in row.rates])
        for row in plan.rows
        if row.rates
    ]
    if rates:
        caption = f"Each fleet with its fewest instances. A mark is one run. {wanted}"
        figure = draw_attainment(rates, colours, "requests/s", target=plan.target)
        yield Section("Attainment by rate", caption, figure)
