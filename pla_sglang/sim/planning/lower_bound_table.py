"""The lower bound on a terminal: a sentence, a table, and what to know beside it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from pla_sglang.sim.planning.lower_bound import BoundResult
from pla_sglang.sim.planning.planned_fleet import PlannedFleet

COLUMNS = ("", "GPU h", "of fixed", "mean instances", "what it is")


def show_bound(bound: BoundResult, console: Console, planned: PlannedFleet | None = None) -> None:
    """In the width of the console. ``planned``: a row beside the bound."""
    console.print(describe_question(bound), markup=False)
    table = Table()
    for place, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if 0 < place < len(COLUMNS) - 1 else "left")
    for row in list_rows(bound, planned):
        table.add_row(*row)
    console.print(table)
    console.print(f"{describe_answer(bound)}.", *(f"- {note}" for note in bound.notes), sep="\n", markup=False)


def list_rows(bound: BoundResult, planned: PlannedFleet | None = None) -> Iterator[list[str]]:
    """Cells of ``COLUMNS``."""
    starts = f", {bound.starts:,} start-ups of {bound.startup_s:g} s included" if bound.starts else ""
    fixed = (
        f"{bound.peak_replicas:,} instance{'s' * (bound.peak_replicas > 1)} all the time: fewer never keep the target"
    )
    rows = [
        ("work", bound.work_gpu_hours, "what the kept requests take in the fullest batches"),
        ("any autoscaler", bound.lower_bound_gpu_hours, f"at least, with perfect foresight{starts}"),
        ("constant fleet", bound.fixed_gpu_hours, fixed),
    ]
    if planned is not None:
        rows.append((planned.name, planned.gpu_hours, f"simulated, with {planned.attainment:.4g} in target"))
    for name, gpu_hours, meaning in rows:
        share = gpu_hours / bound.fixed_gpu_hours if bound.fixed_gpu_hours else 1.0
        span_h = max(bound.paid_span_s, 1e-9) / 3600
        yield [
            name,
            f"{gpu_hours:,.4g}",
            f"{share:.2f}",
            f"{gpu_hours / bound.gpus_per_instance / span_h:,.3g}",
            meaning,
        ]


def describe_question(bound: BoundResult) -> str:
    limits = f"{1e3 * bound.ttft_slo_s:g} ms of TTFT and {1e3 * bound.tpot_slo_s:g} ms of TPOT"
    return (
        f"{bound.trace}, {bound.requests:,} requests, {bound.span_s:,.0f} s of arrivals: fewest GPU hours with "
        f"{bound.attainment:.4g} of them within {limits}, on {bound.profile}"
    )


def describe_answer(bound: BoundResult) -> str:
    """The verdict, without a full stop."""
    startup = f"start-ups of {bound.startup_s:g} s" if bound.startup_s else "instant start-ups"
    floor = f", at least {bound.floor:,} instances at all times" if bound.floor else ""
    share = bound.lower_bound_gpu_hours / bound.fixed_gpu_hours if bound.fixed_gpu_hours else 1.0
    return (
        f"with {startup}{floor} no autoscaler keeps the target with fewer than {bound.lower_bound_gpu_hours:,.4g} GPU "
        f"hours, {share:.2f} times those of the smallest constant fleet by the same bound"
    )
