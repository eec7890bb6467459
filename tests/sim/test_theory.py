"""Where queueing theory is exact, the simulator agrees with it."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from support.sim import Fcfs, Route, profile, simulation

from pla_sglang.policy.interface.fleet import FleetView, InstanceView, RequestView
from pla_sglang.sim.core.config import InstanceSpec
from pla_sglang.sim.workload import Arrivals, LengthModel, generated_trace
from pla_sglang.sim.workload.lengths import fixed
from pla_sglang.sim.workload.trace import Trace

TOKEN_S = 1e-3
REQUESTS = 120_000
MG1_REQUESTS = 300_000  # the mean wait of 120,000 requests still scatters by 1 % at load 0.5
ONE_AT_A_TIME = InstanceSpec(profile(token_s=TOKEN_S))
TWO_POINT = LengthModel((0.8, 0.2), (math.log(50), math.log(300)), (0.0, 0.0))
LOG_NORMAL = LengthModel((1.0,), (4.4,), (0.6,), most=2000)


def waits(trace: Trace, servers: int = 1) -> np.ndarray:
    """Waiting times of a fleet whose engines serve one request after the other; the shortest backlog gets the next."""
    free_s = [0.0] * servers

    def least_work(fleet: FleetView, request: RequestView) -> InstanceView:
        chosen = min(range(servers), key=lambda one: (max(free_s[one], request.arrival_s), one))
        free_s[chosen] = max(free_s[chosen], request.arrival_s) + TOKEN_S * request.input_tokens
        return fleet.instances[chosen]

    fleet = [ONE_AT_A_TIME] * servers
    run = simulation(trace, fleet, route=Route(least_work), policy=lambda: Fcfs(most=1), report_interval_s=1e6)
    result = run.run()
    run.cluster.check_integrity()
    return result.served.ttft_s() - trace.input_tokens * TOKEN_S


def test_mg1_waiting_is_pollaczek_khinchine() -> None:
    """W = lambda E[S^2] / (2 (1 - rho)), with the moments of this sample; at load 0.5."""
    trace = generated_trace(
        MG1_REQUESTS, Arrivals(5.0, random.Random(11)), TWO_POINT, fixed(1)
    )  # 100 tokens on average
    waiting = waits(trace)
    service_s = trace.input_tokens * TOKEN_S
    rate = trace.rate_per_s
    expected_s = rate * np.mean(service_s**2) / (2 * (1 - rate * np.mean(service_s)))
    assert waiting.mean() == pytest.approx(expected_s, rel=0.02)


def test_every_single_wait_follows_lindley() -> None:
    """W[n+1] = max(0, W[n] + S[n] - gap): not on the mean only, but request by request."""
    trace = generated_trace(5_000, Arrivals(8.0, random.Random(5), cv=2.0), LOG_NORMAL, fixed(1))
    wait_s, expected = 0.0, []
    for (before_s, at_s), tokens in zip(
        itertools.pairwise([trace.arrival_s[0], *trace.arrival_s]), [0, *trace.input_tokens[:-1]], strict=True
    ):
        wait_s = max(0.0, wait_s + tokens * TOKEN_S - (at_s - before_s))
        expected.append(wait_s)
    assert waits(trace) == pytest.approx(np.array(expected), abs=1e-9)


@pytest.mark.parametrize(("servers", "load"), [(2, 0.6), (4, 0.7)])
def test_mmc_waiting_is_erlang_c(servers: int, load: float) -> None:
    """Least work left over c servers is one queue before them, so the mean wait is Erlang C's."""
    draws = random.Random(3)
    tokens = np.array([max(1, round(draws.expovariate(1 / 2000))) for _ in range(REQUESTS)])
    mean_s = float(tokens.mean()) * TOKEN_S
    times = itertools.islice(Arrivals(load * servers / mean_s, random.Random(21)).times(), REQUESTS)
    trace = Trace("mmc", np.fromiter(times, dtype=float), tokens, np.ones(REQUESTS, dtype=int))
    offered = trace.rate_per_s * mean_s
    assert waits(trace, servers).mean() == pytest.approx(erlang_c_wait_s(servers, offered, mean_s), rel=0.02)


def erlang_c_wait_s(servers: int, offered: float, mean_s: float) -> float:
    """Mean wait of M/M/c with ``offered`` Erlangs."""
    blocked = 1.0  # Erlang B by its recursion
    for one in range(1, servers + 1):
        blocked = offered * blocked / (one + offered * blocked)
    waiting = blocked / (1 - offered / servers * (1 - blocked))
    return waiting * mean_s / (servers - offered)
