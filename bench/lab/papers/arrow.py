"""Arrow (section 7): its systems, and the highest rate that each of them serves at 90 % attainment.

Eight H800, here H100, with Llama-3.1-8B. Systems of the paper: Arrow on eight instances of one GPU; vLLM on one
instance of eight GPUs; vLLM's P/D split with four GPUs each. The engines of Arrow, of its ablations and of vLLM take
decodes first and chunks of 2,048 tokens into one batch (section 5.4). "DP" is ours: eight one-GPU instances that do
both phases, the least loaded one first, which is what an operator would run today; "mixed" on the same engines.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.lab.fleet_arms import VLLM_CHUNK_TOKENS
from bench.lab.papers.charts import Panel, curves, draw
from bench.lab.papers.context import Context, trace_named, traces_facts
from bench.lab.papers.finding import Claim, Finding, Point, Row, listed, number
from bench.lab.papers.phase_load import PhaseLoad, load_of_phases
from pla_sglang.sim.core.experiment import Experiment, run_experiment
from pla_sglang.sim.metrics.goodput import SLOS, Capacity, find_capacity
from pla_sglang.sim.workload import Trace

PROFILES = Path(__file__).parent / "profiles"
TARGET = 0.9  # section 7.1
SPAN_S = 300.0  # behind a rate
SPANS = f"traces repeated to at least {SPAN_S:g} s of arrivals, copies without common prefixes"
LIMITS = {"low_per_s": 0.5, "high_per_s": 500.0}  # of a search; one that ends there gives no rate

COLOCATED, STATIC = "vLLM TP8", "vLLM P/D TP4+TP4"
DP, DP_MIXED = "DP, least tokens", "DP, least tokens, mixed"
# Where a search starts: requests/s that earlier runs came to, Figure 8's systems last.
STARTS: dict[str, dict[str, float]] = {
    "azure_code": {
        "Arrow": 92,
        COLOCATED: 19,
        STATIC: 16,
        DP: 31,
        DP_MIXED: 114,
        "Minimal Load": 33,
        "Round Robin": 33,
    },
    "burstgpt": {"Arrow": 98, COLOCATED: 33, STATIC: 34, DP: 108, DP_MIXED: 114},
    "azure_conv": {
        "Arrow": 132,
        COLOCATED: 57,
        STATIC: 60,
        DP: 159,
        DP_MIXED: 157,
        "Minimal Load": 97,
        "Round Robin": 97,
    },
    "mooncake": {"Arrow": 9.3, COLOCATED: 8, STATIC: 6.9, DP: 11.6, DP_MIXED: 10.9},
}

Capacities = Mapping[tuple[str, str], Capacity]  # by trace and system


def systems(trace: str, instances: int = 8) -> dict[str, Experiment]:
    """By name. Targets are those of Table 1."""
    slo, profiles = SLOS[trace], {size: str(PROFILES / f"h100-llama3.1-8b-tp{size}.json") for size in (4, 8)}
    chunks: dict[str, Any] = {"mixed": True, "chunk_tokens": VLLM_CHUNK_TOKENS}
    return {
        "Arrow": Experiment("arrow", slo, instances=instances, **chunks),
        COLOCATED: Experiment("round-robin", slo, profile=profiles[8], instances=1, **chunks),
        STATIC: Experiment("static-pd", slo, profile=profiles[4], instances=2, prefills=1),
        DP: Experiment("least-tokens", slo, instances=instances),
        DP_MIXED: Experiment("least-tokens", slo, instances=instances, **chunks),
        "Minimal Load": Experiment("minimal-load", slo, instances=instances, **chunks),
        "Round Robin": Experiment("static-pd-round-robin", slo, instances=instances, **chunks),
    }


def workload(context: Context, name: str, rate_per_s: float) -> Trace:
    """The whole trace, over and over until it spans ``SPAN_S`` at this rate; in tests its head."""
    trace = trace_named(context, name)
    return trace.head(100) if context.size == 0 else trace.repeat(copies(len(trace), rate_per_s))


def copies(requests: int, rate_per_s: float) -> int:
    return math.ceil((SPAN_S * rate_per_s + 1) / requests)


def search(trace: str, system: str, *, context: Context) -> Capacity:
    """By bisection; the answer is within 5 % (full: 2 %)."""
    experiment, tolerance = systems(trace)[system], context.pick(0.9, 0.05, 0.02)

    def attainment_at(rate_per_s: float) -> float:
        repeated = workload(context, trace, rate_per_s)
        return run_experiment(experiment.at_rate(rate_per_s), repeated).figures.attainment

    start_per_s = STARTS[trace][system]
    return find_capacity(attainment_at, **LIMITS, target=TARGET, tolerance=tolerance, start_per_s=start_per_s)


def replay(trace: str, system: str, gpus: int, rate_per_s: float, *, context: Context) -> dict[str, float]:
    run = run_experiment(systems(trace, gpus)[system].at_rate(rate_per_s), workload(context, trace, rate_per_s))
    figures = {name: getattr(run.figures, name) for name in ("attainment", "ttft_p90_s", "tpot_p90_s")}
    return figures | {"flips": run.result.counts["flips"]}


_SEARCHED: dict[tuple[Context, tuple[str, str]], Capacity] = {}  # Figures 7 and 8 share searches


def capacities(context: Context, traces: Sequence[str], names: Sequence[str]) -> Capacities:
    return context.measure(search, itertools.product(traces, names), known=_SEARCHED, context=context)


def tried_rates(results: Capacities) -> tuple[list[Point], list[Panel]]:
    """One record for every run of the searches, by rate; and attainment against rate, a panel a trace."""
    points: list[Point] = [
        {"trace": trace, "system": system, "rate_per_s": rate, "attainment": share}
        for (trace, system), capacity in results.items()
        for rate, share in sorted(capacity.tried)
    ]
    label, fields = "{}, requests/s", {"attainment": "attainment"}
    panels = curves(points, fields, x="rate_per_s", by="system", label=label, each="trace", log_x=True, mark=TARGET)
    return points, panels


def rate_of(capacity: Capacity) -> float | None:
    """None where the search ended at its limit."""
    return None if capacity.failed_per_s is None else capacity.held_per_s


def rate_ratio(results: Capacities, trace: str, system: str, other: str) -> float | None:
    """How many times as high the rate of ``system`` is as that of ``other``; None where a search found none."""
    rate, other_rate = rate_of(results[trace, system]), rate_of(results[trace, other])
    return None if rate is None or other_rate is None else rate / other_rate


def with_values(rows: Sequence[Row]) -> list[Row]:
    """Without those that neither the paper nor a search that came to an end has a value for."""
    return [row for row in rows if row.paper is not None or row.ours is not None]


def least_span_s(results: Capacities, trace: str, requests: int) -> float:
    """Of the arrivals in the shortest run of the searches on ``trace``, which has so many requests."""
    rates = [rate for (of, _), capacity in results.items() if of == trace for rate, _ in capacity.tried]
    return min((requests * copies(requests, rate) - 1) / rate for rate in rates)


# -- Figure 4: load of prefills before that of decodes -----------------------------------------------------------------

CLIP_S = (1200.0, 2400.0)  # of azure_conv: "from the 20th to the 40th minute"
SPEEDS = (1.0, 6.0)  # as recorded, and where four prefill instances are busy
MOMENTS = {"onset": 0.1, "middle": 0.5, "decline": 0.9}  # shares of a phase's load over the clip that have passed
FIG4_WHY = (
    "The paper shows curves without numbers. A decode takes seconds, the clip minutes: how prompts and answers change"
    " over it moves the loads apart by more than the order of the phases does."
)


def phases(speed: float, *, context: Context) -> PhaseLoad:
    """Of the clip on four prefill and four decode instances, ``speed`` times as many requests a second."""
    trace = trace_named(context, "azure_conv")
    clip = trace.window(*CLIP_S) if trace.span_s > CLIP_S[1] else trace
    served = run_experiment(systems("azure_conv")["Minimal Load"].at_rate(clip.rate_per_s * speed), clip).result.served
    return load_of_phases(served, samples=1200)


def fig4(context: Context) -> Finding:
    """Prefill and decode load over time while the load rises and falls."""
    results = context.measure(phases, SPEEDS, context=context)
    rows, claims = [], []
    for speed, of in results.items():
        lags_s = {
            name: of.moment_s(of.decodes, share) - of.moment_s(of.prefills, share) for name, share in MOMENTS.items()
        }
        name, text = f"{speed:g} times the recorded rate", "decodes later than prefills by"
        rows += [Row(f"{name}, {moment}: {text}", None, lag_s, "s", FIG4_WHY) for moment, lag_s in lags_s.items()]
        claims.append(
            Claim(f"{name}: onset, middle and decline of decodes are later", min(lags_s.values()) > 0, listed(lags_s))
        )
    points: list[Point] = [
        {"speed": speed, "at_s": at_s, "phase": phase, "requests": count}
        for speed, of in results.items()
        for phase, counts in (("prefill", of.prefills), ("decode", of.decodes))
        for at_s, count in zip(of.at_s.tolist(), counts.tolist(), strict=True)
    ]
    panels = curves(points, {"requests": "requests"}, x="at_s", by="phase", label="s, {} times the rate", each="speed")
    setting = "4 prefill and 4 decode instances, Minimal Load, Llama-3.1-8B, H100 step times; minutes 20 to 40 of"
    setting = f"{setting} {traces_facts(context, ['azure_conv'])['azure_conv'].text}"
    return Finding(setting, rows, claims, points, draw(panels, "Arrow Fig. 4: load of prefills and of decodes"))


# -- Figures 7 to 9 ----------------------------------------------------------------------------------------------------

# Figure 7: trace -> Arrow over vLLM, Arrow over vLLM disaggregated (section 7.2)
FIG7 = {"azure_code": (5.62, 7.78), "burstgpt": (3.60, 5.04), "azure_conv": (3.76, 4.06), "mooncake": (3.73, 4.14)}
WHY_COLOCATED = (
    "Ours is the scheduling alone: the same step times on both sides. The paper's vLLM 0.7.3 also spends host time in"
    " each of its many small passes, which no step profile has."
)
WHY_STATIC = "vLLM 0.7.3's KV transfers overran a buffer, its batches were small (section 7.1); ours has neither fault."
WHY_DP = "Not in the paper. Prefills that share an instance with decodes cost no transfer and leave no instance idle."
WHY_MIXED = "Not in the paper: as many engines like Arrow's own, none of which is kept from either phase."


def fig7(context: Context) -> Finding:
    """Rates at 90 % attainment on four traces, against vLLM colocated and vLLM disaggregated."""
    results = capacities(context, list(FIG7), ("Arrow", COLOCATED, STATIC, DP, DP_MIXED))
    traces = traces_facts(context, FIG7)
    rows, claims = [], []
    for trace, (paper_colocated, paper_static) in FIG7.items():
        label, span_s = traces[trace].label, least_span_s(results, trace, traces[trace].requests)
        colocated, static, dp, dp_mixed = (
            rate_ratio(results, trace, "Arrow", other) for other in (COLOCATED, STATIC, DP, DP_MIXED)
        )
        rate = rate_of(results[trace, "Arrow"])
        rows += [
            Row(f"{label}: Arrow, rate at 90 %", None, rate, "req/s", "the paper shows it as a curve only"),
            Row(f"{label}: Arrow / vLLM TP8", paper_colocated, colocated, "", WHY_COLOCATED, span_s),
            Row(f"{label}: Arrow / vLLM P/D", paper_static, static, "", WHY_STATIC, span_s),
            Row(f"{label}: Arrow / {DP}", None, dp, "", WHY_DP, span_s),
            Row(f"{label}: Arrow / {DP_MIXED}", None, dp_mixed, "", WHY_MIXED, span_s),
        ]
        holds = min(colocated or 0.0, static or 0.0) > 1
        seen = f"{number(colocated)} times vLLM TP8, {number(static)} times vLLM P/D"
        claims.append(Claim(f"{label}: Arrow serves a higher rate than both baselines", holds, seen))
    rows = with_values(rows)
    points, panels = tried_rates(results)
    setting = f"8 GPUs, Llama-3.1-8B, H100 step times, {SPANS}; " + "; ".join(of.text for of in traces.values())
    picture = draw(panels, "Arrow Fig. 7: share of requests in target against rate")
    keys = {
        "arrow_vs_colocated_azure_code": rate_ratio(results, "azure_code", "Arrow", COLOCATED),
        "arrow_vs_static_pd_azure_code": rate_ratio(results, "azure_code", "Arrow", STATIC),
        "arrow_traces_recorded": all(of.is_recorded for of in traces.values()),
    }
    return Finding(setting, rows, claims, points, picture, keys)


# Figure 8: trace -> SLO-aware over Minimal Load; largest gain in attainment of Minimal Load over Round Robin
FIG8 = {"azure_code": (1.67, 0.043), "azure_conv": (1.1, 0.024)}  # section 7.3
BASELINES = ("Minimal Load", "Round Robin")
WHY_MORE = (
    "In the simulated fleet a flip is a label and costs nothing, so all but one of the decode instances follow a burst;"
    " how far the paper's own fleet went is not printed."
)
WHY_ROBIN = (
    "Minimal Load gains where queues of one phase differ. Here a prefill instance works off what it has before the next"
    " burst, so turns are nearly as good. Both figures are the largest over some rates, ours those of both searches."
)


def fig8(context: Context) -> Finding:
    """SLO-aware scheduling against Minimal Load and Round Robin, 4 + 4 instances; and against eight that do both."""
    results = capacities(context, list(FIG8), ("Arrow", *BASELINES, DP_MIXED))
    traces = traces_facts(context, FIG8)
    rows, claims = [], []
    for trace, (over_minimal, over_robin) in FIG8.items():
        ratio, span_s = (
            rate_ratio(results, trace, "Arrow", "Minimal Load"),
            least_span_s(results, trace, traces[trace].requests),
        )
        minimal, robin = (dict(results[trace, system].tried) for system in BASELINES)
        gain = max((minimal[rate] - robin[rate] for rate in minimal.keys() & robin.keys()), default=None)
        rows += [
            Row(f"{trace}: SLO-aware / Minimal Load, rate at 90 %", over_minimal, ratio, "", WHY_MORE, span_s),
            Row(f"{trace}: Minimal Load over Round Robin, attainment", over_robin, gain, "", WHY_ROBIN, span_s),
            Row(
                f"{trace}: SLO-aware / {DP_MIXED}",
                None,
                rate_ratio(results, trace, "Arrow", DP_MIXED),
                "",
                WHY_MIXED,
                span_s,
            ),
        ]
        text = f"{trace}: SLO-aware serves at least {over_minimal} times the rate of Minimal Load"
        claims.append(Claim(text, (ratio or 0.0) >= over_minimal, number(ratio)))
    rows = with_values(rows)
    points, panels = tried_rates(results)
    texts = "; ".join(of.text for of in traces.values())
    setting = f"8 instances, 4 + 4 at the start, Llama-3.1-8B, H100 step times, {SPANS}; {texts}"
    keys = {f"arrow_vs_minload_{trace}": rate_ratio(results, trace, "Arrow", "Minimal Load") for trace in FIG8}
    return Finding(setting, rows, claims, points, draw(panels, "Arrow Fig. 8: three ways to schedule"), keys)


FIG9_TRACE = "azure_code"
FIG9_RATE_PER_S = 24.0  # of the whole fleet, whatever its size: what 8 instances serve at ease and 2 do not
FIG9_WHY = "the paper shows curves without numbers, and not the rate it ran at"


def fig9(context: Context) -> Finding:
    """SLO-aware scheduling against Minimal Load with two to eight GPUs; and instances that do both phases."""
    sizes = context.pick([2, 4], [2, 3, 4, 5, 6, 7, 8], [2, 3, 4, 5, 6, 7, 8])
    names = ("Arrow", "Minimal Load", DP_MIXED)
    cases = [(FIG9_TRACE, system, size, FIG9_RATE_PER_S) for system in names for size in sizes]
    points: list[Point] = [
        {"system": system, "gpus": size, **run}
        for (_, system, size, _), run in context.measure(replay, cases, context=context).items()
    ]
    share = {(point["system"], point["gpus"]): float(point["attainment"] or 0.0) for point in points}
    arrow = {size: share["Arrow", size] for size in sizes}
    least = min(arrow[size] - share["Minimal Load", size] for size in sizes)
    shown = ", ".join(f"{size}: {number(value)}" for size, value in arrow.items())
    rises = all(later >= earlier for earlier, later in itertools.pairwise(arrow.values()))
    not_behind = "SLO-aware is not behind Minimal Load at any number of GPUs"
    fields = {"P90 TTFT, s": "ttft_p90_s", "P90 TPOT, s": "tpot_p90_s", "attainment": "attainment"}
    slo = SLOS[FIG9_TRACE]
    marks = {"P90 TTFT, s": slo.ttft_s, "P90 TPOT, s": slo.tpot_s, "attainment": TARGET}
    panels = curves(points, fields, x="gpus", by="system", label="GPUs", marks=marks)
    setting = f"{FIG9_RATE_PER_S:g} requests/s, Llama-3.1-8B, H100 step times"
    rows = [
        Row(f"{size} GPUs, {system}: attainment", None, share[system, size], "", FIG9_WHY)
        for size, system in itertools.product(sizes, names)
    ]
    claims = [
        Claim(not_behind, least >= 0, f"least gain {least:+.3f}"),
        Claim("attainment of SLO-aware rises with the number of GPUs", rises, shown),
    ]
    picture = draw(panels, f"Arrow Fig. 9: {FIG9_TRACE} at {FIG9_RATE_PER_S:g} requests/s by number of GPUs")
    return Finding(f"{setting}; {traces_facts(context, [FIG9_TRACE])[FIG9_TRACE].text}", rows, claims, points, picture)
