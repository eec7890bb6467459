"""DOPD's testbed (section VI): its step times and targets, and the systems that it compares.

Step times are those of its own Table I. Prefill instances have one GPU, decode instances two (TP 2). vLLM's aggregation
on four GPUs is two instances of TP 2 here: the table has no other size. Their prefills run 1.63 times as fast as on one
GPU, the ratio of composed step times of Llama-3.1-70B FP8 at TP 1 and TP 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bench.lab.world import World
from pla_sglang.policy.baselines.dispatch import MinimalLoad, RoundRobin
from pla_sglang.policy.common.curve import profile_curve
from pla_sglang.policy.common.dispatch import least_tokens
from pla_sglang.policy.common.predictor import TtftPredictor
from pla_sglang.policy.dopd.batching import BatchingKnobs, LengthAwareBatching
from pla_sglang.policy.dopd.dispatch import DopdDispatcher, DopdDispatchKnobs
from pla_sglang.policy.interface.fleet import InstanceKind, Role
from pla_sglang.profiles import StepProfile, load_profile
from pla_sglang.profiles.step import DecodeTerms
from pla_sglang.sim.core.config import InstanceSpec
from pla_sglang.sim.core.engine_knobs import EngineKnobs
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.workload import Trace

PROFILE = load_profile("h100-llama70b-fp8-dopd")
DECODE_KV_TOKENS = 250_244  # eq. 11 at TP 2 with M' = 4 GB: 82 GB of 327,680 bytes a token
SLO = Slo(2.0, 0.08)  # section VI-B2
TARGETS: dict[str, Any] = {"ttft_slo_s": SLO.ttft_s, "tpot_slo_s": SLO.tpot_s}
TP2_SPEEDUP = 0.130 / 0.080
CHUNK_TOKENS = 2048  # vLLM's
VLLM = "vLLM, aggregated"
ONE_A_PASS = "Dynamo, one prompt a pass"


def make_predictor(profile: StepProfile = PROFILE) -> TtftPredictor:
    return TtftPredictor({"": profile_curve(profile)})


def prefill_spec(count: int) -> InstanceSpec:
    one_gpu = dataclasses.replace(PROFILE, gpus=1)
    return InstanceSpec(one_gpu, count=count, kind=InstanceKind.PREFILL, role=Role.PREFILL)


def slow_decodes(profile: StepProfile, factor: float) -> StepProfile:
    """Every decode step takes ``factor`` times as long."""
    terms = profile.decode
    slower = DecodeTerms(terms.base_s * factor, terms.request_s * factor, terms.read_s * factor)
    return dataclasses.replace(profile, decode=slower)


def decode_spec(count: int, *, factor: float = 1.0) -> InstanceSpec:
    profile = slow_decodes(PROFILE, factor)
    return InstanceSpec(
        profile, count=count, kind=InstanceKind.DECODE, role=Role.DECODE, kv_capacity_tokens=DECODE_KV_TOKENS
    )


def aggregated_spec(count: int, *, factor: float) -> InstanceSpec:
    times_s = {name: getattr(PROFILE.prefill, name) for name in ("floor_s", "base_s", "token_s", "attention_s")}
    faster = dataclasses.replace(PROFILE.prefill, **{name: time_s / TP2_SPEEDUP for name, time_s in times_s.items()})
    profile = dataclasses.replace(PROFILE, name="h100-llama70b-fp8-tp2", prefill=faster)
    return InstanceSpec(slow_decodes(profile, factor), count=count, kv_capacity_tokens=DECODE_KV_TOKENS)


def deploy_system(system: str, trace: Trace, *, pairs: int, users: int, factor: float) -> World:
    """``VLLM``, or so many P and D instances of Table I, whose decode steps take ``factor`` times as long."""
    config = {"users": {0: users}, **TARGETS}
    if system == VLLM:
        knobs = EngineKnobs(chunk_tokens=CHUNK_TOKENS, mixed=True)
        return World([aggregated_spec(pairs, factor=factor)], least_tokens(), knobs=knobs, config=config)
    return deploy_split(system, trace, [prefill_spec(pairs), decode_spec(pairs, factor=factor)], config)


def deploy_split(system: str, trace: Trace, fleet: list[InstanceSpec], config: Mapping[str, object]) -> World:
    """``DistServe`` (in turn), ``Dynamo`` (least backlog), the same with ``ONE_A_PASS``, ``DOPD``.

    DOPD prefills the shortest in place and batches by length (Algorithm 1), with a forecast of the mean input length
    that is right. With a forecast of one token every prompt is long for Algorithm 1, and alone in its pass.
    """
    if system == "DistServe":
        return World(fleet, RoundRobin(), knobs=EngineKnobs(chunk_tokens=CHUNK_TOKENS), config=config)
    profile = fleet[0].profile
    if system == "Dynamo":
        return World(fleet, MinimalLoad(make_predictor(profile)), config=config)
    next_tokens = 1 if system == ONE_A_PASS else max(1, round(float(trace.input_tokens.mean())))
    batching = BatchingKnobs(i_next_tokens=next_tokens)
    dispatcher = (
        MinimalLoad(make_predictor(profile))
        if system == ONE_A_PASS
        else DopdDispatcher(DopdDispatchKnobs(), make_predictor(profile))
    )
    return World(fleet, dispatcher, engine=lambda profile, knobs: LengthAwareBatching(batching), config=config)
