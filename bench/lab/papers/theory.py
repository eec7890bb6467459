"""The simulator where theory is exact: the mean wait of M/G/1, first come first served (PLA-Serve section 2.2).

W = lambda E[S^2] / (2 (1 - rho)), with the moments and the rate of the sample itself.
"""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np

from bench.lab.papers.charts import draw, lines
from bench.lab.papers.context import Context
from bench.lab.papers.finding import Claim, Finding, Row, number, points_of
from bench.lab.world import World
from pla_sglang.policy.baselines.dispatch import RoundRobin
from pla_sglang.policy.interface.prefill import Action, EnginePolicy, PassDecision, PassView, Reason
from pla_sglang.profiles import load_profile
from pla_sglang.sim.core.config import InstanceSpec
from pla_sglang.sim.workload import Arrivals, LengthModel, generated_trace
from pla_sglang.sim.workload.lengths import fixed

TOKEN_S = 1e-3
LIMIT = 0.02  # the bound
LENGTHS = LengthModel((0.8, 0.2), (math.log(50), math.log(300)), (0.0, 0.0))  # shorts and longs, 100 tokens on average
SEED = 11
WHY = "The mean of a finite sample scatters."


class OneByOne(EnginePolicy):
    """A server that takes one request after the other."""

    def decide(self, view: PassView, now_s: float) -> PassDecision:
        if view.chunk is not None:
            return PassDecision(Action.LONG, Reason.NO_SHORT)
        if not view.waiting:
            return PassDecision(Action.HOLD, Reason.EMPTY)
        return PassDecision(Action.LONG, Reason.NO_SHORT, (view.waiting[0],))


def mean_wait(load: float, *, requests: int) -> dict[str, float]:
    arrivals = Arrivals(load / (100 * TOKEN_S), random.Random(SEED))
    trace = generated_trace(requests, arrivals, LENGTHS, fixed(1))
    linear = load_profile("linear")
    exact = dataclasses.replace(linear.prefill, floor_s=0.0, base_s=0.0, token_s=TOKEN_S)
    fleet, config = [InstanceSpec(dataclasses.replace(linear, prefill=exact))], {"report_interval_s": 1e6}
    world = World(fleet, RoundRobin(), engine=lambda profile, knobs: OneByOne(), config=config)
    service_s, rate = trace.input_tokens * TOKEN_S, trace.rate_per_s
    waited_s = world.run(trace).served.ttft_s() - service_s
    theory_s = rate * np.mean(service_s**2) / (2 * (1 - rate * np.mean(service_s)))
    return {"simulated_s": float(waited_s.mean()), "theory_s": float(theory_s)}


def run(context: Context) -> Finding:
    requests = context.pick(3000, 300_000, 300_000)
    loads = context.pick([0.3], [0.3, 0.5], [0.3, 0.5, 0.7])
    results = context.measure(mean_wait, loads, requests=requests)
    worst = max((wait["simulated_s"] / wait["theory_s"] - 1 for wait in results.values()), key=abs)
    simulated_s, theory_s = ([wait[of] for wait in results.values()] for of in ("simulated_s", "theory_s"))
    shown = {"simulated": (loads, simulated_s), "Pollaczek-Khinchine": (loads, theory_s)}
    rows = [
        Row(f"load {load}: mean wait", 1e3 * wait["theory_s"], 1e3 * wait["simulated_s"], "ms", WHY)
        for load, wait in results.items()
    ]
    claim = Claim(
        f"the simulator is within {LIMIT:.0%} of theory", abs(worst) < LIMIT, f"worst {number(100 * worst)} %"
    )
    setting = f"one server, Poisson arrivals, 80 % of 50 ms and 20 % of 300 ms, {requests} requests a load"
    picture = draw([lines(shown, x="load", y="mean wait, s")], "M/G/1: simulated and exact")
    return Finding(setting, rows, [claim], points_of(results, "load"), picture, {"mg1_error": worst})
