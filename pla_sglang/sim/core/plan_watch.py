"""Keeps the log of a simulated planner on the clock of the trace: its plans, the fleet, and starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pla_sglang.policy.common.plan_log import FleetCount, PlanLog, count_instances
from pla_sglang.policy.interface.decisions import Controller, FleetAction
from pla_sglang.policy.interface.fleet import InstanceState, InstanceView
from pla_sglang.sim.core.fleet import SimFleet


class PlanWatch:
    """Args:
    clock: the kernel's time, and what was left out of it.
    gpu_hours: so far.
    """

    def __init__(
        self,
        fleet: SimFleet,
        controllers: Sequence[Controller],
        *,
        clock: Callable[[], float],
        gpu_hours: Callable[[], float],
    ) -> None:
        self.log = PlanLog()
        self._fleet = fleet
        self._controllers = controllers
        self._clock, self._gpu_hours = clock, gpu_hours
        self._known = len(fleet.lives)
        self._starting: list[tuple[float, InstanceView]] = []  # with the time of the order

    def count(self) -> FleetCount:
        return count_instances(self._fleet.view)

    def note_tick(self, actions: Sequence[FleetAction], before: FleetCount) -> None:
        """A controller has answered ``actions``, which were carried out."""
        now_s = self._clock()
        self.log.note_tick(self._controllers, actions, before, now_s)
        new = self._fleet.view.instances[self._known :]
        self._starting += [(now_s, view) for view in new if view.state is InstanceState.STARTING]
        self._known += len(new)
        if new or self.count() != before:
            self.note_fleet()

    def note_fleet(self) -> None:
        """At each report of the instances: starts end within a report of it, and are noted as long as they took."""
        now_s = self._clock()
        for ordered_s, view in self._starting:
            if view.state is InstanceState.DEAD:
                self.log.note_start(ordered_s, now_s, "failed")
            elif view.state is not InstanceState.STARTING:
                self.log.note_start(ordered_s, min(now_s, ordered_s + self._measure_start(view)), "ready")
        self._starting = [one for one in self._starting if one[1].state is InstanceState.STARTING]
        if self.log.plans:
            self.log.note_fleet(self.count(), self._gpu_hours(), now_s)

    def note_end(self, gpu_hours: float, end_s: float) -> None:
        """The last request has ended at ``end_s``."""
        if self.log.plans:
            self.log.note_fleet(self.count(), gpu_hours, end_s)

    def _measure_start(self, view: InstanceView) -> float:
        return view.ready_s - self._fleet.lives[view.index].start_s
