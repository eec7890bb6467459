"""What is asked for when a fleet is planned."""

from __future__ import annotations

import dataclasses

from pla_sglang.sim.metrics.goodput import Slo

INSTANCES_MOST = 512


@dataclasses.dataclass(frozen=True)
class PlanTask:
    """What is asked for.

    Attributes:
        target: share of the requests that must meet both latency targets.
        tolerance: relative width at which the search for the knee ends.
        instances_most: where searches for a number end.
        beyond_profile: also where more requests than ``target`` spares are outside of what the profile was made from.
        gpu_hour_price: in any currency; None: no costs are told.
    """

    rate_per_s: float
    slo: Slo
    target: float
    tolerance: float
    instances_most: int = INSTANCES_MOST
    beyond_profile: bool = False
    gpu_hour_price: float | None = None
