"""``python -m bench.fleets.steadiness``: flips an hour under constant load, also near overload and above.

Poisson arrivals with one mix of lengths for two simulated hours; flips that a controller asks for in the second hour
are counted (settling of a transitional instance is no flip of its own). Instances have the step times of
``h100-llama70b-fp8-dopd``, ten times slower than an 8B model, so that hours need few requests.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.lib.report import emit, environment, say, stdout
from pla_sglang.metrics.goodput import Slo, goodput
from pla_sglang.policy.decisions import Controller, Dispatch, Dispatcher, FleetAction, Placement, SetRole
from pla_sglang.policy.fleet import FleetView, RequestView
from pla_sglang.policy.reasons import FleetReason
from pla_sglang.policy.registry import Setup, build
from pla_sglang.profiles import load_profile
from pla_sglang.sim.config import InstanceSpec, Policies, SimConfig
from pla_sglang.sim.experiment import engine_policy
from pla_sglang.sim.simulation import Simulation
from pla_sglang.workload import Arrivals, Trace, generated_trace
from pla_sglang.workload.lengths import LengthModel

PROFILE = "h100-llama70b-fp8-dopd"
SLO = Slo(3.0, 0.1)
INSTANCES = 8
HOUR_S = 3600.0
INPUTS = LengthModel((1.0,), (6.6,), (0.9,), least=16, most=8192, source="mean about 1,100 tokens")
OUTPUTS = LengthModel((1.0,), (4.7,), (0.7,), least=2, most=2048, source="mean about 140 tokens")
RATES = (4.0, 10.0, 13.0, 16.0, 20.0)  # requests/s: from idle to more than can be served


class FlipLog:
    """Between a driver and a policy: notes when roles change, and passes everything on."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.at_s: list[float] = []

    def note(self, actions: Sequence[FleetAction], now_s: float) -> None:
        self.at_s += [now_s for one in actions if isinstance(one, SetRole) and one.reason is not FleetReason.DRAINED]

    def dispatch(self, request: RequestView, fleet: FleetView, now_s: float) -> Dispatch:
        answer = self._dispatcher.dispatch(request, fleet, now_s)
        self.note(answer.actions, now_s)
        return answer

    def place_decode(self, request: RequestView, fleet: FleetView, now_s: float) -> Placement:
        answer = self._dispatcher.place_decode(request, fleet, now_s)
        self.note(answer.actions, now_s)
        return answer


class LoggedController:
    """A controller whose flips are noted."""

    def __init__(self, controller: Controller, log: FlipLog) -> None:
        self._controller, self._log = controller, log
        self.interval_s = controller.interval_s

    def tick(self, fleet: FleetView, now_s: float) -> list[FleetAction]:
        actions = self._controller.tick(fleet, now_s)
        self._log.note(actions, now_s)
        return actions


@dataclasses.dataclass(frozen=True)
class Logged(Policies):
    """Policies behind logs; those that want reports are the originals."""

    originals: Policies | None = None

    def observers(self) -> list[Any]:
        assert self.originals is not None, "built by steady_run"
        return self.originals.observers()


@dataclasses.dataclass(frozen=True)
class Steady:
    """One run. ``late_flips``: in the last hour."""

    policy: str
    rate_per_s: float
    attainment: float
    flips: int
    late_flips: int
    last_flip_s: float | None


def constant_load(rate_per_s: float, hours: float, seed: int) -> Trace:
    """Poisson arrivals with one mix of lengths."""
    count = max(1, round(rate_per_s * hours * HOUR_S))
    return generated_trace(count, Arrivals(rate_per_s, random.Random(seed)), INPUTS, OUTPUTS, name="constant")


def steady_run(policy: str, rate_per_s: float, *, hours: float = 2.0, seed: int = 1) -> Steady:
    """Flips of ``policy`` under a constant load. Raises ConfigError for a policy that is not known."""
    profile = load_profile(PROFILE)
    trace = constant_load(rate_per_s, hours, seed)
    setup = Setup(
        steps=profile,
        kv_capacity_tokens=profile.kv_capacity_tokens,
        ttft_slo_s=SLO.ttft_s,
        tpot_slo_s=SLO.tpot_s,
        instances=INSTANCES,
        seed=seed,
        mean_context_tokens=float(trace.input_tokens.mean() + trace.output_tokens.mean() / 2),
    )
    chosen = build(policy, setup)
    log = FlipLog(chosen.dispatcher)
    plain = Policies(
        chosen.dispatcher, lambda its, knobs: engine_policy("fcfs", its, knobs), chosen.controllers, name=policy
    )
    logged = Logged(
        log,
        plain.engine,
        [LoggedController(one, log) for one in chosen.controllers],
        name=policy,
        originals=plain,
    )
    fleet = [InstanceSpec(profile, role=role) for role in chosen.roles]
    config = SimConfig(fleet, ttft_slo_s=SLO.ttft_s, tpot_slo_s=SLO.tpot_s, sample_s=60.0, seed=seed)
    result = Simulation(trace, config, logged).run()
    last_hour_s = (hours - 1) * HOUR_S
    return Steady(
        policy,
        rate_per_s,
        goodput(result.served, SLO).attainment,
        len(log.at_s),
        sum(last_hour_s <= at_s < hours * HOUR_S for at_s in log.at_s),
        max(log.at_s, default=None),
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = argparse.ArgumentParser(prog="python -m bench.fleets.steadiness", description=(__doc__ or "").split("\n")[0])
    args.add_argument("--policies", default="arrow,combined")
    args.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    args.add_argument("--hours", type=float, default=2.0)
    args.add_argument("--seed", type=int, default=1)
    args.add_argument("--out", type=Path, default=Path("bench_out"))
    flags = args.parse_args(argv)
    rows: list[Steady] = []
    for policy in flags.policies.split(","):
        for rate in flags.rates:
            rows.append(steady_run(policy, rate, hours=flags.hours, seed=flags.seed))
            say(str(rows[-1]))
    table = Table(title=f"flips under constant load, {INSTANCES} x {PROFILE}")
    names = [field.name for field in dataclasses.fields(Steady)]
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        values = [getattr(row, name) for name in names]
        table.add_row(*(f"{one:.3g}" if isinstance(one, float) else str(one) for one in values))
    stdout.print(table)
    emit(
        {
            "bench": "fleets.steadiness",
            "late_flips_per_hour_max": max(row.late_flips for row in rows),
            "rows": [dataclasses.asdict(row) for row in rows],
            "hours": flags.hours,
            "seed": flags.seed,
            "environment": environment(),
        },
        flags.out,
        "fleets_steadiness",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
