"""One experiment by names: trace, policy, engine order, profile, SLO. Picklable, so that sweeps can use processes."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Sequence

from pla_sglang.common.checks import GIGA, Choice, Range, check_fields, knob, require
from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.config import DEADLINES, PlaConfig
from pla_sglang.plugin.temporal_knobs import DEPTH_WITHOUT_GRAPHS, PARTS, EngineLimits, temporal_knobs, tune
from pla_sglang.policy.baselines.orders import ENGINE_ORDERS
from pla_sglang.policy.common.fleet_policy import NO_PLANNER, PLANNER_NAMES
from pla_sglang.policy.common.step_model import BEND_TOKENS, StepModel
from pla_sglang.policy.common.survival import SurvivalPredictor
from pla_sglang.policy.engine_policies import make_engine_policy
from pla_sglang.policy.interface.fleet import InstanceKind, Role
from pla_sglang.policy.interface.prefill import EnginePolicy
from pla_sglang.policy.interface.remaining_length import NoPrediction, Oracle, RemainingPredictor
from pla_sglang.policy.registry import DEFAULT_FORECASTER, FORECASTERS, PAPER_FORECASTER, PolicySet, Setup, policy_names
from pla_sglang.policy.slo.knobs import EnginePolicyKnobs
from pla_sglang.policy.slo.mixed_batches import MixedBatchModel
from pla_sglang.policy.star.predictors import PAPER_BINS, Binned, Noisy
from pla_sglang.policy_packages import PolicyName, build, read_knobs
from pla_sglang.profiles import StepProfile, load_profile, profile_names
from pla_sglang.profiles.scaled import NO_ERROR, StepError
from pla_sglang.sim.core.config import InstanceSpec, KnownSteps, PrefixKnowledge, RoleSwitch, SimConfig
from pla_sglang.sim.core.engine_knobs import AnswerCaching, EngineKnobs
from pla_sglang.sim.core.host import NO_HOST, HostKnobs
from pla_sglang.sim.core.simulation import Progress, RunResult, Simulation
from pla_sglang.sim.metrics.goodput import Capacity, Goodput, Slo, find_capacity, goodput
from pla_sglang.sim.workload.trace import Trace

TEMPORAL = "temporal"
ENGINES = (*ENGINE_ORDERS, TEMPORAL)
SMALL_FIRST = ("shortest-prefill-first", "pass-srpt", TEMPORAL)  # of them
PLAIN_LENGTHS = {"oracle": Oracle, "none": NoPrediction, "survival": SurvivalPredictor}
LENGTHS = (*PLAIN_LENGTHS, "binned", "noisy:TOKENS")
SESSIONS = ("closed", "open")
COUNT = Range(1)
NO_OTHER_LIMITS = EngineKnobs()
STOCK_KINDS = {
    Role.MIXED: InstanceKind.UNIFIED,
    Role.PREFILL: InstanceKind.PREFILL,
    Role.DECODE: InstanceKind.DECODE,
}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What to run. Everything but the trace, which is large and shared by many.

    ``chunk_tokens``, ``mixed``, ``slots``, ``answers``, ``kv_capacity_tokens``, ``bandwidth_bytes_per_s``, ``flip``,
    ``startup_s``: see ``EngineKnobs``, ``InstanceSpec`` and ``SimConfig``. ``lengths`` "binned" has
    STAR's bins of section 6.5, 6 of them unless "binned:N" says 2 or 4; the TOKENS of "noisy" are a mean absolute
    error.
    """

    policy: str = knob(
        flag="--policy NAME",
        help=f"one of: {', '.join(policy_names())}, or one of an installed package",
        allowed=PolicyName(),
    )
    slo: Slo  # type: ignore[misc]  # neither it nor policy has a default
    engine: str = knob(
        "fcfs", "--engine NAME", f"order of prefills in an engine: {', '.join(ENGINES)}", allowed=Choice(ENGINES)
    )
    profile: str = knob("h100-llama3.1-8b-tp1", "--profile NAME", "a path, or of: " + ", ".join(profile_names()))
    instances: int = knob(8, "--instances", "at the start", allowed=COUNT)
    instances_of: tuple[str, ...] = knob(
        (), "--instances-of PROFILE:COUNT", "the last COUNT of them have another profile; may be repeated"
    )
    known_steps: KnownSteps = knob(
        KnownSteps.EXACT,
        "--known-steps {exact,measured,told}",
        "of instances: by their own profile, by what their passes show, or by --profile for all",
    )
    prefix_knowledge: PrefixKnowledge = knob(
        PrefixKnowledge.EXACT,
        "--prefix-knowledge {exact,index}",
        "what the policy knows of prefix caches: what is in them, or what was sent there, as a router",
    )
    prefills: int | None = knob(
        None,
        "--prefills",
        "prefill instances at the start; default: half, or none behind plain routers",
        allowed=Range(0),
    )
    rate_per_s: float | None = None  # mean rate that the trace is scaled to; None: as recorded
    lengths: str = knob(
        "none", "--lengths NAME", f"what migration knows of answers to come: {', '.join(LENGTHS)}, binned:N"
    )
    move_gain: float = knob(
        1.0,
        "--move-gain",
        "a request moves only where its answer gains so many times the pause; 0: as in the papers",
        allowed=Range(0),
    )
    chunk_tokens: int = knob(8192, "--chunk-tokens", "prefill tokens of a pass at most", allowed=COUNT)
    mixed: bool = knob(False, "--mixed", "decodes join prefill passes")
    decode_interval: int = knob(
        0,
        "--prefill-decode-interval N",
        "decode steps between two prefill passes; not for engine temporal, which refuses it",
        allowed=Range(0),
    )
    deadlines: str = knob(
        "advise",
        "--deadlines {advise,decide}",
        "of engine temporal: 'decide' defers infeasible requests, which cannot meet their TTFT target",
        allowed=Choice(DEADLINES),
    )
    slots: int = knob(1024, "--slots", "requests that run in an engine at once", allowed=COUNT)
    answers: AnswerCaching = knob(
        AnswerCaching.DROPPED, "--answers {dropped,kept,returned}", "what becomes of the KV of answers in conversations"
    )
    kv_capacity_tokens: int | None = knob(None, "--kv-capacity-tokens", "default: the profile's", allowed=COUNT)
    bandwidth_bytes_per_s: float = knob(
        50e9, "--bandwidth-gb-s", "of KV transfers, a link", allowed=Range(0, unit="GB/s", above=True), scale=GIGA
    )
    flip: RoleSwitch = knob(RoleSwitch.LABEL, "--flip {label,drain,restart}", "how an instance changes its role")
    startup_s: float | None = knob(None, "--startup-s", "from the decision to a ready instance", allowed=Range(0))
    output_limit_tokens: int | None = knob(
        None, "--output-limit-tokens", "max_tokens that clients send; default: just what the answer has", allowed=COUNT
    )
    sessions: str = knob(
        "closed",
        "--sessions {closed,open}",
        "of a trace with think times: a request follows the answer before it, or comes at its recorded time",
        allowed=Choice(SESSIONS),
    )
    seed: int = knob(1, "--seed", "of policies that draw at random")
    policy_knobs: tuple[str, ...] = knob(
        (), "--policy-knob PART.NAME=VALUE", "PART.NAME: a knob of the policy, on its page; may be repeated"
    )
    engine_knobs: tuple[str, ...] = knob(
        (),
        "--engine-knob PART.NAME=VALUE",
        f"of engine temporal; parts: {', '.join(PARTS)}; other engines refuse it; may be repeated",
    )
    planner: str = knob(
        NO_PLANNER,
        "--planner NAME",
        "what starts and stops instances, beside any policy",
        allowed=Choice(PLANNER_NAMES),
    )
    instances_min: int = knob(2, "--instances-min", "for planners and policies that scale", allowed=COUNT)
    instances_max: int | None = knob(
        None, "--instances-max", "as --instances-min; default: 64, at least twice --instances", allowed=COUNT
    )
    plan_interval_s: float = knob(
        60.0, "--plan-interval-s", "for planners and policies that scale", allowed=Range(0, unit="s", above=True)
    )
    headroom: float = knob(1.0, "--headroom", "factor on the forecast load", allowed=Range(0, above=True))
    forecaster: str | None = knob(
        None,
        "--forecaster NAME",
        f"of the load: {', '.join(FORECASTERS)}; default: {DEFAULT_FORECASTER}, of policies {PAPER_FORECASTER}",
    )
    stateless: bool = True  # ``Setup.stateless``
    migrates: bool = True  # ``Setup.migrates``
    limits: EngineKnobs = NO_OTHER_LIMITS  # of engines, where no field above says them
    report_interval_s: float = 0.25
    step_error: StepError = NO_ERROR  # of the devices against their profiles
    host: HostKnobs = NO_HOST  # what real hosts add; ``python -m bench fidelity`` measures it

    def __post_init__(self) -> None:
        check_fields(self)
        require("--instances-max", self.instances_max, self.instances)
        if self.decode_interval and self.engine == TEMPORAL:
            raise ConfigError(f"--prefill-decode-interval is {self.decode_interval}; allowed with {TEMPORAL}: 0")
        if self.engine_knobs and self.engine != TEMPORAL:
            raise ConfigError(f"--engine-knob is given with --engine {self.engine}; allowed: with {TEMPORAL}")
        engine_policy_knobs(EngineKnobs(), texts=self.engine_knobs)
        read_kinds(self)
        length_predictor(self.lengths, self.seed)
        read_knobs(self.policy, self.policy_knobs, self.planner)

    def load_steps(self, profile: str) -> StepProfile:
        """As the devices have them. Raises ProfileError."""
        return self.step_error.apply(load_profile(profile))

    def at_rate(self, rate_per_s: float) -> Experiment:
        return dataclasses.replace(self, rate_per_s=rate_per_s)


