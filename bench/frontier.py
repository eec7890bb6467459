"""``python -m bench.frontier``: short TTFT against long TTFT, stock, ours and a newer SGLang, with linear costs.

The workload of a published comparison of SGLang's prefill policies on issue 22831, its cost model and its sizes:
profile ``linear`` (20 ms a pass and 1 ms a new token), prompts of 2,400 and 200 tokens +-10 %, one output token,
Poisson arrivals for a minute at 90 % load, a quarter of the work short; arrivals are redrawn until the load is within
3 %. Figures are pooled over the seeds. Arms: ``stock``; ``chunk820``, ours with whole chunks; ``adaptive``, ours by
default; ``fcfs820``, as ``chunk820`` with the longs in order of arrival; with ``--peer-python`` of an SGLang 0.5.23 its
own shortest-prefill-first with chunks of 820 (``spf820``) and of 256 tokens (``spf256``), the same emulated device
below. ``bounds`` is what the best order without a host reaches on the same arrivals (:mod:`bench.replaying.ideal`).
The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.lib.picture import panels
from bench.lib.plot import arm_colours
from bench.lib.report import emit, environment, stdout
from bench.lib.tables import show
from bench.replaying import engines, ideal
from bench.replaying.engines import Arm, Setup
from bench.replaying.plan import Planned
from bench.replaying.steps import Row
from bench.replaying.stopping import exit_status
from pla_sglang import chain
from pla_sglang.metrics.latency import ecdf, percentile
from pla_sglang.profiles import load_profile

CHUNK_TOKENS = 820
LONG_TOKENS, SHORT_TOKENS = 2400, 200
BOUND_CHUNKS_TOKENS = (820, 256)
SPREAD = 0.1
SHORT_SHARE = 0.25
LOAD_TOLERANCE = 0.03
OURS = ("--prefill-disagg", "temporal", "--pla-boundary", "256")
# Longs in order of arrival cannot starve each other, so the age bound need not watch them this closely.
FCFS_LONGS = ("--pla-long-order", "fcfs", "--pla-long-max-age-ms", "30000")
SPF = ("--schedule-policy", "shortest-prefill-first")
ARMS = {
    arm.name: arm
    for arm in (
        Arm("stock", ()),
        Arm("chunk820", (*OURS, "--pla-long-chunk-min-tokens", str(CHUNK_TOKENS))),
        Arm("adaptive", OURS),
        Arm("fcfs820", (*OURS, "--pla-long-chunk-min-tokens", str(CHUNK_TOKENS), *FCFS_LONGS)),
        Arm("spf820", SPF, peer=True),
        Arm("spf256", (*SPF, "--chunked-prefill-size", "256"), peer=True),
    )
}
KEYS = ("short_mean_s", "short_p99_s", "long_mean_s", "long_max_vs_fcfs")
# Upper bounds of the acceptance, by arm; every arm of ours may reach 1.3 times FCFS's longest wait of a long.
TARGETS = {
    "chunk820": {"short_mean_s": 0.60, "short_p99_s": 1.45, "long_mean_s": 7.7, "long_max_vs_fcfs": 1.3},
    "fcfs820": {"short_mean_s": 0.60, "short_p99_s": 1.45, "long_mean_s": 7.7, "long_max_vs_fcfs": 1.3},
    "adaptive": {"short_mean_s": 0.38, "short_p99_s": 0.70, "long_mean_s": 8.7, "long_max_vs_fcfs": 1.3},
}


def work_s(tokens: int) -> float:
    """Device time of a prompt alone, in chunks."""
    profile = load_profile("linear")
    whole, rest = divmod(tokens, CHUNK_TOKENS)
    sizes = [CHUNK_TOKENS] * whole + ([rest] if rest else [])
    return sum(profile.prefill_s(size, size * size) for size in sizes)


def arrivals(load: float, duration_s: float, seed: int) -> list[tuple[float, int]]:
    """(time, tokens) in order of time, with the wanted load within 3 %."""
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


def planned(load: float, duration_s: float, seed: int, time_scale: float) -> list[Planned]:
    rng = random.Random(f"prompts-{seed}")
    return [
        Planned(index, at_s * time_scale, chain.prompt_of(tokens, 1, rng), 1)
        for index, (at_s, tokens) in enumerate(arrivals(load, duration_s, seed))
    ]


def is_short(tokens: int) -> bool:
    return tokens < (SHORT_TOKENS + LONG_TOKENS) / 2


def ttft_s(rows: Sequence[Row], *, short: bool) -> list[float]:
    """Of one class, over all seeds, in device time."""
    return [first_s for row in rows for tokens, first_s, _ in row["requests"] if is_short(tokens) is short]


def summary(shorts: Sequence[float], longs: Sequence[float]) -> dict[str, float]:
    """The figures of the acceptance, from TTFTs in seconds."""
    return {
        "short_mean_s": statistics.fmean(shorts),
        "short_p99_s": percentile(shorts, 99),
        "long_mean_s": statistics.fmean(longs),
        "long_max_s": max(longs),
    }


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Of one arm, pooled over the seeds."""
    shorts, longs = ttft_s(rows, short=True), ttft_s(rows, short=False)
    counts = {"requests": len(shorts) + len(longs), "seeds": len(rows)}
    return summary(shorts, longs) | counts | engines.quality(rows)


