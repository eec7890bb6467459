"""``python -m bench.frontier``: short TTFT against long TTFT, stock and ours, on real schedulers with linear costs.

The workload of a published comparison of SGLang's prefill policies on issue 22831, its cost model and its sizes:
profile ``linear`` (20 ms a pass and 1 ms a new token), prompts of 2,400 and 200 tokens +-10 %, one output token,
Poisson arrivals for a minute at 90 % load, a quarter of the work short; arrivals are redrawn until the load is within
3 %. Figures are pooled over the seeds. Arms: ``stock``; ``chunk820``, ours with whole chunks; ``adaptive``, ours by
default. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.lib.report import emit, environment, say, stdout
from bench.replaying.client import Record, Replay
from bench.replaying.plan import Planned
from bench.replaying.result import count_wrong, lag_s
from pla_sglang import chain
from pla_sglang.metrics.latency import percentile
from pla_sglang.profiles import load_profile
from pla_sglang.testing.server import Server, ServerError, running

CHUNK_TOKENS = 820
LONG_TOKENS, SHORT_TOKENS = 2400, 200
SPREAD = 0.1
SHORT_SHARE = 0.25
LOAD_TOLERANCE = 0.03
OURS = ("--prefill-disagg", "temporal", "--pla-boundary", "256")
ARMS: dict[str, tuple[str, ...]] = {
    "stock": (),
    "chunk820": (*OURS, "--pla-long-chunk-min-tokens", str(CHUNK_TOKENS)),
    "adaptive": OURS,
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


def server_of(arm: str, options: argparse.Namespace) -> Server:
    flags = ["--pla-emulate", "linear", "--pla-time-scale", f"{options.time_scale:g}", *ARMS[arm]]
    flags += ["--chunked-prefill-size", str(CHUNK_TOKENS), "--log-level", "warning"]
    # As published: with overlap the next chunk is launched while one runs, and a short waits for both.
    flags.append("--disable-overlap-schedule")
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / f"frontier-{arm}.log"
    return Server(None, flags, module="pla_sglang.launch_server", log_path=log, stop_timeout_s=2.0)


async def run_all(servers: Sequence[Server], options: argparse.Namespace) -> list[list[Record]]:
    """Every seed on every server, all servers at the same time; records of each server."""
    collected: list[list[Record]] = [[] for _ in servers]
    for seed in range(1, options.seeds + 1):
        plans = [planned(options.load, options.duration_s, seed, options.time_scale) for _ in servers]
        runs = [Replay(server.url, timeout_s=600) for server in servers]
        done = await asyncio.gather(*(run.run(one) for run, one in zip(runs, plans, strict=True)))
        for records, own in zip(done, collected, strict=True):
            own += records
        say(f"seed {seed}: {len(plans[0])} requests")
    return collected


def figures(records: Sequence[Record], time_scale: float) -> dict[str, Any]:
    """Pooled over the seeds, in seconds of device time. Raises ServerError when a request failed."""
    ttft_s: dict[bool, list[float]] = {True: [], False: []}  # short?
    for record in records:
        if record.error is not None:
            raise ServerError(f"a request failed: {record.error}")
        short = len(record.prompt_ids) < (SHORT_TOKENS + LONG_TOKENS) / 2
        ttft_s[short].append((record.token_s[0] - record.due_s) / time_scale)
    return {
        "short_mean_s": statistics.fmean(ttft_s[True]),
        "short_p99_s": percentile(ttft_s[True], 99),
        "long_mean_s": statistics.fmean(ttft_s[False]),
        "long_max_s": max(ttft_s[False]),
        "requests": len(records),
        "tokens_wrong": sum(map(count_wrong, records)),
        "client_lag_p99_ms": percentile([float(x) * 1e3 for x in lag_s(records)], 99),
    }


def print_table(by_arm: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    table = Table(title=f"TTFT in s of device time, load {options.load:.0%}, {options.seeds} seeds")
    keys = ("short_mean_s", "short_p99_s", "long_mean_s", "long_max_s", "long_max_vs_fcfs", "tokens_wrong")
    for column in ("arm", *keys):
        table.add_column(column)
    for arm, row in by_arm.items():
        table.add_row(arm, *(f"{row[key]:.3f}" if key in row else "-" for key in keys))
    stdout.print(table)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.frontier", description=(__doc__ or "").split("\n\n")[0])
    made.add_argument("--arms", default=",".join(ARMS), help=f"from: {', '.join(ARMS)}")
    made.add_argument("--load", type=float, default=0.9)
    made.add_argument("--duration-s", type=float, default=60.0, help="of arrivals, in device time, per seed")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--time-scale", type=float, default=1.0)
    made.add_argument("--out", type=Path, default=Path("bench_out"))
    return made


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    arms = [name for name in options.arms.split(",") if name]
    if unknown := [name for name in arms if name not in ARMS]:
        print(f"error: --arms {unknown[0]!r} is not known; allowed: {', '.join(ARMS)}", file=sys.stderr)
        return 2
    try:
        with running(*(server_of(arm, options) for arm in arms)) as servers:
            collected = asyncio.run(run_all(servers, options))
        by_arm = {arm: figures(own, options.time_scale) for arm, own in zip(arms, collected, strict=True)}
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if "stock" in by_arm:
        for row in by_arm.values():
            row["long_max_vs_fcfs"] = row["long_max_s"] / by_arm["stock"]["long_max_s"]
    print_table(by_arm, options)
    keys = ("short_mean_s", "short_p99_s", "long_mean_s", "long_max_vs_fcfs")
    result: dict[str, Any] = {key: {arm: row.get(key) for arm, row in by_arm.items()} for key in keys}
    settings = {"load": options.load, "seeds": options.seeds, "time_scale": options.time_scale}
    emit(
        {"bench": "frontier", **settings, **result, "arms": by_arm, "environment": environment()},
        options.out,
        "frontier",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