def read_kinds(experiment: Experiment) -> list[str]:
    """The profile of each instance: that of ``profile``, then those of ``instances_of``, in their order.

    Raises ConfigError for anything but PROFILE:COUNT, and for more instances than there are.
    """
    others: list[str] = []
    for text in experiment.instances_of:
        name, _, count = text.rpartition(":")
        if not name or not count.isdecimal() or int(count) < 1:
            raise ConfigError(f"--instances-of {text!r} is not known; allowed: PROFILE:COUNT, COUNT from 1")
        others += [name] * int(count)
    first = experiment.instances - len(others)
    if first < 0:
        raise ConfigError(
            f"--instances-of names {len(others)} instances; allowed: at most --instances, {experiment.instances}"
        )
    return [experiment.profile] * first + others


@dataclasses.dataclass(frozen=True)
class ExperimentResult:
    """An experiment and what came of it. ``rate_per_s`` is the mean rate of the trace as run."""

    experiment: Experiment
    rate_per_s: float
    result: RunResult
    figures: Goodput


def length_predictor(lengths: str, seed: int) -> RemainingPredictor:
    """What ``Experiment.lengths`` names. Raises ConfigError for anything else."""
    name, _, value = lengths.partition(":")
    if lengths in PLAIN_LENGTHS:
        return PLAIN_LENGTHS[lengths]()
    if name == "binned" and (value or lengths == "binned"):
        bins = {str(count): edges for count, edges in PAPER_BINS.items()}
        if (value or "6") not in bins:
            raise ConfigError(f"--lengths {lengths!r} is not known; allowed: binned:{', binned:'.join(bins)}")
        return Binned(bins[value or "6"])
    try:
        mae_tokens = float(value) if name == "noisy" else math.nan
    except ValueError:
        mae_tokens = math.nan
    if not (math.isfinite(mae_tokens) and mae_tokens >= 0):
        raise ConfigError(f"--lengths {lengths!r} is not known; allowed: {', '.join(LENGTHS)} (0 tokens and more)")
    return Noisy(mae_tokens, random.Random(seed))


