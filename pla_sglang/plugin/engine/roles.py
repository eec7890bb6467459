"""Role of one instance in a spatial pool (PLA-Serve section 3.2), and what of its former role is still to finish.

A role says which class a router or controller sends here. It refuses nothing: whatever comes is served by the temporal
policy, which lets short prompts pass between the chunks of a long, so a stray costs its own class little. A switch
therefore takes effect at once; the instance is *draining* until the requests of the other class that waited then have
had their prefill.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from pla_sglang.plugin.config import ROLES
from pla_sglang.policy.interface.prefill import PrefillClass, WaitingView

MIXED = ROLES[0]


class RoleState:
    """Owned by one scheduler. Requests are told apart by their id."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.switches = 0
        self.switched_s: float | None = None  # wall clock, for people
        self._leaving: set[str] = set()

    def switch(self, role: str, short_prompts: Iterable[WaitingView], long_prompts: Iterable[WaitingView]) -> None:
        """From now on ``role``; ``short_prompts`` and ``long_prompts`` wait or are under way. The same role again
        changes nothing."""
        if role == self.role:
            return
        self.role = role
        self.switches += 1
        self.switched_s = time.time()
        strays = {PrefillClass.SHORT.value: long_prompts, PrefillClass.LONG.value: short_prompts}.get(role, ())
        self._leaving = {view.rid for view in strays}

    def draining(self, unfinished: Iterable[str]) -> int:
        """How many requests of the former class are left among those whose prefill is not done."""
        if self._leaving:
            self._leaving.intersection_update(unfinished)
        return len(self._leaving)

    def to_dict(self, unfinished: Iterable[str]) -> dict[str, Any]:
        return {
            "role": self.role,
            "draining": self.draining(unfinished),
            "switches": self.switches,
            "switched_at": self.switched_s,
        }
