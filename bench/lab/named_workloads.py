"""The named workloads: requests, their targets, and what a search for a fleet's limits needs to know of them.

Recorded traces are not part of this repository. A data folder holds them as plain CSV files (see workloads.md) with
the names in ``WORKLOADS``; what is missing there cannot be had, and is not replaced. The others are generated.

Three of them are another's requests in a regime where the form of the fleet matters: targets or devices that leave a
mixed pass no room. ``azure_code_tight``: 12 ms are two decode steps. ``mooncake_70b``: 25 ms are two decode steps of a
larger model on four GPUs. ``azure_conv_eager``: mixed passes run without a graph, and so never within 28 ms.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.lab.unseen import UNSEEN, draw_unseen
from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.metrics.goodput import SLOS, Slo
from pla_sglang.sim.workload import (
    AgenticKnobs,
    Arrivals,
    Trace,
    chat_trace,
    generated_trace,
    hol_trace,
    length_model,
    load_trace,
)

HOL_PERIOD_S = 10.0
SESSIONS_TIMES = 2.0  # as many requests of sessions as must arrive, so that not all sessions have to start at once
FACTOR_STEP = 1e-4
CHAT_TIMES = 3  # as many requests of ``chat`` as of others: conversations take their time to fill a fleet
DATA = Path(__file__).parent / "data"
MOONCAKE, MOONCAKE_WHOLE = "mooncake_conv_min00_10.csv.gz", "mooncake_conv_1h.csv.gz"
NO_TRACE = Trace("none", np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests with targets, and what it takes to load a fleet with them.

    Attributes:
        low_per_s, high_per_s: bounds of a search for the highest rate, for 8 instances.
        steady_per_s: rate of the GPU-hours figure, which asks for a handful of instances.
        file: in the data folder; empty: generated here.
        whole_file: the recording of which ``file`` is a part; read instead where the folder has it.
        recorded: real arrivals and lengths; False: from a model, also where that is in a file.
        span_times: how many times as long as others its runs must be, as its answers, or their targets, last minutes.
        profile: of the instances, by name or path; None: the default of ``Experiment``.
        agentic: what of recorded sessions is taken.
        trace: empty until ``workload`` has read or made it.
    """

    name: str
    slo: Slo
    low_per_s: float
    high_per_s: float
    steady_per_s: float
    file: str = ""
    recorded: bool = False
    span_times: float = 1.0
    profile: str | None = None
    whole_file: str = ""
    agentic: AgenticKnobs | None = None
    trace: Trace = NO_TRACE

    def is_in(self, folder: Path | None) -> bool:
        """Tells whether a recorded one can be had with this data folder."""
        return self.path_in(folder) is not None

    def path_in(self, folder: Path | None) -> Path | None:
        """Its recording in this data folder."""
        names = [name for name in (self.whole_file, self.file) if name]
        paths = [] if folder is None else [folder / name for name in names]
        return next((path for path in paths if path.is_file()), None)

    def with_trace(self, trace: Trace, requests: int | None) -> Workload:
        """With the first of these requests; None: all of them."""
        return dataclasses.replace(self, trace=trace if requests is None else trace.take(slice(0, requests)))

    def trace_at(self, rate_per_s: float, span_s: float) -> Trace:
        """As many of its requests as arrive in ``span_s`` at this mean rate; repeated where it has fewer.

        At least up to the first that arrives later than the first one: requests at one time have no rate. Of sessions
        with think times see ``arrivals_of_sessions``.
        """
        if self.trace.think_s is not None:
            return arrivals_of_sessions(self.trace, rate_per_s, span_s)
        first_later = int(np.argmax(self.trace.arrival_s > self.trace.arrival_s[0]))
        count = max(1 + first_later, round(rate_per_s * span_s))
        times = math.ceil(count / len(self.trace))
        return (self.trace.repeat(times) if times > 1 else self.trace).head(count).at_rate(rate_per_s)

    def describe(self) -> dict[str, Any]:
        return ({} if self.profile is None else {"profile": Path(self.profile).name.removesuffix(".json")}) | {
            "requests": len(self.trace),
            "recorded": self.recorded,
            "ttft_slo_s": self.slo.ttft_s,
            "tpot_slo_s": self.slo.tpot_s,
            "steady_per_s": self.steady_per_s,
        }


def arrivals_of_sessions(trace: Trace, rate_per_s: float, span_s: float) -> Trace:
    """What arrives in ``span_s`` of sessions that start so often that this is ``rate_per_s`` on average.

    The fleet is empty at first, and sessions last longer than most spans: at its end more requests come a second than
    on average. Arrivals are counted as if answers took as long as in the recording.
    """
    wanted = max(2.0, rate_per_s * span_s)
    at_once = int((trace.arrival_s - trace.start_s() < span_s).sum())  # if all sessions started at the same time
    trace = trace.repeat(max(1, math.ceil(SESSIONS_TIMES * wanted / at_once)))
    start_s = trace.start_s()
    after_s = trace.arrival_s - start_s
    low, high = 1e-6, 1e9  # factors of the sessions' rate
    while high > low * (1 + FACTOR_STEP):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if (start_s / middle + after_s < span_s).sum() >= wanted else (middle, high)
    return trace.scale_rate(high).window(0.0, span_s)


