"""Spatial disaggregation (PLA-Serve section 3.2): short and long prefills go to instances of their own.

A request is classed by its *new* tokens and its history on an instance, so the next turn of a conversation is short
where its history is cached, and long elsewhere. Instances that hold equally much of a prompt form a level. Within a
level the pool of the request's class decides: of its members the one with the least predicted TTFT. Beyond the paper:
where the best of its own would use more than ``spill_at`` of the TTFT target and one of another pool would not, or
where it has none of its own, the request spills over. A pool is a part of the fleet: without that its long prompts are
late while the others idle, and predictions are never exact, so waiting until the target itself is at stake is too late.

Also beyond the paper: a conversation stays with the holders, the level with the longest history, whatever their pool,
until their queue costs more than computing the prefix elsewhere. Both sides are predicted TTFTs: waiting and the
remaining prefill at the holder, waiting and the longer prefill on the instance that a lower level would give. Decodes
are placed by the least tokens.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from pla_sglang.common.checks import Range, check_fields, knob, require
from pla_sglang.policy.common.pools import least_running
from pla_sglang.policy.common.predictor import PredictingPolicy, TtftPredictor
from pla_sglang.policy.interface.decisions import Dispatch, Placement, PrefillSample
from pla_sglang.policy.interface.fleet import FleetView, InstanceView, RequestView, Role
from pla_sglang.policy.interface.prefill import PrefillClass
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.policy.pla.fitted_boundary import FittedBoundary


@dataclasses.dataclass(frozen=True)
class SpatialKnobs:
    """Inputs of the dispatcher.

    Attributes:
        ttft_slo_s: target of requests that bring none.
        spill_at: share of what is left of the target that the own pool may use up before the other one is looked at.
    """

    ttft_slo_s: float
    spill_at: float = knob(0.75, allowed=Range(0, 1, above=True))

    def __post_init__(self) -> None:
        check_fields(self, "spatial")
        require("spatial ttft_slo_s", self.ttft_slo_s, 0, above=True)


class Candidate(NamedTuple):
    """An instance for a request, and the predicted TTFT there."""

    instance: InstanceView
    ttft_s: float
    reason: FleetReason


class SpatialDispatcher(PredictingPolicy):
    """Dispatcher over pools that ``PressureController`` sizes."""

    def __init__(self, knobs: SpatialKnobs, predictor: TtftPredictor, boundary: FittedBoundary) -> None:
        self.knobs = knobs
        self.predictor = predictor
        self.boundary = boundary

    def on_prefill(self, sample: PrefillSample, now_s: float) -> None:
        super().on_prefill(sample, now_s)
        self.boundary.on_prefill(sample, now_s)

    def dispatch(self, request: RequestView, fleet: FleetView, now_s: float) -> Dispatch:
        slo_s = request.ttft_slo_s if request.ttft_slo_s is not None else self.knobs.ttft_slo_s
        left_s = self.knobs.spill_at * (slo_s - (now_s - request.arrival_s))
        best: Candidate | None = None
        for level in _levels(request, fleet.prefill_capable()):
            found = self._choose(request, level, left_s)
            if best is None or found.ttft_s <= best.ttft_s:
                best = found
            else:
                best = best._replace(reason=FleetReason.PLA_RECOMPUTE)
        if best is None:
            return Dispatch(None, None, FleetReason.NO_INSTANCE)
        both = best.instance if best.instance.role is Role.MIXED else None
        return Dispatch(best.instance, both, best.reason, best.ttft_s)

    def _choose(self, request: RequestView, level: list[InstanceView], left_s: float) -> Candidate:
        """The best of instances that hold equally much of the prompt; ``left_s`` as in ``spill_at``."""
        history = request.history_tokens(level[0])
        length_class = self.boundary.class_of(request.input_tokens - history, history)
        own = [instance for instance in level if instance.length_class in (None, length_class)]
        reason = FleetReason.PLA_SHORT if length_class is PrefillClass.SHORT else FleetReason.PLA_LONG
        best = self._soonest(own, request, reason)
        if best is not None and best.ttft_s <= left_s:
            return best
        others = [instance for instance in level if instance.length_class not in (None, length_class)]
        away = FleetReason.PLA_HOLDER if history and not own else FleetReason.PLA_SPILL
        other = self._soonest(others, request, away)
        if best is None or (other is not None and other.ttft_s <= left_s):
            assert other is not None, "a level has members"
            return other
        return best

    def _soonest(self, pool: list[InstanceView], request: RequestView, reason: FleetReason) -> Candidate | None:
        """The instance with the least predicted TTFT, the first of equals; None for an empty pool."""
        predictor = self.predictor
        if request.cached:
            best = min(pool, key=lambda instance: predictor.ttft_s(request, instance), default=None)
        else:
            best = predictor.least_delay(pool)
        return None if best is None else Candidate(best, predictor.ttft_s(request, best), reason)

    def place_decode(self, request: RequestView, fleet: FleetView, now_s: float) -> Placement:
        source = request.prefilled_on
        if source is not None and source.role is Role.MIXED and fleet.is_ready(source):
            return Placement(source, FleetReason.KEEP_LOCAL)
        target = least_running(fleet.decode_capable() or fleet.ready)
        return Placement(target, FleetReason.NO_INSTANCE if target is None else FleetReason.LEAST_TOKENS)


def _levels(request: RequestView, members: list[InstanceView]) -> list[list[InstanceView]]:
    """``members`` by how much of the prompt they hold, the least first."""
    if not members or not request.cached:
        return [members] if members else []
    levels: dict[int, list[InstanceView]] = {}
    for instance in members:
        levels.setdefault(request.history_tokens(instance), []).append(instance)
    return [levels[history] for history in sorted(levels)]
