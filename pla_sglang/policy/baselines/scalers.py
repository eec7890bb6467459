"""Autoscalers similar to Dynamo's planner: by load thresholds (DYN-LOAD) and by the SLA (DYN-SLA).

* threshold: a role grows by one above ``high`` and shrinks by one below ``low`` mean utilisation (prefill: backlog over
  the TTFT target; decode: KV cache in use), at most one change a role and cool-down.
* SLA: replicas from the forecast rate, each phase on its own: prefill = rate * prefill time / target utilisation;
  decode = rate * output length * token time / the concurrency that keeps the TPOT target. No common ratio.

As planners beside any policy (``policy/planners.py``) they get a ``scaling`` with the limits of the fleet. Of all
instances together one is added where either phase is above ``high``, and leaves where both are below ``low``; the SLA's
replicas are added up. The forecast is then the largest until an instance ordered now would be there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from pla_sglang.common.checks import Range, check_fields, knob, require, require_order
from pla_sglang.policy.baselines.migration import used_share
from pla_sglang.policy.common.forecast import Forecaster, LastValue, next_values
from pla_sglang.policy.common.load_meter import ENOUGH_REQUESTS, LoadMeter
from pla_sglang.policy.common.plan_log import Forecast, Look
from pla_sglang.policy.common.predictor import PredictingPolicy, TtftPredictor
from pla_sglang.policy.common.scaling import Limits, PhaseScaling, Scaling, Wanted, last_ready_s, steps_ahead
from pla_sglang.policy.common.tables import DecodeTable, PrefillTable
from pla_sglang.policy.interface.decisions import FleetAction, Hold, Observer, ScaleTo
from pla_sglang.policy.interface.fleet import FleetView, InstanceView, RequestView, Role
from pla_sglang.policy.interface.reasons import FleetReason


@dataclasses.dataclass(frozen=True)
class ThresholdKnobs:
    """Attributes:
    ttft_slo_s: what a prefill backlog is measured by.
    high, low: utilisation thresholds.
    cool_down_s: between two changes of one role. None leaves so soon after the newest became ready either: what that
        one does for the utilisation is not known before.
    role_max: largest count of each role, where no limits of the fleet are given.
    """

    ttft_slo_s: float
    high: float = knob(0.8, allowed=Range(0, above=True))
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

    def __init__(
        self, knobs: ThresholdKnobs, predictor: TtftPredictor, scaling: Scaling | PhaseScaling | None = None
    ) -> None:
        self.knobs = knobs
        self.predictor = predictor
        self.interval_s = knobs.interval_s
        self._scaling = scaling or PhaseScaling(Limits(most=knobs.role_max), together=False)
        self.look: Look | None = None  # for ``plan_log.py``
        self._changed_s: dict[Role, float] = {}  # MIXED: of the whole fleet

    def tick(self, fleet: FleetView, now_s: float) -> list[FleetAction]:
        scaling = self._scaling
        if isinstance(scaling, Scaling):
            backlog, used = self._backlog(fleet.prefill_capable()), _used(fleet.ready)
            wanted = self._judge(scaling, (backlog, used), fleet, now_s)
            actions = [wanted if isinstance(wanted, Hold) else scaling.decide(wanted, fleet, now_s)]
        else:
            prefills, decodes = scaling.prefills, scaling.decodes
            backlog, used = self._backlog(prefills.members(fleet)), _used(decodes.members(fleet))
            actions = scaling.decide(
                self._judge(prefills, (backlog,), fleet, now_s),
                self._judge(decodes, (used,), fleet, now_s),
                fleet,
                now_s,
            )
        self.look = {"prefill_utilisation": Forecast(backlog, None), "decode_utilisation": Forecast(used, None)}
        self._changed_s |= {action.role: now_s for action in actions if isinstance(action, ScaleTo)}
        return actions

    def _judge(self, scaling: Scaling, utilisations: Sequence[float], fleet: FleetView, now_s: float) -> Wanted | Hold:
        """One more where some utilisation is high, one less where all are low."""
        if not scaling.members(fleet):
            return Hold(FleetReason.NO_DATA)
        if now_s - self._changed_s.get(scaling.role or Role.MIXED, -math.inf) < self.knobs.cool_down_s:
            return Hold(FleetReason.COOL_DOWN)
        have, change = scaling.count(fleet), FleetReason.UTILISATION_IN_BAND
        if max(utilisations) > self.knobs.high:
            have, change = have + 1, FleetReason.UTILISATION_HIGH
        elif max(utilisations) < self.knobs.low:
            if now_s - last_ready_s(scaling.members(fleet)) < self.knobs.cool_down_s:
                return Hold(FleetReason.COOL_DOWN)
            have, change = have - 1, FleetReason.UTILISATION_LOW
        return Wanted.exactly(have, change, FleetReason.UTILISATION_IN_BAND)

    def _backlog(self, members: Sequence[InstanceView]) -> float:
        """Mean delay of a prefill over its target; 0 without members."""
        delays_s = [self.predictor.delay_s(member) for member in members]
        return sum(delays_s) / len(delays_s) / self.knobs.ttft_slo_s if delays_s else 0.0


def _used(members: Sequence[InstanceView]) -> float:
    """Mean share of KV cache in use; 0 without members."""
    return sum(used_share(member) for member in members) / len(members) if members else 0.0


class ThresholdPlanner(ThresholdScaler, PredictingPolicy):
    """Beside any policy: with a predictor of its own, which learns."""


@dataclasses.dataclass(frozen=True)
class SlaKnobs:
    """Attributes:
    tpot_slo_s: target that sets the concurrency of a decode instance.
    concurrency_max: cap of that concurrency (KV cache, graphs).
    prefill_utilisation: planned utilisation of prefill instances.
    role_max: largest count of each role, where no limits of the fleet are given.
    headroom: factor on the forecast rate.
    cool_down_s: between two times that instances leave.
    """

    tpot_slo_s: float
    concurrency_max: int
    prefill_utilisation: float = knob(0.8, allowed=Range(0, 1, above=True))
    headroom: float = knob(1.0, allowed=Range(0, above=True))
    cool_down_s: float = knob(0.0, allowed=Range(0))
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
        *,
        scaling: Scaling | PhaseScaling | None = None,
    ) -> None:
        self.knobs = knobs
        self._looks_ahead = scaling is not None
        self._scaling = scaling or PhaseScaling(Limits(most=knobs.role_max), together=False)
        self.prefill_table, self.decode_table = prefill, decode
        self.interval_s = knobs.interval_s
        self.look: Look | None = None  # for ``plan_log.py``
        self._meter = LoadMeter(ENOUGH_REQUESTS if self._looks_ahead else 0)
        self._series = [forecaster() for _ in range(3)]  # input, output, rate

    def tick(self, fleet: FleetView, now_s: float) -> list[FleetAction]:
        sample = self._meter.take(now_s)
        if sample is None:
            return [Hold(FleetReason.NO_DATA)]
        ended = (sample.input_tokens, sample.output_tokens, sample.rate_per_s)
        values = next_values(self._series, ended, steps_ahead(fleet, self.interval_s) if self._looks_ahead else 1)
        figures = ("input_tokens", "output_tokens", "requests_per_s")
        self.look = {
            figure: Forecast(load) if values is None else Forecast(load, values[place], self._series[place].name)
            for place, (figure, load) in enumerate(zip(figures, ended, strict=True))
        }
        if values is None:
            return [Hold(FleetReason.NO_DATA)]
        input_tokens, output_tokens, rate = values
        prefills, decodes = self.replicas(input_tokens, output_tokens, self.knobs.headroom * rate)
        if isinstance(self._scaling, Scaling):
            return [self._scaling.decide(self._want(prefills + decodes), fleet, now_s)]
        return self._scaling.decide(self._want(prefills), self._want(decodes), fleet, now_s)

    @staticmethod
    def _want(count: int) -> Wanted:
        return Wanted.exactly(count, FleetReason.SLA_DEMAND, FleetReason.SLA_UNCHANGED)

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