def step_model(profile: StepProfile, pass_s: float = 0.0) -> StepModel:
    """The roofline that engine policies start from, out of a profile's terms.

    ``pass_s``: what a pass costs besides, and beside what the profile says of that.
    """
    terms, curve = profile.prefill, profile.prefill_correction
    return StepModel(
        g0_s=terms.floor_s,
        gw_s=0.0,
        gr_s=terms.read_s,
        k0_s=terms.base_s,
        bend=tuple(map(curve, BEND_TOKENS)) if curve.at else (),
        edge=tuple(curve(size + 1) for size in BEND_TOKENS) if curve.at else (),
        b_s=terms.token_s,
        a_s=terms.attention_s,
        kr_s=terms.read_s,
        pass_s=profile.pass_s + pass_s,
    )


def mixed_batch_model(profile: StepProfile) -> MixedBatchModel:
    """What decodes cost beside prefills, out of a profile's terms.

    Its error is that of ``step_model`` for passes of the size to which a chunk is cut, the crossing and above.
    """
    terms, curve = profile.decode, profile.prefill_correction
    crossing = step_model(profile).crossing_tokens(0)
    slower = max((factor for at, factor in zip(curve.at, curve.factor, strict=True) if at >= crossing), default=1.0)
    return MixedBatchModel(terms.base_s, terms.request_s, terms.read_s, error=max(0.0, slower - 1))


