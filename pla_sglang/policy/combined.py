"""All four systems at once: who decides what, and who gives way.

What each part does:

* Arrow dispatches requests, holds the pools and flips instances within seconds (``arrow``);
* PLA-Serve splits the prefill pool into short and long instances, sizes the split, and batches inside an engine;
* STAR moves running requests between decode instances;
* DOPD prefills ultra-short prompts in place, and plans the *number* of instances over minutes.

Where they want different things, the first of this list wins:

1. liveness: a phase without instance is repaired before anything else (Arrow's REPAIR);
2. targets now: a flip for a predicted TTFT or a measured TPOT violation; while one is fresh (``quiet_s``), DOPD does
   not drain instances and the pressure controller does not move any: both would work with counts about to change;
3. plan: DOPD's scaling and, on a fleet of fixed size, nothing else of it - Arrow's triggers own the ratio there;
4. comfort: PLA's length classes, then STAR's moves. STAR never moves a request to an instance that Arrow is emptying
   (D->P), and it stops while decode is being flipped.

A request that may be prefilled in place goes before length classes; length classes apply to the PREFILL pool only, when
it has at least ``split_from`` instances; spilling over to the other class comes before any flip.
"""

from __future__ import annotations

import dataclasses

from pla_sglang.policy.arrow.policy import ArrowPolicy
from pla_sglang.policy.checks import require
from pla_sglang.policy.decisions import (
    Controller,
    Dispatch,
    FleetAction,
    Hold,
    Observer,
    Placement,
    PrefillSample,
    ScaleTo,
    SetLengthClass,
    SetRole,
)
from pla_sglang.policy.dopd.dispatch import DopdDispatcher
from pla_sglang.policy.dopd.planner import DopdController
from pla_sglang.policy.fleet import FleetView, InstanceView, RequestView, Role
from pla_sglang.policy.pla.pressure import PressureController
from pla_sglang.policy.pla.spatial import SpatialDispatcher
from pla_sglang.policy.reasons import FleetReason
from pla_sglang.policy.star.policy import StarRescheduler
from pla_sglang.policy.types import PrefillClass

_URGENT = {FleetReason.FLIP_TTFT, FleetReason.FLIP_NO_ROOM, FleetReason.FLIP_TPOT, FleetReason.REPAIR}


@dataclasses.dataclass(frozen=True)
class CombinedKnobs:
    """Attributes:
    quiet_s: after an urgent flip the slower parts rest for so long.
    split_from: prefill instances from which on they are split by length; 0: never.
    interval_s: of the common tick; each part keeps its own interval on top.
    """

    quiet_s: float = 2.0
    split_from: int = 3
    interval_s: float = 0.25

    def __post_init__(self) -> None:
        require("combined quiet_s", self.quiet_s, 0)
        require("combined split_from", self.split_from, 0)
        require("combined interval_s", self.interval_s, 0, above=True)


@dataclasses.dataclass
class Parts:
    """The parts; a part that is None is left out."""

    arrow: ArrowPolicy
    local: DopdDispatcher | None = None
    spatial: SpatialDispatcher | None = None
    pressure: PressureController | None = None
    star: StarRescheduler | None = None
    planner: DopdController | None = None

    def observers(self) -> list[Observer]:
        """Those that want reports. ``local`` and ``spatial`` share the predictor of ``arrow``, which feeds it."""
        return [part for part in (self.arrow, self.star, self.planner) if part is not None]


