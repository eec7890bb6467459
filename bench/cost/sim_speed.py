"""Simulated requests a second of CPU time, for fleets of 8 to 1,024 instances.

Chat-like lengths (LMSYS-like prompts, ShareGPT-4 answers), Poisson arrivals of so many requests per second and
instance, any policy of the registry, reports every 250 ms. Every decode step counts; steps between events are summed in
closed form, which ``tests/sim/test_engine.py`` checks against visiting each.

Runs in one process. ``peak_rss_mb`` is of the whole process after the largest fleet.
"""

from __future__ import annotations

import argparse
import gc
import platform
import random
import resource
from importlib import metadata
from typing import Any

from bench.harness.bench import measuring
from bench.harness.report import emit, say, show
from pla_sglang.sim.core.experiment import Experiment, ExperimentResult, run_experiment
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.workload import Arrivals, generated_trace, length_model

FLEETS = (8, 64, 256, 1024)
RATE_PER_INSTANCE = 2.0  # requests/s
SLO = Slo(1.0, 0.05)


def measure(instances: int, options: argparse.Namespace) -> ExperimentResult:
    """One run of a fleet, with the trace made before the clock starts."""
    arrivals = Arrivals(RATE_PER_INSTANCE * instances, random.Random(options.seed))
    inputs, outputs = length_model("lmsys_first_turn_prompt"), length_model("sharegpt4_output")
    trace = generated_trace(options.requests, arrivals, inputs, outputs, name=f"chat-{instances}")
    gc.collect()
    return run_experiment(Experiment(options.policy, SLO, instances=instances, seed=options.seed), trace)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fleets", type=int, nargs="+", default=list(FLEETS))
    parser.add_argument("--requests", type=int, default=20_000, help="of each run")
    parser.add_argument("--policy", default="two-choices")
    parser.add_argument("--seed", type=int, default=1)


def run(options: argparse.Namespace) -> int:
    figures: dict[str, dict[str, Any]] = {"requests_per_s": {}, "events_per_s": {}, "wall_requests_per_s": {}}
    rows, peak_mb = [], 0.0
    with measuring():
        for instances in options.fleets:
            outcome = measure(instances, options)
            result, count = outcome.result, options.requests
            # Tokens after the first, of all requests: what a simulator that visits each step would touch.
            steps = int((result.served.output_tokens - 1).sum())
            speeds = [round(number / result.cpu_s) for number in (count, result.events, steps)]
            figures["requests_per_s"][str(instances)], figures["events_per_s"][str(instances)], _ = speeds
            figures["wall_requests_per_s"][str(instances)] = round(count / result.wall_s)
            say(f"{instances} instances: {speeds[0]:,} requests/s")
            peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            times = [f"{result.cpu_s:.2f}", f"{result.wall_s:.2f}", f"{peak_mb:.0f}"]
            rows.append([instances, *speeds, *times, f"{outcome.figures.attainment:.3f}"])
    header = ("instances", "requests/s", "events/s", "decode tokens/s", "CPU s", "wall s", "peak MiB", "attainment")
    show(f"simulation speed, {options.requests} requests each, policy {options.policy}, one core", header, rows)
    workload = {"requests": options.requests, "rate_per_instance_per_s": RATE_PER_INSTANCE, "policy": options.policy}
    versions = {"python": platform.python_version(), "numpy": metadata.version("numpy")}
    about = {"peak_rss_mb": round(peak_mb, 1), "seed": options.seed, "workload": workload, "versions": versions}
    emit({**figures, **about}, "sim_speed")
    return 0
