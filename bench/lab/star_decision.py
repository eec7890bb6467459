"""Time of one scheduling decision of STAR (Algorithm 1, scheduler side) by cluster size.

Workers have reported their summaries already, as in the paper (section 5.2); their own time is measured apart. Loads
follow the paper's output lengths: log-normal remaining lengths with a cap of 32K, requests at random points of their
life. The worst of several states counts as well as the mean.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from random import Random

from bench.harness.bench import measuring
from bench.harness.report import emit, show
from pla_sglang.policy.interface.fleet import DecodeBatch
from pla_sglang.policy.star.horizon import Horizon, HorizonKnobs, summarise
from pla_sglang.policy.star.select import DecodeInstance, SelectKnobs, best_move

SIZES = (8, 64, 256, 1024)
OUTPUT_CAP_TOKENS = 32_768


def make_workers(instances: int, requests: int, horizon: Horizon, rng: Random) -> tuple[list[DecodeInstance], float]:
    """Workers with summaries, and the mean milliseconds that one summary took."""
    workers, spent_s = [], 0.0
    for _ in range(instances):
        rows: list[tuple[str, int, float | None]] = []
        for number in range(max(1, round(rng.gauss(requests, requests / 4)))):
            output = min(OUTPUT_CAP_TOKENS, 1 + int(rng.lognormvariate(7.3, 1.6)))
            done = rng.randrange(output)
            rows.append((str(number), 300 + done, float(output - done)))
        batch = DecodeBatch.of(rows)
        start_s = time.perf_counter()
        summary = summarise(batch, horizon)
        spent_s += time.perf_counter() - start_s
        workers.append(DecodeInstance(summary, room_tokens=2_000_000))
    return workers, 1e3 * spent_s / instances


def measure(instances: int, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of decisions over several random states, after one that does not count."""
    horizon, knobs, rng = Horizon(HorizonKnobs()), SelectKnobs(), Random(options.seed)
    times_ms, moves = [], 0
    for number in range(options.states + 1):
        workers, summary_ms = make_workers(instances, options.requests, horizon, rng)
        start_s = time.perf_counter()
        move = best_move(workers, horizon, knobs).move
        if number:
            times_ms.append(1e3 * (time.perf_counter() - start_s))
            moves += move is not None
    return {"mean_ms": statistics.fmean(times_ms), "max_ms": max(times_ms), "summary_ms": summary_ms, "moves": moves}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=64, help="mean running requests an instance")
    parser.add_argument("--states", type=int, default=20, help="random states a size")
    parser.add_argument("--seed", type=int, default=1)


def run(options: argparse.Namespace) -> int:
    result: dict[str, object] = dict(vars(options))
    rows = []
    with measuring():
        for instances in SIZES:
            row = measure(instances, options)
            rows.append([instances, *row.values()])
            result[f"star_decision_ms_{instances}"] = round(row["mean_ms"], 3)
            result[f"star_decision_max_ms_{instances}"] = round(row["max_ms"], 3)
    show("one decision of STAR", ("instances", "mean ms", "max ms", "worker ms", "moves"), rows)
    emit(result | {"python": platform.python_version(), "machine": platform.machine()}, "star_decision")
    return 0
