"""PLA-Serve's prefill instances (section 4): one or eight H200, four ways to run them.

The model knows of a prefill graph that it saves the launches: below the eager launch floor a pass takes its roofline
time if its tokens fit a captured size, else the floor. What else a GPU does to a mixed batch (interference of kernels,
padding inside a graph on a length grid) it does not know; the rows say so.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

from bench.papers.measure import MakeEngine, World, fcfs
from pla_sglang.policy.awd import AwdKnobs
from pla_sglang.policy.baselines.dispatch import LeastLoad, RoundRobin, least_tokens
from pla_sglang.policy.buckets.choose import LARGEST_TOKENS
from pla_sglang.policy.buckets.layouts import token_steps
from pla_sglang.policy.decisions import Controller, Dispatcher
from pla_sglang.policy.fleet import Role
from pla_sglang.policy.registry import Setup, build
from pla_sglang.policy.temporal import TemporalKnobs, TemporalPolicy
from pla_sglang.profiles import StepProfile, load_profile
from pla_sglang.sim.config import InstanceSpec
from pla_sglang.sim.experiment import step_model
from pla_sglang.sim.interfaces import EngineKnobs, EnginePolicy
from pla_sglang.workload import Arrivals, LengthModel, Trace, chat_trace, generated_trace, length_model
from pla_sglang.workload.lengths import fixed

TTFT_SLO_S = 0.4  # section 4.1
GRAPH_TOKENS = tuple(token_steps(LARGEST_TOKENS))  # those of --pla-graph-layout varlen
CHUNK_TOKENS = 8192
MODELS = {"7B": "h100-qwen2.5-7b-tp1", "14B": "h200-qwen2.5-14b-tp1", "32B": "h200-qwen2.5-32b-tp1"}
SHORT, LONG = 0, 1  # clients of ``two_kinds``


@dataclasses.dataclass(frozen=True)
class Mode:
    """What is switched on: prefill graphs, disaggregation by length."""

    graphs: bool
    split: bool


MODES = {
    "SGLang": Mode(graphs=False, split=False),
    "graphs only": Mode(graphs=True, split=False),
    "split only": Mode(graphs=False, split=True),
    "PLA": Mode(graphs=True, split=True),
}


def temporal(wait_s: float | None = None, *, boundary_tokens: int | None = None) -> MakeEngine:
    """Maker of the engine policy; ``wait_s`` is a fixed window, None the adaptive one."""
    awd = AwdKnobs() if wait_s is None else AwdKnobs(wait_min_s=wait_s, wait_max_s=max(wait_s, 1e-6))

    def engine(profile: StepProfile, knobs: EngineKnobs) -> EnginePolicy:
        made = TemporalKnobs(boundary_tokens=boundary_tokens, boundary_cap_tokens=knobs.chunk_tokens, awd=awd)
        return TemporalPolicy(made, step_model(profile))

    return engine


def spatial(profile: StepProfile, instances: int) -> tuple[Dispatcher, tuple[Controller, ...], list[InstanceSpec]]:
    """Short and long pools with the pressure controller, of prefill instances alone."""
    setup = Setup(profile, profile.kv_capacity_tokens, TTFT_SLO_S, 1.0, instances=2 * instances, prefills=instances)
    chosen = build("pla", setup)
    classes = chosen.length_classes[:instances]
    fleet = [InstanceSpec(profile, role=Role.PREFILL, length_class=one) for one in classes]
    return chosen.dispatcher, chosen.controllers, fleet


def world(
    mode: Mode,
    *,
    model: str,
    instances: int,
    users: Mapping[int, int] | None,
    router: str = "least tokens",
    wait_s: float | None = None,
    boundary_tokens: int | None = None,
) -> World:
    """Prefill instances alone: requests end with their first token. ``router`` counts where nothing is split."""
    profile = load_profile(MODELS[model])
    graphs = GRAPH_TOKENS if mode.graphs else ()
    config = {"users": users, "prefill_graph_tokens": graphs, "ttft_slo_s": TTFT_SLO_S, "tpot_slo_s": 1.0}
    knobs = EngineKnobs(chunk_tokens=CHUNK_TOKENS)
    engine = temporal(wait_s, boundary_tokens=boundary_tokens) if mode.split else fcfs
    fleet = [InstanceSpec(profile, count=instances, role=Role.PREFILL)]
    if mode.split and instances > 1:
        dispatcher, controllers, fleet = spatial(profile, instances)
        return World(fleet, dispatcher, controllers, engine=engine, knobs=knobs, config=config)
    chosen: LeastLoad | RoundRobin = RoundRobin() if router == "round robin" else least_tokens()
    return World(fleet, chosen, engine=engine, knobs=knobs, config=config)


def conversations(requests: int, seed: int, dataset: str) -> Trace:
    """Multi-turn conversations of ``lmsys`` or ``sharegpt`` lengths; answers of one token, for prefills alone."""
    kind = {"lmsys": "lmsys", "sharegpt": "sharegpt4"}[dataset]
    first, later = (length_model(f"{kind}_{turn}_turn_prompt") for turn in ("first", "later"))
    sessions = max(2, requests // 5)
    trace = chat_trace(sessions, Arrivals(1.0, random.Random(seed)), first=first, later=later, name=dataset)
    short = dataclasses.replace(trace, output_tokens=trace.output_tokens * 0 + 1)
    return short.head(min(requests, len(short)))


def two_kinds(shorts: int, longs: int, seed: int) -> Trace:
    """Prompts under 64 tokens of one client and of 1,024 to 4,096 of another (Figures 1 and 3), one token out."""
    rng = random.Random(seed)
    short = LengthModel((1.0,), (3.4,), (0.5,), least=8, most=63)
    long = LengthModel((1.0,), (7.6,), (0.3,), least=1025, most=4096)
    parts = [
        generated_trace(max(1, count), Arrivals(1.0, rng), model, fixed(1))
        for count, model in ((shorts, short), (longs, long))
    ]
    return joined(parts[0], parts[1])


def joined(shorts: Trace, longs: Trace) -> Trace:
    """Both as one trace, all at time 0, with their client; a closed loop takes each client's rows by themselves."""
    import numpy as np

    return Trace(
        "short and long",
        np.zeros(len(shorts) + len(longs)),
        np.concatenate([shorts.input_tokens, longs.input_tokens]),
        np.concatenate([shorts.output_tokens, longs.output_tokens]),
        client=np.array([SHORT] * len(shorts) + [LONG] * len(longs)),
    )
