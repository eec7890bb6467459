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

import numpy as np
import numpy.typing as npt

from pla_sglang.metrics.goodput import Slo, goodput, quantile
from pla_sglang.policy.baselines.dispatch import least_tokens, split_roles
from pla_sglang.policy.decisions import Controller
from pla_sglang.policy.star.horizon import HorizonKnobs
from pla_sglang.policy.star.policy import StarKnobs, StarRescheduler
from pla_sglang.policy.star.predictors import PAPER_BINS, Binned, NoPrediction, Oracle, Proportional, RemainingPredictor
from pla_sglang.policy.star.select import SelectKnobs
from pla_sglang.profiles import StepProfile, load_profile
from pla_sglang.profiles.step import DecodeTerms, PrefillTerms
from pla_sglang.sim.config import InstanceSpec, Policies, SimConfig
from pla_sglang.sim.experiment import engine_policy
from pla_sglang.sim.interfaces import EngineKnobs
from pla_sglang.sim.network import NetworkKnobs
from pla_sglang.sim.simulation import RunResult, Simulation
from pla_sglang.workload import Arrivals, Trace, generated_trace, length_model

STRATEGIES = ("vLLM", "no prediction", "prediction", "oracle")
PAPER_MAE_TOKENS = 3873.2  # Table 1
MEAN_REMAINING_TOKENS = (7542**2 + 12_008**2) / (2 * 7542)  # over all steps of answers with Table 2's moments: 13,330
PREDICTION_S = 1.40e-3  # a batch of 10 on the small cluster (section 5.3)
LINK_BYTES_PER_S = 25e9 / 8  # section 6.3
FULL_SHARE = 0.99  # dashed line of Figure 12
LIMIT_TOKENS = 32_768
WARM_SHARE = 0.3  # of the arrivals' time: by then answers of 32K tokens, 600 s long, have begun to end

