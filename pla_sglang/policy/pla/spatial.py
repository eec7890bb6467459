"""Spatial disaggregation (PLA-Serve section 3.2): short and long prefills go to instances of their own.

A request is classed by its *new* tokens on the candidate instance. It goes to the instance of its pool with the least
predicted TTFT. Beyond the paper: where the own pool would miss the TTFT target and the other pool would keep it, the
request spills over; a pool that has lost its last instance spills too. Decodes are placed by the least tokens.
"""

from __future__ import annotations

import dataclasses

from pla_sglang.policy.arrow.flips import least_running
from pla_sglang.policy.arrow.predictor import TtftPredictor
from pla_sglang.policy.checks import require
from pla_sglang.policy.decisions import Dispatch, Observer, Placement, PrefillSample
from pla_sglang.policy.fleet import FleetView, InstanceView, RequestView, Role
from pla_sglang.policy.reasons import FleetReason
from pla_sglang.policy.types import PrefillClass


@dataclasses.dataclass(frozen=True)
class SpatialKnobs:
    """``boundary_tokens``: new tokens at which a request is long; ``spill``: allow the other pool at all."""

    ttft_slo_s: float
    boundary_tokens: int = 256
    spill: bool = True

    def __post_init__(self) -> None:
        require("spatial ttft_slo_s", self.ttft_slo_s, 0, above=True)
        require("spatial boundary_tokens", self.boundary_tokens, 1)


class SpatialDispatcher(Observer):
    """Dispatcher over pools that ``PressureController`` sizes."""

    def __init__(self, knobs: SpatialKnobs, predictor: TtftPredictor) -> None:
        self.knobs = knobs
        self.predictor = predictor

    def dispatch(self, request: RequestView, fleet: FleetView, now_s: float) -> Dispatch:
        members = fleet.prefill_capable()
        best_cached = max((request.cached.get(instance.index, 0) for instance in members), default=0)
        new_tokens = request.input_tokens - min(best_cached, request.input_tokens - 1)
        wanted = PrefillClass.SHORT if new_tokens < self.knobs.boundary_tokens else PrefillClass.LONG
        own = self._best([i for i in members if i.length_class in (wanted, None)], request)
        slo_s = request.ttft_slo_s if request.ttft_slo_s is not None else self.knobs.ttft_slo_s
        left_s = slo_s - (now_s - request.arrival_s)
        own_s = None if own is None else self.predictor.ttft_s(request, own)
        reason = FleetReason.PLA_SHORT if wanted is PrefillClass.SHORT else FleetReason.PLA_LONG
        if own is not None and own_s is not None and (own_s <= left_s or not self.knobs.spill):
            return self._to(own, reason, own_s)
        other = self._best([i for i in members if i.length_class not in (wanted, None)], request)
        other_s = None if other is None else self.predictor.ttft_s(request, other)
        if other is not None and other_s is not None and (own_s is None or other_s <= left_s):
            return self._to(other, FleetReason.PLA_SPILL, other_s)
        if own is None or own_s is None:
            return Dispatch(None, None, FleetReason.NO_INSTANCE)
        return self._to(own, reason, own_s)

    def place_decode(self, request: RequestView, fleet: FleetView, now_s: float) -> Placement:
        source = request.prefilled_on
        if source is not None and source.role is Role.MIXED and fleet.is_ready(source):
            return Placement(source, FleetReason.KEEP_LOCAL)
        target = least_running(fleet.decode_capable() or fleet.ready)
        return Placement(target, FleetReason.NO_INSTANCE if target is None else FleetReason.LEAST_TOKENS)

    def _to(self, instance: InstanceView, reason: FleetReason, ttft_s: float) -> Dispatch:
        return Dispatch(instance, instance if instance.role is Role.MIXED else None, reason, ttft_s)

    def _best(self, pool: list[InstanceView], request: RequestView) -> InstanceView | None:
        if not request.cached:
            return self.predictor.least_delay(pool)
        return min(pool, key=lambda instance: self.predictor.ttft_s(request, instance), default=None)

    def on_prefill(self, sample: PrefillSample, now_s: float) -> None:
        self.predictor.on_prefill(sample)

    def on_first_token(self, request: RequestView, instance: InstanceView, now_s: float) -> None:
        self.predictor.on_first_token(request, now_s)
