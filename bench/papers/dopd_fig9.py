"""DOPD Figures 9 and 10: scaling with the load, against a threshold scaler and an SLA scaler as Dynamo has them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from bench.papers.charts import Panel, draw, lines
from bench.papers.context import Context, silent
from bench.papers.dopd_cases import DECODE_KV_TOKENS, PROFILE, SLO, decode_spec, prefill_spec
from bench.papers.finding import Claim, Finding, Point, Row, number, ordered
from bench.papers.measure import World
from bench.papers.traces import described, trace_named
from pla_sglang.metrics.goodput import Goodput, goodput
from pla_sglang.policy.fleet import Role
from pla_sglang.policy.registry import Setup, build
from pla_sglang.sim.samples import ROLE_ORDER
from pla_sglang.sim.simulation import RunResult
from pla_sglang.workload import Trace

SYSTEMS = {"DYN-LOAD": "threshold-scaler", "DYN-SLA": "sla-scaler", "DOPD": "dopd"}
PAPER = {"DYN-LOAD": 0.808, "DYN-SLA": 0.873, "DOPD": 0.994}
RATE_PER_S = 4.0  # mean; the busiest minute then needs about 8 GPUs, the paper's cluster
INTERVAL_S = 15.0
STARTUP_S = 20.0  # 70 GB of weights at 3.5 GB/s; the paper's elastic resizing has no figure
INSTANCES_MAX = 6  # 4 P of one GPU and 2 D of two
BIN_S = 60.0  # in which GPUs and load are compared; several plans long, as instances take their time to start
WHY = (
    "BurstGPT's requests are not to be had, so this is a made-up trace of the same burstiness; the knobs of the"
    " baselines and the interval are not printed."
)


@dataclasses.dataclass(frozen=True)
class Job:
    policy: str
    context: Context


@dataclasses.dataclass(frozen=True)
class Scaled:
    """What one system made of the load. ``at_s`` and ``gpus``: ready GPUs over time."""

    figures: Goodput
    gpu_hours: float
    at_s: list[float]
    gpus: list[float]


def workload(context: Context) -> Trace:
    trace = trace_named(context, "burstgpt").at_rate(RATE_PER_S)
    return trace.head(context.pick(400, len(trace), len(trace)))


def scale(job: Job) -> Scaled:
    trace = workload(job.context)
    setup = Setup(
        PROFILE,
        DECODE_KV_TOKENS,
        SLO.ttft_s,
        SLO.tpot_s,
        instances=2,
        mean_context_tokens=float(trace.input_tokens.mean() + trace.output_tokens.mean() / 2),
        instances_max=INSTANCES_MAX,
        plan_interval_s=INTERVAL_S,
    )
    chosen = build(job.policy, setup)
    config = {"startup_s": STARTUP_S, "ttft_slo_s": SLO.ttft_s, "tpot_slo_s": SLO.tpot_s}
    result = World([prefill_spec(1), decode_spec(1)], chosen.dispatcher, chosen.controllers, config=config).run(trace)
    return Scaled(goodput(result.served, SLO), result.gpu_hours, result.samples.at_s.tolist(), ready_gpus(result))


def ready_gpus(result: RunResult) -> list[float]:
    """Per sample: one GPU a prefill instance, two a decode instance."""
    role = result.samples.role
    prefills = (role == ROLE_ORDER.index(Role.PREFILL)).sum(axis=1)
    decodes = (role == ROLE_ORDER.index(Role.DECODE)).sum(axis=1)
    return [float(gpus) for gpus in prefills + 2 * decodes]


def run(context: Context) -> Finding:
    plain = dataclasses.replace(context, progress=silent)
    found = dict(zip(SYSTEMS, context.map(scale, [Job(policy, plain) for policy in SYSTEMS.values()]), strict=True))
    attainment = {name: one.figures.attainment for name, one in found.items()}
    hours = {name: one.gpu_hours for name, one in found.items()}
    trace = workload(context)
    rows = [Row(f"{name}: SLO attainment", PAPER[name], attainment[name], "", WHY) for name in SYSTEMS]
    curve_only = "the paper shows curves without numbers"
    rows += [Row(f"{name}: GPU-hours", None, hours[name], "h", curve_only) for name in SYSTEMS]
    follows = {name: correlation(one, trace) for name, one in found.items()}
    rows += [Row(f"{name}: correlation of GPUs and load", None, follows[name], "", curve_only) for name in SYSTEMS]
    best = max(follows[name] for name in SYSTEMS if name != "DOPD")
    return Finding(
        "dopd_fig9",
        "DOPD, Figures 9 and 10",
        f"step times of DOPD's Table I, 1 P and 1 D at the start, at most {INSTANCES_MAX} instances, a plan every"
        f" {INTERVAL_S:g} s, {STARTUP_S:g} s to start; {described(trace)} at {RATE_PER_S:g} req/s",
        rows,
        [
            Claim("attainment rises from DYN-LOAD to DYN-SLA to DOPD", *ordered(attainment, falling=False)),
            Claim(
                "DOPD's GPUs follow the load more closely than those of the others (Figure 10)",
                follows["DOPD"] > best,
                ", ".join(f"{name} {number(value)}" for name, value in follows.items()),
            ),
        ],
        [point(name, at_s, gpus) for name, one in found.items() for at_s, gpus in zip(one.at_s, one.gpus, strict=True)],
        draw(panels(found, trace), "DOPD Fig. 9 and 10: GPUs that follow the load"),
    )


def point(name: str, at_s: float, gpus: float) -> Point:
    return {"system": name, "at_s": at_s, "gpus": gpus}


def correlation(one: Scaled, trace: Trace) -> float:
    """Pearson's, of arrivals and mean ready GPUs in bins of ``BIN_S``; nan where one of them never changes."""
    edges_s = np.arange(0.0, trace.arrival_s[-1] + BIN_S, BIN_S)
    load = np.histogram(trace.arrival_s, edges_s)[0]
    samples = np.histogram(one.at_s, edges_s)[0]
    gpus = np.histogram(one.at_s, edges_s, weights=one.gpus)[0]
    seen = samples > 0
    loads, means = load[seen], gpus[seen] / samples[seen]
    if np.ptp(loads) == 0 or np.ptp(means) == 0:
        return math.nan
    return float(np.corrcoef(loads, means)[0, 1])


def panels(found: dict[str, Scaled], trace: Trace) -> list[Panel]:
    bins_s = np.arange(0.0, trace.arrival_s[-1] + 15.0, 15.0)
    rate = np.histogram(trace.arrival_s, bins_s)[0] / 15.0
    return [
        lines({name: (one.at_s, one.gpus) for name, one in found.items()}, x="s", y="GPUs"),
        lines({"load": (bins_s[:-1].tolist(), rate.tolist())}, x="s", y="requests/s"),
    ]