def bounds(load: float, duration_s: float, seeds: int) -> dict[str, dict[str, float]]:
    """By name, pooled over the seeds: SRPT at the pass boundary with each chunk, and fluid SRPT."""
    profile = load_profile("linear")
    ways: dict[str, Callable[[list[tuple[float, int]]], list[float]]] = {
        f"srpt{chunk}": partial(ideal.at_pass_boundary_s, profile=profile, chunk_tokens=chunk)
        for chunk in BOUND_CHUNKS_TOKENS
    }
    ways["fluid"] = partial(ideal.fluid_s, profile=profile)
    drawn = [arrivals(load, duration_s, seed) for seed in range(1, seeds + 1)]
    found = {}
    for name, way in ways.items():
        pairs = [(tokens, took_s) for some in drawn for (_, tokens), took_s in zip(some, way(some), strict=True)]
        shorts, longs = ([took_s for tokens, took_s in pairs if is_short(tokens) is short] for short in (True, False))
        found[name] = summary(shorts, longs)
    return found


def against_fcfs(by_arm: dict[str, dict[str, Any]], rows: Mapping[str, Sequence[Row]]) -> None:
    """Adds each arm's longest wait of a long over stock's (FCFS), where both ran the same seeds."""
    for arm, own in by_arm.items():
        if "stock" in rows and len(rows["stock"]) == len(rows[arm]):
            own["long_max_vs_fcfs"] = own["long_max_s"] / by_arm["stock"]["long_max_s"]


