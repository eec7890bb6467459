"""``python -m bench fleets steadiness``: flips an hour under constant load, also near overload and above.

Poisson arrivals with one mix of lengths for two simulated hours; flips that a policy has asked for in the second hour
are counted (settling of a transitional instance is no flip of its own). Instances have the step times of
``h100-llama70b-fp8-dopd``, ten times slower than an 8B model, so that hours need few requests.
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from pathlib import Path
from typing import Any

from bench.harness.bench import measuring
from bench.harness.report import emit, environment, say, show
from bench.harness.steps import NoStepError, Row
from bench.lab.fleets.tables import Table
from bench.lab.world import World
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.policy.registry import Setup, build
from pla_sglang.policy.runner import PoolMove
from pla_sglang.profiles import load_profile
from pla_sglang.sim.core.config import InstanceSpec
from pla_sglang.sim.metrics.goodput import Slo, goodput
from pla_sglang.sim.workload import Arrivals, generated_trace
from pla_sglang.sim.workload.lengths import LengthModel

PROFILE = "h100-llama70b-fp8-dopd"
SLO = Slo(3.0, 0.1)
INSTANCES = 8
HOUR_S = 3600.0
INPUTS = LengthModel((1.0,), (6.6,), (0.9,), least=16, most=8192, source="mean about 1,100 tokens")
OUTPUTS = LengthModel((1.0,), (4.7,), (0.7,), least=2, most=2048, source="mean about 140 tokens")
RATES = (4.0, 10.0, 13.0, 16.0, 20.0)  # requests/s: from idle to more than can be served


def steady_run(policy: str, rate_per_s: float, *, hours: float = 2.0, seed: int = 1) -> Row:
    """Flips of ``policy`` under a constant load, ``late_flips`` in the last hour. ConfigError for an unknown policy."""
    profile = load_profile(PROFILE)
    count = max(1, round(rate_per_s * hours * HOUR_S))
    trace = generated_trace(count, Arrivals(rate_per_s, random.Random(seed)), INPUTS, OUTPUTS, name="constant")
    targets: dict[str, Any] = {"ttft_slo_s": SLO.ttft_s, "tpot_slo_s": SLO.tpot_s}
    context_tokens = float(trace.input_tokens.mean() + trace.output_tokens.mean() / 2)
    fleet_facts: dict[str, Any] = {"instances": INSTANCES, "seed": seed, "mean_context_tokens": context_tokens}
    chosen = build(policy, Setup(profile, profile.kv_capacity_tokens, **targets, **fleet_facts))
    fleet = [InstanceSpec(profile, role=role) for role in chosen.roles]
    world = World(fleet, chosen.dispatcher, chosen.controllers, config=targets | {"sample_s": 60.0})
    simulation = world.simulation(trace)
    moves: deque[PoolMove] = deque()
    simulation.cluster.runner.moves = moves  # all of them: the runner's own keeps the last few only
    attainment = goodput(simulation.run().served, SLO).attainment
    flips_s = [move.at_s for move in moves if move.reason != FleetReason.DRAINED.value]
    return {
        "policy": policy,
        "rate_per_s": rate_per_s,
        "attainment": attainment,
        "flips": len(flips_s),
        "late_flips": sum((hours - 1) * HOUR_S <= at_s < hours * HOUR_S for at_s in flips_s),
        "last_flip_s": max(flips_s, default=None),
    }


def steady_table(rows: list[Row], hours: float = 2.0) -> Table:
    counts = (f"flips in {hours:g} h", f"in the {'second' if hours == 2 else 'last'} hour")
    return ("policy", "requests/s", "attainment", *counts, "last one at, s"), [
        [
            f"`{row['policy']}`",
            f"{row['rate_per_s']:g}",
            f"{row['attainment']:.3f}",
            str(row["flips"]),
            str(row["late_flips"]),
            "-" if row["last_flip_s"] is None else f"{row['last_flip_s']:.0f}",
        ]
        for row in rows
    ]


PAGES = {"fleets-steadiness": ("flips", steady_table)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policies", default="arrow,combined")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("bench_out"))


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError, NoStepError."""
    rows: list[Row] = []
    with measuring():
        for policy in options.policies.split(","):
            for rate in options.rates:
                rows.append(steady_run(policy, rate, hours=options.hours, seed=options.seed))
                say(str(rows[-1]))
    if not rows:
        raise NoStepError("nothing was measured")
    show(f"flips under constant load, {INSTANCES} x {PROFILE}", *steady_table(rows, options.hours))
    result = {
        "bench": "fleets.steadiness",
        "late_flips_per_hour_max": max(row["late_flips"] for row in rows),
        "rows": rows,
        "hours": options.hours,
        "seed": options.seed,
        "environment": environment(),
    }
    emit(result, "fleets_steadiness", options.out)
    return 0
