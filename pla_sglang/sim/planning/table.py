"""A plan on a terminal: the sentence, the table, and the notes that belong to its rows."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from pla_sglang.sim.planning.result import FleetRow, PlanResult
from pla_sglang.sim.planning.words import describe_verdict

UNKNOWN = "-"
LEGEND = (
    "range: the fewest instances within the stated error of profile and simulator. a GPU: requests/s and tokens/s of "
    "answers at the rate asked for. one fewer: attainment with an instance less. margin: highest rate of these "
    "instances over the rate asked for, less 1, within {tolerance:.0%}. error: attainment simulated less live where "
    "that was measured (bench fidelity).{cost}"
)
COST = " an hour: of all GPUs at {price:g} a GPU hour. 1M tokens: that of a million tokens of answers."


def show_plan(plan: PlanResult, console: Console) -> None:
    """In the width of the console."""
    console.print(describe_task(plan), markup=False)
    console.print(make_table(plan))
    texts = [f"{describe_verdict(plan)}.", LEGEND.format(tolerance=plan.tolerance, cost=describe_cost(plan))]
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


def describe_cost(plan: PlanResult) -> str:
    return "" if plan.gpu_hour_price is None else COST.format(price=plan.gpu_hour_price)


def make_table(plan: PlanResult) -> Table:
    """A row for each form."""
    table = Table()
    table.add_column("policy", overflow="fold")
    for name in list_columns(plan.gpu_hour_price):
        table.add_column(name.replace(" ", "\n", 1), justify="right")
    for row in plan.rows:
        cells = cells_of(row, plan.rate_per_s, plan.output_tokens_per_s, plan.gpu_hour_price)
        table.add_row(row.name, *cells, style="bold" if row is plan.best else None)
    return table


def list_columns(gpu_hour_price: float | None) -> list[str]:
    """All but the name of the fleet."""
    cost = [] if gpu_hour_price is None else ["an hour", "1M tokens"]
    columns = ["instances", "range", "GPUs", "requests/s a GPU", "tokens/s a GPU", *cost]
    return [*columns, "attainment", "one fewer", "margin", "error"]


def cells_of(
    row: FleetRow, rate_per_s: float, output_tokens_per_s: float, gpu_hour_price: float | None = None
) -> list[str]:
    """All but its name, as ``list_columns`` has them."""
    if row.instances is None or row.gpus is None:
        return ["none", *[UNKNOWN] * (len(list_columns(gpu_hour_price)) - 1)]
    cost = []
    if gpu_hour_price is not None:
        hour = row.gpus * gpu_hour_price
        cost = [f"{hour:.4g}", f"{hour / (3600 * output_tokens_per_s) * 1e6:.3g}"]
    split = "" if row.prefills is None else f" ({row.prefills}+{row.instances - row.prefills})"
    error = row.measured_error
    margin = UNKNOWN if row.margin is None else f"{'>= ' * row.margin_is_lower_bound}{row.margin:+.0%}"
    return [
        f"{row.instances}{split}",
        row.range_text() or UNKNOWN,
        f"{row.gpus}",
        f"{rate_per_s / row.gpus:.3g}",
        f"{output_tokens_per_s / row.gpus:,.0f}",
        *cost,
        _share(row.attainment),
        _share(row.one_fewer),
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
