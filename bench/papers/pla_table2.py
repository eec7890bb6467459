"""PLA-Serve Table 2: the time to work off a data set without deadlines, four prefill and four decode instances."""

from __future__ import annotations

import dataclasses

import numpy as np

from bench.papers.charts import bars, draw
from bench.papers.context import Context
from bench.papers.finding import Claim, Finding, Row, number
from bench.papers.measure import World, fcfs
from bench.papers.pla_cases import CHUNK_TOKENS, GRAPH_TOKENS, MODELS, MODES, conversations, temporal
from pla_sglang.policy.baselines.dispatch import least_tokens
from pla_sglang.policy.fleet import Role
from pla_sglang.profiles import load_profile
from pla_sglang.sim.config import InstanceSpec
from pla_sglang.sim.interfaces import EngineKnobs

MODEL, PREFILLS, DECODES = "32B", 4, 4
ANSWER_TOKENS = 1024  # "a decoding length of 1K tokens"
USERS = 512  # under way at once: an offline task keeps the instances full
# seconds of SGLang and of PLA, and the improvement as printed
PAPER = {"lmsys": (18_963, 17_572, 0.073), "sharegpt": (25_132, 23_041, 0.083)}
WHY_SECONDS = "The paper's data sets are larger by a factor that is not printed; only the improvement can be compared."
WHY_GAIN = (
    "With answers of 1K tokens four decode instances take nearly all of the time in our model, so a faster prefill"
    " hardly shows; the share of prefill in the paper's time is not printed."
)


@dataclasses.dataclass(frozen=True)
class Job:
    mode: str
    dataset: str
    requests: int
    seed: int


def seconds(job: Job) -> float:
    """Until the last answer is complete."""
    trace = conversations(job.requests, job.seed, job.dataset)
    trace = dataclasses.replace(trace, output_tokens=np.full(len(trace), ANSWER_TOKENS))
    mode, profile = MODES[job.mode], load_profile(MODELS[MODEL])
    fleet = [
        InstanceSpec(profile, count=PREFILLS, role=Role.PREFILL),
        InstanceSpec(profile, count=DECODES, role=Role.DECODE),
    ]
    config = {"users": {0: USERS}, "prefill_graph_tokens": GRAPH_TOKENS if mode.graphs else ()}
    engine = temporal() if mode.split else fcfs
    knobs = EngineKnobs(chunk_tokens=CHUNK_TOKENS)
    result = World(fleet, least_tokens(), engine=engine, knobs=knobs, config=config).run(trace)
    return float(np.nanmax(result.served.finish_s))


def run(context: Context) -> Finding:
    requests = context.pick(200, 4000, 20_000)
    keys = [(mode, dataset) for dataset in PAPER for mode in ("SGLang", "PLA")]
    found = dict(zip(keys, context.map(seconds, [Job(*key, requests, context.seed) for key in keys]), strict=True))
    rows, claims = [], []
    for dataset, (stock_s, ours_s, improvement) in PAPER.items():
        gain = 1 - found["PLA", dataset] / found["SGLang", dataset]
        rows += [
            Row(f"{dataset}: SGLang", stock_s, found["SGLang", dataset], "s", WHY_SECONDS),
            Row(f"{dataset}: PLA", ours_s, found["PLA", dataset], "s", WHY_SECONDS),
            Row(f"{dataset}: improvement", improvement, gain, "", WHY_GAIN),
        ]
        claims.append(Claim(f"{dataset}: PLA takes no longer than SGLang", gain > -0.01, f"{number(100 * gain)} %"))
    return Finding(
        "pla_table2",
        "PLA-Serve, Table 2",
        f"{PREFILLS} P + {DECODES} D, Qwen2.5-{MODEL} (the paper names none), H200 step times, {requests} prompts of"
        f" conversations, answers of {ANSWER_TOKENS} tokens, {USERS} under way",
        rows,
        claims,
        [{"mode": mode, "dataset": dataset, "seconds": one} for (mode, dataset), one in found.items()],
        draw(
            [bars({name: {mode: found[mode, name] for mode in ("SGLang", "PLA")} for name in PAPER}, y="s")],
            "PLA-Serve Table 2: time to work off a data set",
        ),
    )