def engine_policy_knobs(knobs: EngineKnobs, *, decide: bool = False, texts: Sequence[str] = ()) -> EnginePolicyKnobs:
    """What engine temporal decides by. ``decide``: deadlines do; ``texts``: ``Experiment.engine_knobs``.

    Raises ConfigError.
    """
    config = PlaConfig(prefill_disagg=TEMPORAL, deadlines="decide" if decide else "advise")
    limits = EngineLimits(knobs.chunk_tokens, knobs.chunk_tokens, depth_max=min(DEPTH_WITHOUT_GRAPHS, knobs.slots))
    return tune(temporal_knobs(config, limits), texts)


def engine_policy(
    name: str,
    profile: StepProfile,
    knobs: EngineKnobs,
    *,
    decide: bool = False,
    pass_s: float = 0.0,
    texts: Sequence[str] = (),
) -> EnginePolicy:
    """A fresh engine policy by name.

    ``pass_s``: what a pass costs beside its profile; ``decide``, ``texts``: as of ``engine_policy_knobs``.
    """
    model = step_model(profile, pass_s)
    if name == TEMPORAL:
        tuned = engine_policy_knobs(knobs, decide=decide, texts=texts)
        return make_engine_policy(tuned, model, mixed_batch_model(profile))
    return ENGINE_ORDERS[name](model)


def riding_tokens(engine: str, chunk_tokens: int) -> int:
    """``Setup.riding_tokens`` of engines with mixed passes."""
    return 1 if engine == TEMPORAL else chunk_tokens


