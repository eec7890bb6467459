"""Autoscalers similar to Dynamo's planner: by load thresholds (DYN-LOAD) and by the SLA (DYN-SLA).

* threshold: a role grows by one above ``high`` and shrinks by one below ``low`` mean utilisation (prefill: backlog over
  the TTFT target; decode: KV cache in use), at most one change a role and cool-down.
* SLA: replicas from the forecast rate, each phase on its own: prefill = rate * prefill time / target utilisation;
  decode = rate * output length * token time / the concurrency that keeps the TPOT target. No common ratio.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from pla_sglang.common.checks import Range, check_fields, knob, require, require_order
from pla_sglang.policy.baselines.migration import used_share
from pla_sglang.policy.common.forecast import Forecaster, LastValue, next_values
from pla_sglang.policy.common.load_meter import LoadMeter
from pla_sglang.policy.common.pools import least_loaded
from pla_sglang.policy.common.predictor import TtftPredictor
from pla_sglang.policy.common.tables import DecodeTable, PrefillTable
from pla_sglang.policy.interface.decisions import FleetAction, Hold, Observer, ScaleTo
from pla_sglang.policy.interface.fleet import FleetView, InstanceView, RequestView, Role
from pla_sglang.policy.interface.reasons import FleetReason


def scale(
    fleet: FleetView, role: Role, wanted: int, maximum: int, reason: FleetReason, same: FleetReason
) -> FleetAction:
    """To ``wanted`` within [1, maximum]; ready members with the least work leave, starting ones are not called back."""
    members = fleet.by_role[role]
    have = len(members) + fleet.starting[role]
    wanted = min(max(wanted, 1), maximum)
    if wanted > have:
        return ScaleTo(role, wanted, reason, start=wanted - have)
    leaving = min(have - wanted, len(members) - 1)
    if leaving <= 0:
        return Hold(same)
    return ScaleTo(role, have - leaving, reason, drain=least_loaded(members, leaving))


@dataclasses.dataclass(frozen=True)
class ThresholdKnobs:
    """Attributes:
    ttft_slo_s: what a prefill backlog is measured by.
    high, low: utilisation thresholds.
    cool_down_s: between two changes of one role.
    role_max: largest count of each role.
    """

    ttft_slo_s: float
    high: float = 0.8
    low: float = knob(0.3, allowed=Range(0))
    cool_down_s: float = knob(60.0, allowed=Range(0))
    role_max: int = knob(512, allowed=Range(1))
    interval_s: float = knob(10.0, allowed=Range(0, above=True))

    def __post_init__(self) -> None:
        check_fields(self, "threshold")
        require("threshold ttft_slo_s", self.ttft_slo_s, 0, above=True)
        require_order("threshold low", self.low, "high", self.high)


class ThresholdScaler:
    """DYN-LOAD."""

    def __init__(self, knobs: ThresholdKnobs, predictor: TtftPredictor) -> None:
        self.knobs = knobs
        self.predictor = predictor
        self.interval_s = knobs.interval_s
        self._changed_s = {Role.PREFILL: float("-inf"), Role.DECODE: float("-inf")}

    def tick(self, fleet: FleetView, now_s: float) -> list[FleetAction]:
        return [
            self._one(fleet, Role.PREFILL, self._backlog, now_s),
            self._one(fleet, Role.DECODE, used_share, now_s),
        ]

    def _backlog(self, instance: InstanceView) -> float:
        return self.predictor.delay_s(instance) / self.knobs.ttft_slo_s

    def _one(self, fleet: FleetView, role: Role, load: Callable[[InstanceView], float], now_s: float) -> FleetAction:
        members = fleet.by_role[role]
        if not members:
            return Hold(FleetReason.NO_DATA)
        if now_s - self._changed_s[role] < self.knobs.cool_down_s:
            return Hold(FleetReason.COOL_DOWN)
        mean = sum(load(member) for member in members) / len(members)
        have = len(members) + fleet.starting[role]
        wanted, reason = have, FleetReason.UTILISATION_IN_BAND
        if mean > self.knobs.high:
            wanted, reason = have + 1, FleetReason.UTILISATION_HIGH
        elif mean < self.knobs.low:
            wanted, reason = have - 1, FleetReason.UTILISATION_LOW
        action = scale(fleet, role, wanted, self.knobs.role_max, reason, FleetReason.UTILISATION_IN_BAND)
        if isinstance(action, ScaleTo):
            self._changed_s[role] = now_s
        return action


@dataclasses.dataclass(frozen=True)
class SlaKnobs:
    """Attributes:
    tpot_slo_s: target that sets the concurrency of a decode instance.
    concurrency_max: cap of that concurrency (KV cache, graphs).
    prefill_utilisation: planned utilisation of prefill instances.
    role_max: largest count of each role.
    """

    tpot_slo_s: float
    concurrency_max: int
    prefill_utilisation: float = knob(0.8, allowed=Range(0, 1, above=True))
    role_max: int = knob(512, allowed=Range(1))
    interval_s: float = knob(60.0, allowed=Range(0, above=True))

    def __post_init__(self) -> None:
        check_fields(self, "sla")
        require("sla tpot_slo_s", self.tpot_slo_s, 0, above=True)
        require("sla concurrency_max", self.concurrency_max, 1)


class SlaScaler(Observer):
    """DYN-SLA."""

    def __init__(
        self,
        knobs: SlaKnobs,
        prefill: PrefillTable,
        decode: DecodeTable,
        forecaster: Callable[[], Forecaster] = LastValue,
    ) -> None:
        self.knobs = knobs
        self.prefill_table, self.decode_table = prefill, decode
        self.interval_s = knobs.interval_s
        self._meter = LoadMeter()
        self._series = [forecaster() for _ in range(3)]  # input, output, rate

    def tick(self, fleet: FleetView, now_s: float) -> list[FleetAction]:
        sample = self._meter.take(now_s)
        if sample is None:
            return [Hold(FleetReason.NO_DATA)]
        values = next_values(self._series, (sample.input_tokens, sample.output_tokens, sample.rate_per_s))
        if values is None:
            return [Hold(FleetReason.NO_DATA)]
        input_tokens, output_tokens, rate = values
        prefills, decodes = self.replicas(input_tokens, output_tokens, rate)
        maximum, same = self.knobs.role_max, FleetReason.SLA_UNCHANGED
        return [
            scale(fleet, Role.PREFILL, prefills, maximum, FleetReason.SLA_DEMAND, same),
            scale(fleet, Role.DECODE, decodes, maximum, FleetReason.SLA_DEMAND, same),
        ]

    def replicas(self, input_tokens: float, output_tokens: float, rate_per_s: float) -> tuple[int, int]:
        """Prefill and decode instances for a load."""
        work = rate_per_s * self.prefill_table.at(input_tokens) / self.knobs.prefill_utilisation
        length = input_tokens + output_tokens / 2
        batch = self.concurrency(length)
        running = rate_per_s * output_tokens * self.decode_table.at(batch, length)
        return max(1, math.ceil(work - 1e-9)), max(1, math.ceil(running / batch - 1e-9))

    def concurrency(self, length: float) -> int:
        """Largest batch of requests of this length within the TPOT target, by bisection."""
        low, high = 1, self.knobs.concurrency_max
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.decode_table.at(middle, length) <= self.knobs.tpot_slo_s
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def on_arrival(self, request: RequestView, now_s: float) -> None:
        self._meter.arrive(request.input_tokens, now_s)

    def on_finish(self, request: RequestView, output_tokens: int, now_s: float) -> None:
        self._meter.finish(output_tokens, now_s)
