"""The page of ``simulate find-instances``: the fewest instances of each fleet, and every size and rate tried."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.planning.result import PlanResult
from pla_sglang.sim.planning.table import cells_of, list_columns, list_notes
from pla_sglang.sim.planning.words import describe_verdict, is_within_error
from pla_sglang.sim.report.figures import Bar, Line, colour_names, draw_attainment, draw_bars
from pla_sglang.sim.report.page import Heading, Page, PageTable, Section
from pla_sglang.sim.report.run_page import describe_lengths
from pla_sglang.sim.report.verdict import describe_targets, show_share
from pla_sglang.sim.workload.trace import Trace

LEGENDS = {
    "instances": "the fewest that keep the target; of a split prefill + decode; none: see the notes",
    "range": "the fewest within the stated error of profile and simulator",
    "GPUs": "of these instances",
    "requests/s a GPU": "of the rate asked for",
    "tokens/s a GPU": "of answers, at the rate asked for",
    "an hour": "cost of all GPUs",
    "1M tokens": "cost of a million tokens of answers",
    "attainment": "share of requests in target with these instances",
    "one fewer": "the same with one instance less",
    "margin": "highest rate that these instances keep over the rate asked for, less 1",
    "error": "attainment simulated less live, where that was measured in this regime (bench fidelity)",
}
CLIP = 2  # times the winner, or the rate asked for: what lies beyond is the way of other searches
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
BREAK = "/\u200b"  # a name may be folded there


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
    colours = colour_names(label_rows(plan).values())
    sections = [*_bar_sections(plan, colours), *_table_sections(plan), *_search_sections(plan, colours)]
    missing = [f"Not finished: {', '.join(plan.missing)}."] if plan.missing else []
    verdict = [f"{describe_verdict(plan)}.", *missing]
    return Page(f"Instances for {plan.trace}", facts, verdict, sections, setting, unsure=is_within_error(plan))


def label_rows(plan: PlanResult) -> dict[str, str]:
    """A letter for each fleet, the smallest first: names are too long for a small screen."""
    return {
        row.name: LETTERS[place % len(LETTERS)] * (1 + place // len(LETTERS)) for place, row in enumerate(plan.rows)
    }


def _bar_sections(plan: PlanResult, colours: Mapping[str, str]) -> Iterator[Section]:
    letters = label_rows(plan)
    bars = [
        Bar(letters[row.name], row.gpus, row.gpus, row.gpus)
        if row.gpus_low is None
        else Bar(letters[row.name], row.gpus, row.gpus_low, row.gpus_high)
        for row in plan.rows
        if row.gpus is not None
    ]
    if not bars:
        return
    caption = "The smallest fleet first. Whiskers: within the stated error of profile and simulator. Names: the table."
    yield Section("GPUs needed", caption, draw_bars(bars, colours, "GPUs"))


def _table_sections(plan: PlanResult) -> Iterator[Section]:
    names = list_columns(plan.gpu_hour_price)
    headings = [Heading("fleet", "policy, and for stock engines their order and chunks")]
    headings += [Heading(name, LEGENDS[name]) for name in names]
    headings.append(Heading("profile", "step times that the fleet was simulated with"))
    letters = label_rows(plan)
    rows = [
        [
            f"{letters[row.name]} {row.name.replace('/', BREAK)}",
            *cells_of(row, plan.rate_per_s, plan.output_tokens_per_s, plan.gpu_hour_price),
            row.profile,
        ]
        for row in plan.rows
    ]
    marked = None if plan.best is None else plan.rows.index(plan.best)
    yield Section(
        "Fewest instances", "A click on a column's name sorts by it.", table=PageTable(headings, rows, marked)
    )
    if notes := list(list_notes(plan)):
        yield Section(
            "What to know beside the figures", table=PageTable([Heading("note", is_text=True)], [[n] for n in notes])
        )


def _search_sections(plan: PlanResult, colours: Mapping[str, str]) -> Iterator[Section]:
    """Attainment by size, the best split of each; and by rate with the size found."""
    letters = label_rows(plan)
    wanted = f"The dotted line: the wanted {show_share(plan.target)}."
    sizes = []
    for row in plan.rows:
        shares: dict[float, float] = {}
        for tried in row.sizes:
            shares[tried.instances] = max(tried.attainment, shares.get(tried.instances, 0.0))
        sizes.append(Line(letters[row.name], list(shares), list(shares.values()), row.instances))
    caption = f"At the rate asked for. A mark is the best split of that size that was run. {wanted} A star: the answer."
    draw = functools.partial(draw_attainment, colours=colours, target=plan.target, requests=plan.requests)
    answer = max((at for line in sizes for at in line.tried), default=1.0)
    if plan.best is not None and plan.best.instances is not None:
        answer = plan.best.instances
    figure = draw(sizes, over="instances", most=CLIP * answer + 1)
    yield Section("Attainment by number of instances", caption, figure)
    rates = [
        Line(letters[row.name], [tried.rate_per_s for tried in row.rates], [tried.attainment for tried in row.rates])
        for row in plan.rows
        if row.rates
    ]
    if rates:
        caption = f"Each fleet with its fewest instances. A mark is one run. {wanted}"
        most = max(at for line in rates for at in line.tried)
        figure = draw(rates, over="requests/s", most=min(most, CLIP * plan.rate_per_s))
        yield Section("Attainment by rate", caption, figure)
