"""Rows of a closed loop count while all of its users are there."""

from __future__ import annotations

import numpy as np
import pytest
from support.sim import Fcfs, Route, profile, simulation

from bench.lab.world import while_all_are_there
from pla_sglang.sim.core.config import InstanceSpec
from pla_sglang.sim.metrics.goodput import Served
from pla_sglang.sim.workload.trace import Trace


def serve(users: int, *, session: list[int] | None = None, rows: int = 0) -> Served:
    """Prompts of ten tokens, answers of one; rows of a session are its turns, in order."""
    count = rows if session is None else len(session)
    kept = None if session is None else np.array(session)
    trace = Trace("lengths", np.arange(count) * 1e4, np.full(count, 10), np.ones(count, dtype=np.int64), session=kept)
    route = Route(lambda fleet, request: fleet.instances[0])
    return simulation(trace, [InstanceSpec(profile())], route=route, policy=Fcfs, users={0: users}).run().served


def test_rows_count_while_all_users_are_there() -> None:
    """Two users, one with a conversation of ten turns: after the short ones it is alone."""
    served = serve(2, session=[0, 1, 2, 0, 1, 2, *[0] * 8])
    counted = while_all_are_there(served, 2)
    assert len(counted) == 9  # four passes of two, and the one row that comes as the other user ends
    assert counted.ttft_s()[:8] == pytest.approx(0.02)
    assert counted.ttft_s().mean() > served.ttft_s().mean()
    independent = serve(4, rows=20)
    assert while_all_are_there(independent, 4) is independent
