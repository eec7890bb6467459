"""Arrow's systems (section 7.1) and the highest rate each of them serves at 90 % attainment.

Eight H800, here H100, with Llama-3.1-8B. Systems of the paper: Arrow on eight instances of one GPU; vLLM on one
instance of eight GPUs with chunked prefill, decodes first; vLLM's P/D split with four GPUs each. "DP" is ours: eight
one-GPU instances that do both phases, the least loaded one first, which is what an operator would run today.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.papers.context import Context, silent
from bench.papers.finding import Point
from bench.papers.traces import trace_named
from pla_sglang.metrics.goodput import SLOS, Capacity
from pla_sglang.sim.experiment import Experiment, Outcome, capacity_of, run_experiment
from pla_sglang.workload import Trace

PROFILES = Path(__file__).parent / "profiles"
TARGET = 0.9  # section 7.1
VLLM_CHUNK_TOKENS = 2048  # default of vLLM 0.7.3 with chunked prefill
# Where a search starts: all systems serve the first rate, none the second. A run at a low rate is long virtual time.
BOUNDS_PER_S = {"mooncake": (0.5, 60.0)}
MOST_BOUNDS_PER_S = (4.0, 250.0)


def systems(trace: str, instances: int = 8) -> dict[str, Experiment]:
    """By name. Targets are those of Table 1."""
    slo = SLOS[trace]
    return {
        "Arrow": Experiment("arrow", slo, instances=instances),
        "vLLM TP8": Experiment(
            "round-robin",
            slo,
            profile=str(PROFILES / "h100-llama3.1-8b-tp8.json"),
            instances=1,
            mixed=True,
            chunk_tokens=VLLM_CHUNK_TOKENS,
        ),
        "vLLM P/D TP4+TP4": Experiment(
            "static-pd", slo, profile=str(PROFILES / "h100-llama3.1-8b-tp4.json"), instances=2, prefills=1
        ),
        "DP, least tokens": Experiment("least-tokens", slo, instances=instances),
        "Minimal Load": Experiment("minimal-load", slo, instances=instances),
        "Round Robin": Experiment("static-pd-round-robin", slo, instances=instances),
    }


@dataclasses.dataclass(frozen=True)
class Search:
    """The capacity of one system on one trace; what a worker process needs to find it."""

    trace: str
    experiment: Experiment
    context: Context


@dataclasses.dataclass(frozen=True)
class Replay:
    """One run, at the rate of its experiment."""

    trace: str
    experiment: Experiment
    context: Context


def workload(context: Context, name: str) -> Trace:
    """The trace; whole but in tests, as a part of it at a high rate would be over in seconds."""
    trace = trace_named(context, name)
    return trace.head(100) if context.size == 0 else trace


def search(job: Search) -> Capacity:
    """By bisection; the answer is within 5 % (full: 2 %)."""
    tolerance = job.context.pick(0.9, 0.05, 0.02)
    low_per_s, high_per_s = BOUNDS_PER_S.get(job.trace, MOST_BOUNDS_PER_S)
    bounds = {"low_per_s": low_per_s, "high_per_s": high_per_s, "target": TARGET, "tolerance": tolerance}
    return capacity_of(job.experiment, workload(job.context, job.trace), **bounds)


def replay(job: Replay) -> Outcome:
    return run_experiment(job.experiment, workload(job.context, job.trace))


_FOUND: dict[Search, Capacity] = {}  # Figures 7 and 8 share searches


def capacities(context: Context, wanted: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Capacity]:
    """By (trace, system)."""
    plain = dataclasses.replace(context, progress=silent)  # what travels to workers, and keys the memory
    jobs = {key: Search(key[0], systems(key[0])[key[1]], plain) for key in wanted}
    new = [job for job in jobs.values() if job not in _FOUND]
    _FOUND.update(zip(new, context.map(search, new), strict=True))
    return {key: _FOUND[job] for key, job in jobs.items()}


def curve(found: Capacity) -> tuple[list[float], list[float]]:
    """Rates and attainments that the search has seen, by rate."""
    tried = sorted(found.tried)
    return [rate for rate, _ in tried], [share for _, share in tried]


def points_of(found: Mapping[tuple[str, str], Capacity]) -> list[Point]:
    """One record for every run of the searches."""
    return [
        {"trace": trace, "system": system, "rate_per_s": rate, "attainment": share}
        for (trace, system), capacity in found.items()
        for rate, share in zip(*curve(capacity), strict=True)
    ]


def times(found: Mapping[tuple[str, str], Capacity], trace: str, system: str, other: str) -> float | None:
    """How many times as high the rate of ``system`` is as that of ``other``; None where one has none."""
    one, two = found[trace, system].held_per_s, found[trace, other].held_per_s
    return None if one is None or two is None else one / two
