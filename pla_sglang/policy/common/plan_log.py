"""What a planner saw and wanted, and what came of it: loads and forecasts, plans, instances, GPU-hours, starts.

Router and simulator keep the same object, and the pages of both draw it. Pure data: times come from outside, in seconds
on the clock of the driver. A rate is per second of device time, as the planner sees it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from pla_sglang.policy.common.load_meter import LoadSample
from pla_sglang.policy.interface.decisions import FleetAction, ScaleTo
from pla_sglang.policy.interface.fleet import FleetView, InstanceState


class Forecast(NamedTuple):
    """One figure of the load. ``load``: of the interval that has ended, None: nothing to measure; ``forecast``: the
    largest of the intervals that are planned for, None: it is not forecast; ``by``: its ``Forecaster.name``."""

    load: float | None
    forecast: float | None = None
    by: str | None = None


Look = Mapping[str, Forecast]  # figure, as in ``common/legend/explanations.py``, -> its values


@runtime_checkable
class Planning(Protocol):
    """A controller that plans how many instances there are.

    ``look``: what its last plan is from, a new object each time; None: it has not planned yet.
    """

    @property
    def look(self) -> Look | None: ...


_FIELDS = {  # of ``LoadSample``
    "input_tokens": "input_tokens",
    "output_tokens": "output_tokens",
    "requests": "concurrency",
    "requests_per_s": "rate_per_s",
}


def compare_loads(measured: LoadSample, expected: LoadSample | None, by: Sequence[str]) -> Look:
    """``expected``: what is forecast, before headroom; None: not yet. ``by``: whose forecasts, as in ``_FIELDS``."""
    return {
        figure: Forecast(getattr(measured, name))
        if expected is None
        else Forecast(getattr(measured, name), getattr(expected, name), who)
        for (figure, name), who in zip(_FIELDS.items(), by, strict=True)
    }


class Plan(NamedTuple):
    """``planned``: instances there would be once all that the plan orders is done, starting ones included."""

    at_s: float
    planned: int
    look: Look


class FleetCount(NamedTuple):
    """Instances by state; all of them cost GPU time."""

    ready: int
    starting: int
    draining: int


class FleetPoint(NamedTuple):
    """``gpu_hours``: of all instances so far."""

    at_s: float
    counts: FleetCount
    gpu_hours: float


class Start(NamedTuple):
    """An instance that was ordered, and how that ended: ready, failed or expired."""

    ordered_s: float
    ended_s: float
    outcome: str


def count_instances(fleet: FleetView) -> FleetCount:
    draining = sum(view.state is InstanceState.DRAINING for view in fleet.instances)
    return FleetCount(len(fleet.ready), sum(fleet.starting.values()), draining)


class PlanLog:
    """The last ``window_s``. Of times in which the counts stay the same only both ends are kept."""

    def __init__(self, window_s: float = math.inf) -> None:
        self.window_s = window_s
        self.plans: deque[Plan] = deque()
        self.points: deque[FleetPoint] = deque()
        self.starts: deque[Start] = deque()
        self._seen: Look | None = None

    @property
    def last_plan(self) -> Plan | None:
        return self.plans[-1] if self.plans else None

    def note_tick(
        self, controllers: Sequence[object], actions: Sequence[FleetAction], before: FleetCount, now_s: float
    ) -> None:
        """Some controller has answered ``actions``; that counts as a plan if the planner, the last of ``controllers``
        that is one, has looked anew. ``before``: the fleet before they were carried out."""
        planners = [one for one in controllers if isinstance(one, Planning)]
        look = planners[-1].look if planners else None
        if look is None or look is self._seen:
            return
        self._seen = look
        change = sum(one.start - len(one.drain) for one in actions if isinstance(one, ScaleTo))
        self.plans.append(Plan(now_s, before.ready + before.starting + change, look))

    def note_fleet(self, counts: FleetCount, gpu_hours: float, now_s: float) -> None:
        """How it is at ``now_s``. Times do not fall."""
        points = self.points
        if len(points) > 1 and points[-1].counts == points[-2].counts == counts:
            points.pop()
        points.append(FleetPoint(now_s, counts, gpu_hours))
        self._forget_before(now_s - self.window_s)

    def note_start(self, ordered_s: float, ended_s: float, outcome: str) -> None:
        self.starts.append(Start(ordered_s, ended_s, outcome))

    def _forget_before(self, limit_s: float) -> None:
        """What holds at ``limit_s`` stays."""
        for kept in (self.plans, self.points):
            while len(kept) > 1 and kept[1].at_s <= limit_s:
                kept.popleft()
        while self.starts and self.starts[0].ended_s < limit_s:
            self.starts.popleft()

    def to_document(self) -> dict[str, Any]:
        """JSON-ready, for both pages."""
        return {
            "plans": [[round(plan.at_s, 3), plan.planned, describe_look(plan.look)] for plan in self.plans],
            "fleet": [[round(point.at_s, 3), *point.counts, round(point.gpu_hours, 6)] for point in self.points],
            "starts": [[round(one.ordered_s, 3), round(one.ended_s, 3), one.outcome] for one in self.starts],
        }


def describe_look(look: Look) -> dict[str, dict[str, float | None]]:
    """JSON-ready."""
    return {figure: values._asdict() for figure, values in look.items()}
