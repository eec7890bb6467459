"""One experiment by names: trace, policy, engine order, profile, SLO. Picklable, so that sweeps can use processes."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence

from pla_sglang.errors import ConfigError
from pla_sglang.metrics.goodput import Capacity, Goodput, Slo, find_capacity, goodput
from pla_sglang.policy.baselines.orders import ENGINE_ORDERS
from pla_sglang.policy.boundary import StepModel
from pla_sglang.policy.dopd.forecast import Forecaster
from pla_sglang.policy.registry import DEFAULT_FORECASTER, PolicySet, Setup, build
from pla_sglang.policy.star.predictors import PAPER_BINS, Binned, Noisy, NoPrediction, Oracle, RemainingPredictor
from pla_sglang.policy.temporal import TemporalKnobs, TemporalPolicy
from pla_sglang.policy.types import PassDecision, PassView, WaitingView
from pla_sglang.profiles import StepProfile, load_profile
from pla_sglang.sim.config import Flip, InstanceSpec, Policies, SimConfig
from pla_sglang.sim.interfaces import EngineKnobs, EnginePolicy
from pla_sglang.sim.network import NetworkKnobs
from pla_sglang.sim.simulation import Progress, RunResult, Simulation
from pla_sglang.workload.trace import Trace

TEMPORAL = "temporal"
LENGTHS = ("oracle", "none", "binned", "noisy:TOKENS")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What to run. Everything but the trace, which is large and shared by many.

    Attributes:
        policy: a name of ``policy/registry.py``.
        engine: order of prefills inside an engine: a name of ``ENGINE_ORDERS``, or ``temporal``.
        profile: a name or path of a step profile.
        instances: at the start.
        prefills: of them for prefill, where a policy starts with a static split; None: half.
        slo: targets.
        rate_per_s: the trace is scaled to this mean rate; None: as recorded.
        lengths: what migration policies know of remaining lengths: ``oracle``, ``none``, ``binned`` (STAR section 6.5;
            ``binned:N`` with N of its 2, 4 or 6 bins, 6 by default), or ``noisy:TOKENS``, a mean absolute error.
        chunk_tokens, mixed, slots, kv_capacity_tokens, bandwidth_bytes_per_s, flip, startup_s: see ``EngineKnobs``,
            ``InstanceSpec``, ``NetworkKnobs`` and ``SimConfig``.
        output_limit_tokens: ``max_tokens`` of clients; None: just what the answer has.
        seed: of policies that draw at random.
        instances_min, instances_max: of policies that scale; maximum None: 64, at least twice ``instances``.
        plan_interval_s, headroom, forecaster: of policies that plan (``Setup``); forecaster None: the default one.
    """

    policy: str
    slo: Slo
    engine: str = "fcfs"
    profile: str = "h100-llama3.1-8b-tp1"
    instances: int = 8
    prefills: int | None = None
    rate_per_s: float | None = None
    lengths: str = "oracle"
    chunk_tokens: int = 8192
    mixed: bool = False
    slots: int = 1024
    kv_capacity_tokens: int | None = None
    bandwidth_bytes_per_s: float = 50e9
    flip: Flip = Flip.LABEL
    startup_s: float | None = None
    output_limit_tokens: int | None = None
    seed: int = 1
    instances_min: int = 2
    instances_max: int | None = None
    plan_interval_s: float = 60.0
    headroom: float = 1.0
    forecaster: str | Callable[[], Forecaster] | None = None

    def __post_init__(self) -> None:
        if self.instances < 1:
            raise ConfigError(f"instances is {self.instances}; allowed: 1 and more")
        if self.instances_max is not None and self.instances_max < self.instances:
            raise ConfigError(f"instances_max is {self.instances_max}; allowed: {self.instances} (instances) and more")
        if self.engine not in engine_names():
            raise ConfigError(f"engine order {self.engine!r} is not known; allowed: {', '.join(engine_names())}")
        length_predictor(self.lengths, self.seed)

    def at_rate(self, rate_per_s: float) -> Experiment:
        return dataclasses.replace(self, rate_per_s=rate_per_s)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """An experiment and what came of it. ``rate_per_s`` is the mean rate of the trace as run."""

    experiment: Experiment
    rate_per_s: float
    result: RunResult
    figures: Goodput


def length_predictor(lengths: str, seed: int) -> RemainingPredictor:
    """What ``Experiment.lengths`` names. Raises ConfigError for anything else."""
    name, _, value = lengths.partition(":")
    if lengths in ("oracle", "none"):
        return Oracle() if lengths == "oracle" else NoPrediction()
    if name == "binned" and (value or lengths == "binned"):
        bins = {str(count): edges for count, edges in PAPER_BINS.items()}
        if (value or "6") not in bins:
            raise ConfigError(f"lengths is {lengths!r}; allowed: binned:{', binned:'.join(bins)}")
        return Binned(bins[value or "6"])
    try:
        mae_tokens = float(value) if name == "noisy" else math.nan
    except ValueError:
        mae_tokens = math.nan
    if not (math.isfinite(mae_tokens) and mae_tokens >= 0):
        raise ConfigError(f"lengths is {lengths!r}; allowed: {', '.join(LENGTHS)} (0 tokens and more)")
    return Noisy(mae_tokens, random.Random(seed))