RTX_4090D = StepProfile(
    name="rtx4090d-qwen7b-w8a8",
    source="STAR section 5.3 (18.23 ms at half the KV cache) and 80 % of 1,008 GB/s",
    prefill=PrefillTerms(floor_s=0.0108, base_s=0.0, token_s=6.5e-5, attention_s=8e-10),
    decode=DecodeTerms(base_s=0.0108, request_s=0.0, read_s=7.1e-8),
    kv_bytes_per_token=57_344,
    kv_capacity_tokens=207_000,
    weights_bytes=8_700_000_000,
)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A testbed: profile, instances of each phase, and the TPOT target of its model (TTFT is 1 s everywhere)."""

    profile: StepProfile
    prefills: int
    decodes: int
    tpot_slo_s: float

    @property
    def slo(self) -> Slo:
        return Slo(1.0, self.tpot_slo_s)


SMALL = Cluster(RTX_4090D, prefills=1, decodes=3, tpot_slo_s=0.025)
LARGE = Cluster(load_profile("h100-qwen2.5-14b-tp1"), prefills=2, decodes=6, tpot_slo_s=0.050)


def simulated(decodes: int) -> Cluster:
    """Section 6.3: small-cluster instances in any number; one prefill instance for eight, which is never the limit."""
    return Cluster(RTX_4090D, prefills=max(1, decodes // 8), decodes=decodes, tpot_slo_s=0.025)


@dataclasses.dataclass(frozen=True)
class StarCase:
    """One run.

    Attributes:
        strategy: one of ``STRATEGIES``.
        rate_per_s, arrivals_s: Poisson arrivals of that rate for that long; what they start runs to its end.
        dataset: of Table 2, ``sharegpt`` or ``alpaca``.
        bins: of Table 3; 0: the prediction of Table 1's error. Only ``prediction`` looks at it.
        iterations: decode steps between two predictions and decisions (Table 4).
    """

    cluster: Cluster
    strategy: str
    rate_per_s: float
    arrivals_s: float
    seed: int
    dataset: str = "sharegpt"
    bins: int = 0
    iterations: int = 20


@dataclasses.dataclass(frozen=True)
class StarRun:
    """What a run shows; times in ms where they are compared with the paper's.

    Attributes:
        at_s, step_ms_var, usage: samples after the warm-up: time, variance of the decode step over instances, and the
            largest share of KV cache in use of any of them.
        tpot_ms: of requests that arrived after the warm-up.
        ooms: requests that lost their KV cache because it was full.
        migrations: carried out.
        throughput_per_s, goodput_per_s: requests ended, and in target, per second between warm-up and last arrival.
    """

    case: StarCase
    at_s: npt.NDArray[np.float64]
    step_ms_var: npt.NDArray[np.float64]
    usage: npt.NDArray[np.float64]
    tpot_ms: npt.NDArray[np.float64]
    ooms: int
    migrations: int
    throughput_per_s: float
    goodput_per_s: float

    @property
    def variance(self) -> float:
        """Mean over time, ms^2."""
        return float(self.step_ms_var.mean())

    @property
    def full_share(self) -> float:
        """Share of the time in which some cache was full."""
        return float((self.usage >= FULL_SHARE).mean())

    def p99_tpot_ms(self) -> float:
        return quantile(self.tpot_ms, 99)


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
    return Proportional(PAPER_MAE_TOKENS / MEAN_REMAINING_TOKENS, random.Random(case.seed))


def half_full_step_s(profile: StepProfile) -> float:
    """A decode step of ten requests that hold half of the KV cache (section 5.3)."""
    return profile.decode_s(10, profile.kv_capacity_tokens / 2)


def controllers(case: StarCase) -> list[Controller]:
    if case.strategy == "vLLM":
        return []
    profile = case.cluster.profile
    per_token_s = profile.kv_bytes_per_token / LINK_BYTES_PER_S
    knobs = StarKnobs(
        horizon=HorizonKnobs(steps=0) if case.strategy == "no prediction" else HorizonKnobs(),
        select=SelectKnobs(migrate_s_per_token=per_token_s),
        interval_s=case.iterations * half_full_step_s(profile),
    )
    return [StarRescheduler(knobs, predictor(case))]


def simulation(case: StarCase) -> Simulation:
    """vLLM's engine: no reserve for growth, so that a full cache throws requests out (section 6.4)."""
    cluster = case.cluster
    roles = split_roles(cluster.prefills + cluster.decodes, cluster.prefills)
    config = SimConfig(
        [InstanceSpec(cluster.profile, role=role) for role in roles],
        engine=EngineKnobs(growth_start=0.0, growth_least=0.0),
        network=NetworkKnobs(LINK_BYTES_PER_S),
        report_interval_s=1.0,
        sample_s=1.0,
        overhead_s=PREDICTION_S / case.iterations if case.strategy == "prediction" else 0.0,
        output_limit_tokens=LIMIT_TOKENS,
        ttft_slo_s=cluster.slo.ttft_s,
        tpot_slo_s=cluster.slo.tpot_s,
        seed=case.seed,
    )
    policies = Policies(
        least_tokens(),
        lambda profile, knobs: engine_policy("fcfs", profile, knobs),
        controllers(case),
        predict=lambda _input, _done, remaining: float(remaining),
        name=case.strategy,
    )
    return Simulation(workload(case), config, policies)


def run_case(case: StarCase) -> StarRun:
    """Runs it and keeps what the figures show."""
    return observed(case, simulation(case).run())


def observed(case: StarCase, result: RunResult) -> StarRun:
    cluster, samples, served = case.cluster, result.samples, result.served
    last_s = float(served.arrival_s[-1])
    warm_s = WARM_SHARE * last_s
    rows = (samples.at_s >= warm_s) & (samples.at_s <= last_s)
    context, running = samples.context_tokens[rows, cluster.prefills :], samples.running[rows, cluster.prefills :]
    terms = cluster.profile.decode
    busy = running > 0
    step_ms = np.where(busy, 1e3 * (terms.base_s + terms.request_s * running + terms.read_s * context), 0.0)
    asked = served.arrival_s >= warm_s
    ended = (served.finish_s >= warm_s) & (served.finish_s <= last_s)
    return StarRun(
        case,
        at_s=samples.at_s[rows],
        step_ms_var=step_ms.var(axis=1),
        usage=context.max(axis=1) / cluster.profile.kv_capacity_tokens,
        tpot_ms=1e3 * served.tpot_s()[asked],
        ooms=int(result.counts["retractions"]),
        migrations=int(result.counts.get("migrations", 0)),
        throughput_per_s=float(ended.sum()) / (last_s - warm_s),
        goodput_per_s=float((ended & served.met(cluster.slo)).sum()) / (last_s - warm_s),
    )


def attainment(case: StarCase, result: RunResult) -> float:
    """Share of all requests in target."""
    return goodput(result.served, case.cluster.slo).attainment
