"""GPU-hours of a fleet that grows and shrinks over a day, against the smallest fleet of a fixed size.

A day's shape in 20 minutes: Poisson arrivals whose rate is a floor and the eighth power of a half sine, at the peak
three times the mean; chat lengths (LMSYS-like prompts, ShareGPT-4 answers). Instances take as long to start as without
the compression. An arm is POLICY+PLANNER. Beside each stands the smallest fixed fleet, in hindsight, whose attainment
is at most half a point below the arm's: policy ``combined`` without a planner on that many instances.

Simulated; live: ``elastic_live``. ``lower_bound_gpu_hours``: the fewest with which anybody could have had the arm's
attainment (``simulate lower-bound``), with as many instances at the least.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.bench import Result, measuring
from bench.harness.report import Cells, emit, environment, markdown, progress_bar, show
from pla_sglang.common.checks import require
from pla_sglang.sim.core.experiment import Experiment, ExperimentResult, run_experiment
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.planning.lower_bound import BoundTask, find_lower_bound
from pla_sglang.sim.workload import Trace, length_model

ARMS = ("combined+dopd", "dopd+dopd", "combined+threshold", "combined+sla")
FIXED_POLICY = "combined"
PEAK_OVER_MEAN = 3.0
POWER = 8  # of the half sine: a day has fewer busy hours than quiet ones
HALF_SINE_MEAN = 35 / 128  # of its eighth power
FLOOR = (1 / PEAK_OVER_MEAN - HALF_SINE_MEAN) / (1 - HALF_SINE_MEAN)  # of the peak, so that the mean is a third of it
SLO = Slo(2.0, 0.1)
MARGIN = 0.005  # of attainment, that counts as the same
FIXED_MOST = 32
AIM = 0.70  # of the GPU-hours of the fixed fleet


def rate_share(at_s: float, day_s: float) -> float:
    """The rate over that of the peak, which is in the middle of the day."""
    return FLOOR + (1 - FLOOR) * math.sin(math.pi * at_s / day_s) ** POWER


def make_day(mean_rate_per_s: float, day_s: float, seed: int) -> Trace:
    """A Poisson process of the peak's rate, thinned."""
    rng, peak_per_s = random.Random(seed), PEAK_OVER_MEAN * mean_rate_per_s
    at_s, times = 0.0, []
    while (at_s := at_s + rng.expovariate(peak_per_s)) < day_s:
        if rng.random() < rate_share(at_s, day_s):
            times.append(at_s)
    inputs, outputs = (
        np.array([model.draw(rng) for _ in times], dtype=np.int64)
        for model in (length_model("lmsys_first_turn_prompt"), length_model("sharegpt4_output"))
    )
    return Trace("day", np.array(times), inputs, outputs).require_requests()


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of a run. ``scale_outs``, ``scale_ins``: instances that were started and told to leave."""

    gpu_hours: float
    attainment: float
    scale_outs: int = 0
    scale_ins: int = 0

    @classmethod
    def of(cls, outcome: ExperimentResult) -> Figures:
        result = outcome.result
        outs, ins = result.counts["scale_outs"], result.counts["scale_ins"]
        return cls(result.gpu_hours, outcome.figures.attainment, outs, ins)


class SimulatedFleets:
    """Runs on one trace; every run once. ``base``: all of an experiment but policy, planner and instances."""

    def __init__(self, base: Experiment, trace: Trace) -> None:
        self._base = base
        self._trace = trace
        self._fixed: dict[int, Figures] = {}

    def run_arm(self, name: str) -> Figures:
        """Begins with the least instances that a planner may leave."""
        return self.run_planned(name, self._base.instances_min)

    def run_planned(self, arm: str, instances: int, forecaster: str | None = None) -> Figures:
        """``instances``: at the start; ``forecaster`` None: the planner's."""
        policy, _, planner = arm.partition("+")
        experiment = dataclasses.replace(
            self._base, policy=policy, planner=planner, instances=instances, forecaster=forecaster
        )
        return Figures.of(run_experiment(experiment, self._trace))

    def run_fixed(self, instances: int) -> Figures:
        if instances not in self._fixed:
            experiment = dataclasses.replace(self._base, policy=FIXED_POLICY, instances=instances, instances_max=None)
            self._fixed[instances] = Figures.of(run_experiment(experiment, self._trace))
        return self._fixed[instances]

    def bound_hours(self, attainment: float) -> float:
        """The fewest GPU-hours that this attainment takes, whoever plans."""
        task = BoundTask(attainment, self._base.startup_s or 0.0, floor=self._base.instances_min)
        return find_lower_bound(self._base, self._trace, task).lower_bound_gpu_hours

    def smallest_fixed(self, attainment: float) -> int | None:
        """The least number of instances with this attainment, which is taken to rise with it; None: above the most."""
        low, high = 0, 1
        while self.run_fixed(high).attainment < attainment:
            if high == FIXED_MOST:
                return None
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.run_fixed(middle).attainment >= attainment else (middle, high)
        return high