class Ordered:
    """An engine order, which only decides, as an engine policy."""

    def __init__(self, decide: Callable[[PassView, float], PassDecision]) -> None:
        self.decide = decide

    def on_arrival(self, view: WaitingView, now_s: float) -> None:
        """Orders keep no statistics."""

    def on_pass(self, decision: PassDecision, view: PassView, admitted: Sequence[WaitingView], now_s: float) -> None:
        """Orders keep no state."""


def engine_names() -> list[str]:
    """Engine orders that an experiment may name."""
    return [*ENGINE_ORDERS, TEMPORAL]


def step_model(profile: StepProfile) -> StepModel:
    """The roofline that engine policies start from, out of a profile's terms."""
    terms = profile.prefill
    return StepModel(
        g0_s=terms.floor_s,
        gw_s=0.0,
        gr_s=terms.read_s,
        k0_s=terms.base_s,
        b_s=terms.token_s,
        a_s=terms.attention_s,
        kr_s=terms.read_s,
    )


def engine_policy(name: str, profile: StepProfile, knobs: EngineKnobs) -> EnginePolicy:
    """A fresh engine policy by name."""
    model = step_model(profile)
    if name == TEMPORAL:
        return TemporalPolicy(TemporalKnobs(boundary_cap_tokens=knobs.chunk_tokens), model)
    return Ordered(ENGINE_ORDERS[name](model).decide)


def run_experiment(experiment: Experiment, trace: Trace, progress: Progress | None = None) -> Outcome:
    """Runs it once. Raises ConfigError and its kin for what does not fit together."""
    trace.require_requests()
    if experiment.rate_per_s is not None:
        trace = trace.at_rate(experiment.rate_per_s)
    profile = load_profile(experiment.profile)
    chosen = build(experiment.policy, _setup(experiment, profile, trace))
    slo = experiment.slo
    config = SimConfig(
        _fleet(experiment, profile, chosen),
        engine=EngineKnobs(chunk_tokens=experiment.chunk_tokens, slots=experiment.slots, mixed=experiment.mixed),
        network=NetworkKnobs(experiment.bandwidth_bytes_per_s),
        flip=experiment.flip,
        startup_s=experiment.startup_s,
        output_limit_tokens=experiment.output_limit_tokens,
        ttft_slo_s=slo.ttft_s,
        tpot_slo_s=slo.tpot_s,
        seed=experiment.seed,
    )
    policies = Policies(
        chosen.dispatcher,
        lambda its_profile, knobs: engine_policy(experiment.engine, its_profile, knobs),
        chosen.controllers,
        # The truth; the predictor of the policy decides how much of it is seen.
        predict=None if experiment.lengths == "none" else lambda _input, _done, remaining: float(remaining),
        name=experiment.policy,
    )
    result = Simulation(trace, config, policies).run(progress)
    return Outcome(experiment, trace.rate_per_s, result, goodput(result.served, slo))


def _setup(experiment: Experiment, profile: StepProfile, trace: Trace) -> Setup:
    # A running request holds its prompt and, on average over its life, half of its answer.
    context = float(trace.input_tokens.mean() + trace.output_tokens.mean() / 2)
    return Setup(
        steps=profile,
        kv_capacity_tokens=experiment.kv_capacity_tokens or profile.kv_capacity_tokens,
        ttft_slo_s=experiment.slo.ttft_s,
        tpot_slo_s=experiment.slo.tpot_s,
        instances=experiment.instances,
        prefills=experiment.prefills,
        seed=experiment.seed,
        predictor=length_predictor(experiment.lengths, experiment.seed),
        mean_context_tokens=context,
        instances_min=experiment.instances_min,
        instances_max=experiment.instances_max or max(64, 2 * experiment.instances),
        plan_interval_s=experiment.plan_interval_s,
        headroom=experiment.headroom,
        forecaster=experiment.forecaster or DEFAULT_FORECASTER,
    )


def _fleet(experiment: Experiment, profile: StepProfile, chosen: PolicySet) -> list[InstanceSpec]:
    classes = chosen.length_classes or (None,) * len(chosen.roles)
    return [
        InstanceSpec(profile, role=role, length_class=length_class, kv_capacity_tokens=experiment.kv_capacity_tokens)
        for role, length_class in zip(chosen.roles, classes, strict=True)
    ]


def capacity_of(
    experiment: Experiment,
    trace: Trace,
    *,
    low_per_s: float,
    high_per_s: float,
    target: float = 0.9,
    tolerance: float = 0.02,
) -> Capacity:
    """The highest rate at which the experiment keeps the attainment target (Arrow 7.1)."""
    return find_capacity(
        lambda rate: run_experiment(experiment.at_rate(rate), trace).figures.attainment,
        low_per_s=low_per_s,
        high_per_s=high_per_s,
        target=target,
        tolerance=tolerance,
    )
