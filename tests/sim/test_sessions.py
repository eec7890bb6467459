"""Sessions as closed loops: each request follows the answer before it, the first ones come at their times."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
from support.sim import Fcfs, Route, profile, simulation

from pla_sglang.policy.interface.fleet import FleetView, InstanceView, RequestView
from pla_sglang.sim.core.config import InstanceSpec
from pla_sglang.sim.core.errors import SimError
from pla_sglang.sim.core.experiment import Experiment, run_experiment
from pla_sglang.sim.core.simulation import RunResult
from pla_sglang.sim.core.upper_bound import least_instances
from pla_sglang.sim.metrics.goodput import Served, Slo, goodput, job_times_s
from pla_sglang.sim.workload.trace import Trace, sort_by_arrival

SLO = Slo(1.0, 0.05)


def sessions(count: int = 12, seed: int = 3) -> Trace:
    """Of 1 to 6 requests, think times up to 3 s; answers take 1 s in the recording."""
    draw = random.Random(seed)
    rows = []
    for session in range(count):
        at_s = 4.0 * session
        for turn in range(draw.randint(1, 6)):
            think_s = draw.random() * 3 if turn else 0.0
            at_s += think_s + (1.0 if turn else 0.0)
            rows.append((at_s, session, turn, think_s, draw.randint(5, 60), draw.randint(1, 20)))
    names = ("arrival_s", "session", "turn", "think_s", "input_tokens", "output_tokens")
    columns = {name: np.array(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}
    return Trace("sessions", **sort_by_arrival(columns)).require_requests()


def run(trace: Trace) -> RunResult:
    made = simulation(
        trace,
        [InstanceSpec(profile(kv_capacity_tokens=5000))],
        route=Route(lambda fleet, request: fleet.instances[0]),
        policy=Fcfs,
    )
    result = made.run()
    made.cluster.check_integrity()
    return result


def test_a_request_follows_the_answer_before_it_after_its_think_time() -> None:
    trace = sessions()
    served = run(trace).served
    assert trace.session is not None
    assert trace.think_s is not None
    for session in set(trace.session.tolist()):
        mine = np.flatnonzero(trace.session == session)
        assert served.arrival_s[mine[0]] == trace.arrival_s[mine[0]]
        follows = served.finish_s[mine[:-1]] + trace.think_s[mine[1:]]
        assert served.arrival_s[mine[1:]] == pytest.approx(follows)


def test_what_is_refused_does_not_end_its_session() -> None:
    trace = sessions()
    tokens = trace.input_tokens.copy()
    tokens[0] = 10_000  # more than the memory
    assert trace.session is not None
    mine = np.flatnonzero(trace.session == trace.session[0])
    stages = run(dataclasses.replace(trace, input_tokens=tokens)).stage
    assert [stages[row] for row in mine] == ["refused", *["finished"] * (len(mine) - 1)]


def test_clients_of_a_trace_are_no_users() -> None:
    trace = sessions()
    clients = np.arange(len(trace)) % 3
    assert run(dataclasses.replace(trace, client=clients)).digest() == run(trace).digest()


def test_long_pauses_between_sessions_are_left_out_as_in_an_open_loop() -> None:
    trace = sessions(3)
    far = trace.scale_rate(1e-4)
    result = run(far)
    assert set(result.stage) == {"finished"}
    starts = far.session_starts()
    assert result.served.arrival_s[starts] == pytest.approx(far.arrival_s[starts])


def test_a_request_that_nobody_serves_ends_the_run_with_an_error() -> None:
    def route(fleet: FleetView, request: RequestView) -> InstanceView | None:
        return None

    made = simulation(sessions(), [InstanceSpec(profile())], route=Route(route), policy=Fcfs)  # type: ignore[arg-type]
    with pytest.raises(SimError, match="requests can never end"):
        made.run()


def test_open_loop_is_a_choice() -> None:
    trace = sessions()
    closed, opened = (
        run_experiment(Experiment("least-tokens", SLO, instances=1, sessions=kind), trace)
        for kind in ("closed", "open")
    )
    assert opened.result.served.arrival_s.tolist() == trace.arrival_s.tolist()
    assert closed.result.served.arrival_s.tolist() != trace.arrival_s.tolist()
    for outcome in (closed, opened):
        jobs_s = job_times_s(outcome.result.served, trace.session)  # type: ignore[arg-type]
        assert outcome.figures.job_p50_s == pytest.approx(np.median(jobs_s))


def test_an_experiment_scales_the_starts_of_sessions() -> None:
    trace = sessions()
    outcome = run_experiment(Experiment("least-tokens", SLO, instances=1).at_rate(2 * trace.rate_per_s), trace)
    assert outcome.rate_per_s == pytest.approx(2 * trace.rate_per_s)
    starts = trace.at_rate(2 * trace.rate_per_s).session_starts()
    assert outcome.result.served.arrival_s[starts] == pytest.approx(4.0 * np.arange(12) / 2)


def test_job_times() -> None:
    served = Served(
        np.array([0.0, 5.0, 1.0, 2.0]),
        np.array([1.0, 6.0, 2.0, math.nan]),
        np.array([3.0, 9.0, 2.5, math.nan]),
        np.array([2, 2, 2, 2]),
    )
    jobs_s = job_times_s(served, np.array([7, 7, 1, 2]))
    assert math.isnan(jobs_s[1])
    assert jobs_s[[0, 2]].tolist() == [1.5, 9.0]
    figures = goodput(served, SLO, np.array([7, 7, 1, 2]))
    assert (figures.job_p50_s, figures.job_p99_s) == (pytest.approx(5.25), pytest.approx(8.925))
    assert math.isnan(goodput(served, SLO).job_p50_s)


def test_closed_loops_have_no_bound_by_work() -> None:
    assert least_instances(sessions(), SLO, profile(), target=0.9, most=8) == 1
