"""The pressure controller on signals that are averaged over a few control periods.

Reported values change with every pass: a pool with one prefill at the tick has many times the pressure of one without,
and at a constant load instances would move back and forth. The paper's controller measures over its period. Here the
backlog of each instance is an exponential average with a time constant of ``PERIODS`` periods, kept in views of their
own that only the controller sees. Utilisation comes as a mean over a window; averaged twice it held back a move for
seconds after the load had gone. Drivers tick ``LOOKS`` times a period or more often: each tick samples the signals, and
one in a period decides.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from pla_sglang.policy.common.predictor import TtftPredictor
from pla_sglang.policy.interface.decisions import FleetAction, SetLengthClass
from pla_sglang.policy.interface.fleet import FleetView, InstanceView
from pla_sglang.policy.pla.pressure import PressureController, PressureKnobs, Signals

PERIODS = 3.0
LOOKS = 10
SUMS = ("queued_prefills", "queued_tokens", "queued_attention", "queued_history_tokens")


@dataclasses.dataclass(slots=True)
class _Followed:
    """``mean`` follows what a view shows; ``sums`` are what it showed at the last look."""

    mean: InstanceView
    sums: list[float]


class Averages:
    """Views that follow others slowly. Sums of the backlog are averages too, so they are no whole numbers."""

    def __init__(self, period_s: float) -> None:
        self.period_s = period_s
        self._last_s: float | None = None
        self._followed: dict[int, _Followed] = {}  # by index, which is never reused

    def observe(self, views: Iterable[InstanceView], now_s: float) -> None:
        """Between the last call and this one the views showed what they did then."""
        elapsed_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        weight = 1.0 - math.exp(-elapsed_s / (PERIODS * self.period_s))
        for view in views:
            entry = self._entry(view)
            mean = entry.mean
            for name, value in zip(SUMS, entry.sums, strict=True):
                old = getattr(mean, name)
                setattr(mean, name, old + weight * (value - old))
            mean.utilisation, mean.ttft_ratio = view.utilisation, view.ttft_ratio  # means over a window already
            mean.length_class, mean.steps = view.length_class, view.steps
            entry.sums = [getattr(view, name) for name in SUMS]

    def of(self, view: InstanceView) -> InstanceView:
        """The averaged view of ``view``; zeros before the first look."""
        return self._entry(view).mean

    def _entry(self, view: InstanceView) -> _Followed:
        entry = self._followed.get(view.index)
        if entry is None:
            mean = InstanceView(
                view.index,
                view.name,
                kind=view.kind,
                role=view.role,
                length_class=view.length_class,
                profile=view.profile,
            )
            entry = self._followed[view.index] = _Followed(mean, [0.0] * len(SUMS))
        return entry


class AveragedPressure(PressureController):
    """Algorithm 2 on averaged signals, as a controller of a fleet.

    Attributes:
        interval_s: the longest time between two ticks; a decision comes once in ``knobs.interval_s``.
    """

    def __init__(self, knobs: PressureKnobs, predictor: TtftPredictor) -> None:
        super().__init__(knobs, predictor)
        self._averages = Averages(knobs.interval_s)
        self._next_s: float | None = None
        self.interval_s = knobs.interval_s / LOOKS

    def retune(self, knobs: PressureKnobs) -> None:
        """New knobs. Averages and a cool-down that is under way go on."""
        self.knobs = knobs
        self._averages.period_s = knobs.interval_s
        self.interval_s = knobs.interval_s / LOOKS

    def tick(self, fleet: FleetView, now_s: float) -> list[FleetAction]:
        """Sample the signals; empty unless a period is over. Call often."""
        members = fleet.prefill_capable()
        self._averages.observe(members, now_s)
        if self._next_s is None:
            self._next_s = now_s + self.knobs.interval_s
        if now_s < self._next_s - self.interval_s / 2:  # timers are not exact
            return []
        self._next_s = now_s + self.knobs.interval_s
        actions = self.decide([self._averages.of(view) for view in members], now_s)
        return [
            dataclasses.replace(action, instance=fleet.instances[action.instance.index])
            if isinstance(action, SetLengthClass)
            else action
            for action in actions
        ]

    def look(self, fleet: FleetView, now_s: float) -> None:
        """Sample the signals without a decision, if the controller is off."""
        self._averages.observe(fleet.prefill_capable(), now_s)

    def signals(self, instance: InstanceView) -> Signals:
        """q, e, u and psi of one instance, averaged. ``instance`` may be an averaged view itself."""
        return super().signals(self._averages.of(instance))
