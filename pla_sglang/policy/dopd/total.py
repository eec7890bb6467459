"""DOPD's planner beside a policy whose instances have no roles, or change them: it plans how many there are in all.

The total is n_p + n_d of Algorithm 2; what each instance does is the policy's. Where that is DOPD itself, the roles
follow the ratio of the same plan, as labels (``labels.py``). Where every instance does both phases, a phase does not
need whole instances: the total is ``FleetPlan.united``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pla_sglang.policy.common.forecast import Forecaster
from pla_sglang.policy.common.load_meter import LoadSample
from pla_sglang.policy.common.scaling import Scaling, Wanted
from pla_sglang.policy.dopd.labels import RatioController
from pla_sglang.policy.dopd.planner import FleetPlan, Planner
from pla_sglang.policy.interface.decisions import FleetAction, ScaleTo
from pla_sglang.policy.interface.fleet import FleetView, Role
from pla_sglang.policy.interface.reasons import FleetReason


class TotalController(RatioController):
    """``follow_ratio``: roles change with the plan; False: the policy sees to them, and to how engines batch.

    ``bounds``: least and most instances.
    """

    def __init__(
        self, planner: Planner, forecaster: Callable[[], Forecaster], bounds: tuple[int, int], *, follow_ratio: bool
    ) -> None:
        super().__init__(planner, forecaster, looks_ahead=True)
        self._total = Scaling(dataclasses.replace(self.limits, least=bounds[0], most=bounds[1]))
        self._follow_ratio = follow_ratio

    def tick(self, fleet: FleetView, now_s: float) -> list[FleetAction]:
        actions = super().tick(fleet, now_s)
        if not self._follow_ratio:
            self.batching = None
        return actions

    def follow(self, load: LoadSample, fleet: FleetView, now_s: float = 0.0) -> list[FleetAction]:
        plan, careful = self.plan_twice(load)
        wanted = Wanted(
            _total(plan, fleet),
            _total(careful, fleet),
            FleetReason.DOPD_TOTAL,
            FleetReason.DOPD_UNCHANGED,
            FleetReason.DOPD_HYSTERESIS,
        )
        action = self._total.decide(wanted, fleet, now_s)
        if not self._follow_ratio:
            return [action]
        leaving = frozenset(action.drain) if isinstance(action, ScaleTo) else frozenset()
        return [action, *super().follow(load, fleet.without(leaving), now_s)]


def _total(plan: FleetPlan, fleet: FleetView) -> int:
    does_both = bool(fleet.ready) and len(fleet.by_role[Role.MIXED]) == len(fleet.ready)
    return plan.united if does_both else plan.prefill + plan.decode
