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
   (D->P), nor to one that would then hold more than Max Running Tokens, and it stops while decode is being flipped.

A request goes the first way that is open:

1. in place (DOPD): few new tokens, computed sooner than their KV cache would be handed over, and the decode instance
   has room and stands still no longer than one token may take;
2. its length class (PLA), when the PREFILL pool has at least ``split_from`` instances, no instance has a prefix of it,
   and the class is at ease: predicted TTFT within ``comfort_share`` of the target. A class that is busier than that
   gives way to the whole pool: two queues of their own waste what one of them leaves idle, and above some load that is
   what decides whether targets are kept;
3. Arrow's Algorithm 1 over all, which may flip an instance;
4. where even that would be late: in place on a decode instance that would be in time and keeps its pace, for the last
   decode instance may not be flipped, and with short answers it has time to spare.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from pla_sglang.policy.arrow.policy import ArrowPolicy
from pla_sglang.policy.checks import require
from pla_sglang.policy.decisions import (
    Controller,
    Dispatch,
    FleetAction,
    Hold,
    Migrate,
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
    comfort_share: of the TTFT target, up to which a length class keeps its requests to itself.
    class_memory: recent requests by which it is judged whether classes are in use; pools that most of them do not
        keep to are not sized.
    spare_pace: share of the TPOT target at which a decode instance takes requests that would be late elsewhere; 0:
        none does.
    spare_memory: share of the KV cache that in-place prefills may fill.
    interval_s: of the common tick; each part keeps its own interval on top.
    """

    quiet_s: float = 2.0
    split_from: int = 3
    comfort_share: float = 0.05
    class_memory: int = 200
    spare_pace: float = 0.5
    spare_memory: float = 0.8
    interval_s: float = 0.25

    def __post_init__(self) -> None:
        require("combined quiet_s", self.quiet_s, 0)
        require("combined split_from", self.split_from, 0)
        require("combined comfort_share", self.comfort_share, 0, 1)
        require("combined class_memory", self.class_memory, 1)
        require("combined spare_pace", self.spare_pace, 0, 1)
        require("combined spare_memory", self.spare_memory, 0, 1)
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
        self._classed: deque[bool] = deque(maxlen=knobs.class_memory)  # did recent requests follow their class?

    # -- requests ------------------------------------------------------------------------------------------------------

    def dispatch(self, request: RequestView, fleet: FleetView, now_s: float) -> Dispatch:
        local = self._in_place(request, fleet, now_s)
        if local is not None:
            return local
        own = self._own_class(request, fleet, now_s)
        if own is not None:
            return own
        answer = self.parts.arrow.dispatch(request, fleet, now_s)
        self._note(answer.actions, now_s)
        if answer.reason is FleetReason.PREFILL_FALLBACK:
            return self._spare(request, fleet, now_s) or answer
        return answer

    def place_decode(self, request: RequestView, fleet: FleetView, now_s: float) -> Placement:
        answer = self.parts.arrow.place_decode(request, fleet, now_s)
        self._note(answer.actions, now_s)
        return answer

    def _in_place(self, request: RequestView, fleet: FleetView, now_s: float) -> Dispatch | None:
        """DOPD's answer where it is in place, the decode instance has room, and both targets are kept.

        DOPD looks at each prompt alone. A burst of them on one instance adds up, so its whole backlog counts here: the
        decodes there stand still for no longer than one token may take.
        """
        local = self.parts.local
        if local is None:
            return None
        most_cached = max(request.cached.values(), default=0)
        if request.input_tokens > local.knobs.local_max_tokens + most_cached:
            return None
        answer = local.dispatch(request, fleet, now_s)
        if answer.reason is not FleetReason.DOPD_LOCAL or not self._on_time(answer, request, now_s):
            return None
        if answer.predicted_ttft_s is None or answer.predicted_ttft_s > self.parts.arrow.knobs.tpot_slo_s:
            return None
        return answer if answer.decode is not None and self._fits(request, answer.decode) else None

    def _own_class(self, request: RequestView, fleet: FleetView, now_s: float) -> Dispatch | None:
        """PLA's answer where length classes are formed and the request's own is at ease."""
        spatial = self.parts.spatial
        if spatial is None or request.cached or not self._is_split(fleet):
            return None
        answer = spatial.dispatch(request, fleet, now_s)
        follows = answer.reason in (FleetReason.PLA_SHORT, FleetReason.PLA_LONG) and self._on_time(
            answer, request, now_s, self.knobs.comfort_share
        )
        self._classed.append(follows)
        return answer if follows else None

    def _spare(self, request: RequestView, fleet: FleetView, now_s: float) -> Dispatch | None:
        """The decode instance with the least backlog, if it would be in time and has time and memory to spare.

        Its decodes stand still meanwhile: no longer than one token may take.
        """
        arrow, knobs = self.parts.arrow, self.knobs
        pace_s = knobs.spare_pace * arrow.knobs.tpot_slo_s
        able = [
            instance
            for instance in fleet.by_role[Role.DECODE]
            if self._fits(request, instance) and (instance.token_interval_s or 0.0) <= pace_s
        ]
        chosen = arrow.predictor.least_delay(able) if pace_s else None
        if chosen is None:
            return None
        ttft_s = arrow.predictor.ttft_s(request, chosen)
        answer = Dispatch(chosen, chosen, FleetReason.SPARE_DECODE, ttft_s)
        return answer if ttft_s <= arrow.knobs.tpot_slo_s and self._on_time(answer, request, now_s) else None

    def _fits(self, request: RequestView, instance: InstanceView) -> bool:
        """Room for one more decode (Arrow), memory for its prompt beside what is queued, and no prefill that is stuck.

        An engine admits a prefill only if its running requests can still grow, which a router does not see: a prefill
        that has waited for longer than a token may take tells.
        """
        used = instance.kv_used_tokens + instance.queued_tokens + request.input_tokens
        if used > self.knobs.spare_memory * instance.kv_capacity_tokens:
            return False
        return instance.prefill_age_s <= self.parts.arrow.knobs.tpot_slo_s and self.parts.arrow.has_room(instance)

    def _on_time(self, answer: Dispatch, request: RequestView, now_s: float, share: float = 1.0) -> bool:
        """Whether the predicted TTFT is within ``share`` of the target, counted from arrival."""
        slo_s = request.ttft_slo_s if request.ttft_slo_s is not None else self.parts.arrow.knobs.ttft_slo_s
        left_s = share * slo_s - (now_s - request.arrival_s)
        return answer.predicted_ttft_s is not None and answer.predicted_ttft_s <= left_s

    def _is_split(self, fleet: FleetView) -> bool:
        members = fleet.by_role[Role.PREFILL]
        if not self.knobs.split_from or len(members) < self.knobs.split_from:
            return False
        return any(member.length_class is not None for member in members)

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
        if self._is_urgent(now_s) or 2 * sum(self._classed) < len(self._classed):
            # Counts about to change, or loads of pools that most requests do not keep to: nothing to size them by.
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
        return [self._unless_full(action) for action in star.tick(fleet, now_s)]

    def _unless_full(self, action: FleetAction) -> FleetAction:
        """STAR's move stands if Arrow could have placed that decode on the target: where all instances are above Max
        Running Tokens, levelling makes all tokens late instead of some."""
        if not isinstance(action, Migrate):
            return action
        fits = action.target.decode_tokens() + action.tokens <= self.parts.arrow.limit_tokens(action.target)
        return action if fits else Hold(FleetReason.VETO)

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