# Targets of Arrow's Table 1; ``burst`` has made-up requests with the burstiness of BurstGPT, ``reason`` is generated
# from measured distributions of clients of a reasoning model.
WORKLOADS = {
    load.name: load
    for load in (
        Workload("azure_code", SLOS["azure_code"], 8.0, 400.0, 26.0, "azure_code_2023.csv.gz", recorded=True),
        Workload("azure_conv", SLOS["azure_conv"], 8.0, 400.0, 55.0, "azure_conv_2023.csv.gz", recorded=True),
        Workload(
            "mooncake", SLOS["mooncake"], 1.0, 100.0, 9.0, MOONCAKE, True, span_times=2.0, whole_file=MOONCAKE_WHOLE
        ),
        Workload("burst", SLOS["burstgpt"], 4.0, 400.0, 30.0, "SYNTHETIC_burstgpt_like_1h.csv.gz"),
        Workload("reason", Slo(2.0, 0.03), 1.0, 100.0, 8.0, "servegen_r1_10h_1rps.csv.gz", span_times=3.0),
        Workload("chat", Slo(0.5, 0.04), 4.0, 800.0, 80.0),
        Workload("hol", Slo(4.0, 0.1), 0.5, 100.0, 4.0),
        Workload("star", Slo(2.0, 0.03), 0.5, 50.0, 3.0, span_times=6.0),
        Workload(
            "agentic",
            Slo(2.0, 0.05),
            0.1,
            20.0,
            1.0,
            "agentic_coding_sessions.jsonl.gz",
            recorded=True,
            span_times=20.0,  # first requests of sessions, which find no prefix, are many in shorter runs
            agentic=AgenticKnobs(window_tokens=120_000, requests_least=5),
        ),
        Workload("azure_code_tight", Slo(1.5, 0.012), 4.0, 400.0, 13.0, "azure_code_2023.csv.gz", recorded=True),
        Workload(
            "mooncake_70b",
            Slo(10.0, 0.025),
            0.2,
            50.0,
            1.0,
            MOONCAKE,
            recorded=True,
            span_times=2.0,
            profile="h200-llama3.1-70b-tp4",
            whole_file=MOONCAKE_WHOLE,
        ),
        Workload(
            "azure_conv_eager",
            Slo(2.0, 0.028),
            2.0,
            200.0,
            8.0,
            "azure_conv_2023.csv.gz",
            recorded=True,
            profile=str(DATA / "h100-llama3.1-70b-fp8-tp2-eager-mixed.json"),
        ),
    )
}


UNSEEN_BOUNDS_PER_S = (0.05, 1_000.0)
UNSEEN_REQUESTS = 4_000
FLEET_WORKLOADS = ("azure_code", "azure_conv", "mooncake", "burst", "reason", "chat", "hol", "star")  # on one profile


def available(folder: Path | None, names: Sequence[str] = tuple(WORKLOADS)) -> list[str]:
    """Those of these workloads that can be had with this data folder, in a fixed order."""
    return [name for name in names if not WORKLOADS[name].file or WORKLOADS[name].is_in(folder)]


@functools.lru_cache(maxsize=16)
def workload(
    name: str,
    folder: Path | None,
    requests: int | None = None,
    seed: int = 1,
    agentic: AgenticKnobs | None = None,
) -> Workload:
    """A workload by name; ``agentic``: what of its sessions is taken, None: ``Workload.agentic``.

    Raises ConfigError for an unknown one, or one whose file is not there."""
    if name.startswith(UNSEEN) and name.removeprefix(UNSEEN).isdecimal():
        unseen = draw_unseen(int(name.removeprefix(UNSEEN)))
        load = Workload(name, unseen.slo, *UNSEEN_BOUNDS_PER_S, 1.0, profile=unseen.profile)
        return load.with_trace(unseen.trace(seed, requests or UNSEEN_REQUESTS), None)
    if name not in WORKLOADS:
        raise ConfigError(f"workload {name!r} is not known; allowed: {', '.join(WORKLOADS)}, {UNSEEN}SEED")
    load = WORKLOADS[name]
    if (path := load.path_in(folder)) is not None:
        return load.with_trace(load_trace(path, agentic=agentic or load.agentic), requests)
    if load.file:
        raise ConfigError(f"workload {name} needs {load.file}; give a data folder that holds it")
    times = CHAT_TIMES if name == "chat" else 1
    make = {"chat": _make_chat, "hol": _make_hol, "star": _make_star}[name]
    return load.with_trace(make(times * (requests or 10_000), random.Random(seed)), requests and times * requests)


def _make_chat(requests: int, rng: random.Random) -> Trace:
    """Conversations with LMSYS-like prompts; rates count requests, so that sessions arrive 5.45 times as seldom."""
    return chat_trace(max(1, requests // 3), Arrivals(2.0, rng, think_s=20.0))


def _make_hol(requests: int, rng: random.Random) -> Trace:
    """The burst of SGLang issue #22831, 18 prompts of 24,000 and 11 of 2,000 tokens in random order, over and over."""
    burst = hol_trace()
    count = max(1, min(requests, 2_000) // len(burst))
    orders = np.concatenate([rng.sample(range(len(burst)), len(burst)) for _ in range(count)])
    arrival_s = np.concatenate([burst.arrival_s + HOL_PERIOD_S * place for place in range(count)])
    return Trace("hol", arrival_s, burst.input_tokens[orders], burst.output_tokens[orders])


def _make_star(requests: int, rng: random.Random) -> Trace:
    """Short prompts and long answers, a sixth of them cut at 32K tokens: STAR's Table 2, ShareGPT."""
    lengths = (length_model(f"star_sharegpt_{part}") for part in ("input", "output"))
    return generated_trace(min(requests, 1_000), Arrivals(2.0, rng), *lengths, name="star")
