"""DOPD's dispatch: the router of section V-B, and in-place prefill of ultra-short prompts (section V-E).

The decode instance is chosen on arrival, by cache locality and load: least of

    cost = ``load_weight`` * decode tokens / capacity - cached share of the prompt

A prompt whose prefill in place costs less than a hand-over of its KV cache would add is prefilled there (sections
II-C and V-E, which give no formula, but 15 to 80 ms for the hand-over). All others go to the prefill instance with the
least backlog, which is what a shared FIFO queue polled by all prefill instances amounts to.
"""

from __future__ import annotations

import dataclasses

from pla_sglang.common.checks import Range, check_fields, knob
from pla_sglang.policy.common.predictor import PredictingPolicy, TtftPredictor
from pla_sglang.policy.interface.decisions import Dispatch, Placement
from pla_sglang.policy.interface.fleet import FleetView, InstanceKind, InstanceView, RequestView, Role
from pla_sglang.policy.interface.reasons import FleetReason


@dataclasses.dataclass(frozen=True)
class DopdDispatchKnobs:
    """When to prefill in place. Half and twice of all of them in the combination moved no share in target on five named
    workloads, where no fleet took roles (bench/lab/docs/fleets.md).

    Attributes:
        transfer_base_s, transfer_s_per_token: time a hand-over of KV cache takes.
        local_max_tokens: nothing longer is prefilled in place.
        local_stall_s: in-place prefill must not hold up the decodes of the instance for longer.
        load_weight: of load against cache locality.
    """

    transfer_base_s: float = knob(0.015, allowed=Range(0))
    transfer_s_per_token: float = knob(5e-6, allowed=Range(0))
    local_max_tokens: int = knob(256, allowed=Range(0))
    local_stall_s: float = knob(0.05, allowed=Range(0))
    load_weight: float = knob(2.0, allowed=Range(0))

    def __post_init__(self) -> None:
        check_fields(self, "dopd")


class DopdDispatcher(PredictingPolicy):
    """Router of DOPD; roles are changed by ``DopdController``."""

    def __init__(self, knobs: DopdDispatchKnobs, predictor: TtftPredictor) -> None:
        self.knobs = knobs
        self.predictor = predictor

    def dispatch(self, request: RequestView, fleet: FleetView, now_s: float) -> Dispatch:
        decode = self._decode_instance(request, fleet.decode_capable())
        if decode is not None and self.runs_in_place(request, decode):
            local_s = self.predictor.ttft_s(request, decode)
            return Dispatch(decode, decode, FleetReason.DOPD_LOCAL, local_s)
        prefill = self.predictor.least_delay(fleet.prefill_capable()) or decode
        if prefill is None:
            return Dispatch(None, None, FleetReason.NO_INSTANCE)
        return Dispatch(prefill, decode, FleetReason.DOPD_REMOTE, self.predictor.ttft_s(request, prefill))

    def place_decode(self, request: RequestView, fleet: FleetView, now_s: float) -> Placement:
        """Only asked where the instance chosen on arrival is gone."""
        decode = self._decode_instance(request, fleet.decode_capable() or fleet.ready)
        return Placement(decode, FleetReason.NO_INSTANCE if decode is None else FleetReason.DOPD_REMOTE)

    def runs_in_place(self, request: RequestView, instance: InstanceView) -> bool:
        if instance.kind is InstanceKind.DECODE:
            return False
        if instance.role is Role.MIXED:
            return True
        if request.new_tokens(instance) > self.knobs.local_max_tokens:
            return False
        own_s = self.predictor.own_s(request, instance)
        return own_s <= self.transfer_s(request) and own_s <= self.knobs.local_stall_s

    def transfer_s(self, request: RequestView) -> float:
        """What the hand-over of its KV cache takes."""
        return self.knobs.transfer_base_s + self.knobs.transfer_s_per_token * request.input_tokens

    def _decode_instance(self, request: RequestView, pool: list[InstanceView]) -> InstanceView | None:
        """Least cost, the first of equals."""
        best, best_cost = None, float("inf")
        cached, weight, prompt = request.cached, self.knobs.load_weight, request.input_tokens
        for instance in pool:
            load = (instance.context_tokens + instance.waiting_decode_tokens) / instance.kv_capacity_tokens
            hit = cached.get(instance.index, 0) / prompt if cached else 0.0
            cost = weight * load - hit
            if cost < best_cost:
                best, best_cost = instance, cost
        return best
