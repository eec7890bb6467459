"""What PLA-Serve's figures run: one or eight H200 prefill instances, four ways to run them, and chats for them.

The model knows of a prefill graph that it saves the launches: below the eager launch floor a pass takes its roofline
time if its tokens fit a captured size, else the floor. What else a GPU does to a mixed batch (interference of kernels,
padding inside a graph on a length grid) it does not know; the rows say so.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

import numpy as np

from bench.harness.talks import Dataset
from bench.lab.world import MakeEngine, Steady, World, steady
from pla_sglang.policy.baselines.dispatch import CacheAware, RoundRobin
from pla_sglang.policy.common.dispatch import least_tokens
from pla_sglang.policy.interface.fleet import Role
from pla_sglang.policy.pla.awd import AwdKnobs
from pla_sglang.policy.pla.graphs.choose import LARGEST_TOKENS
from pla_sglang.policy.pla.graphs.layouts import token_steps
from pla_sglang.policy.pla.temporal import TemporalKnobs, TemporalPolicy
from pla_sglang.policy.registry import Setup, build
from pla_sglang.profiles import load_profile
from pla_sglang.sim.core.config import InstanceSpec
from pla_sglang.sim.core.engine_knobs import AnswerCaching, EngineKnobs
from pla_sglang.sim.core.experiment import step_model
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.workload import Arrivals, Trace, chat_trace, length_model

TTFT_SLO_S = 0.4  # section 4.1
SLO = Slo(TTFT_SLO_S, 1.0)  # requests end with their first token, so TPOT does not count
GRAPH_TOKENS = tuple(token_steps(LARGEST_TOKENS))  # those of --pla-graph-layout varlen
CHUNK_TOKENS = 8192
PROFILES = {
    "7B": load_profile("h100-qwen2.5-7b-tp1"),
    "14B": load_profile("h200-qwen2.5-14b-tp1"),
    "32B": load_profile("h200-qwen2.5-32b-tp1"),
}
MODES = ("SGLang", "graphs only", "split only", "PLA")
GRAPHS, SPLIT = ("graphs only", "PLA"), ("split only", "PLA")  # with prefill graphs, with disaggregation by length
COMPARED = ("SGLang", "PLA")
# SGLang with the routers of several instances; alone it is least tokens, which knows no prefixes.
ROBIN, CACHE_AWARE = "SGLang, round robin", "SGLang, cache-aware"
ROUTERS = {ROBIN: RoundRobin, CACHE_AWARE: CacheAware}
CURVE_ONLY = "the paper shows curves without numbers"


def graph_tokens(mode: str) -> tuple[int, ...]:
    return GRAPH_TOKENS if mode in GRAPHS else ()


def temporal(awd: AwdKnobs | None = None, boundary_tokens: int | None = None) -> MakeEngine:
    """Maker of the engine policy; ``boundary_tokens`` None: from the step model."""
    knobs = TemporalKnobs(boundary_tokens=boundary_tokens, boundary_cap_tokens=CHUNK_TOKENS, awd=awd or AwdKnobs())
    return lambda profile, _: TemporalPolicy(knobs, step_model(profile))


def engine_of(mode: str) -> str | MakeEngine:
    return temporal() if mode in SPLIT else "fcfs"


def deploy(
    mode: str, *, model: str, instances: int, users: Mapping[int, int], engine: str | MakeEngine | None = None
) -> World:
    """Prefill instances alone: requests end with their first token.

    Several of them, split by length, are short and long pools with the pressure controller; else requests go to the
    instance with the fewest tokens, or as ``ROUTERS`` says. Answers are in the prefix cache where the prompt is.
    """
    profile = PROFILES[model]
    config = {"users": users, "prefill_graph_tokens": graph_tokens(mode), "ttft_slo_s": TTFT_SLO_S, "tpot_slo_s": 1.0}
    knobs = EngineKnobs(chunk_tokens=CHUNK_TOKENS, answers=AnswerCaching.RETURNED)
    engine = engine or engine_of(mode)
    if mode not in SPLIT or instances == 1:
        fleet = [InstanceSpec(profile, count=instances, role=Role.PREFILL)]
        return World(fleet, ROUTERS.get(mode, least_tokens)(), engine=engine, knobs=knobs, config=config)
    setup = Setup(profile, profile.kv_capacity_tokens, TTFT_SLO_S, 1.0, instances=2 * instances, prefills=instances)
    pools = build("pla", setup)
    classes = pools.length_classes[:instances]
    fleet = [InstanceSpec(profile, role=Role.PREFILL, length_class=length_class) for length_class in classes]
    return World(fleet, pools.dispatcher, pools.controllers, engine=engine, knobs=knobs, config=config)


# Length models, and the mean number of turns: LMSYS-Chat-1M's by its paper (arXiv 2309.11998), ShareGPT-4's measured.
DATASETS = {"lmsys": ("lmsys", 2.0), "sharegpt": ("sharegpt4", 5.45)}
BLOCK_TOKENS = 16  # of a prefix match: it rounds what is computed up by half a block on average
TALKS = 2  # of each user, at least: rows count until the first user has none left


def conversations(requests: int, users: int, seed: int, dataset: str | Dataset) -> Trace:
    """About so many prompts of multi-turn conversations, answers included.

    ``dataset``: recorded ones, or the name of a model of lengths, ``lmsys`` or ``sharegpt``.
    """
    if isinstance(dataset, Dataset):
        trace = dataset.make_trace(requests, TALKS * users, Arrivals(1.0, random.Random(seed)))
        return trace.with_session_hashes(BLOCK_TOKENS)
    kind, turns = DATASETS[dataset]
    first, later = (length_model(f"{kind}_{turn}_turn_prompt") for turn in ("first", "later"))
    sessions, arrivals = max(round(requests / turns), TALKS * users), Arrivals(1.0, random.Random(seed))
    trace = chat_trace(sessions, arrivals, first=first, later=later, mean_turns=turns, name=dataset)
    return trace.with_session_hashes(BLOCK_TOKENS)


def prompts_alone(trace: Trace) -> Trace:
    """Answers of one token, so that requests end with their prefill; what follows a prompt in the cache stays."""
    return dataclasses.replace(trace, output_tokens=np.ones_like(trace.output_tokens))


def chat_prefills(
    model: str, instances: int, mode: str, users: int, *, dataset: str | Dataset, requests: int, seed: int
) -> Steady:
    """A closed loop of conversations' prompts; ``users`` an instance, as the paper's load is per instance.

    Requests/s are users over mean latency: ends that are counted would leave out those that wait longest.
    """
    users *= instances
    trace = prompts_alone(conversations(requests, users, seed, dataset))
    fleet = deploy(mode, model=model, instances=instances, users={0: users})
    counted = steady(fleet.run(trace).served, users, SLO)
    return dataclasses.replace(counted, requests_per_s=users / counted.ttft_mean_s)
