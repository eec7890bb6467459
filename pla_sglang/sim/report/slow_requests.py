"""The requests of a run that were slowest against their targets, and where their time went."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pla_sglang.common.legend.colours import STAGE_COLOURS
from pla_sglang.sim.core.experiment import ExperimentResult
from pla_sglang.sim.metrics.goodput import Floats
from pla_sglang.sim.report.columns import NOTHING, show_number
from pla_sglang.sim.report.figures import cut_digits, make_layout, name_axis
from pla_sglang.sim.report.page import Figure, Heading, PageTable
from pla_sglang.sim.workload.trace import Trace

MOST = 15
FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SlowRequest:
    """``over``: how many times its worse target it took; infinity: it did not finish. ``stages_s`` by stage."""

    row: int
    over: float
    ended: str
    input_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float
    stages_s: Mapping[str, float]
    retractions: int
    moves: int
    prefilled_at: int
    decoded_at: int


def find_slow_requests(run: ExperimentResult, trace: Trace) -> list[SlowRequest]:
    """The slowest first; only requests that have missed a target."""
    served, result, slo = run.result.served, run.result, run.experiment.slo
    ttft_s, tpot_s = served.ttft_s(), served.tpot_s()
    over = np.fmax(ttft_s / slo.ttft_s, tpot_s / slo.tpot_s)
    over = np.where(np.isfinite(served.finish_s), over, math.inf)
    order = np.argsort(-over, kind="stable")[:MOST]
    stages_s = split_time(run)
    return [
        SlowRequest(
            row=row,
            over=float(over[row]),
            ended=result.stage[row],
            input_tokens=int(trace.input_tokens[row]),
            output_tokens=int(trace.output_tokens[row]),
            ttft_s=float(ttft_s[row]),
            tpot_s=float(tpot_s[row]),
            stages_s={name: float(column[row]) for name, column in stages_s.items()},
            retractions=int(result.retractions[row]),
            moves=int(result.migrations[row]),
            prefilled_at=int(result.prefill_instance[row]),
            decoded_at=int(result.decode_instance[row]),
        )
        for row in map(int, order)
        if over[row] > 1
    ]


def split_time(run: ExperimentResult) -> dict[str, Floats]:
    """[n] seconds of each request by stage; 0 for a stage that it never reached.

    What a retraction or a move costs is part of "decode": the request has begun to decode before.
    """
    served, result = run.result.served, run.result
    moments = (served.arrival_s, result.prefill_start_s, served.first_token_s, result.decode_start_s, served.finish_s)
    # Without a stage of its own (a single token, a cancel) the next one begins where the one before has ended.
    filled = [moments[0]]
    for moment in moments[1:]:
        filled.append(np.fmax(filled[-1], np.where(np.isfinite(moment), moment, filled[-1])))
    return {name: after - before for name, before, after in zip(STAGE_COLOURS, filled[:-1], filled[1:], strict=True)}


def draw_stages(slow: Sequence[SlowRequest]) -> Figure:
    """A bar a request, the slowest at the top, in parts by stage."""
    names = [f"request {request.row}" for request in slow]
    notes = [f"{request.input_tokens:,} + {request.output_tokens:,} tokens, {request.ended}" for request in slow]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": stage,
            "y": names,
            "x": cut_digits(request.stages_s[stage] for request in slow),
            "marker": {"color": colour},
            "customdata": notes,
            "hovertemplate": f"%{{y}} (%{{customdata}})<br>{stage}: %{{x}} s<extra></extra>",
        }
        for stage, colour in STAGE_COLOURS.items()
    ]
    height = 110 + 24 * len(slow)
    axes = {"xaxis": name_axis("s since arrival"), "yaxis": {"automargin": True, "autorange": "reversed"}}
    return {"data": data, "layout": make_layout(height, barmode="stack", **axes), "height": height}


def make_slow_table(slow: Sequence[SlowRequest]) -> PageTable:
    headings = [
        Heading("request", "row of the trace, from 0"),
        Heading("over target", "the worse of TTFT and TPOT, as a multiple of its target; -: it did not finish"),
        Heading("ended", "how it ended"),
        Heading("prompt", "tokens"),
        Heading("answer", "tokens"),
        Heading("TTFT, s", "from arrival to the first token"),
        Heading("TPOT, ms", "mean time per token after the first"),
        *(Heading(f"{stage}, s", STAGE_LEGENDS[stage]) for stage in STAGE_COLOURS),
        Heading("retracted", "times that it lost its KV memory while it decoded"),
        Heading("moves", "times that it was moved while it decoded"),
        Heading("prefilled, decoded at", "instances where it was last"),
    ]
    return PageTable(headings, [_show_request(request) for request in slow])


STAGE_LEGENDS = {
    "waiting": "from arrival to its first prefill pass",
    "prefill": "from its first pass to the first token, waits between passes included",
    "hand-off": "from the first token until it joins a running batch",
    "decode": "from there to the last token, retractions and moves included",
}


def _show_request(request: SlowRequest) -> list[str]:
    places = (request.prefilled_at, request.decoded_at)
    return [
        str(request.row),
        show_number(request.over),
        request.ended,
        f"{request.input_tokens:,}",
        f"{request.output_tokens:,}",
        show_number(request.ttft_s),
        show_number(request.tpot_s * 1e3),
        *(show_number(seconds) for seconds in request.stages_s.values()),
        str(request.retractions),
        str(request.moves),
        ", ".join(NOTHING if place < 0 else f"i{place}" for place in places),
    ]
