"""A plan on a terminal: the sentence, the table, and the notes that belong to its rows."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from pla_sglang.sim.planning.result import FleetRow, PlanResult
from pla_sglang.sim.planning.words import describe_verdict

UNKNOWN = "-"
LEGEND = (
    "a GPU: requests/s of the rate asked for. one fewer: attainment with an instance less. GPU h: of all GPUs, from "
    "the first arrival to the last answer{span}. margin: highest rate of these instances over the rate asked for, "
    "less 1, within {tolerance:.0%}. error: attainment simulated less live where that was measured (bench fidelity)."
)


def show_plan(plan: PlanResult, console: Console) -> None:
    """In the width of the console."""
    console.print(describe_task(plan), markup=False)
    console.print(make_table(plan))
    texts = [f"{describe_verdict(plan)}.", LEGEND.format(tolerance=plan.tolerance, span=describe_span(plan))]
    if plan.missing:
        texts.append(f"not finished: {', '.join(plan.missing)}")
    console.print(*texts, *(f"- {note}" for note in list_notes(plan)), sep="\n", markup=False)
    if plan.start and plan.best is not None:
        console.print(f"To start {plan.best.name}:", markup=False)
        for line in plan.start:
            console.out(f"  {line}")  # never folded, so that it can be copied


def describe_task(plan: PlanResult) -> str:
    """What was asked for, and over how long a span."""
    span = f"{plan.span_s:,.0f} s of arrivals" + (" (short span)" if plan.short_span else "")
    limits = f"{1e3 * plan.ttft_slo_s:g} ms of TTFT and {1e3 * plan.tpot_slo_s:g} ms of TPOT"
    return (
        f"{plan.trace}, {plan.requests:,} requests at {plan.rate_per_s:.4g}/s, {span}: fewest instances with "
        f"{plan.target:.4g} of them within {limits}"
    )


def describe_span(plan: PlanResult) -> str:
    """Such as " (299 to 301 s)": of the runs with the numbers that were found; empty where none was."""
    spans_s = [row.simulated_s for row in plan.rows if row.simulated_s is not None]
    if not spans_s:
        return ""
    bounds = dict.fromkeys(f"{span_s:,.0f}" for span_s in (min(spans_s), max(spans_s)))
    return f" ({' to '.join(bounds)} s)"


def make_table(plan: PlanResult) -> Table:
    """A row for each form."""
    table = Table()
    table.add_column("policy", overflow="fold")
    for name in ("instances", "GPUs", "a GPU", "attainment", "one fewer", "GPU h", "margin", "error"):
        table.add_column(name, justify="right")
    for row in plan.rows:
        table.add_row(row.name, *cells_of(row, plan.rate_per_s))
    return table


def cells_of(row: FleetRow, rate_per_s: float) -> list[str]:
    """All but its name."""
    if row.instances is None or row.gpus is None:
        return ["none", *[UNKNOWN] * 7]
    split = "" if row.prefills is None else f" ({row.prefills}+{row.instances - row.prefills})"
    error = row.measured_error
    margin = UNKNOWN if row.margin is None else f"{'>= ' * row.margin_is_lower_bound}{row.margin:+.0%}"
    return [
        f"{row.instances}{split}",
        f"{row.gpus}",
        f"{rate_per_s / row.gpus:.3g}",
        _share(row.attainment),
        _share(row.one_fewer),
        UNKNOWN if row.gpu_hours is None else f"{row.gpu_hours:.3g}",
        margin,
        UNKNOWN if error is None else f"{error.attainment:+.3f}",
    ]


def _share(attainment: float | None) -> str:
    return UNKNOWN if attainment is None else f"{attainment:.4f}"


def list_notes(plan: PlanResult) -> Iterator[str]:
    """Those of the plan, then those of rows, each with all names that it holds for."""
    yield from plan.notes
    names: dict[str, list[str]] = {}
    for row in plan.rows:
        for note in (*row.notes, *([row.problem] if row.problem else [])):
            names.setdefault(note, []).append(row.name)
    for note, of in names.items():
        yield f"{', '.join(of)}: {note}"
