"""Where queueing theory is exact, the simulator agrees with it: with one queue before the servers, wait by wait."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from support.sim import Fcfs, Route, profile, simulation

from pla_sglang.policy.interface.fleet import FleetView, InstanceView, RequestView
from pla_sglang.sim.core.config import InstanceSpec
from pla_sglang.sim.workload import Arrivals, LengthModel, generated_trace
from pla_sglang.sim.workload.lengths import fixed
from pla_sglang.sim.workload.trace import Trace

TOKEN_S = 1e-3
SIMULATED = 8_000  # each wait is compared, so that no more are needed
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


def waits_of_one_queue(trace: Trace, servers: int = 1) -> np.ndarray:
    """Each begins at the server that is free first; of one server Lindley's W[n+1] = max(0, W[n] + S[n] - gap)."""
    free_s, waits_s = [0.0] * servers, []
    for at_s, tokens in zip(trace.arrival_s.tolist(), trace.input_tokens.tolist(), strict=True):
        begins_s = max(at_s, heapq.heappop(free_s))
        heapq.heappush(free_s, begins_s + TOKEN_S * tokens)
        waits_s.append(begins_s - at_s)
    return np.array(waits_s)


def mg1_trace(requests: int) -> Trace:
    """100 tokens on average, at load 0.5."""
    return generated_trace(requests, Arrivals(5.0, random.Random(11)), TWO_POINT, fixed(1))


def bursty_trace(requests: int) -> Trace:
    return generated_trace(requests, Arrivals(8.0, random.Random(5), cv=2.0), LOG_NORMAL, fixed(1))


def mmc_trace(requests: int, servers: int, load: float) -> Trace:
    draws = random.Random(3)
    tokens = np.array([max(1, round(draws.expovariate(1 / 2000))) for _ in range(requests)])
    mean_s = float(tokens.mean()) * TOKEN_S
    times = itertools.islice(Arrivals(load * servers / mean_s, random.Random(21)).times(), requests)
    return Trace("mmc", np.fromiter(times, dtype=float), tokens, np.ones(requests, dtype=int))


@pytest.mark.parametrize(
    ("make_trace", "servers"),
    [
        pytest.param(mg1_trace, 1, id="M/G/1"),
        pytest.param(bursty_trace, 1, id="G/G/1"),
        pytest.param(functools.partial(mmc_trace, servers=2, load=0.6), 2, id="M/M/2"),
        pytest.param(functools.partial(mmc_trace, servers=4, load=0.7), 4, id="M/M/4"),
    ],
)
def test_every_single_wait_is_that_of_one_queue(make_trace: Callable[[int], Trace], servers: int) -> None:
    """Least work left over several servers is one queue before them: not on the mean only, but request by request."""
    trace = make_trace(SIMULATED)
    expected = waits_of_one_queue(trace, servers)
    assert np.count_nonzero(expected) > SIMULATED / 10
    assert waits(trace, servers) == pytest.approx(expected, abs=1e-9)
