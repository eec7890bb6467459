"""The page of a what-if: what was recorded, the same simulated, other settings with their intervals, and what nobody
can tell from the recording."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pla_sglang.common.legend.colours import POLICY_COLOURS
from pla_sglang.sim.core.experiment import Experiment
from pla_sglang.sim.planning.what_if import (
    FIGURES,
    PredictedRange,
    WhatIf,
    figures_of,
    find_fewest_instances,
    measure_spans,
)
from pla_sglang.sim.planning.what_if_table import cells_of, describe_fleet, list_notes, title_of
from pla_sglang.sim.report.figures import Bar, colour_names, draw_bars, draw_distributions
from pla_sglang.sim.report.page import Heading, Page, PageTable, Section
from pla_sglang.sim.report.plan_page import LETTERS
from pla_sglang.sim.report.run_page import describe_lengths, describe_span
from pla_sglang.sim.report.verdict import show_share

Answers = Sequence[Mapping[str, PredictedRange]]
MEASURED, SIMULATED = "measured", "simulated"
DRAWN = {"attainment": "% of requests in target", "ttft_p99_s": "ms, P99 TTFT", "tpot_p99_s": "ms, P99 TPOT"}
LEGENDS = {
    "attainment": "share of requests that kept both targets",
    "TTFT": "time to the first token",
    "TPOT": "mean time per output token",
}


def make_what_if_page(
    known: WhatIf, others: Sequence[Experiment], answers: Answers, setting: Mapping[str, Any]
) -> Page:
    """``answers``: of the ``others``, in their order."""
    run, trace = known.run, known.run.trace
    facts = {
        "recording": f"{trace.name}: {len(trace):,} served requests over {describe_span(trace.span_s)}",
        "prompt, answer": describe_lengths(trace),
        "recorded fleet": describe_fleet(known.experiment),
        "profile": run.header.profile,
        "intervals": f"{show_share(known.confidence)}, from the simulator's error in {len(known.spans)} spans of "
        f"{describe_span(known.span_s)}",
    }
    verdict = list(_make_verdict(known, others, answers))
    unsure = any(
        answer["attainment"].holds(_measure_attainment(known, other))
        for other, answer in zip(others, answers, strict=True)
    )
    sections = [
        *_bar_sections(known, answers),
        _table_section(known, others, answers),
        *_distribution_sections(known),
        _span_section(known),
        _limit_section(known),
    ]
    return Page(f"What if? {trace.name}", facts, verdict, sections, setting, unsure=unsure)


def _measure_attainment(known: WhatIf, other: Experiment) -> float:
    """The share of the recorded requests that kept the targets of ``other``."""
    return figures_of(known.run.served, other.slo)["attainment"]


def _make_verdict(known: WhatIf, others: Sequence[Experiment], answers: Answers) -> Iterator[str]:
    measured, simulated = known.recorded["attainment"], known.replayed["attainment"]
    yield (
        f"{show_share(measured)} of the recorded requests kept their targets; the simulator of the same fleet says "
        f"{show_share(simulated)}."
    )
    for letter, other, answer in zip(LETTERS, others, answers, strict=False):
        interval, before = answer["attainment"], _measure_attainment(known, other)
        effect = "which the interval holds too" if interval.holds(before) else "fewer" if interval.high < before else ""
        told = f"{show_share(interval.low)} to {show_share(interval.high)} would have"
        against = (
            f"measured: {show_share(before)}"
            if other.slo == known.experiment.slo
            else (f"by these targets {show_share(before)} was measured")
        )
        yield f"{letter}, {describe_fleet(other)}: {told}; {against}, {effect or 'more than that'}."


def name_figure(name: str) -> str:
    """As a heading."""
    return "Attainment" if name == "attainment" else title_of(name).removesuffix(", ms")


def _bar_sections(known: WhatIf, answers: Answers) -> Iterator[Section]:
    names = [MEASURED, SIMULATED, *LETTERS[: len(answers)]]
    colours = colour_names(names)
    for figure, over in DRAWN.items():
        scale = 100 if figure == "attainment" else 1e3
        plain = [PredictedRange(value, value, value) for value in (known.recorded[figure], known.replayed[figure])]
        bars = [
            Bar(name, *(float(f"{scale * value:.4g}") for value in (one.predicted, one.low, one.high)))
            for name, one in zip(names, [*plain, *(answer[figure] for answer in answers)], strict=False)
            if not math.isnan(one.predicted + one.low + one.high)
        ]
        if bars:
            caption = "The recording first, then the same fleet simulated. Whiskers: the interval. Letters: the table."
            yield Section(name_figure(figure), caption, draw_bars(bars, colours, over))


def _table_section(known: WhatIf, others: Sequence[Experiment], answers: Answers) -> Section:
    headings = [Heading("fleet", "policy, instances, targets")]
    headings += [Heading(title_of(name), LEGENDS[title_of(name).partition(" ")[0]]) for name in FIGURES]
    rows = [[name, *cells] for name, cells in zip((MEASURED, SIMULATED), cells_of(known), strict=True)]
    rows += [
        [f"{letter} {describe_fleet(other)}", *cells]
        for letter, other, cells in zip(LETTERS, others, cells_of(known, answers)[2:], strict=False)
    ]
    return Section("Figures", "Predicted (least to greatest).", table=PageTable(headings, rows))


def _distribution_sections(known: WhatIf) -> Iterator[Section]:
    colours = {MEASURED: POLICY_COLOURS[0], SIMULATED: POLICY_COLOURS[1]}
    slo = known.experiment.slo
    for what, target_s in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s)):
        seconds = {
            name: getattr(served, f"{what.lower()}_s")()
            for name, served in ((MEASURED, known.run.served), (SIMULATED, known.simulated))
        }
        caption = "The recorded fleet. The nearer the lines, the better the simulator knows it. Dotted: the target."
        yield Section(
            f"{what}, measured beside simulated", caption, draw_distributions(seconds, colours, what, target_s)
        )


def _span_section(known: WhatIf) -> Section:
    """What the intervals are made of."""
    headings = [Heading("from, s", "of the recording")]
    headings += [
        Heading(f"{title}, {side}") for title in ("TTFT p90, ms", "TPOT p90, ms") for side in (MEASURED, SIMULATED)
    ]
    rows = [
        [f"{from_s:,.0f}", *(f"{1e3 * value:,.4g}" if not math.isnan(value) else "-" for value in values)]
        for from_s, *values in measure_spans(known)
    ]
    caption = "Each span's error is applied to the whole of another setting; the interval holds all that comes out."
    return Section("The simulator's error by span", caption, table=PageTable(headings, rows), folded=True)


def _limit_section(known: WhatIf) -> Section:
    """What the recording says nothing of."""
    fewest, profile = find_fewest_instances(known), known.run.header.profile
    rows = [
        f"Another profile than {profile}, another rate, or longer prompts: nobody has served them here",
        "Planners, and policies that change the number of instances: the fleet is of a fixed size",
        *(note.removeprefix("- ").capitalize() for note in list_notes(known)),
    ]
    if fewest > 1:
        least = (
            f"Fewer than {fewest} instances: each would have more work than any has had in the busiest span "
            f"({known.load_seen:.2f} s of work a second)"
        )
        rows.insert(0, least)
    return Section(
        "Outside of what was recorded",
        "These questions are refused, or stand in no figure.",
        table=PageTable([Heading("what", is_text=True)], [[row] for row in rows]),
    )
