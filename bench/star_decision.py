"""Time of one scheduling decision of STAR (Algorithm 1, scheduler side) by cluster size.

Workers have reported their summaries already, as in the paper (section 5.2); their own time is measured apart. Loads
follow the paper's output lengths: log-normal remaining lengths with a cap of 32K, requests at random points of their
life. The worst of several states counts as well as the mean.

    python -m bench.star_decision [--requests 64] [--states 20] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from random import Random

import numpy as np

from pla_sglang.policy.fleet import DecodeBatch
from pla_sglang.policy.star.horizon import Horizon, HorizonKnobs, summarise
from pla_sglang.policy.star.select import SelectKnobs, Worker, best_move

SIZES = (8, 64, 256, 1024)
OUTPUT_CAP_TOKENS = 32_768


def state(instances: int, requests: int, horizon: Horizon, rng: Random) -> tuple[list[Worker], float]:
    """Workers with summaries, and the mean seconds that one summary took."""
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
        workers.append(Worker(summary, room_tokens=2_000_000))
    return workers, spent_s / instances


def measure(instances: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of decisions over several random states, after one that does not count."""
    horizon, knobs, rng = Horizon(HorizonKnobs()), SelectKnobs(), Random(arguments.seed)
    times_s, moves, summary_s = [], 0, 0.0
    for number in range(arguments.states + 1):
        workers, summary_s = state(instances, arguments.requests, horizon, rng)
        start_s = time.perf_counter()
        move = best_move(workers, horizon, knobs).move
        if number:
            times_s.append(time.perf_counter() - start_s)
            moves += move is not None
    return {
        "mean_ms": round(1e3 * float(np.mean(times_s)), 3),
        "max_ms": round(1e3 * max(times_s), 3),
        "summary_ms": round(1e3 * summary_s, 4),
        "moves": moves,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=64, help="mean running requests an instance")
    parser.add_argument("--states", type=int, default=20, help="random states a size")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    result: dict[str, object] = {"seed": arguments.seed, "requests": arguments.requests, "states": arguments.states}
    print(f"{'instances':>9} {'mean ms':>9} {'max ms':>9} {'worker ms':>9} {'moves':>6}")
    for instances in SIZES:
        row = measure(instances, arguments)
        columns = f"{row['mean_ms']:9.2f} {row['max_ms']:9.2f} {row['summary_ms']:9.3f} {row['moves']:6.0f}"
        print(f"{instances:9d} {columns}")
        result[f"star_decision_ms_{instances}"] = row["mean_ms"]
        result[f"star_decision_max_ms_{instances}"] = row["max_ms"]
    result["python"], result["machine"] = platform.python_version(), platform.machine()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
