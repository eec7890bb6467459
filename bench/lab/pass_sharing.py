"""Who shares a prefill pass: stock, the classes apart as in PLA-Serve, by seconds, where passes cost more than tokens.

In the simulator, one prefill instance with SGLang's overlap schedule: prompts of one answer token in a closed loop of
clients and as Poisson arrivals, of similar lengths and of lengths that differ a hundred times, on the step times of
``--profile`` with ``--pass-ms`` besides; one H100 took 3 to 7 ms. The arms are SGLang's first come
first served with chunked prefill; temporal scheduling with ``--pla-mixing never``; and with its default.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.bench import Result, measuring
from bench.harness.report import Cells, emit, environment, markdown, progress_bar, show
from bench.lab.world import MakeEngine, World
from pla_sglang.common.checks import require
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.temporal_knobs import EngineLimits, temporal_knobs
from pla_sglang.policy.baselines.dispatch import RoundRobin
from pla_sglang.policy.interface.fleet import Role
from pla_sglang.policy.pla.temporal import TemporalPolicy
from pla_sglang.profiles import StepProfile, load_profile
from pla_sglang.sim.core.config import InstanceSpec
from pla_sglang.sim.core.engine_knobs import EngineKnobs
from pla_sglang.sim.core.experiment import step_model
from pla_sglang.sim.core.host import HostKnobs
from pla_sglang.sim.workload import Trace

Draw = Callable[[random.Random], int]
LENGTHS: Mapping[str, Draw] = {
    "chat": lambda rng: rng.randint(150, 380),  # a message and the answer before it, on a prefill instance
    "medium": lambda rng: rng.randint(300, 900),
    "mixed": lambda rng: min(16_000, max(8, round(rng.lognormvariate(5.5, 1.3)))),
    "short and long": lambda rng: rng.randint(20, 300) if rng.random() < 0.9 else rng.randint(4000, 12_000),
    "code": lambda rng: min(30_000, max(50, round(rng.lognormvariate(7.5, 1.0)))),
}
CLIENTS = (4, 16, 64)
LOADS = (0.6, 0.9)  # of what the tokens alone ask for at the time of a full pass
STOCK, APART, SECONDS = ARMS = ("stock", "apart", "seconds")
FIGURES = {
    "rps": "requests/s",
    "mean_s": "mean",
    "p90_s": "P90",
    "p99_s": "P99",
    "small_p90_s": "P90 of the smaller half",
}
ON_PAGE = ("rps", "mean_s", "p99_s", "small_p90_s")


@dataclasses.dataclass(frozen=True)
class Load:
    """Prompts of ``lengths``: in a closed loop of ``clients``, or at ``share`` of the device's capacity."""

    lengths: str
    clients: int | None = None
    share: float | None = None

    @property
    def name(self) -> str:
        return f"{self.lengths}, {f'{self.clients} clients' if self.clients else f'load {self.share:g}'}"

    def make_trace(self, requests: int, seed: int, token_s: float) -> Trace:
        """``token_s``: seconds of a token in a full pass."""
        rng = random.Random(f"{seed}/{self.name}")
        tokens = np.array([LENGTHS[self.lengths](rng) for _ in range(requests)], dtype=np.int64)
        arrivals_s = np.zeros(requests)
        if self.share is not None:
            rate_per_s = self.share / (token_s * float(tokens.mean()))
            arrivals_s = np.cumsum([rng.expovariate(rate_per_s) for _ in range(requests)])
        return Trace(self.name, arrivals_s, tokens, np.ones(requests, dtype=np.int64))


ALL_LOADS = [
    Load(lengths, clients, share)
    for lengths in LENGTHS
    for clients, share in [*((clients, None) for clients in CLIENTS), *((None, share) for share in LOADS)]
]


def make_engine(arm: str) -> str | MakeEngine:
    if arm == STOCK:
        return "fcfs"

    def make(profile: StepProfile, knobs: EngineKnobs) -> TemporalPolicy:
        config = PlaConfig(prefill_disagg="temporal", mixing="never" if arm == APART else "auto")
        limits = EngineLimits(knobs.chunk_tokens, knobs.chunk_tokens)
        return TemporalPolicy(temporal_knobs(config, limits), step_model(profile))

    return make


