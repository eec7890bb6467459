"""What policies can do to a simulated fleet: all of it."""

from __future__ import annotations

from collections import Counter

from pla_sglang.policy.interface.decisions import Migrate, ScaleTo, SetLengthClass, SetRole
from pla_sglang.policy.runner import Effects, Refusal
from pla_sglang.sim.core.fleet import SimFleet
from pla_sglang.sim.core.ledger import RequestCounts
from pla_sglang.sim.core.request import SimStage


class ClusterEffects(Effects):
    """``counts`` gets ``migrations_refused``, which is in the result of a run."""

    def __init__(self, fleet: SimFleet, ledger: RequestCounts, counts: Counter[str]) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._counts = counts

    def set_role(self, action: SetRole, now_s: float) -> Refusal | None:
        self._fleet.set_role(action.instance, action.role)
        return None

    def set_length_class(self, action: SetLengthClass, now_s: float) -> Refusal | None:
        action.instance.length_class = action.length_class
        return None

    def scale(self, action: ScaleTo, now_s: float) -> Refusal | None:
        self._fleet.scale(action)
        return None

    def migrate(self, action: Migrate, now_s: float) -> Refusal | None:
        request = self._ledger.live.get(action.rid)
        source, target = self._fleet.of(action.source), self._fleet.of(action.target)
        movable = (
            request is not None
            and request.stage is SimStage.DECODE
            and request.target is None
            and request in source.decoding.running.members
            and target is not source
            and self._fleet.is_ready(target)
        )
        if request is None or not movable or not target.incoming.has_room(action.tokens):
            self._counts["migrations_refused"] += 1
            return Refusal.NOT_MOVABLE
        request.target = target.view.index
        request.reserved = False
        source.part_with(request)
        return None
