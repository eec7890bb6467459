"""A closed loop of users: each sends the next request of the trace when its last one has ended.

Papers that speak of a "concurrency" measure this way. The trace then gives lengths and their order, not times. Users
are of a kind, the trace's ``client`` (0 where it has none): users of one kind send the rows of that kind only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from pla_sglang.sim.errors import SimConfigError
from pla_sglang.workload.trace import Trace


class ClosedLoop:
    """Which row comes next.

    Args:
        trace: rows in the order in which they are sent, those of each kind by themselves.
        users: kind -> how many users of it there are at once.

    Raises:
        SimConfigError: fewer than one user of a kind, a kind without rows, or rows of a kind without users.
    """

    def __init__(self, trace: Trace, users: Mapping[int, int]) -> None:
        kinds = [0] * len(trace) if trace.client is None else trace.client.tolist()
        self._kinds: list[int] = kinds
        self._rows: dict[int, deque[int]] = {kind: deque() for kind in users}
        for row, kind in enumerate(kinds):
            if kind not in self._rows:
                raise SimConfigError(f"row {row} is of client {kind}; allowed: those with users, {sorted(users)}")
            self._rows[kind].append(row)
        for kind, count in users.items():
            if count < 1:
                raise SimConfigError(f"users of client {kind} are {count}; allowed: 1 and more")
            if not self._rows[kind]:
                raise SimConfigError(f"client {kind} has users but no rows; allowed: clients of the trace")
        self._users = dict(users)

    def first(self) -> list[int]:
        """The rows that are sent at the start, in order of rows."""
        return sorted(
            self._rows[kind].popleft() for kind, count in self._users.items() for _ in range(self._fit(kind, count))
        )

    def _fit(self, kind: int, count: int) -> int:
        return min(count, len(self._rows[kind]))

    def after(self, row: int) -> int | None:
        """``row`` has ended: the row that its user sends now; None when none of its kind is left."""
        rows = self._rows[self._kinds[row]]
        return rows.popleft() if rows else None
