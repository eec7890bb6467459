"""Spatial disaggregation (PLA-Serve section 3.2): short and long prefills go to instances of their own.

A request is classed by its *new* tokens on the candidate instance, so the next turn of a conversation is short where
its history is cached, and long elsewhere. Instances whose pool is that of its class there are its own; it goes to the
one with the least predicted TTFT. Beyond the paper: where the best of its own would use more than ``spill_at`` of the
TTFT target and one of another pool would not, or where it has none of its own, the request spills over. A pool is a
part of the fleet: without that its longs are late while the others idle, and predictions are never exact, so waiting
until the target itself is at stake is too late. Decodes are placed by the least tokens.
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
    """Inputs of the dispatcher.

    Attributes:
        ttft_slo_s: target of requests that bring none.
        boundary_tokens: new tokens at which a request is long.
        spill: allow the other pool at all.
        spill_at: share of what is left of the target that the own pool may use up before the other one is looked at.
    """

    ttft_slo_s: float
    boundary_tokens: int = 256
    spill: bool = True
    spill_at: float = 0.75

    def __post_init__(self) -> None:
        require("spatial ttft_slo_s", self.ttft_slo_s, 0, above=True)
        require("spatial boundary_tokens", self.boundary_tokens, 1)
        require("spatial spill_at", self.spill_at, 0, 1, above=True)


class SpatialDispatcher(Observer):
    """Dispatcher over pools that ``PressureController`` sizes."""

    def __init__(self, knobs: SpatialKnobs, predictor: TtftPredictor) -> None:
        self.knobs = knobs
        self.predictor = predictor

    def dispatch(self, request: RequestView, fleet: FleetView, now_s: float) -> Dispatch:
        members = fleet.prefill_capable()
        own, others = self._split(request, members)
        best = self._best(own, request)
        slo_s = request.ttft_slo_s if request.ttft_slo_s is not None else self.knobs.ttft_slo_s
        left_s = self.knobs.spill_at * (slo_s - (now_s - request.arrival_s))
        best_s = None if best is None else self.predictor.ttft_s(request, best)
        if best is not None and best_s is not None and (best_s <= left_s or not self.knobs.spill):
            return self._to(best, self._reason(request, best), best_s)
        other = self._best(others, request)
        other_s = None if other is None else self.predictor.ttft_s(request, other)
        if other is not None and other_s is not None and (best_s is None or other_s <= left_s):
            return self._to(other, FleetReason.PLA_SPILL, other_s)
        if best is None or best_s is None:
            return Dispatch(None, None, FleetReason.NO_INSTANCE)
        return self._to(best, self._reason(request, best), best_s)

    def _class_on(self, request: RequestView, instance: InstanceView) -> PrefillClass:
        short = request.new_tokens(instance) < self.knobs.boundary_tokens
        return PrefillClass.SHORT if short else PrefillClass.LONG

    def _reason(self, request: RequestView, instance: InstanceView) -> FleetReason:
        short = self._class_on(request, instance) is PrefillClass.SHORT
        return FleetReason.PLA_SHORT if short else FleetReason.PLA_LONG

    def _split(
        self, request: RequestView, members: list[InstanceView]
    ) -> tuple[list[InstanceView], list[InstanceView]]:
        """Instances whose pool the request belongs to, and the rest."""
        own: list[InstanceView] = []
        others: list[InstanceView] = []
        for instance in members:
            fits = instance.length_class in (None, self._class_on(request, instance))
            (own if fits else others).append(instance)
        return own, others

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
