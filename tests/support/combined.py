"""The combined policy's two parts for a fleet without roles, at targets that can be checked in the head.

Prefill takes 10 ms + 1 ms a token; TTFT target 1 s, TPOT 50 ms, Max Running Tokens 1,000.
"""

from __future__ import annotations

from typing import Any

from support.fleets import LinearSteps, predictor

from pla_sglang.policy.arrow.policy import ArrowKnobs, ArrowPolicy
from pla_sglang.policy.combined.colocation import ColocationKnobs, ColocationMode
from pla_sglang.policy.combined.cost import CostKnobs, InstanceCost
from pla_sglang.policy.combined.policy import CombinedKnobs, CombinedPolicy, Parts
from pla_sglang.policy.common.eviction import EvictionCost, EvictionKnobs
from pla_sglang.policy.interface.step_times import StepTimes

TTFT_S, TPOT_S = 1.0, 0.050


def arrow(ttft_slo_s: float = TTFT_S, tpot_slo_s: float = TPOT_S) -> ArrowPolicy:
    return ArrowPolicy(ArrowKnobs(ttft_slo_s, tpot_slo_s, {"": 1000}), predictor())


def cost(over: ArrowPolicy | None = None, *, small_first: bool = False, **knobs: Any) -> InstanceCost:
    over = over or arrow()
    eviction = EvictionCost(EvictionKnobs(), over.predictor)
    return InstanceCost(CostKnobs(**knobs), over, LinearSteps(), eviction, small_first=small_first)


def mode(
    steps: StepTimes,
    over: ArrowPolicy | None = None,
    *,
    mixes: bool = True,
    **knobs: Any,
) -> ColocationMode:
    """The last request and the last answer are all that it knows of the traffic, unless ``memory`` is given."""
    given = {"memory": 1, "prior": 1, "refresh": 1, **knobs}
    return ColocationMode(ColocationKnobs(**given), over or arrow(), steps, mixes=mixes)


def combined(part: InstanceCost, over: ArrowPolicy, unite: ColocationMode | None = None) -> CombinedPolicy:
    """``over``: of ``part``. Without ``unite`` the fleet stays colocated: no tick is made."""
    unite = unite or mode(LinearSteps(), over)
    return CombinedPolicy(CombinedKnobs(), Parts(over, unite=unite, cost=part))