def missed(by_arm: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is above its target, in words."""
    return [
        f"{arm} {key} {by_arm[arm][key]:.3f} is above {limit:g}"
        for arm, limits in TARGETS.items()
        for key, limit in limits.items()
        if arm in by_arm and by_arm[arm].get(key, 0.0) > limit
    ]


def print_table(
    by_arm: Mapping[str, Mapping[str, Any]], limits: Mapping[str, Mapping[str, float]], options: argparse.Namespace
) -> None:
    seeds = min(row["seeds"] for row in by_arm.values())
    keys = ("short_mean_s", "short_p99_s", "long_mean_s", "long_max_s", "long_max_vs_fcfs", "host_overhead_share")
    rows = [
        [arm, *(f"{row[key]:.3f}" if key in row else "-" for key in keys), row.get("sglang", "bound"), row.get("valid")]
        for arm, row in [*by_arm.items(), *limits.items()]
    ]
    title = f"TTFT in s of device time, load {options.load:.0%}, seeds measured: {seeds}"
    show(title, ("arm", *keys, "sglang", "valid"), rows)


def plot(by_arm: Mapping[str, Mapping[str, Any]], rows: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Left: the frontier, mean long against mean short TTFT with p99 as a bar. Right: distribution of the shorts."""
    colours = arm_colours(list(by_arm))
    with panels(path, 2, size=(10.5, 4.4)) as (left, right):
        for arm, own in by_arm.items():
            mean_s, p99_s, long_s = own["short_mean_s"], own["short_p99_s"], own["long_mean_s"]
            left.plot([mean_s, p99_s], [long_s, long_s], "-", color=colours[arm], alpha=0.5)
            left.plot(mean_s, long_s, "o", color=colours[arm], label=arm)
            left.plot(p99_s, long_s, "|", color=colours[arm], ms=12)
            values, shares = ecdf(ttft_s(rows[arm], short=True))
            right.step(values, shares, where="post", color=colours[arm])
        for arm, limits in TARGETS.items():
            left.plot(limits["short_mean_s"], limits["long_mean_s"], "x", color=colours.get(arm, "#222222"))
        left.set(xscale="log", xlabel="short TTFT, s: mean (dot) to p99 (bar); x: target", ylabel="long TTFT, mean, s")
        right.set(xscale="log", xlabel="short TTFT, s", ylabel="share of shorts", ylim=(0, 1.02))
        for panel in (left, right):
            panel.grid(alpha=0.3)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.frontier", description=(__doc__ or "").split("\n\n")[0])
    engines.add_arguments(made, ARMS)
    made.add_argument("--load", type=float, default=0.9)
    made.add_argument("--duration-s", type=float, default=60.0, help="of arrivals, in device time, per seed")
    made.add_argument("--seeds", type=int, default=3)
    return made


def measure(options: argparse.Namespace) -> dict[str, list[Row]]:
    """Rows by arm, as far as the time went; arms without any are left out.

    Raises ConfigError, ServerError, NoStepError.
    """
    chosen = engines.choose(options.arms, ARMS, options.peer_python)
    # As published: with overlap the next chunk is launched while one runs, and a short waits for both.
    flags = ("--chunked-prefill-size", str(CHUNK_TOKENS), "--disable-overlap-schedule")
    setup = Setup("linear", options.time_scale, flags, options.out, "frontier", options.peer_python)
    settings = {"load": options.load, "duration_s": options.duration_s, "time_scale": options.time_scale}
    keys = [{"seed": seed} | settings for seed in range(1, options.seeds + 1)]

    def plan_of(key: dict[str, Any]) -> list[Planned]:
        return planned(key["load"], key["duration_s"], key["seed"], key["time_scale"])

    return engines.collect(chosen, keys, plan_of, setup=setup, budget_s=options.budget_s)


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError, ServerError, NoStepError."""
    rows = measure(options)
    by_arm = {arm: figures(own) for arm, own in rows.items()}
    against_fcfs(by_arm, rows)
    measured = min(row["seeds"] for row in by_arm.values())
    limits = bounds(options.load, options.duration_s, measured)
    print_table(by_arm, limits, options)
    plot(by_arm, rows, options.out / "frontier.png")
    misses = missed(by_arm)
    for miss in misses:
        stdout.print(f"MISSED: {miss}", markup=False)
    result: dict[str, Any] = {key: {arm: row.get(key) for arm, row in by_arm.items()} for key in KEYS}
    settings = {"load": options.load, "seeds": measured, "seeds_asked": options.seeds, "time_scale": options.time_scale}
    valid = all(row["valid"] for row in by_arm.values())
    outcome = {"targets_missed": misses, "valid": valid, "arms": by_arm, "bounds": limits, "environment": environment()}
    emit({"bench": "frontier", **settings, **result, **outcome}, options.out, "frontier")
    return 0 if valid else 1


def main(argv: list[str] | None = None) -> int:
    return exit_status(run, parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
