"""A closed loop of users: each sends the next request of the trace when its last one has ended.

Papers that speak of a "concurrency" measure this way. The trace then gives lengths and their order, not times. Users
are of a kind, the trace's ``client`` (0 where it has none): users of one kind send the rows of that kind only. Where
the trace has sessions, a user goes through one conversation, turn by turn, before it takes up the next.

A trace with think times is a closed loop of its own (``session_loop``): each session has a user, who comes when the
session starts and sends each further request its think time after the answer before it.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping

from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.workload.trace import Trace


class ClosedLoop:
    """Which row comes next.

    Args:
        trace: rows in the order in which they are sent, those of each kind by themselves.
        users: kind -> how many users of it there are at once.

    Raises:
        ConfigError: fewer than one user of a kind, a kind without rows, or rows of a kind without users.
    """

    def __init__(self, trace: Trace, users: Mapping[int, int]) -> None:
        kinds = [0] * len(trace) if trace.client is None else trace.client.tolist()
        self._kinds: list[int] = kinds
        sessions = range(len(trace)) if trace.session is None else trace.session.tolist()
        talks: dict[int, dict[int, deque[int]]] = {kind: {} for kind in users}  # by kind and session: rows to send
        for row, (kind, session) in enumerate(zip(kinds, sessions, strict=True)):
            if kind not in talks:
                raise ConfigError(f"row {row} is of client {kind}; allowed: those with users, {sorted(users)}")
            talks[kind].setdefault(session, deque()).append(row)
        for kind, count in users.items():
            if count < 1:
                raise ConfigError(f"users of client {kind} are {count}; allowed: 1 and more")
            if not talks[kind]:
                raise ConfigError(f"client {kind} has users but no rows; allowed: clients of the trace")
        self._talks = {kind: deque(by_session.values()) for kind, by_session in talks.items()}  # not begun
        self._rest: dict[int, deque[int]] = {}  # by row under way: what its user sends after it
        self._users = dict(users)

    def first(self) -> list[int]:
        """The rows that are sent at the start, in order of rows."""
        places = ((talks, min(self._users[kind], len(talks))) for kind, talks in self._talks.items())
        return sorted(self._next_of(talks.popleft()) for talks, count in places for _ in range(count))

    def after(self, row: int) -> int | None:
        """``row`` has ended: the row that its user sends now; None when none of its kind is left."""
        rest, talks = self._rest.pop(row), self._talks[self._kinds[row]]
        if rest:
            return self._next_of(rest)
        return self._next_of(talks.popleft()) if talks else None

    def _next_of(self, talk: deque[int]) -> int:
        row = talk.popleft()
        self._rest[row] = talk
        return row


def session_loop(trace: Trace) -> tuple[ClosedLoop, list[float]]:
    """The loop of a trace with think times, and by row how long its user waits before it sends it.

    For the first row of a session that is its arrival time: users of sessions that start later wait for that.
    """
    assert trace.think_s is not None
    starts, waits_s = trace.session_starts(), trace.think_s.copy()
    waits_s[starts] = trace.arrival_s[starts]
    return ClosedLoop(dataclasses.replace(trace, client=None), {0: len(starts)}), waits_s.tolist()
