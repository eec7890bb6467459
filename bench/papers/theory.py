"""The simulator where theory is exact: the mean wait of M/G/1, first come first served (PLA-Serve section 2.2).

W = lambda E[S^2] / (2 (1 - rho)), with the moments and the rate of the sample itself.
"""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np

from bench.papers.charts import draw, lines
from bench.papers.context import Context
from bench.papers.finding import Claim, Finding, Point, Row, number
from bench.papers.measure import World
from pla_sglang.policy.baselines.dispatch import RoundRobin
from pla_sglang.policy.types import Action, PassDecision, PassView, Reason
from pla_sglang.profiles import StepProfile, load_profile
from pla_sglang.sim.config import InstanceSpec
from pla_sglang.sim.experiment import Ordered
from pla_sglang.sim.interfaces import EngineKnobs, EnginePolicy
from pla_sglang.workload import Arrivals, LengthModel, Trace, generated_trace

TOKEN_S = 1e-3
LIMIT = 0.02  # the bound
LENGTHS = LengthModel((0.8, 0.2), (math.log(50), math.log(300)), (0.0, 0.0))  # shorts and longs, 100 tokens on average
ONE_TOKEN = LengthModel((1.0,), (0.0,), (0.0,), most=1)


class OneByOne:
    """A server that takes one request after the other."""

    def decide(self, view: PassView, now_s: float) -> PassDecision:
        if view.chunk is not None:
            return PassDecision(Action.LONG, Reason.NO_SHORT)
        if not view.waiting:
            return PassDecision(Action.HOLD, Reason.EMPTY)
        return PassDecision(Action.LONG, Reason.NO_SHORT, (view.waiting[0],))


def one_by_one(profile: StepProfile, knobs: EngineKnobs) -> EnginePolicy:
    return Ordered(OneByOne().decide)


@dataclasses.dataclass(frozen=True)
class Job:
    load: float
    requests: int
    seed: int


def linear_profile() -> StepProfile:
    """Prefill of exactly 1 ms a token."""
    given = load_profile("linear")
    return dataclasses.replace(
        given, prefill=dataclasses.replace(given.prefill, floor_s=0.0, base_s=0.0, token_s=TOKEN_S)
    )


def waits_s(job: Job) -> tuple[float, float]:
    """Mean wait as simulated, and by theory."""
    arrivals = Arrivals(job.load / (100 * TOKEN_S), random.Random(job.seed))
    trace = generated_trace(job.requests, arrivals, LENGTHS, ONE_TOKEN)
    world = World([InstanceSpec(linear_profile())], RoundRobin(), engine=one_by_one, config={"report_interval_s": 1e6})
    service_s = trace.input_tokens * TOKEN_S
    waited_s = world.run(trace).served.ttft_s() - service_s
    return float(waited_s.mean()), pollaczek_khinchine_s(trace)


def pollaczek_khinchine_s(trace: Trace) -> float:
    service_s, rate = trace.input_tokens * TOKEN_S, trace.rate_per_s
    return float(rate * np.mean(service_s**2) / (2 * (1 - rate * np.mean(service_s))))


def run(context: Context) -> Finding:
    requests = context.pick(3000, 300_000, 300_000)
    loads = context.pick([0.3], [0.3, 0.5], [0.3, 0.5, 0.7])
    found = dict(zip(loads, context.map(waits_s, [Job(load, requests, 11) for load in loads]), strict=True))
    errors = {load: simulated / theory - 1 for load, (simulated, theory) in found.items()}
    worst = max(errors.values(), key=abs)
    points: list[Point] = [
        {"load": load, "simulated_s": simulated, "theory_s": theory} for load, (simulated, theory) in found.items()
    ]
    shown = {
        "simulated": (loads, [found[load][0] for load in loads]),
        "Pollaczek-Khinchine": (loads, [found[load][1] for load in loads]),
    }
    why = "The mean of a finite sample scatters."
    return Finding(
        "theory",
        "M/G/1 by Pollaczek and Khinchine",
        f"one server, Poisson arrivals, 80 % of 50 ms and 20 % of 300 ms, {requests} requests a load",
        [Row(f"load {load}: mean wait", 1e3 * found[load][1], 1e3 * found[load][0], "ms", why) for load in loads],
        [Claim(f"the simulator is within {LIMIT:.0%} of theory", abs(worst) < LIMIT, f"worst {number(100 * worst)} %")],
        points,
        draw([lines(shown, x="load", y="mean wait, s")], "M/G/1: simulated and exact"),
        {"mg1_error": worst},
    )