def run_experiment(experiment: Experiment, trace: Trace, progress: Progress | None = None) -> ExperimentResult:
    """Runs it once. Raises ConfigError and its kin for what does not fit together."""
    trace.require_requests()
    if experiment.rate_per_s is not None:
        trace = trace.at_rate(experiment.rate_per_s)
    jobs = None if trace.think_s is None else trace.session
    trace = trace.as_recorded() if experiment.sessions == "open" else trace
    profile = experiment.load_steps(experiment.profile)
    chosen = build(experiment.policy, _setup(experiment, profile, trace))
    slo = experiment.slo
    config = SimConfig(
        _fleet(experiment, chosen),
        engine=_engine_knobs(experiment),
        bandwidth_bytes_per_s=experiment.bandwidth_bytes_per_s,
        flip=experiment.flip,
        startup_s=experiment.startup_s,
        output_limit_tokens=experiment.output_limit_tokens,
        ttft_slo_s=slo.ttft_s,
        tpot_slo_s=slo.tpot_s,
        host=experiment.host,
        report_interval_s=experiment.report_interval_s,
        known_steps=experiment.known_steps,
        told_profile=profile,
        prefix_knowledge=experiment.prefix_knowledge,
    )
    make_engine = functools.partial(
        engine_policy,
        experiment.engine,
        decide=experiment.deadlines == "decide",
        pass_s=experiment.host.step_s,
        texts=experiment.engine_knobs,
    )
    lengths = length_predictor(experiment.lengths, experiment.seed)
    result = Simulation(trace, config, chosen, make_engine, lengths).run(progress)
    return ExperimentResult(experiment, trace.rate_per_s, result, goodput(result.served, slo, jobs))


def _engine_knobs(experiment: Experiment) -> EngineKnobs:
    return dataclasses.replace(
        experiment.limits,
        chunk_tokens=experiment.chunk_tokens,
        slots=experiment.slots,
        mixed=experiment.mixed,
        decode_interval=experiment.decode_interval,
        answers=experiment.answers,
    )


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
        mean_context_tokens=context,
        riding_tokens=riding_tokens(experiment.engine, experiment.chunk_tokens) if experiment.mixed else None,
        small_first=experiment.engine in SMALL_FIRST,
        stateless=experiment.stateless,
        migrates=experiment.migrates,
        instances_min=experiment.instances_min,
        instances_max=experiment.instances_max or max(64, 2 * experiment.instances),
        plan_interval_s=experiment.plan_interval_s,
        headroom=experiment.headroom,
        forecaster=experiment.forecaster,
        move_gain=experiment.move_gain,
        planner=experiment.planner,
        knobs=read_knobs(experiment.policy, experiment.policy_knobs, experiment.planner),
    )


def _fleet(experiment: Experiment, chosen: PolicySet) -> list[InstanceSpec]:
    """Instances in the order of the policy's roles: of a fixed split the first prefill, and the last decode."""
    classes = chosen.length_classes or (None,) * len(chosen.roles)
    kinds = {name: experiment.load_steps(name) for name in {experiment.profile, *read_kinds(experiment)}}
    kv_tokens = experiment.kv_capacity_tokens
    specs = [
        InstanceSpec(kinds[name], role=role, length_class=length_class, kv_capacity_tokens=kv_tokens)
        for name, role, length_class in zip(read_kinds(experiment), chosen.roles, classes, strict=True)
    ]
    return specs if experiment.stateless else [dataclasses.replace(spec, kind=STOCK_KINDS[spec.role]) for spec in specs]


def capacity_of(
    experiment: Experiment,
    trace: Trace,
    *,
    low_per_s: float,
    high_per_s: float,
    target: float = 0.9,
    tolerance: float = 0.02,
    tell: Callable[[float], None] | None = None,
) -> Capacity:
    """The highest rate at which the experiment keeps the attainment target (Arrow 7.1), and the span at that rate.

    ``tell``: called with each rate before it is tried.
    """

    def attainment_at(rate_per_s: float) -> float:
        if tell is not None:
            tell(rate_per_s)
        return run_experiment(experiment.at_rate(rate_per_s), trace).figures.attainment

    capacity = find_capacity(
        attainment_at,
        low_per_s=low_per_s,
        high_per_s=high_per_s,
        target=target,
        tolerance=tolerance,
    )
    held_per_s = capacity.held_per_s
    span_s = None if held_per_s is None else trace.at_rate(held_per_s).span_s
    return dataclasses.replace(capacity, span_s=span_s)
