"""The signals of Algorithm 2, averaged over a few control periods.

What a rank reports jumps with every pass: a pool that happens to hold one prefill at the tick has any number of times
the pressure of one that holds none. The paper's controller measures over its period; here the load of each rank is an
exponential average with a time constant of ``PERIODS`` periods, kept in views of their own, which only the pressure
controller reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pla_sglang.policy.fleet import FleetView, InstanceView

PERIODS = 3.0
SUMS = ("queued_prefills", "queued_tokens", "queued_attention", "queued_history_tokens")


class Averages:
    """A fleet that follows ``views`` slowly. Sums of the backlog are averages too, so they are no whole numbers."""

    def __init__(self, views: Sequence[InstanceView], period_s: float) -> None:
        self._views = tuple(views)
        self._last_s: float | None = None
        self._shown = self._look()
        self.period_s = period_s
        self.fleet = FleetView(
            [
                InstanceView(view.index, view.name, kind=view.kind, role=view.role, profile=view.profile)
                for view in views
            ]
        )

    def observe(self, now_s: float) -> None:
        """Between the last call and this one the views showed what they did then."""
        elapsed_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        weight = 1.0 - math.exp(-elapsed_s / (PERIODS * self.period_s))
        for (values, utilisation), mean in zip(self._shown, self.fleet.instances, strict=True):
            for name, value in zip(SUMS, values, strict=True):
                old = getattr(mean, name)
                setattr(mean, name, old + weight * (value - old))
            mean.utilisation += weight * (utilisation - mean.utilisation)
        for view, mean in zip(self._views, self.fleet.instances, strict=True):
            mean.ttft_ratio = view.ttft_ratio  # a mean over a window already
            mean.length_class = view.length_class
        self._shown = self._look()

    def _look(self) -> list[tuple[list[float], float]]:
        return [([getattr(view, name) for name in SUMS], view.utilisation) for view in self._views]
