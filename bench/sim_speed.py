"""``python -m bench.sim_speed``: simulated requests a second of CPU time, for fleets of 8 to 1,024 instances.

Chat-like lengths (LMSYS-like prompts, ShareGPT-4 answers), Poisson arrivals of so many requests per second and
instance, any policy of the registry, reports every 250 ms. Every decode step counts; steps between events are summed in
closed form, which ``tests/sim/test_engine.py`` checks against visiting each.

Runs in one process. ``peak_rss_mb`` is of the whole process after the largest fleet. Last stdout line: one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import resource
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from rich.console import Console
from rich.table import Table

from pla_sglang.metrics.goodput import Slo
from pla_sglang.sim.experiment import Experiment, Outcome, run_experiment
from pla_sglang.workload import Arrivals, Trace, generated_trace, length_model

FLEETS = (8, 64, 256, 1024)
RATE_PER_INSTANCE = 2.0  # requests/s
SLO = Slo(1.0, 0.05)


def workload(instances: int, requests: int, seed: int) -> Trace:
    """``requests`` for a fleet of this size."""
    arrivals = Arrivals(RATE_PER_INSTANCE * instances, random.Random(seed))
    inputs, outputs = length_model("lmsys_first_turn_prompt"), length_model("sharegpt4_output")
    return generated_trace(requests, arrivals, inputs, outputs, name=f"chat-{instances}")


def measure(instances: int, requests: int, policy: str, seed: int) -> Outcome:
    """One run, with the trace made before the clock starts."""
    trace = workload(instances, requests, seed)
    gc.collect()
    return run_experiment(Experiment(policy, SLO, instances=instances, seed=seed), trace)


def decode_steps(one: Outcome) -> int:
    """Tokens after the first, of all requests: what a simulator that visits each would touch."""
    return int((one.result.served.output_tokens - 1).sum())


def peak_rss_mb() -> float:
    """Largest resident size of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(argv: Sequence[str] | None = None) -> int:
    args = argparse.ArgumentParser(prog="python -m bench.sim_speed", description=__doc__)
    args.add_argument("--fleets", type=int, nargs="+", default=list(FLEETS))
    args.add_argument("--requests", type=int, default=20_000, help="of each run")
    args.add_argument("--policy", default="two-choices")
    args.add_argument("--seed", type=int, default=1)
    flags = args.parse_args(argv)
    table = Table(title=f"simulation speed, {flags.requests} requests each, policy {flags.policy}, one core")
    for name in ("instances", "requests/s", "events/s", "decode tokens/s", "CPU s", "wall s", "peak MiB", "attainment"):
        table.add_column(name, justify="right")
    found: dict[str, dict[str, Any]] = {"requests_per_s": {}, "events_per_s": {}, "wall_requests_per_s": {}}
    for instances in flags.fleets:
        one = measure(instances, flags.requests, flags.policy, flags.seed)
        result, count = one.result, flags.requests
        found["requests_per_s"][str(instances)] = round(count / result.cpu_s)
        found["wall_requests_per_s"][str(instances)] = round(count / result.wall_s)
        found["events_per_s"][str(instances)] = round(result.events / result.cpu_s)
        table.add_row(
            str(instances),
            f"{count / result.cpu_s:,.0f}",
            f"{result.events / result.cpu_s:,.0f}",
            f"{decode_steps(one) / result.cpu_s:,.0f}",
            f"{result.cpu_s:.2f}",
            f"{result.wall_s:.2f}",
            f"{peak_rss_mb():.0f}",
            f"{one.figures.attainment:.3f}",
        )
    Console(width=120).print(table)
    versions = {"python": platform.python_version(), "numpy": metadata.version("numpy")}
    last = {
        **found,
        "peak_rss_mb": round(peak_rss_mb(), 1),
        "seed": flags.seed,
        "workload": {"requests": flags.requests, "rate_per_instance_per_s": RATE_PER_INSTANCE, "policy": flags.policy},
        "versions": versions,
    }
    print(json.dumps(last))
    return 0


if __name__ == "__main__":
    sys.exit(main())
