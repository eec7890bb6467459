"""A closed loop: as many requests under way as there are users, and each user's next one follows its last."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from support.sim import Fcfs, Route, profile, simulation

from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.core.closed import ClosedLoop
from pla_sglang.sim.core.config import InstanceSpec
from pla_sglang.sim.core.simulation import RunResult
from pla_sglang.sim.workload.trace import Trace


def lengths(inputs: list[int], outputs: list[int], clients: list[int] | None = None) -> Trace:
    """Lengths only; the times are those of a trace in which nobody ever waits."""
    return Trace(
        "lengths",
        np.arange(len(inputs)) * 1e4,
        np.array(inputs),
        np.array(outputs),
        client=None if clients is None else np.array(clients),
    )


def run(
    trace: Trace, users: Mapping[int, int], *, most: int = 1 << 30, pauses_s: Sequence[float] | None = None
) -> RunResult:
    made = simulation(
        trace,
        [InstanceSpec(profile())],
        route=Route(lambda fleet, request: fleet.instances[0]),
        policy=lambda: Fcfs(most=most),
        users=users,
        pauses_s=pauses_s,
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


def talks(*turns: int) -> Trace:
    """Conversations with so many turns, rows by turn: the first of all, the second of all that have one..."""
    rows = [(turn, talk) for turn in range(max(turns)) for talk, count in enumerate(turns) if turn < count]
    plain = lengths([10] * len(rows), [1] * len(rows))
    return dataclasses.replace(plain, session=np.array([talk for _, talk in rows]))


def test_a_user_ends_a_conversation_before_the_next() -> None:
    trace = talks(3, 1, 2)
    served = run(trace, {0: 1}).served
    assert trace.session is not None
    assert trace.session[np.argsort(served.arrival_s)].tolist() == [0, 0, 0, 1, 2, 2]
    loop = ClosedLoop(trace, {0: 2})
    assert loop.first() == [0, 1]
    assert (loop.after(1), loop.after(0), loop.after(2)) == (2, 3, 4)
    assert (loop.after(4), loop.after(3), loop.after(5)) == (None, 5, None)


def test_users_pause_before_they_send() -> None:
    served = run(lengths([10, 20, 30], [1, 1, 1]), {0: 1}, pauses_s=[0.5, 1.0, 2.0]).served
    assert served.arrival_s.tolist() == pytest.approx([0.5, 1.51, 3.53])
    with pytest.raises(ConfigError, match="1 pauses; allowed: one for each of the 2 rows"):
        run(lengths([1, 1], [1, 1]), {0: 1}, pauses_s=[0.0])
    with pytest.raises(ConfigError, match=r"pause before row 1, seconds -1\.0 is out of range"):
        run(lengths([1, 1], [1, 1]), {0: 1}, pauses_s=[0.0, -1.0])


@pytest.mark.parametrize(
    ("users", "message"),
    [
        ({0: 0, 1: 1}, "users of client 0 are 0; allowed: 1 and more"),
        ({0: 1}, "row 1 is of client 1; allowed: those with users"),
        ({0: 1, 1: 1, 2: 1}, "client 2 has users but no rows"),
    ],
)
def test_bad_users(users: Mapping[int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClosedLoop(lengths([1, 1], [1, 1], [0, 1]), users)