def simulate_arm(name: str, fleets: SimulatedFleets) -> dict[str, Any]:
    """The figures of an arm beside its fixed fleet: what a live run is to be compared with."""
    figures = fleets.run_arm(name)
    instances = fleets.smallest_fixed(figures.attainment - MARGIN)
    fixed = None if instances is None else fleets.run_fixed(instances)
    return {
        **dataclasses.asdict(figures),
        "gpu_hours_vs_fixed": None if fixed is None else figures.gpu_hours / fixed.gpu_hours,
        "fixed_instances": instances,
        "fixed_attainment": None if fixed is None else fixed.attainment,
        "lower_bound_gpu_hours": fleets.bound_hours(figures.attainment),
    }


# -- the bench ---------------------------------------------------------------------------------------------------------


def table(arms: Mapping[str, Mapping[str, Any]]) -> Cells:
    header = [
        "arm",
        "GPU h",
        "lower bound",
        "attainment",
        "over fixed",
        "fixed instances",
        "attainment",
        "started",
        "left",
    ]
    rows = []
    for name, one in arms.items():
        rows.append([f"`{name}`", *cells_of(one)])
    return header, rows


def cells_of(one: Mapping[str, Any]) -> list[str]:
    """Of what ``simulate_arm`` returned: from GPU h to the instances that left."""
    ratio, fixed, kept = one["gpu_hours_vs_fixed"], one["fixed_instances"], one["fixed_attainment"]
    cells = [f"{one[key]:.2f}" for key in ("gpu_hours", "lower_bound_gpu_hours")] + [f"{one['attainment']:.4f}"]
    cells += ["-", "-", "-"] if ratio is None else [f"{ratio:.2f}", str(fixed), f"{kept:.4f}"]
    return [*cells, str(one["scale_outs"]), str(one["scale_ins"])]


def page(result: Result) -> str:
    foot = f"{result['requests']:,} requests, `{result['profile']}`, start-up {result['startup_s']:g} s, a plan every"
    foot += f" {result['plan_interval_s']:g} s, seed {result['seed']}. Commit {result['environment']['plugin_commit']}."
    return "\n\n".join([markdown(*table(result["arms"]), right=True), foot])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arms", default=",".join(ARMS), help="POLICY+PLANNER, with commas between")
    parser.add_argument("--rate", type=float, default=22.0, help="mean requests/s")
    parser.add_argument("--day-s", type=float, default=1200.0, help="seconds of the day")
    add_fleet_arguments(parser)
    parser.add_argument("--seed", type=int, default=1, help="of arrivals and lengths")
    parser.add_argument("--out", type=Path, default=Path("bench_out"), help="folder of the result")


def add_fleet_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``base_of`` and ``Experiment.startup_s`` are from."""
    parser.add_argument("--profile", default="h100-llama3.1-70b-fp8-tp2", help="step profile of an instance")
    parser.add_argument("--startup-s", type=float, default=27.5, help="from the order to a ready instance")
    parser.add_argument("--plan-interval-s", type=float, default=10.0, help="between two plans")
    parser.add_argument("--instances-min", type=int, default=2, help="that planners leave")


def base_of(options: argparse.Namespace, *, startup_s: float, most: int) -> Experiment:
    """``most``: instances that a planner may have."""
    return Experiment(
        FIXED_POLICY,
        SLO,
        engine="temporal",
        mixed=True,
        profile=options.profile,
        startup_s=startup_s,
        plan_interval_s=options.plan_interval_s,
        instances=options.instances_min,
        instances_min=options.instances_min,
        instances_max=most,
    )


def read_arms(text: str, base: Experiment) -> Sequence[str]:
    """Raises ConfigError for a policy or a planner that is not known."""
    names = text.split(",")
    for name in names:
        policy, _, planner = name.partition("+")
        dataclasses.replace(base, policy=policy, planner=planner)
    return names


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError."""
    require("--rate", options.rate, 0, above=True)
    require("--day-s", options.day_s, 0, above=True)
    about, base = environment(), base_of(options, startup_s=options.startup_s, most=FIXED_MOST)
    names = read_arms(options.arms, base)
    trace = make_day(options.rate, options.day_s, options.seed)
    fleets, arms = SimulatedFleets(base, trace), {}
    with measuring(), progress_bar("arms", len(names)) as advance:
        for name in names:
            arms[name] = simulate_arm(name, fleets)
            advance()
    settings = ("rate", "day_s", "profile", "startup_s", "plan_interval_s", "instances_min", "seed")
    result = {
        "bench": "elastic",
        **{key: {name: one[key] for name, one in arms.items()} for key in ("gpu_hours_vs_fixed", "attainment")},
        "lower_bound_gpu_hours": {name: one["lower_bound_gpu_hours"] for name, one in arms.items()},
        "aim": AIM,
        "arms": arms,
        "requests": len(trace),
        **{name: getattr(options, name) for name in settings},
        "environment": about,
    }
    show("GPU-hours over a day, simulated", *table(arms))
    emit(result, "elastic", options.out)
    return 0


PAGES = {"elastic": page}
