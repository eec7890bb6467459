"""PLA-Serve Figures 1 and 3: P90 TTFT of long and of short prefills by how many of either kind are under way."""

from __future__ import annotations

import dataclasses

from bench.papers.charts import draw, lines
from bench.papers.context import Context
from bench.papers.finding import Claim, Finding, Row, number
from bench.papers.measure import of_kind
from bench.papers.pla_cases import LONG, MODES, SHORT, two_kinds, world
from pla_sglang.metrics.goodput import quantile

MODEL = "32B"
KINDS = {SHORT: "short", LONG: "long"}
CURVE_ONLY = (
    "The paper shows curves without numbers. Kernels that slow each other down inside a batch only a GPU can show."
)


@dataclasses.dataclass(frozen=True)
class Job:
    """One closed loop: users of either kind, requests of either kind, how the instance is run."""

    mode: str
    shorts: int
    longs: int
    rows: int
    seed: int


def p90s(job: Job) -> dict[str, float]:
    """P90 TTFT by kind, seconds. Users are of both kinds, or of one; where a kind runs out, the count ends."""
    users = {kind: count for kind, count in ((SHORT, job.shorts), (LONG, job.longs)) if count}
    # as many passes of either kind as the run is to hold: one round of all users is what a pass can take at most
    trace = two_kinds(job.rows * max(job.shorts, 1), job.rows * max(job.longs, 1), job.seed)
    trace = trace.take([row for row in range(len(trace)) if int(trace.client[row]) in users])  # type: ignore[index]
    served = world(MODES[job.mode], model=MODEL, instances=1, users=users).run(trace).served
    assert trace.client is not None, "two_kinds names its clients"
    both_s = min(float(of_kind(served, trace.client, kind).arrival_s.max()) for kind in users)
    found = {}
    for kind in users:
        one = of_kind(served, trace.client, kind)
        ttft_s = one.ttft_s()[one.arrival_s <= both_s]  # while both kinds are there
        found[KINDS[kind]] = quantile(ttft_s[len(ttft_s) // 10 :], 90)
    return found


def run(context: Context) -> Finding:
    levels = context.pick([2, 8], [1, 2, 4, 8, 16], [1, 2, 4, 8, 16, 32])
    rows = context.pick(10, 60, 300)
    mixes = [(shorts, longs) for longs in (0, *levels) for shorts in (0, *levels) if shorts or longs]
    keys = [(mode, *mix) for mode in ("SGLang", "PLA") for mix in mixes]
    found = dict(zip(keys, context.map(p90s, [Job(*key, rows, context.seed) for key in keys]), strict=True))
    top = levels[-1]
    both, alone_long = found["SGLang", top, top], found["SGLang", 0, top]["long"]
    alone_short, ours = found["SGLang", top, 0]["short"], found["PLA", top, top]
    slower_long, slower_short = both["long"] / alone_long, both["short"] / alone_short
    setting = f"{top} + {top} under way"
    return Finding(
        "pla_fig1",
        "PLA-Serve, Figures 1 and 3",
        "one prefill instance, Qwen2.5-32B, H200 step times, closed loop; short: under 64 tokens, long: 1,025 to 4,096",
        [
            Row(f"{setting}: P90 TTFT of longs, beside shorts / alone", None, slower_long, "", CURVE_ONLY),
            Row(f"{setting}: P90 TTFT of shorts, beside longs / alone", None, slower_short, "", CURVE_ONLY),
            Row(f"{setting}: the same of shorts under PLA", None, ours["short"] / alone_short, "", CURVE_ONLY),
            Row(f"{setting}: the same of longs under PLA", None, ours["long"] / alone_long, "", CURVE_ONLY),
        ],
        [
            Claim("longs are slower beside shorts", slower_long > 1, f"{number(slower_long)} times"),
            Claim(
                "longs hurt shorts more than shorts hurt longs", slower_short > slower_long, f"{number(slower_short)}"
            ),
            Claim(
                "PLA keeps shorts apart from longs", ours["short"] < both["short"], f"{number(1e3 * ours['short'])} ms"
            ),
        ],
        [{"mode": mode, "shorts": shorts, "longs": longs, **one} for (mode, shorts, longs), one in found.items()],
        picture(found, levels),
    )


def picture(found: dict[tuple[str, int, int], dict[str, float]], levels: list[int]) -> bytes:
    panels = []
    for kind in ("long", "short"):
        for mode in ("SGLang", "PLA"):
            shown = {}
            for own in levels[::2]:
                keys = [(mode, other, own) if kind == "long" else (mode, own, other) for other in (0, *levels)]
                shown[f"{own} {kind}s"] = ([0, *levels], [found[key][kind] for key in keys])
            other_kind = "shorts" if kind == "long" else "longs"
            panels.append(lines(shown, x=f"{other_kind} under way ({mode})", y=f"P90 TTFT of {kind}s, s", log_y=True))
    return draw(panels, "PLA-Serve Fig. 1 and 3: longs and shorts in each other's way")