def measure(load: Load, arm: str, options: argparse.Namespace, seed: int) -> dict[str, float]:
    """``small_p90_s`` is of the smaller half of the prompts."""
    profile = dataclasses.replace(load_profile(options.profile), pass_s=options.pass_ms / 1e3)
    full = options.chunk_tokens
    trace = load.make_trace(options.requests, seed, (profile.prefill_s(full, full * full) - profile.pass_s) / full)
    config: dict[str, Any] = {"host": HostKnobs(overlap=True)}
    if load.clients is not None:
        config["users"] = {0: load.clients}
    world = World(
        [InstanceSpec(profile, role=Role.PREFILL)],
        RoundRobin(),
        engine=make_engine(arm),
        knobs=EngineKnobs(chunk_tokens=options.chunk_tokens),
        config=config,
    )
    served = world.run(trace).served
    ttfts_s = served.ttft_s()
    small = ttfts_s[trace.input_tokens <= np.median(trace.input_tokens)]
    return {
        "rps": len(ttfts_s) / float(served.finish_s.max() - served.arrival_s.min()),
        "mean_s": float(ttfts_s.mean()),
        "p90_s": float(np.percentile(ttfts_s, 90)),
        "p99_s": float(np.percentile(ttfts_s, 99)),
        "small_p90_s": float(np.percentile(small, 90)),
    }


def ratios(by_arm: Mapping[str, Sequence[Mapping[str, float]]], arm: str) -> dict[str, float]:
    """Of the arm to stock on the same arrivals: the median over the seeds."""
    pairs = list(zip(by_arm[arm], by_arm[STOCK], strict=True))
    return {name: statistics.median(ours[name] / stock[name] for ours, stock in pairs) for name in FIGURES}


def table(loads: Mapping[str, Any], figures: Sequence[str] = tuple(FIGURES)) -> Cells:
    header = ["load", "stock: requests/s", "mean, s", "P99, s"]
    for arm in (APART, SECONDS):
        first, *others = (FIGURES[key] for key in figures)
        header += [f"{arm}: {first}", *others]
    rows = []
    for name, of in loads.items():
        stock = of["stock"]
        cells = [name, f"{stock['rps']:.1f}", f"{stock['mean_s']:.3f}", f"{stock['p99_s']:.2f}"]
        for arm in (APART, SECONDS):
            cells += [f"{of[arm][key]:.2f}" for key in figures]
        rows.append(cells)
    return header, rows


def page(result: Result) -> str:
    text = (
        f"`{result['profile']}`, {result['pass_ms']:g} ms a pass besides, chunk {result['chunk_tokens']}, "
        f"{result['requests']} requests, {result['seeds']} seeds (medians), "
        f"commit {result['environment']['plugin_commit']}. "
        f"`apart` and `seconds` are times stock's; above 1 is better for requests/s, below 1 for times."
    )
    return f"{markdown(*table(result['loads'], ON_PAGE))}\n\n{text}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", default="h100-qwen2.5-7b-tp1", help="step times")
    parser.add_argument("--pass-ms", type=float, default=5.0, help="what a pass costs beside its tokens")
    parser.add_argument("--chunk-tokens", type=int, default=2048)
    parser.add_argument("--requests", type=int, default=1200, help="of each run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for pass_sharing.json")


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError."""
    require("--pass-ms", options.pass_ms, 0)
    for flag, least in (("chunk_tokens", 1), ("requests", 100), ("seeds", 1)):
        require(f"--{flag.replace('_', '-')}", getattr(options, flag), least)
    loads: dict[str, Any] = {}
    with measuring(), progress_bar("loads", len(ALL_LOADS)) as advance:
        for load in ALL_LOADS:
            by_arm = {arm: [measure(load, arm, options, seed) for seed in range(1, options.seeds + 1)] for arm in ARMS}
            stock = {name: statistics.median(row[name] for row in by_arm[STOCK]) for name in FIGURES}
            loads[load.name] = {STOCK: stock, APART: ratios(by_arm, APART), SECONDS: ratios(by_arm, SECONDS)}
            advance()
    show("TTFT and requests/s; of ours in times of stock's", *table(loads))
    result = {
        "bench": "pass_sharing",
        "profile": options.profile,
        "pass_ms": options.pass_ms,
        "chunk_tokens": options.chunk_tokens,
        "requests": options.requests,
        "seeds": options.seeds,
        "least_rps_ratio": {arm: min(of[arm]["rps"] for of in loads.values()) for arm in (APART, SECONDS)},
        "loads": loads,
        "environment": environment(),
    }
    emit(result, "pass_sharing", options.out)
    return 0


PAGES = {"pass_sharing": page}
