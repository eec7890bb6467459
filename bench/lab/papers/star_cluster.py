"""STAR's clusters, strategies and one run of them (section 6.1).

Two step profiles. The small cluster's RTX 4090D with a 7B model in W8A8 is made from the one step time that the paper
prints, 18.23 ms at half the KV cache (section 5.3), and the device's memory bandwidth: 1,008 GB/s, of which 80 % are
reached. Weights of 8.7 GB then take 10.8 ms and a token of KV (57,344 bytes) 71 ns, so half of 207,000 tokens 7.4 ms:
18.2 ms in all, which is the printed figure. The large cluster is Qwen2.5-14B on an H100 (the paper: Qwen3-14B, H800,
the same compute and bandwidth).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from bench.lab.papers.context import Context
from bench.lab.papers.finding import Claim, Point
from bench.lab.papers.seeds import Change, geometric_mean, measure_change
from bench.lab.papers.star_errors import FIGURE_7_SHARES, Refining
from bench.lab.world import World
from pla_sglang.policy.baselines.dispatch import least_tokens, split_roles
from pla_sglang.policy.interface.decisions import Controller
from pla_sglang.policy.interface.remaining_length import NoPrediction, Oracle, RemainingPredictor
from pla_sglang.policy.star.horizon import HorizonKnobs
from pla_sglang.policy.star.policy import StarKnobs, StarRescheduler
from pla_sglang.policy.star.predictors import PAPER_BINS, Binned
from pla_sglang.policy.star.select import SelectKnobs
from pla_sglang.profiles import StepProfile, load_profile
from pla_sglang.sim.core.config import InstanceSpec
from pla_sglang.sim.core.engine_knobs import EngineKnobs
from pla_sglang.sim.core.host import HostKnobs
from pla_sglang.sim.core.simulation import RunResult
from pla_sglang.sim.metrics.goodput import Slo, quantile
from pla_sglang.sim.workload import Arrivals, Trace, generated_trace, length_model

Key = TypeVar("Key", bound=Hashable)
Floats = npt.NDArray[np.float64]
STRATEGIES = ("vLLM", "no prediction", "prediction", "oracle")
PREDICTION_S = 1.40e-3  # a batch of 10 on the small cluster (section 5.3)
LINK_BYTES_PER_S = 25e9 / 8  # section 6.3
FULL_SHARE = 0.99  # dashed line of Figure 12
LIMIT_TOKENS = 32_768
# vLLM reserves nothing for growth. The ratio that SGLang raises when memory runs out is gone after 100 steps at most.
NO_RESERVE: dict[str, Any] = {"growth_start": 0.01, "growth_least": 0.0, "growth_decay_steps": 1}
ARRIVALS_S = (40.0, 1200.0, 2000.0)  # by size of a run
SEEDS = (1, 5, 10)  # the same
WARM_SHARE = 0.3  # of the arrivals' time: by then answers of 32K tokens, 600 s long, have begun to end

RTX_4090D = load_profile(Path(__file__).parent / "profiles" / "rtx4090d-qwen7b-w8a8.json")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A testbed: profile, instances of each phase, and the targets of its model."""

    profile: StepProfile
    prefills: int
    decodes: int
    slo: Slo

    def resized(self, decodes: int) -> Cluster:
        """The simulated ones of section 6.3; one prefill instance for eight, which is never the limit."""
        return dataclasses.replace(self, prefills=max(1, decodes // 8), decodes=decodes)


SMALL = Cluster(RTX_4090D, prefills=1, decodes=3, slo=Slo(1.0, 0.025))
LARGE = Cluster(load_profile("h100-qwen2.5-14b-tp1"), prefills=2, decodes=6, slo=Slo(1.0, 0.050))

# requests/s: those of the printed figures, and of those scanned (``star.goodput``) the one at which the cluster without
# migration has the P99 TPOT that the paper prints of it. Some cache is then full for about 5 % of the time.
PAPER_RATES = {"small": 0.17, "large": 0.20}
SATURATED_RATES = {"small": 0.28, "large": 0.52}


@dataclasses.dataclass(frozen=True)
class StarCase:
    """One run.

    Attributes:
        strategy: one of ``STRATEGIES``.
        rate_per_s, arrivals_s: Poisson arrivals of that rate for that long; what they start runs to its end.
        dataset: of Table 2, ``sharegpt`` or ``alpaca``.
        bins: of Table 3; 0: errors over generated tokens as in Figure 7. Only ``prediction`` looks at it.
        iterations: decode steps between two predictions and decisions (Table 4).
        lose_all: the paper's failure: an instance without memory computes all its requests again; else one of them.
        sampled: its result has the samples over time (Figures 11 and 12).
    """

    cluster: Cluster
    strategy: str
    rate_per_s: float
    arrivals_s: float
    seed: int
    dataset: str = "sharegpt"
    bins: int = 0
    iterations: int = 20
    lose_all: bool = True
    sampled: bool = False


@dataclasses.dataclass(frozen=True)
class StarRun:
    """What a run shows; times in ms where they are compared with the paper's.

    Attributes:
        decodes: instances.
        at_s, step_ms_var, usage: samples after the warm-up: time, variance of the decode step over instances, and the
            largest share of KV cache in use of any of them; empty unless ``StarCase.sampled``.
        p99_tpot_ms: of requests that arrived after the warm-up.
        variance: of the decode step, mean over time, ms^2.
        fullest: mean over time of the largest share in use.
        full_share: of the time in which some cache was full.
        ooms: requests that lost their KV cache because it was full.
        migrations: carried out.
        throughput_per_s, goodput_per_s: requests ended, and in target, per second between warm-up and last arrival.
    """

    case: StarCase
    decodes: int
    at_s: Floats
    step_ms_var: Floats
    usage: Floats
    p99_tpot_ms: float
    variance: float
    fullest: float
    full_share: float
    ooms: int
    migrations: int
    throughput_per_s: float
    goodput_per_s: float


Runs = Sequence[StarRun]  # of one setting, a seed each


def workload(case: StarCase) -> Trace:
    """Lengths of Table 2. The same seed gives the same requests whatever the strategy."""
    arrivals = Arrivals(case.rate_per_s, random.Random(case.seed))
    lengths = (length_model(f"star_{case.dataset}_{part}") for part in ("input", "output"))
    count = max(2, round(case.rate_per_s * case.arrivals_s))
    return generated_trace(count, arrivals, *lengths, name=f"star-{case.dataset}")


def predictor(case: StarCase) -> RemainingPredictor:
    if case.strategy == "oracle":
        return Oracle()
    if case.strategy == "no prediction":
        return NoPrediction()
    if case.bins:
        return Binned(PAPER_BINS[case.bins])
    return Refining(FIGURE_7_SHARES, random.Random(case.seed))


def controllers(case: StarCase) -> list[Controller]:
    if case.strategy == "vLLM":
        return []
    profile = case.cluster.profile
    # a decode step of ten requests that hold half of the KV cache (section 5.3)
    step_s = profile.decode_s(10, profile.kv_capacity_tokens / 2)
    knobs = StarKnobs(
        horizon=HorizonKnobs(steps=0) if case.strategy == "no prediction" else HorizonKnobs(),
        select=SelectKnobs(migrate_s_per_token=profile.kv_bytes_per_token / LINK_BYTES_PER_S),
        interval_s=case.iterations * step_s,
    )
    return [StarRescheduler(knobs)]


def run_case(case: StarCase) -> StarRun:
    """vLLM's engine: no reserve for growth, so that a cache runs full and requests lose it (section 6.4)."""
    cluster = case.cluster
    roles = split_roles(cluster.prefills + cluster.decodes, cluster.prefills)
    world = World(
        [InstanceSpec(cluster.profile, role=role) for role in roles],
        least_tokens(),
        controllers(case),
        knobs=EngineKnobs(**NO_RESERVE, lose_all=case.lose_all),
        bandwidth_bytes_per_s=LINK_BYTES_PER_S,
        lengths=predictor(case),
        config={
            "report_interval_s": 1.0,
            "sample_s": 1.0,
            "host": HostKnobs(step_s=PREDICTION_S / case.iterations if case.strategy == "prediction" else 0.0),
            "output_limit_tokens": LIMIT_TOKENS,
            "ttft_slo_s": cluster.slo.ttft_s,
            "tpot_slo_s": cluster.slo.tpot_s,
        },
    )
    return observe(case, world.run(workload(case)))


def observe(case: StarCase, result: RunResult) -> StarRun:
    cluster, samples, served = case.cluster, result.samples, result.served
    last_s = float(served.arrival_s[-1])
    warm_s = WARM_SHARE * last_s
    rows = (samples.at_s >= warm_s) & (samples.at_s <= last_s)
    context, running = samples.context_tokens[rows, cluster.prefills :], samples.running[rows, cluster.prefills :]
    terms = cluster.profile.decode
    step_s = np.where(running > 0, terms.base_s + terms.request_s * running + terms.read_s * context, 0.0)
    ended = (served.finish_s >= warm_s) & (served.finish_s <= last_s)
    step_ms_var, usage = (1e3 * step_s).var(axis=1), context.max(axis=1) / cluster.profile.kv_capacity_tokens
    kept = None if case.sampled else 0
    return StarRun(
        case,
        cluster.decodes,
        at_s=samples.at_s[rows][:kept],
        step_ms_var=step_ms_var[:kept],
        usage=usage[:kept],
        p99_tpot_ms=1e3 * quantile(served.tpot_s()[served.arrival_s >= warm_s], 99),
        variance=float(step_ms_var.mean()),
        fullest=float(usage.mean()),
        full_share=float((usage >= FULL_SHARE).mean()),
        ooms=int(result.counts["retractions"]),
        migrations=int(result.counts.get("migrations", 0)),
        throughput_per_s=float(ended.sum()) / (last_s - warm_s),
        goodput_per_s=float((ended & served.met(cluster.slo)).sum()) / (last_s - warm_s),
    )


_RUNS: dict[tuple[Context, StarCase], StarRun] = {}  # figures and tables share them


def runs_by_seed(context: Context, cases: Mapping[Key, StarCase], seeds: int | None = None) -> dict[Key, Runs]:
    """Each case with that many seeds (default: ``SEEDS``), the first of which is the context's."""
    extras = range(seeds or context.pick(*SEEDS))
    work = {
        key: [dataclasses.replace(case, seed=context.seed + extra) for extra in extras] for key, case in cases.items()
    }
    each = dict.fromkeys(case for of_key in work.values() for case in of_key)
    runs = context.measure(run_case, each, known=_RUNS)
    return {key: [runs[case] for case in of_key] for key, of_key in work.items()}


# -- settings compared, over seeds ------------------------------------------------------------------------------------

LOSE_ALL = "an instance without memory computes all its requests again"
COUNTED = ("ooms", "fullest", "full_share", "migrations")  # may be 0
SHOWN = ("variance", "p99_tpot_ms", "goodput_per_s", "throughput_per_s", *COUNTED)


def values_of(runs: Runs, field: str) -> list[float]:
    return [float(getattr(run, field)) for run in runs]


def mean_of(runs: Runs, field: str) -> float:
    """Geometric, as what is compared with it; of what may be 0 arithmetic."""
    return (fmean if field in COUNTED else geometric_mean)(values_of(runs, field))


def change_of(later: Runs, earlier: Runs, field: str) -> Change:
    return measure_change(values_of(later, field), values_of(earlier, field))


def compare(runs: Mapping[str, Runs], pairs: Iterable[tuple[str, str]], field: str, text: str) -> list[Claim]:
    """That the first of each pair is below the second, of goodput above it: undecided where the interval holds zero."""
    word, sign = ("above", 1) if field == "goodput_per_s" else ("below", -1)
    claims = []
    for better, other in pairs:
        change = change_of(runs[better], runs[other], field)
        holds = sign * change.share > 0 if change.is_decided else None
        claims.append(Claim(f"{text}, {better} {word} {other}", holds, change.text))
    return claims


def points_by_seed(results: Mapping[Any, Runs], *names: str) -> list[Point]:
    """A point a run; ``names``: of the parts of the key."""
    return [
        dict(zip(names, key if isinstance(key, tuple) else (key,), strict=True))
        | {field: getattr(run, field) for field in SHOWN}
        for key, runs in results.items()
        for run in runs
    ]
