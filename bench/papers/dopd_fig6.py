"""DOPD Figure 6: the closed-form P/D ratio from Table I, and throughput by number of prefill instances."""

from __future__ import annotations

import dataclasses

import numpy as np

from bench.papers.charts import draw, lines
from bench.papers.context import Context
from bench.papers.dopd_cases import SLO, decode_spec, one_at_a_time, predictor, prefill_spec
from bench.papers.finding import Claim, Finding, Point, Row, number
from bench.papers.measure import World, rate_of_ends
from pla_sglang.policy.baselines.dispatch import MinimalLoad
from pla_sglang.policy.dopd.ratio import Device, decode_concurrency, optimal_ratio
from pla_sglang.policy.dopd.tables import DecodeTable, PrefillTable
from pla_sglang.workload import Trace

# Table I: ms of one prefill, and of one decode step at a concurrency of 104, 200, 248
LENGTHS = (100.0, 200.0, 700.0, 1200.0, 1700.0)
PREFILL_MS = (36, 46, 125, 193, 269)
DECODE_MS = {104: (28, 31, 33, 35, 37), 200: (45, 46, 47, 50, 53), 248: (47, 49, 53, 57, 61)}
# 80 GB, M' = 4 GB (not printed), 3.35 TB/s, 70 GB of weights, 327,680 bytes of KV a token
H100 = Device(80e9, 4e9, 3.35e12, 70e9, 327_680)
INSTANCES = (1, 2, 3, 4, 5, 6)
WHY_RATIO = (
    "The paper does not print how it reads between the points of Table I; ours is linear between and beyond them."
)
WHY_BATCH = (
    "80 x 150 tokens a step cannot give the throughput of 4.58 prefill instances by the paper's own Table I; our"
    " batch is what balance asks for."
)


@dataclasses.dataclass(frozen=True)
class Workload:
    """Fixed lengths; ``concurrency`` and ``ratio`` as printed in section VI-B3."""

    input_tokens: int
    output_tokens: int
    concurrency: int
    ratio: float

    @property
    def name(self) -> str:
        return f"{self.input_tokens}/{self.output_tokens}"


WORKLOADS = (Workload(1000, 150, 235, 4.58), Workload(3000, 300, 78, 3.18))


@dataclasses.dataclass(frozen=True)
class Job:
    workload: Workload
    prefills: int
    requests: int


@dataclasses.dataclass(frozen=True)
class Found:
    """Requests per second, the largest decode batch, and the share of the time in which prefill instances work."""

    rate_per_s: float
    batch: int
    busy: float


def table_ratio(workload: Workload) -> float:
    """Eq. 15 at the printed concurrency."""
    prefill = PrefillTable(LENGTHS, [ms / 1e3 for ms in PREFILL_MS])
    decode = DecodeTable(list(DECODE_MS), LENGTHS, [[ms / 1e3 for ms in row] for row in DECODE_MS.values()])
    return optimal_ratio(
        prefill_s=prefill.at(workload.input_tokens),
        step_s=decode.at(workload.concurrency, workload.input_tokens + workload.output_tokens / 2),
        output_tokens=workload.output_tokens,
        concurrency=workload.concurrency,
    )


def table_concurrency(workload: Workload) -> int:
    """Eq. 11 to 13 at TP 2."""
    return decode_concurrency(
        H100, 2, tpot_slo_s=SLO.tpot_s, input_tokens=workload.input_tokens, output_tokens=workload.output_tokens
    )


def measure(job: Job) -> Found:
    """So many users that the decode instance is as full as the paper lets it be, and prefills wait besides."""
    lengths = job.workload
    users = round(1.6 * lengths.concurrency)
    count = max(job.requests, 2 * users)
    trace = Trace(
        lengths.name, np.zeros(count), np.full(count, lengths.input_tokens), np.full(count, lengths.output_tokens)
    )
    knobs = dataclasses.replace(one_at_a_time(lengths.input_tokens), slots=lengths.concurrency)
    world = World(
        [prefill_spec(job.prefills), decode_spec(1)],
        MinimalLoad(predictor()),
        knobs=knobs,
        config={"users": {0: users}, "sample_s": 0.5},
    )
    result = world.run(trace)
    rate = rate_of_ends(result.served)
    single_s = PrefillTable(LENGTHS, [ms / 1e3 for ms in PREFILL_MS]).at(lengths.input_tokens)
    batch = int(np.percentile(result.samples.running[:, job.prefills], 90))
    return Found(rate, batch, min(1.0, rate * single_s / job.prefills))


def run(context: Context) -> Finding:
    requests = context.pick(600, 3000, 10_000)
    keys = [(workload, prefills) for workload in WORKLOADS for prefills in INSTANCES]
    jobs = [Job(workload, prefills, requests) for workload, prefills in keys]
    found = dict(zip(keys, context.map(measure, jobs), strict=True))
    ratios = {workload.name: table_ratio(workload) for workload in WORKLOADS}
    rows, claims = [], []
    for workload in WORKLOADS:
        rates = [found[workload, prefills].rate_per_s for prefills in INSTANCES]
        rows += [
            Row(f"{workload.name}: optimal P/D ratio", workload.ratio, ratios[workload.name], "", WHY_RATIO),
            Row(
                f"{workload.name}: largest concurrency",
                workload.concurrency,
                table_concurrency(workload),
                "",
                WHY_RATIO,
            ),
        ]
        claims.append(knee_claim(workload, rates))
    thousand = WORKLOADS[0]
    rows.append(Row("1000/150: decode batch with 5 and more prefills", 80, found[thousand, 5].batch, "", WHY_BATCH))
    return Finding(
        "dopd_fig6",
        "DOPD, Figure 6",
        "step times of DOPD's Table I (Llama-70B-FP8, H100), n prefill instances (TP 1) and one decode instance (TP 2),"
        f" closed loop, {requests} requests a point",
        rows,
        claims,
        [point(workload, prefills, one) for (workload, prefills), one in found.items()],
        picture(found),
        {"dopd_ratio_1000_150": ratios["1000/150"], "dopd_ratio_3000_300": ratios["3000/300"]},
    )


def knee(rates: list[float]) -> float:
    """Prefill instances at which the first instances' slope meets the plateau: where the two lines cross."""
    return max(rates) / rates[0]


def knee_claim(workload: Workload, rates: list[float]) -> Claim:
    low = int(workload.ratio)
    shown = ", ".join(f"{prefills}: {number(rate)}" for prefills, rate in zip(INSTANCES, rates, strict=True))
    text = f"{workload.name}: throughput bends between {low} and {low + 1} prefill instances"
    return Claim(text, low <= knee(rates) <= low + 1, f"at {number(knee(rates))}; requests/s by instances {shown}")


def point(workload: Workload, prefills: int, one: Found) -> Point:
    return {
        "lengths": workload.name,
        "prefills": prefills,
        "requests_per_s": one.rate_per_s,
        "decode_batch": one.batch,
        "prefill_busy": one.busy,
    }


def picture(found: dict[tuple[Workload, int], Found]) -> bytes:
    panels = []
    for label, field in (("requests/s", "rate_per_s"), ("decode batch, P90", "batch"), ("prefill busy", "busy")):
        shown = {
            workload.name: (INSTANCES, [getattr(found[workload, prefills], field) for prefills in INSTANCES])
            for workload in WORKLOADS
        }
        panels.append(lines(shown, x="prefill instances", y=label))
    return draw(panels, "DOPD Fig. 6: one decode instance and more and more prefill instances")
