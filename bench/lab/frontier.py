"""Short TTFT against long TTFT, stock, ours and a newer SGLang, with linear costs.

The workload of a published comparison of SGLang's prefill policies on issue 22831, its cost model and its sizes:
profile ``linear`` (20 ms a pass and 1 ms a new token), prompts of 2,400 and 200 tokens +-10 %, one output token,
Poisson arrivals for a minute at 90 % load, a quarter of the work short; arrivals are redrawn until the load is within
3 %. Figures are pooled over the seeds. Arms: ``stock``; ``chunk820``, ours with whole chunks; ``adaptive``, ours by
default; ``fcfs820``, as ``chunk820`` with the longs in order of arrival; SGLang's own shortest-prefill-first with
chunks of 820 (``spf820``) and of 256 tokens (``spf256``), its hrrn likewise. An SGLang without them, such as 0.5.17,
needs ``--peer-python`` of a newer one for those. ``bounds`` is what the best order without a host reaches on the same
arrivals: shortest remaining prefill first.
The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import engines, report
from bench.harness.arms import HRRN, SPF, Arm
from bench.harness.bench import Result
from bench.harness.engines import Setup
from bench.harness.figures import arm_colours, panels
from bench.harness.latency import ecdf, percentile
from bench.harness.replay import Planned
from bench.harness.report import emit, emulated_conditions, environment, markdown, print_lines, scale_text, show, yes_no
from bench.harness.steps import Row
from bench.lab.fluid_srpt import fluid_srpt
from bench.lab.world import World
from pla_sglang.policy.baselines.dispatch import RoundRobin
from pla_sglang.profiles import load_profile
from pla_sglang.sim import chain
from pla_sglang.sim.core.config import InstanceSpec
from pla_sglang.sim.core.engine_knobs import EngineKnobs
from pla_sglang.sim.workload import Trace

PROFILE = load_profile("linear")
CHUNK_TOKENS = 820
BOUND_CHUNKS_TOKENS = (820, 256)
LONG_TOKENS, SHORT_TOKENS = 2400, 200
SPREAD = 0.1
SHORT_SHARE = 0.25
LOAD_TOLERANCE = 0.03
OURS = ("--prefill-disagg", "temporal", "--pla-boundary", "256")
WHOLE_CHUNKS = (*OURS, "--pla-long-chunk-min-tokens", str(CHUNK_TOKENS))
# Longs in order of arrival cannot starve each other, so the age bound need not watch them this closely.
FCFS_LONGS = ("--pla-long-order", "fcfs", "--pla-long-max-age-ms", "30000")
CHUNK_256 = ("--chunked-prefill-size", "256")
ARMS = {
    arm.name: arm
    for arm in (
        Arm("stock"),
        Arm("chunk820", WHOLE_CHUNKS),
        Arm("adaptive", OURS),
        Arm("fcfs820", (*WHOLE_CHUNKS, *FCFS_LONGS)),
        Arm("spf820", SPF),  # mixed chunks would change nothing: with one output token nobody decodes
        Arm("spf256", (*SPF, *CHUNK_256)),
        Arm("hrrn820", HRRN),
        Arm("hrrn256", (*HRRN, *CHUNK_256)),
    )
}
KEYS = ("short_mean_s", "short_p99_s", "long_mean_s", "long_max_vs_fcfs")
# Upper bounds of the acceptance, by arm; every arm of ours may reach 1.3 times FCFS's longest wait of a long.
TARGETS = {
    "chunk820": dict(zip(KEYS, (0.60, 1.45, 7.7, 1.3), strict=True)),
    "fcfs820": dict(zip(KEYS, (0.60, 1.45, 7.7, 1.3), strict=True)),
    "adaptive": dict(zip(KEYS, (0.38, 0.70, 8.7, 1.3), strict=True)),
}
Arrival = tuple[float, int]  # seconds, prompt tokens
ByArm = Mapping[str, Mapping[str, Any]]  # figures of an arm or of a bound


def work_s(tokens: int) -> float:
    """Device time of a prompt alone, in chunks."""
    whole, rest = divmod(tokens, CHUNK_TOKENS)
    return sum(PROFILE.prefill_s(size, size * size) for size in [CHUNK_TOKENS] * whole + [rest] * bool(rest))


def draw_arrivals(load: float, duration_s: float, seed: int) -> list[Arrival]:
    """In order of time, with the wanted load within 3 %."""
    rng = random.Random(seed)
    rates = {
        SHORT_TOKENS: load * SHORT_SHARE / work_s(SHORT_TOKENS),
        LONG_TOKENS: load * (1 - SHORT_SHARE) / work_s(LONG_TOKENS),
    }
    while True:
        drawn = []
        for tokens, rate in rates.items():
            at_s = rng.expovariate(rate)
            while at_s < duration_s:
                drawn.append((at_s, round(tokens * rng.uniform(1 - SPREAD, 1 + SPREAD))))
                at_s += rng.expovariate(rate)
        offered = sum(work_s(tokens) for _, tokens in drawn) / duration_s
        if abs(offered / load - 1) <= LOAD_TOLERANCE:
            return sorted(drawn)


def plan_requests(key: Mapping[str, Any]) -> list[Planned]:
    rng = random.Random(f"prompts-{key['seed']}")
    return [
        Planned(index, at_s * key["time_scale"], chain.prompt_of(tokens, 1, rng), 1)
        for index, (at_s, tokens) in enumerate(draw_arrivals(key["load"], key["duration_s"], key["seed"]))
    ]


def split_ttfts(requests: Iterable[Sequence[float]]) -> tuple[list[float], list[float]]:
    """TTFTs of shorts and of longs, from prompt tokens, TTFT and perhaps more of each request."""
    shorts: list[float] = []
    longs: list[float] = []
    for tokens, ttft_s, *_ in requests:
        (shorts if tokens < (SHORT_TOKENS + LONG_TOKENS) / 2 else longs).append(ttft_s)
    return shorts, longs


def summarise(shorts: Sequence[float], longs: Sequence[float]) -> dict[str, float]:
    """The figures of the acceptance, from TTFTs in seconds."""
    return {
        "short_mean_s": statistics.fmean(shorts),
        "short_p99_s": percentile(shorts, 99),
        "long_mean_s": statistics.fmean(longs),
        "long_max_s": max(longs),
    }


def figures(rows: Mapping[str, Sequence[Row]]) -> dict[str, dict[str, Any]]:
    """By arm, pooled over the seeds; with the longest wait of a long over stock's (FCFS) where both ran the same."""
    by_arm: dict[str, dict[str, Any]] = {}
    for arm, of_arm in rows.items():
        shorts, longs = split_ttfts(request for row in of_arm for request in row["requests"])
        counts = {"requests": len(shorts) + len(longs), "seeds": len(of_arm)}
        by_arm[arm] = summarise(shorts, longs) | counts | engines.quality(of_arm)
    for of in by_arm.values():
        if "stock" in by_arm and by_arm["stock"]["seeds"] == of["seeds"]:
            of["long_max_vs_fcfs"] = of["long_max_s"] / by_arm["stock"]["long_max_s"]
    return by_arm


