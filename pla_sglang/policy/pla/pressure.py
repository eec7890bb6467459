"""Instance-pressure controller (PLA-Serve Algorithm 2): moves instances between the short and the long prefill pool.

    psi_k = alpha * q_k + beta * e_k - gamma * u_k          lines 18 to 21
    P     = 90th percentile of psi over the pool            line 23
    one instance moves to the pool with more than (1 + tau) times the pressure of the other (lines 26 to 28), unless the
    other would fall below its minimum, and not within T_cool of the last move (line 23)

q is the queue backlog, e the SLO deviation, u the utilisation. The paper gives neither their units nor the sign rule
for a negative pressure. Here q is the predicted backlog over the TTFT target, e is max(0, TTFT / target - 1), u is the
busy share, all without unit; gamma * u lowers the pressure of a pool that is busy without a queue, and a pressure below
0 counts as 0. Below ``idle_pressure`` nothing moves: the ratio of two numbers near zero means nothing.

Beyond the paper: with few instances one is a large part of a pool, and the pool that gave it would ask for it back
after the cool-down. So nothing moves if the rule, with the same work on the new sizes, would undo it; nor if the pool
that gives would be busier than ``busy`` and than the one that asks, since near 1 a backlog grows without bound.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from pla_sglang.common.checks import Range, check_fields, knob, require
from pla_sglang.policy.common.predictor import TtftPredictor
from pla_sglang.policy.interface.decisions import FleetAction, Hold, SetLengthClass
from pla_sglang.policy.interface.fleet import FleetView, InstanceView
from pla_sglang.policy.interface.prefill import PrefillClass
from pla_sglang.policy.interface.reasons import FleetReason


@dataclasses.dataclass(frozen=True)
class PressureKnobs:
    """Inputs of Algorithm 2.

    Attributes:
        ttft_slo_s: target that backlog is measured by.
        alpha, beta, gamma: weights of backlog, SLO deviation and utilisation.
        tau: hysteresis.
        cool_down_s: T_cool.
        minimum: n_min of each pool.
        percentile: of the robust aggregator A, in (0, 100].
        idle_pressure: least pressure that asks for an instance.
        busy: utilisation up to which a pool may always be brought by giving an instance.
        interval_s: control period.
    """

    ttft_slo_s: float
    alpha: float = knob(1.0, allowed=Range(0))
    beta: float = knob(0.5, allowed=Range(0))
    gamma: float = knob(0.1, allowed=Range(0))
    tau: float = knob(0.5, allowed=Range(0))
    cool_down_s: float = knob(10.0, allowed=Range(0))
    minimum: int = knob(1, allowed=Range(1))
    percentile: float = knob(90.0, allowed=Range(0, 100, above=True))
    idle_pressure: float = knob(0.1, allowed=Range(0))
    busy: float = knob(0.9, allowed=Range(0, 1))
    interval_s: float = knob(1.0, allowed=Range(0, above=True))

    def __post_init__(self) -> None:
        check_fields(self, "pressure")
        require("pressure ttft_slo_s", self.ttft_slo_s, 0, above=True)


class Signals(NamedTuple):
    """One instance, all without unit: queue backlog, SLO deviation, utilisation, and psi, their weighted sum."""

    q: float
    e: float
    u: float
    psi: float


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; 0.0 of nothing. With fewer than ten values the 90th percentile is the largest."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)]


class PressureController:
    """Controller over the ``length_class`` of instances that take prefills."""

    def __init__(self, knobs: PressureKnobs, predictor: TtftPredictor) -> None:
        self.knobs = knobs
        self.predictor = predictor
        self.interval_s = knobs.interval_s
        self._last_s = float("-inf")

    def cool_down_from(self, when_s: float) -> None:
        """An instance changed pools at ``when_s`` by somebody else's order."""
        self._last_s = when_s

    def signals(self, instance: InstanceView) -> Signals:
        """Lines 18 to 21 for one instance."""
        knobs = self.knobs
        backlog = self.predictor.delay_s(instance) / knobs.ttft_slo_s
        deviation = 0.0 if instance.ttft_ratio is None else max(0.0, instance.ttft_ratio - 1.0)
        psi = knobs.alpha * backlog + knobs.beta * deviation - knobs.gamma * instance.utilisation
        return Signals(backlog, deviation, instance.utilisation, psi)

    def pressure(self, instance: InstanceView) -> float:
        """psi of one instance."""
        return self.signals(instance).psi

    def pool_pressure(self, pool: Sequence[InstanceView]) -> float:
        """P of one pool, at least 0."""
        return max(0.0, percentile([self.pressure(instance) for instance in pool], self.knobs.percentile))

    def tick(self, fleet: FleetView, now_s: float) -> list[FleetAction]:
        return self.decide(fleet.prefill_capable(), now_s)

    def decide(self, members: Sequence[InstanceView], now_s: float) -> list[FleetAction]:
        """Algorithm 2 over the instances that take prefills. One action: a move, or why there is none."""
        short_prompts = [instance for instance in members if instance.length_class is PrefillClass.SHORT]
        long_prompts = [instance for instance in members if instance.length_class is PrefillClass.LONG]
        if now_s - self._last_s < self.knobs.cool_down_s:
            return [Hold(FleetReason.COOL_DOWN)]
        short_pressure, long_pressure = self.pool_pressure(short_prompts), self.pool_pressure(long_prompts)
        if self._asks(short_pressure, long_pressure):
            asks, gives, to, reason = short_prompts, long_prompts, PrefillClass.SHORT, FleetReason.PRESSURE_SHORT
        elif self._asks(long_pressure, short_pressure):
            asks, gives, to, reason = long_prompts, short_prompts, PrefillClass.LONG, FleetReason.PRESSURE_LONG
        else:
            return [Hold(FleetReason.PRESSURE_BALANCED)]
        if len(gives) <= self.knobs.minimum:
            return [Hold(FleetReason.PRESSURE_MINIMUM)]
        asker, giver = max(short_pressure, long_pressure), min(short_pressure, long_pressure)
        if self._would_return(asks, gives, asker, giver):
            return [Hold(FleetReason.PRESSURE_RETURN)]
        return [self._move(gives, to, reason, now_s)]

    def _would_return(
        self, asks: Sequence[InstanceView], gives: Sequence[InstanceView], asker: float, giver: float
    ) -> bool:
        """With the same work on one instance more and on one less."""
        more, less = len(asks) / (len(asks) + 1), len(gives) / (len(gives) - 1)
        if self._asks(giver * less, asker * more):
            return True
        return _utilisation(gives) * less > max(self.knobs.busy, _utilisation(asks))

    def _asks(self, mine: float, other: float) -> bool:
        return mine > (1 + self.knobs.tau) * other and mine > self.knobs.idle_pressure

    def _move(self, pool: list[InstanceView], to: PrefillClass, reason: FleetReason, now_s: float) -> SetLengthClass:
        """Lines 27 and 28: the instance with the least backlog leaves."""
        leaver = self.predictor.least_delay(pool)
        assert leaver is not None, "the pool has more than its minimum"
        self._last_s = now_s
        return SetLengthClass(leaver, to, reason)


def _utilisation(pool: Sequence[InstanceView]) -> float:
    """Mean of a pool; 0 of nothing."""
    return sum(instance.utilisation for instance in pool) / len(pool) if pool else 0.0
