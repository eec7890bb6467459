"""DOPD's deployments (section VI) on the step times of its own Table I.

Prefill instances have one GPU, decode instances two (TP 2). vLLM's aggregation on four GPUs is two instances of TP 2
here: the table has no other size. Their prefills run 1.63 times as fast as on one GPU, the ratio of composed step times
of Llama-3.1-70B FP8 at TP 1 and TP 2.
"""

from __future__ import annotations

import dataclasses

from bench.papers.measure import World
from pla_sglang.metrics.goodput import Slo
from pla_sglang.policy.arrow.curve import profile_curve
from pla_sglang.policy.arrow.predictor import TtftPredictor
from pla_sglang.policy.baselines.dispatch import MinimalLoad, RoundRobin, least_tokens
from pla_sglang.policy.dopd.batching import BatchingKnobs, LengthAwareBatching
from pla_sglang.policy.dopd.dispatch import DopdDispatcher, DopdDispatchKnobs
from pla_sglang.policy.fleet import InstanceKind, Role
from pla_sglang.profiles import StepProfile, load_profile
from pla_sglang.profiles.step import DecodeTerms
from pla_sglang.sim.config import InstanceSpec
from pla_sglang.sim.experiment import Ordered
from pla_sglang.sim.interfaces import EngineKnobs, EnginePolicy

PROFILE = load_profile("h100-llama70b-fp8-dopd")
DECODE_KV_TOKENS = 250_244  # eq. 11 at TP 2 with M' = 4 GB: 82 GB of 327,680 bytes a token
SLO = Slo(2.0, 0.08)  # section VI-B2
TP2_SPEEDUP = 0.130 / 0.080
SYSTEMS = ("vLLM, aggregated", "DistServe", "Dynamo", "DOPD")
VLLM_CHUNK_TOKENS = 2048


def predictor() -> TtftPredictor:
    return TtftPredictor({"": profile_curve(PROFILE)})


def prefill_spec(count: int) -> InstanceSpec:
    return InstanceSpec(PROFILE, count=count, kind=InstanceKind.PREFILL, role=Role.PREFILL)


def slower_decodes(profile: StepProfile, factor: float) -> StepProfile:
    """Every decode step takes ``factor`` times as long."""
    terms = profile.decode
    slower = DecodeTerms(terms.base_s * factor, terms.request_s * factor, terms.read_s * factor)
    return dataclasses.replace(profile, decode=slower)


def decode_spec(count: int, *, factor: float = 1.0) -> InstanceSpec:
    return InstanceSpec(
        slower_decodes(PROFILE, factor),
        count=count,
        kind=InstanceKind.DECODE,
        role=Role.DECODE,
        tensor_parallel=2,
        kv_capacity_tokens=DECODE_KV_TOKENS,
    )


def aggregated_spec(count: int, *, factor: float = 1.0) -> InstanceSpec:
    terms = PROFILE.prefill
    faster = dataclasses.replace(
        terms,
        floor_s=terms.floor_s / TP2_SPEEDUP,
        base_s=terms.base_s / TP2_SPEEDUP,
        token_s=terms.token_s / TP2_SPEEDUP,
        attention_s=terms.attention_s / TP2_SPEEDUP,
    )
    profile = dataclasses.replace(PROFILE, name="h100-llama70b-fp8-tp2", prefill=faster)
    profile = slower_decodes(profile, factor)
    return InstanceSpec(profile, count=count, tensor_parallel=2, kv_capacity_tokens=DECODE_KV_TOKENS)


def length_aware(mean_input_tokens: float) -> LengthAwareBatching:
    """Algorithm 1 with a forecast that is right: i_next is the mean input length."""
    return LengthAwareBatching(BatchingKnobs(i_next_tokens=max(1, round(mean_input_tokens))))


def one_at_a_time(longest_tokens: int) -> EngineKnobs:
    """A prefill instance that takes requests from its queue one by one: no pass holds two of the longest."""
    return EngineKnobs(chunk_tokens=max(1, longest_tokens))


def world(
    system: str, *, prefills: int, decodes: int, mean_input_tokens: float, users: int, factor: float = 1.0
) -> World:
    """One of ``SYSTEMS``. DistServe: in turn; Dynamo: least backlog; DOPD: in place and length-aware batches too.

    ``factor``: of decode steps.
    """
    config = {"users": {0: users}, "ttft_slo_s": SLO.ttft_s, "tpot_slo_s": SLO.tpot_s}
    if system == "vLLM, aggregated":
        knobs = EngineKnobs(chunk_tokens=VLLM_CHUNK_TOKENS, mixed=True)
        return World([aggregated_spec(decodes, factor=factor)], least_tokens(), knobs=knobs, config=config)
    fleet = [prefill_spec(prefills), decode_spec(decodes, factor=factor)]
    if system == "DistServe":
        return World(fleet, RoundRobin(), knobs=EngineKnobs(chunk_tokens=2048), config=config)
    if system == "Dynamo":
        return World(fleet, MinimalLoad(predictor()), config=config)

    def engine(profile: StepProfile, knobs: EngineKnobs) -> EnginePolicy:
        return Ordered(length_aware(mean_input_tokens).decide)

    return World(fleet, DopdDispatcher(DopdDispatchKnobs(), predictor()), engine=engine, config=config)
