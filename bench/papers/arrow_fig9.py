"""Arrow Figure 9: SLO-aware scheduling against Minimal Load with two to eight GPUs."""

from __future__ import annotations

import dataclasses
import itertools

from bench.papers.arrow_cases import Replay, replay, systems
from bench.papers.charts import Panel, draw, lines
from bench.papers.context import Context, silent
from bench.papers.finding import Claim, Finding, Point, Row, number
from bench.papers.traces import described, trace_named
from pla_sglang.sim.experiment import Outcome

TRACE = "azure_code"
SYSTEMS = ("Arrow", "Minimal Load")
RATE_PER_S = 24.0  # of the whole fleet, whatever its size, as in the paper: what 8 instances serve at ease and 2 do not
CURVE_ONLY = "the paper shows curves without numbers, and not the rate it ran at"


def run(context: Context) -> Finding:
    sizes = context.pick([2, 4], [2, 3, 4, 5, 6, 7, 8], [2, 3, 4, 5, 6, 7, 8])
    wanted = [(system, size) for system in SYSTEMS for size in sizes]
    plain = dataclasses.replace(context, progress=silent)
    jobs = [Replay(TRACE, systems(TRACE, size)[system].at_rate(RATE_PER_S), plain) for system, size in wanted]
    found = dict(zip(wanted, context.map(replay, jobs), strict=True))
    share = {key: one.figures.attainment for key, one in found.items()}
    rows = [
        Row(f"{size} GPUs, {system}: attainment", None, share[system, size], "", CURVE_ONLY)
        for size in sizes
        for system in SYSTEMS
    ]
    return Finding(
        "arrow_fig9",
        "Arrow, Figure 9",
        f"{RATE_PER_S:g} requests/s, Llama-3.1-8B, H100 step times; {described(trace_named(context, TRACE))}",
        rows,
        claims(share, sizes),
        [point(system, size, one) for (system, size), one in found.items()],
        draw(panels(found, sizes), f"Arrow Fig. 9: {TRACE} at {RATE_PER_S:g} requests/s by number of GPUs"),
    )


def claims(share: dict[tuple[str, int], float], sizes: list[int]) -> list[Claim]:
    least = min(share["Arrow", size] - share["Minimal Load", size] for size in sizes)
    shown = ", ".join(f"{size}: {number(share['Arrow', size])}" for size in sizes)
    rises = all(share["Arrow", b] >= share["Arrow", a] - 0.01 for a, b in itertools.pairwise(sizes))
    return [
        Claim("SLO-aware is not behind Minimal Load at any number of GPUs", least >= -0.01, f"least gain {least:+.3f}"),
        Claim("attainment of SLO-aware rises with the number of GPUs", rises, shown),
    ]


def point(system: str, size: int, one: Outcome) -> Point:
    figures = one.figures
    return {
        "system": system,
        "gpus": size,
        "attainment": figures.attainment,
        "ttft_p90_s": figures.ttft_p90_s,
        "tpot_p90_s": figures.tpot_p90_s,
        "flips": one.result.counts["flips"],
    }


def panels(found: dict[tuple[str, int], Outcome], sizes: list[int]) -> list[Panel]:
    shown = {
        "P90 TTFT, s": "ttft_p90_s",
        "P90 TPOT, s": "tpot_p90_s",
        "attainment": "attainment",
    }
    return [
        lines(
            {system: (sizes, [getattr(found[system, size].figures, name) for size in sizes]) for system in SYSTEMS},
            x="GPUs",
            y=label,
        )
        for label, name in shown.items()
    ]
