"""When the running requests of an instance are due their next tokens, without visiting them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Container

from pla_sglang.sim.core.request import SimRequest


class TokenDeadlines:
    """The first next-token deadline of a running batch.

    Token g + 1 of a request with TPOT target T is due g * T after its first token, or T after its last one if that is
    later: who is behind its target already is due as if it were not, so that nobody waits for what cannot be made up.
    All members get a token in each step, so their deadlines keep their order from step to step: one heap a target.

    Args:
        members: who runs; entries of others are dropped when they come up.
    """

    def __init__(self, members: Container[SimRequest]) -> None:
        self._members = members
        self._by_target: dict[float, list[tuple[float, int, int, SimRequest]]] = {}
        self._sequence = 0

    def add(self, request: SimRequest) -> None:
        """``request`` has joined; its ``join_step`` says when. An infinite target is none."""
        target_s, first_s = request.fleet.tpot_slo_s, request.first_token_s
        if target_s is None or math.isinf(target_s) or first_s is None or request.join_step is None:
            return
        self._sequence += 1
        key_s = first_s + (request.done_tokens - request.join_step) * target_s
        entry = (key_s, self._sequence, request.join_step, request)
        heapq.heappush(self._by_target.setdefault(target_s, []), entry)

    def first_s(self, step: int, last_token_s: float) -> float | None:
        """The first deadline after ``step`` steps, whose last ended at ``last_token_s``; None without targets."""
        first_s: float | None = None
        for target_s, entries in self._by_target.items():
            self._drop_gone(entries)
            if entries:
                due_s = max(entries[0][0] + step * target_s, last_token_s + target_s)
                first_s = due_s if first_s is None else min(first_s, due_s)
        return first_s

    def least_target_s(self) -> float | None:
        """The least target of the members; None without targets."""
        for entries in self._by_target.values():
            self._drop_gone(entries)
        return min((target_s for target_s, entries in self._by_target.items() if entries), default=None)

    def _drop_gone(self, entries: list[tuple[float, int, int, SimRequest]]) -> None:
        while entries and not (entries[0][3] in self._members and entries[0][3].join_step == entries[0][2]):
            heapq.heappop(entries)
