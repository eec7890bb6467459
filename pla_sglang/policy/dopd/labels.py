"""DOPD's ratio on a fleet of a fixed size: ADJUST_PD of line 15 by roles that change and not by instances that come.

Of a plan only the ratio counts: the instances are shared in proportion to it, each phase keeping one. A phase gives
instances away at once if a load higher by ``down_margin`` would leave it enough; else only after ``down_intervals``
plans in a row that want it, as where instances are stopped.
"""

from __future__ import annotations

from pla_sglang.policy.common.load_meter import LoadSample
from pla_sglang.policy.common.pools import PoolEvent, can_settle, least_loaded, movable, switch_role
from pla_sglang.policy.dopd.planner import DopdController, FleetPlan
from pla_sglang.policy.interface.decisions import FleetAction, Hold
from pla_sglang.policy.interface.fleet import FleetView, Role
from pla_sglang.policy.interface.reasons import FleetReason

# As often as Arrow looks, so that both find an instance without old work as soon. It is not part of the combined
# policy, whose Arrow does that itself.
SETTLE_S = 0.25


def share_prefills(plan: FleetPlan, instances: int) -> int:
    """How many of ``instances``, two or more, prefill."""
    return min(max(round(instances * plan.prefill / (plan.prefill + plan.decode)), 1), instances - 1)


class RatioController(DopdController):
    """``DopdController`` that changes roles."""

    _waits = 0  # plans in a row that wanted instances from a phase that could not spare them

    def follow(self, load: LoadSample, fleet: FleetView, now_s: float = 0.0) -> list[FleetAction]:
        roles, knobs = fleet.by_role, self.planner.knobs
        prefills = roles[Role.PREFILL] + roles[Role.DECODE_TO_PREFILL]
        decodes = roles[Role.DECODE] + roles[Role.PREFILL_TO_DECODE]
        instances = len(prefills) + len(decodes)
        if instances < 2:
            return [Hold(FleetReason.DOPD_UNCHANGED)]
        plan, careful = self.plan_twice(load)
        more = share_prefills(plan, instances) - len(prefills)
        if not more:
            self._waits = 0
            return [Hold(FleetReason.DOPD_UNCHANGED)]
        givers, needed = (decodes, careful.decode) if more > 0 else (prefills, careful.prefill)
        self._waits += 1
        if needed > len(givers) - abs(more) and self._waits < knobs.down_intervals:
            return [Hold(FleetReason.DOPD_HYSTERESIS)]
        self._waits = 0
        event = PoolEvent.TO_PREFILL if more > 0 else PoolEvent.TO_DECODE
        chosen = least_loaded(movable(givers), abs(more))
        flips: list[FleetAction] = [switch_role(instance, event, FleetReason.DOPD_RATIO) for instance in chosen]
        return flips or [Hold(FleetReason.DOPD_UNCHANGED)]


class Settling:
    """A controller for members of transitional pools: those without old work left have their new role alone."""

    interval_s = SETTLE_S

    def tick(self, fleet: FleetView, now_s: float) -> list[FleetAction]:
        return [
            switch_role(instance, PoolEvent.SETTLE, FleetReason.DRAINED)
            for role in (Role.PREFILL_TO_DECODE, Role.DECODE_TO_PREFILL)
            for instance in fleet.by_role[role]
            if can_settle(instance)
        ]