class CombinedPolicy(Observer):
    """Dispatcher and controller."""

    def __init__(self, knobs: CombinedKnobs, parts: Parts) -> None:
        self.knobs = knobs
        self.parts = parts
        self.interval_s = knobs.interval_s
        self._urgent_s = float("-inf")
        self._ticked_s: dict[str, float] = {}

    # -- requests ------------------------------------------------------------------------------------------------------

    def dispatch(self, request: RequestView, fleet: FleetView, now_s: float) -> Dispatch:
        local = self._in_place(request, fleet, now_s)
        if local is not None:
            return local
        spatial = self.parts.spatial
        if spatial is not None and self._is_split(fleet):
            answer = spatial.dispatch(request, fleet, now_s)
            if answer.prefill is not None and self._on_time(answer, request, now_s):
                return answer
        return self._noted(self.parts.arrow.dispatch(request, fleet, now_s), now_s)

    def place_decode(self, request: RequestView, fleet: FleetView, now_s: float) -> Placement:
        answer = self.parts.arrow.place_decode(request, fleet, now_s)
        self._note(answer.actions, now_s)
        return answer

    def _in_place(self, request: RequestView, fleet: FleetView, now_s: float) -> Dispatch | None:
        """DOPD's answer where it is in place, the decode instance has room, and the target is kept."""
        local = self.parts.local
        if local is None:
            return None
        most_cached = max(request.cached.values(), default=0)
        if request.input_tokens > local.knobs.local_max_tokens + most_cached:
            return None
        answer = local.dispatch(request, fleet, now_s)
        if answer.reason is not FleetReason.DOPD_LOCAL or not self._on_time(answer, request, now_s):
            return None
        return answer if answer.decode is not None and self.parts.arrow.has_room(answer.decode) else None

    def _on_time(self, answer: Dispatch, request: RequestView, now_s: float) -> bool:
        slo_s = request.ttft_slo_s if request.ttft_slo_s is not None else self.parts.arrow.knobs.ttft_slo_s
        return answer.predicted_ttft_s is not None and answer.predicted_ttft_s <= slo_s - (now_s - request.arrival_s)

    def _is_split(self, fleet: FleetView) -> bool:
        members = fleet.by_role[Role.PREFILL]
        if not self.knobs.split_from or len(members) < self.knobs.split_from:
            return False
        return any(member.length_class is not None for member in members)

    def _noted(self, answer: Dispatch, now_s: float) -> Dispatch:
        self._note(answer.actions, now_s)
        return answer

    # -- instances -----------------------------------------------------------------------------------------------------

    def tick(self, fleet: FleetView, now_s: float) -> list[FleetAction]:
        """Arrow first; the others when they are due and nothing with precedence speaks against it."""
        actions = self.parts.arrow.tick(fleet, now_s)
        self._note(actions, now_s)
        if any(isinstance(action, SetRole) for action in actions):
            return actions  # the pools change; the others see them at the next tick
        actions += self._plan(fleet, now_s)
        if any(isinstance(action, ScaleTo) for action in actions):
            return actions
        actions += self._split(fleet, now_s)
        actions += self._level(fleet, now_s)
        return actions

    def _plan(self, fleet: FleetView, now_s: float) -> list[FleetAction]:
        planner = self.parts.planner
        if planner is None or not self._is_due("planner", planner, now_s):
            return []
        return [
            Hold(FleetReason.VETO)
            if isinstance(action, ScaleTo) and action.drain and self._is_urgent(now_s)
            else action
            for action in planner.tick(fleet, now_s)
        ]

    def _split(self, fleet: FleetView, now_s: float) -> list[FleetAction]:
        """PLA's pools: made when the prefill pool is large enough, dissolved when it no longer is, else sized."""
        pressure = self.parts.pressure
        if pressure is None or not self.knobs.split_from or not self._is_due("pressure", pressure, now_s):
            return []
        members = fleet.by_role[Role.PREFILL]
        stray = [instance for instance in fleet.ready if instance.role is not Role.PREFILL and instance.length_class]
        cleared: list[FleetAction] = [SetLengthClass(i, None, FleetReason.PRESSURE_BALANCED) for i in stray]
        if len(members) < self.knobs.split_from:
            return cleared + [
                SetLengthClass(i, None, FleetReason.PRESSURE_MINIMUM) for i in members if i.length_class is not None
            ]
        lacking = [instance for instance in members if instance.length_class is None]
        if lacking:
            return cleared + self._assign(members, lacking)
        if self._is_urgent(now_s):
            return [*cleared, Hold(FleetReason.VETO)]
        return cleared + pressure.tick(fleet, now_s)

    @staticmethod
    def _assign(members: list[InstanceView], lacking: list[InstanceView]) -> list[FleetAction]:
        """Instances without class join the smaller pool, longs first: a long needs more."""
        shorts = sum(instance.length_class is PrefillClass.SHORT for instance in members)
        longs = sum(instance.length_class is PrefillClass.LONG for instance in members)
        actions: list[FleetAction] = []
        for instance in lacking:
            to = PrefillClass.SHORT if shorts < longs else PrefillClass.LONG
            shorts, longs = (shorts + 1, longs) if to is PrefillClass.SHORT else (shorts, longs + 1)
            reason = FleetReason.PRESSURE_SHORT if to is PrefillClass.SHORT else FleetReason.PRESSURE_LONG
            actions.append(SetLengthClass(instance, to, reason))
        return actions

    def _level(self, fleet: FleetView, now_s: float) -> list[FleetAction]:
        star = self.parts.star
        if star is None or not self._is_due("star", star, now_s):
            return []
        if self._is_urgent(now_s):
            return [Hold(FleetReason.VETO)]
        return star.tick(fleet, now_s)

    # -- small questions -----------------------------------------------------------------------------------------------

    def _is_due(self, name: str, part: Controller, now_s: float) -> bool:
        """Each part keeps its interval; a tick may be early by a rounding error."""
        if now_s - self._ticked_s.get(name, float("-inf")) < part.interval_s - 1e-9:
            return False
        self._ticked_s[name] = now_s
        return True

    def _is_urgent(self, now_s: float) -> bool:
        return now_s - self._urgent_s < self.knobs.quiet_s

    def _note(self, actions: tuple[FleetAction, ...] | list[FleetAction], now_s: float) -> None:
        if any(isinstance(action, SetRole) and action.reason in _URGENT for action in actions):
            self._urgent_s = now_s

    # -- observations --------------------------------------------------------------------------------------------------

    def on_arrival(self, request: RequestView, now_s: float) -> None:
        for part in self.parts.observers():
            part.on_arrival(request, now_s)

    def on_prefill(self, sample: PrefillSample, now_s: float) -> None:
        for part in self.parts.observers():
            part.on_prefill(sample, now_s)

    def on_first_token(self, request: RequestView, instance: InstanceView, now_s: float) -> None:
        for part in self.parts.observers():
            part.on_first_token(request, instance, now_s)

    def on_token_interval(self, instance: InstanceView, interval_s: float, now_s: float) -> None:
        for part in self.parts.observers():
            part.on_token_interval(instance, interval_s, now_s)

    def on_finish(self, request: RequestView, output_tokens: int, now_s: float) -> None:
        for part in self.parts.observers():
            part.on_finish(request, output_tokens, now_s)
