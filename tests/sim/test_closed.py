"""A closed loop: as many requests under way as there are users, and each user's next one follows its last."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import pytest
from support.sim import Fcfs, Route, profile, simulation

from pla_sglang.sim.closed import ClosedLoop
from pla_sglang.sim.config import InstanceSpec
from pla_sglang.sim.errors import SimConfigError
from pla_sglang.sim.simulation import RunResult
from pla_sglang.workload.trace import Trace


def lengths(inputs: list[int], outputs: list[int], clients: list[int] | None = None) -> Trace:
    """Lengths only; the times are those of a trace in which nobody ever waits."""
    return Trace(
        "lengths",
        np.arange(len(inputs)) * 1e4,
        np.array(inputs),
        np.array(outputs),
        client=None if clients is None else np.array(clients),
    )


def run(trace: Trace, users: Mapping[int, int], *, most: int = 1 << 30) -> RunResult:
    made = simulation(
        trace,
        [InstanceSpec(profile())],
        route=Route(lambda fleet, request: fleet.instances[0]),
        policy=lambda: Fcfs(most=most),
        users=users,
    )
    result = made.run()
    made.cluster.check_integrity()
    return result


def test_one_user_sends_one_after_the_other() -> None:
    served = run(lengths([10, 20, 30], [3, 1, 2]), {0: 1}).served
    assert served.arrival_s[0] == 0
    assert served.arrival_s[1:] == pytest.approx(served.finish_s[:-1])
    assert served.ttft_s() == pytest.approx([0.010, 0.020, 0.030])  # 1 ms a token, and nobody else is there


def test_concurrency_is_kept_until_the_rows_run_out() -> None:
    draw = random.Random(4)
    trace = lengths([draw.randint(1, 50) for _ in range(200)], [draw.randint(1, 30) for _ in range(200)])
    served = run(trace, {0: 8}).served
    for now_s in np.linspace(0, np.sort(served.arrival_s)[-1], 400):
        under_way = ((served.arrival_s <= now_s) & (served.finish_s > now_s)).sum()
        assert under_way == 8


def test_kinds_of_users_do_not_take_each_others_rows() -> None:
    clients = [0, 1, 1, 0, 1, 1, 1, 0]
    served = run(lengths([100, 1, 1, 100, 1, 1, 1, 100], [1] * 8, clients), {0: 1, 1: 2}).served
    mine = np.flatnonzero(np.array(clients) == 0)
    assert served.arrival_s[mine][1:] == pytest.approx(served.finish_s[mine][:-1])
    assert sorted(served.arrival_s[np.array(clients) == 1])[:2] == [0, 0]


def test_more_users_than_rows() -> None:
    assert run(lengths([5, 5], [1, 1]), {0: 10}).served.arrival_s.tolist() == [0, 0]


def test_rows_that_are_refused_do_not_stop_their_user() -> None:
    made = simulation(
        lengths([10, 10_000, 10], [1, 1, 1]),
        [InstanceSpec(profile(kv_capacity_tokens=1000))],
        route=Route(lambda fleet, request: fleet.instances[0]),
        policy=Fcfs,
        users={0: 1},
    )
    assert made.run().stage == ["finished", "refused", "finished"]


@pytest.mark.parametrize(
    ("users", "message"),
    [
        ({0: 0, 1: 1}, "users of client 0 are 0; allowed: 1 and more"),
        ({0: 1}, "row 1 is of client 1; allowed: those with users"),
        ({0: 1, 1: 1, 2: 1}, "client 2 has users but no rows"),
    ],
)
def test_bad_users(users: Mapping[int, int], message: str) -> None:
    with pytest.raises(SimConfigError, match=message):
        ClosedLoop(lengths([1, 1], [1, 1], [0, 1]), users)
