"""The page of ``parity``: a recording's decisions, those that came out otherwise, and their reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pla_sglang.recording.rows import Header
from pla_sglang.sim.core.parity import Parity
from pla_sglang.sim.report.figures import draw_reasons
from pla_sglang.sim.report.page import Heading, Page, PageTable, Section
from pla_sglang.sim.report.run_page import make_reason_table
from pla_sglang.sim.report.verdict import show_share

KINDS = (
    Heading("decision", "what the policy was asked for"),
    Heading("count", "decisions of the recording"),
    Heading("identical", "those that came out the same in the replay"),
)
DIFFERENCES = (
    Heading("line", "of the recording, from 1"),
    Heading("decision", "what the policy was asked for"),
    Heading("at, s", "on the clock of the recording"),
    Heading("live", is_text=True),
    Heading("replayed", is_text=True),
)


def make_parity_page(file: str, header: Header, result: Parity, setting: Mapping[str, Any]) -> Page:
    """``file``: name of the recording. Raises RecordError where it holds no decision."""
    facts = {
        "recording": f"{file}: {result.virtual_s:,.0f} s",
        "policy": header.policy,
        "profile": header.profile,
        "time scale": f"{header.time_scale:g}",
    }
    verdict = f"{show_share(result.identical_share)} of {result.count:,} decisions came out as they did live."
    return Page(f"Replay of {file}", facts, [verdict], list(_make_sections(result)), setting)


def _make_sections(result: Parity) -> Iterator[Section]:
    kinds = [[kind, f"{count:,}", f"{result.identical[kind]:,}"] for kind, count in sorted(result.decisions.items())]
    yield Section("Decisions by kind", "Live against replayed.", table=PageTable(KINDS, kinds))
    if result.reasons:
        caption = "As given live. What a reason means stands beside the mouse, and in the table."
        yield Section("Decisions by reason", caption, draw_reasons(result.reasons), make_reason_table(result.reasons))
    rows = [
        [
            f"{difference.line:,}",
            difference.kind,
            f"{difference.now_s:.3f}",
            str(difference.live),
            str(difference.replayed),
        ]
        for difference in result.differences
    ]
    if rows:
        yield Section("First differences", f"The first {len(rows)}, in order.", table=PageTable(DIFFERENCES, rows))