def find_missed(by_arm: ByArm) -> list[str]:
    """What is above its target, in words."""
    return [
        f"{arm} {key} {by_arm[arm][key]:.3f} is above {limit:g}"
        for arm, limits in TARGETS.items()
        for key, limit in limits.items()
        if arm in by_arm and by_arm[arm].get(key, 0.0) > limit
    ]


def best_ttfts_s(arrivals: Sequence[Arrival], chunk_tokens: int | None) -> list[float]:
    """Of each arrival (sorted by time) in the order of the shortest remaining prefill, without a host.

    At the pass boundary, with passes of at most ``chunk_tokens``, it may park a chunk, but not interrupt a pass. The
    fluid one (None) may interrupt anything: no order has a lower mean (Schrage 1968). Both starve longs, so the worst
    long is no bound for anything.
    """
    if chunk_tokens is None:
        return fluid_srpt([(at_s, PROFILE.prefill_s(tokens, tokens * tokens)) for at_s, tokens in arrivals])
    times, tokens = np.array(arrivals).T
    trace = Trace("ideal", times, tokens.astype(np.int64), np.ones(len(times), dtype=np.int64))
    knobs = EngineKnobs(chunk_tokens=chunk_tokens)
    world = World([InstanceSpec(PROFILE)], RoundRobin(), engine="pass-srpt", knobs=knobs)
    return [float(ttft_s) for ttft_s in world.run(trace).served.ttft_s()]


def bounds(load: float, duration_s: float, seeds: int) -> dict[str, dict[str, float]]:
    """By name, pooled over the seeds: SRPT at the pass boundary with each chunk, and fluid SRPT."""
    drawn = [draw_arrivals(load, duration_s, seed) for seed in range(1, seeds + 1)]
    tokens = [tokens for arrivals in drawn for _, tokens in arrivals]
    by_name = {}
    for chunk_tokens in (*BOUND_CHUNKS_TOKENS, None):
        best_s = itertools.chain.from_iterable(best_ttfts_s(arrivals, chunk_tokens) for arrivals in drawn)
        name = f"srpt{chunk_tokens}" if chunk_tokens else "fluid"
        by_name[name] = summarise(*split_ttfts(zip(tokens, best_s, strict=True)))
    return by_name


