"""A what-if on a terminal and as JSON: what was recorded, the same simulated, and other settings with intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from pla_sglang.sim.core.experiment import Experiment
from pla_sglang.sim.planning.what_if import FIGURES, PredictedRange, WhatIf

LEGEND = (
    "measured: as recorded. simulated: the recorded fleet in the simulator. Others: predicted (least to greatest) with "
    "the simulator's error in each of {spans} spans of {span_s:.0f} s; {confidence:.0%} of such intervals hold where "
    "its error for the other setting is like these."
)


def show_what_if(
    known: WhatIf, others: Sequence[Experiment], answers: Sequence[Mapping[str, PredictedRange]], out: Console
) -> None:
    """In the width of the console."""
    run = known.run
    table = Table(title=f"{run.trace.name}: {len(run.trace):,} served requests at {run.trace.rate_per_s:.3g}/s")
    table.add_column("fleet", overflow="fold")
    for name in FIGURES:
        table.add_column(title_of(name), justify="right")
    names = [f"measured: {describe_fleet(known.experiment)}", "simulated", *map(describe_fleet, others)]
    for name, cells in zip(names, cells_of(known, answers), strict=True):
        table.add_row(name, *cells)
    out.print(table)
    legend = LEGEND.format(spans=len(known.spans), span_s=known.span_s, confidence=known.confidence)
    out.print(legend, *list_notes(known), sep="\n", markup=False)


def cells_of(known: WhatIf, answers: Sequence[Mapping[str, PredictedRange]] = ()) -> list[list[str]]:
    """``FIGURES`` measured, simulated, and of each answer."""
    plain = [[_cell(name, figures[name]) for name in FIGURES] for figures in (known.recorded, known.replayed)]
    return plain + [[_range(name, answer[name]) for name in FIGURES] for answer in answers]


def list_notes(known: WhatIf) -> list[str]:
    notes = []
    if known.run.unserved:
        notes.append(f"- left out: {known.run.unserved} without an answer, or from before all instances were ready")
    if known.run.away_s:
        notes.append(
            f"- instances were away for {known.run.away_s:.1f} s in all, and came back; what that did is in the error"
        )
    return notes


def describe_fleet(experiment: Experiment) -> str:
    """Such as ``arrow, 4 instances (2+2), 500 ms / 50 ms``."""
    prefills = experiment.prefills
    split = "" if prefills is None else f" ({prefills}+{experiment.instances - prefills})"
    slo = experiment.slo
    targets = f"{1e3 * slo.ttft_s:.4g} ms / {1e3 * slo.tpot_s:.4g} ms"
    return f"{experiment.policy}, {experiment.instances} instance{'s' * (experiment.instances > 1)}{split}, {targets}"


def title_of(name: str) -> str:
    return "attainment" if name == "attainment" else f"{name.removesuffix('_s').upper().replace('_P', ' p')}, ms"


def _cell(name: str, value: float) -> str:
    if name == "attainment":
        return f"{value:.3f}"
    return f"{1e3 * value:,.0f}" if value >= 0.1 else f"{1e3 * value:.3g}"


def _range(name: str, interval: PredictedRange) -> str:
    value, low, high = (_cell(name, one) for one in dataclasses.astuple(interval))
    return f"{value} ({low} to {high})"


def as_json(
    known: WhatIf, others: Sequence[Experiment], answers: Sequence[Mapping[str, PredictedRange]]
) -> dict[str, Any]:
    """Plain values; no setting but the recorded one: ``others`` is empty."""
    return {
        "requests": len(known.run.trace),
        "unserved": known.run.unserved,
        "recorded": fleet_json(known.experiment) | known.recorded,
        "replayed": known.replayed,
        "host": dataclasses.asdict(known.host),
        "spans": len(known.spans),
        "span_s": known.span_s,
        "confidence": known.confidence,
        "others": [
            fleet_json(other) | {name: dataclasses.asdict(answer[name]) for name in FIGURES}
            for other, answer in zip(others, answers, strict=True)
        ],
    }


def fleet_json(experiment: Experiment) -> dict[str, Any]:
    return {
        "policy": experiment.policy,
        "instances": experiment.instances,
        "prefills": experiment.prefills,
        "ttft_slo_s": experiment.slo.ttft_s,
        "tpot_slo_s": experiment.slo.tpot_s,
    }