def table(by_arm: ByArm, limits: ByArm) -> report.Cells:
    """A row an arm, then a row a bound; seconds of device time."""

    def cells(of: Mapping[str, Any]) -> list[str]:
        return [*(f"{of[name]:.2f}" for name in KEYS[:3]), f"{of['long_max_s']:.1f}"]

    rows = []
    for arm, of in by_arm.items():
        ratio = f"{of['long_max_vs_fcfs']:.2f}x" if of.get("long_max_vs_fcfs") is not None else "-"
        quality = [f"{of['host_overhead_share']:.1%}", yes_no(of["valid"])]
        rows.append([f"`{arm}`", of["sglang"], *cells(of), ratio, *quality])
    rows += [[f"`{name}`", "bound", *cells(of), "-", "-", "-"] for name, of in limits.items()]
    header = ["arm", "SGLang", "short mean, s", "short p99", "long mean", "long max"]
    return [*header, "long max over that of FCFS, below 1: better", "host in the way", "valid"], rows


def plot(by_arm: ByArm, rows: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Left: the frontier, mean long against mean short TTFT with p99 as a bar. Right: distribution of the shorts."""
    colours = arm_colours(list(by_arm))
    with panels(path, 2, size=(10.5, 4.4)) as (left, right):
        for arm, of_arm in by_arm.items():
            mean_s, p99_s, long_s = of_arm["short_mean_s"], of_arm["short_p99_s"], of_arm["long_mean_s"]
            left.plot([mean_s, p99_s], [long_s, long_s], "-", color=colours[arm], alpha=0.5)
            left.plot(mean_s, long_s, "o", color=colours[arm], label=arm)
            left.plot(p99_s, long_s, "|", color=colours[arm], ms=12)
            shorts, _ = split_ttfts(request for row in rows[arm] for request in row["requests"])
            right.step(*ecdf(shorts), where="post", color=colours[arm])
        for arm, limits in TARGETS.items():
            left.plot(limits["short_mean_s"], limits["long_mean_s"], "x", color=colours.get(arm, "#222222"))
        left.set(xscale="log", xlabel="short TTFT, s: mean (dot) to p99 (bar); x: target", ylabel="long TTFT, mean, s")
        right.set(xscale="log", xlabel="short TTFT, s", ylabel="share of shorts", ylim=(0, 1.02))
        for panel in (left, right):
            panel.grid(alpha=0.3)


def page(result: Result) -> str:
    misses = "; ".join(result["targets_missed"])
    verdict = f"Targets missed: {misses}." if misses else "All targets are met."
    seeds = min(of_arm["seeds"] for of_arm in result["arms"].values())
    conditions = emulated_conditions(result, f"load {result['load']:.0%}, seeds measured: {seeds}", scale_text(result))
    return f"{markdown(*table(result['arms'], result.get('bounds', {})))}\n\n{verdict}\n\n{conditions}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engines.add_arguments(parser, ARMS)
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--duration-s", type=float, default=60.0, help="of arrivals, in device time, per seed")
    parser.add_argument("--seeds", type=int, default=3)


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError, ServerError, NoStepError."""
    chosen = engines.choose(options.arms, ARMS, options.peer_python)
    # As published: with overlap the next chunk is launched while one runs, and a short waits for both.
    flags = ("--chunked-prefill-size", str(CHUNK_TOKENS), "--disable-overlap-schedule")
    setup = Setup("linear", options.time_scale, flags, options.out, "frontier", options.peer_python)
    settings = {"load": options.load, "duration_s": options.duration_s, "time_scale": options.time_scale}
    keys = [{"seed": seed} | settings for seed in range(1, options.seeds + 1)]
    rows = engines.collect(chosen, keys, plan_requests, setup=setup, budget_s=options.budget_s)
    by_arm = figures(rows)
    measured = min(of["seeds"] for of in by_arm.values())
    limits, misses = bounds(options.load, options.duration_s, measured), find_missed(by_arm)
    show(f"TTFT in s of device time, load {options.load:.0%}, seeds measured: {measured}", *table(by_arm, limits))
    plot(by_arm, rows, options.out / "frontier.png")
    print_lines("MISSED", misses)
    valid = all(of["valid"] for of in by_arm.values())
    result = {
        "bench": "frontier",
        "load": options.load,
        "seeds": measured,
        "seeds_asked": options.seeds,
        "time_scale": options.time_scale,
        **{key: {arm: of.get(key) for arm, of in by_arm.items()} for key in KEYS},
        "targets_missed": misses,
        "valid": valid,
        "arms": by_arm,
        "bounds": limits,
        "environment": environment(),
    }
    emit(result, "frontier", options.out)
    return 0 if valid else 1


PAGES = {"frontier": page}
