"""Arrow's global scheduler: Algorithms 1 to 4 and the three triggers of section 5.5.

Where Algorithm 1 says "Load of decode instances is low", this asks whether the instances that would stay could hold the
decode tokens of all within ``low_load`` (see ``role_switches.py``). A flip to decode never asks for the prefill load:
decode first, the paper's overload rule.

Decode load is what runs or arrives (``InstanceView.decode_tokens``). Where decodes are named at dispatch, prompts that
still wait for their prefill count only in the choice of an instance (``pools.least_running``): a backlog of prefills is
no reason to keep instances from helping with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from operator import attrgetter

from pla_sglang.common.checks import Range, check_fields, knob, require
from pla_sglang.policy.arrow.role_switches import RoleSwitchGuard, RoleSwitchKnobs, pick_for_decode, pick_for_prefill
from pla_sglang.policy.common.pools import PoolEvent, can_settle, least_running, movable, switch_role
from pla_sglang.policy.common.predictor import PredictingPolicy, TtftPredictor
from pla_sglang.policy.interface.decisions import (
    Dispatch,
    FleetAction,
    Hold,
    Placement,
    SetRole,
)
from pla_sglang.policy.interface.fleet import FleetView, InstanceView, RequestView, Role
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.policy.interface.step_times import StepTimes


@dataclasses.dataclass(frozen=True)
class ArrowKnobs:
    """Targets, limits and triggers.

    Attributes:
        ttft_slo_s, tpot_slo_s: targets of requests that bring none. TPOT is one target for the fleet.
        max_running_tokens: by profile (``capacity.max_running_tokens``); ``""`` serves all others. An instance with
            step times of its own has its own.
        flips: damping.
        tpot_window_s: trigger 2: how long the mean token interval must be above target.
        idle_s: trigger 3: how long a prefill instance must have been idle.
        busy_load: trigger 3: decode load, as in ``RoleSwitchKnobs.low_load``, that counts as busy.
        adaptive: False: no flips at all, only request scheduling (for ablations).
        interval_s: time between two ticks.
    """

    ttft_slo_s: float
    tpot_slo_s: float
    max_running_tokens: Mapping[str, int]
    flips: RoleSwitchKnobs = dataclasses.field(default_factory=RoleSwitchKnobs)
    tpot_window_s: float = knob(1.0, allowed=Range(0))
    idle_s: float = knob(1.0, allowed=Range(0))
    busy_load: float = knob(0.5, allowed=Range(0, above=True))
    adaptive: bool = True
    interval_s: float = knob(0.25, allowed=Range(0, above=True))

    def __post_init__(self) -> None:
        check_fields(self, "arrow")
        require("ttft_slo_s", self.ttft_slo_s, 0, above=True)
        require("tpot_slo_s", self.tpot_slo_s, 0, above=True)
        for name, tokens in self.max_running_tokens.items():
            require(f"max_running_tokens[{name!r}]", tokens, 1)


class ArrowPolicy(PredictingPolicy):
    """Dispatcher and controller in one: both change the same pools.

    ``pace_s`` reads an instance's token interval, None where there is none that tells of its decode load. ``planned``
    is the number of prefill instances that flips may leave by one at most; None: any number (as in the paper).

    Args:
        running_tokens: Max Running Tokens by step times and KV capacity, for instances with step times of their own.
    """

    def __init__(
        self,
        knobs: ArrowKnobs,
        predictor: TtftPredictor,
        running_tokens: Callable[[StepTimes, int], int] | None = None,
    ) -> None:
        self.knobs = knobs
        self.predictor = predictor
        self._running_tokens = running_tokens
        self._own_limits: dict[int, tuple[StepTimes, int]] = {}  # by instance, with the step times that it follows from
        self.guard = RoleSwitchGuard(knobs.flips)
        self.interval_s = knobs.interval_s
        self.pace_s: Callable[[InstanceView], float | None] = attrgetter("token_interval_s")
        self.planned: int | None = None
        self._over_since_s: float | None = None  # token interval above target since; None: it is not
        self._idle_since_s: dict[int, float] = {}

    # -- request scheduling --------------------------------------------------------------------------------------------

    def dispatch(self, request: RequestView, fleet: FleetView, now_s: float) -> Dispatch:
        """Algorithm 1."""
        slo_s = request.ttft_slo_s if request.ttft_slo_s is not None else self.knobs.ttft_slo_s
        left_s = slo_s - (now_s - request.arrival_s)
        first = self._best(fleet.by_role[Role.PREFILL], request)
        first_s = None if first is None else self.predictor.ttft_s(request, first)
        if first_s is not None and first_s <= left_s:
            return Dispatch(first, None, FleetReason.PREFILL_SLO, first_s)
        second = self._best(fleet.by_role[Role.DECODE_TO_PREFILL], request)
        second_s = None if second is None else self.predictor.ttft_s(request, second)
        if second_s is not None and second_s <= left_s:
            return Dispatch(second, None, FleetReason.PREFILL_SLO_MIXED, second_s)
        move = self.move_for(request, fleet, now_s, left_s)
        if isinstance(move, SetRole):
            third_s = self.predictor.ttft_s(request, move.instance)
            return Dispatch(move.instance, None, FleetReason.PREFILL_FLIP, third_s, (move,))
        fallback = first or second or self.predictor.least_delay(fleet.ready)  # paper: t1, which always exists there
        if fallback is None:
            return Dispatch(None, None, FleetReason.NO_INSTANCE)
        fallback_s = self.predictor.ttft_s(request, fallback)
        return Dispatch(fallback, None, FleetReason.PREFILL_FALLBACK, fallback_s, (move,))

    def move_for(self, request: RequestView, fleet: FleetView, now_s: float, left_s: float) -> SetRole | Hold:
        """Lines 7 to 9. Beyond the paper: no flip for a request that would be late on an idle instance as well."""
        candidate = pick_for_prefill(fleet) if self.knobs.adaptive else None
        if candidate is not None and self.predictor.ttft_s(request, candidate) > left_s:
            return Hold(FleetReason.HOLD_LATE)
        return self.try_move_decode_to_prefill(fleet, now_s, FleetReason.FLIP_TTFT)

    def place_decode(self, request: RequestView, fleet: FleetView, now_s: float) -> Placement:
        """Algorithm 2."""
        source = request.prefilled_on
        here = source is not None and fleet.is_ready(source)
        if here and source is not None and source.role in (Role.DECODE, Role.PREFILL_TO_DECODE, Role.MIXED):
            return Placement(source, FleetReason.DECODE_IN_PLACE)
        first = least_running(fleet.by_role[Role.DECODE])
        if first is not None and self.has_room(first):
            return Placement(first, FleetReason.DECODE_SLO)
        second = least_running(fleet.by_role[Role.PREFILL_TO_DECODE])
        if second is not None and self.has_room(second):
            return Placement(second, FleetReason.DECODE_SLO_MIXED)
        move = self.try_move_prefill_to_decode(fleet, now_s, FleetReason.FLIP_NO_ROOM)
        if isinstance(move, SetRole):
            return Placement(move.instance, FleetReason.DECODE_FLIP, (move,))
        fallback = least_running(instance for instance in (first, second) if instance is not None)
        if fallback is None:
            fallback = source if here else least_running(fleet.ready)
        if fallback is None:
            return Placement(None, FleetReason.NO_INSTANCE)
        return Placement(fallback, FleetReason.DECODE_FALLBACK, (move,))

    # -- instance scheduling -------------------------------------------------------------------------------------------

    def try_move_decode_to_prefill(self, fleet: FleetView, now_s: float, reason: FleetReason) -> SetRole | Hold:
        """Algorithm 3 behind the guard and the overload rule."""
        instance = pick_for_prefill(fleet) if self.knobs.adaptive else None
        if instance is None:
            return Hold(FleetReason.HOLD_LAST)
        if self.planned is not None and _count_prefills(fleet) > self.planned:
            return Hold(FleetReason.HOLD_PLAN)
        if not self.guard.may(PoolEvent.TO_PREFILL, now_s):
            return Hold(FleetReason.HOLD_COOL_DOWN)
        if not self._decode_load_stays_low(fleet, instance):
            return Hold(FleetReason.HOLD_OVERLOAD)
        self.guard.note(PoolEvent.TO_PREFILL, now_s)
        return switch_role(instance, PoolEvent.TO_PREFILL, reason)

    def try_move_prefill_to_decode(self, fleet: FleetView, now_s: float, reason: FleetReason) -> SetRole | Hold:
        """Algorithm 4 behind the guard; the prefill load does not matter."""
        return self._give_to_decode(pick_for_decode(fleet, self.predictor), fleet, now_s, reason)

    def _give_to_decode(
        self, instance: InstanceView | None, fleet: FleetView, now_s: float, reason: FleetReason
    ) -> SetRole | Hold:
        """``instance`` None: prefill has none to give away."""
        if instance is None or not self.knobs.adaptive:
            return Hold(FleetReason.HOLD_LAST)
        if self._is_below_plan(fleet):
            return Hold(FleetReason.HOLD_PLAN)
        if not self.guard.may(PoolEvent.TO_DECODE, now_s):
            return Hold(FleetReason.HOLD_COOL_DOWN)
        self.guard.note(PoolEvent.TO_DECODE, now_s)
        return switch_role(instance, PoolEvent.TO_DECODE, reason)

    def tick(self, fleet: FleetView, now_s: float) -> list[FleetAction]:
        """What the instance monitor starts: members that have settled, a lost phase, triggers 2 and 3."""
        settled: list[FleetAction] = [
            switch_role(instance, PoolEvent.SETTLE, FleetReason.DRAINED)
            for role in (Role.PREFILL_TO_DECODE, Role.DECODE_TO_PREFILL)
            for instance in fleet.by_role[role]
            if can_settle(instance)
        ]
        if settled:
            return settled  # the next tick sees the pools as they are then
        repair = self._repair(fleet)
        if repair is not None:
            return [repair]
        over, idle = self._interval_is_over(fleet, now_s), self._idle_prefill(fleet, now_s)
        if over:
            return [self.try_move_prefill_to_decode(fleet, now_s, FleetReason.FLIP_TPOT)]
        if idle is not None and self._decode_is_busy(fleet):
            return [self._switch_idle(fleet, idle, now_s)]
        return [Hold(FleetReason.STEADY)]

    def _switch_idle(self, fleet: FleetView, idle: InstanceView, now_s: float) -> FleetAction:
        """Trigger 3, for the instance that is idle."""
        given = None if pick_for_decode(fleet, self.predictor) is None else idle
        action = self._give_to_decode(given, fleet, now_s, FleetReason.FLIP_IDLE)
        if isinstance(action, SetRole):
            self._idle_since_s.clear()
        return action

    def _repair(self, fleet: FleetView) -> SetRole | None:
        """After the death of the last instance of a phase; neither cool-down nor load matter then."""
        roles = fleet.by_role
        prefill = roles[Role.PREFILL] or roles[Role.DECODE_TO_PREFILL] or roles[Role.MIXED]
        decode = roles[Role.DECODE] or roles[Role.PREFILL_TO_DECODE] or roles[Role.MIXED]
        if not self.knobs.adaptive:
            return None
        if not prefill and len(decode) > 1:
            instance = pick_for_prefill(fleet)
            return None if instance is None else switch_role(instance, PoolEvent.TO_PREFILL, FleetReason.REPAIR)
        if not decode and len(prefill) > 1:
            instance = pick_for_decode(fleet, self.predictor)
            return None if instance is None else switch_role(instance, PoolEvent.TO_DECODE, FleetReason.REPAIR)
        return None

    # -- small questions -----------------------------------------------------------------------------------------------

    def _is_below_plan(self, fleet: FleetView) -> bool:
        return self.planned is not None and _count_prefills(fleet) < self.planned

    def best_prefill(self, request: RequestView, fleet: FleetView) -> InstanceView | None:
        """The member of both prefill pools with the least predicted TTFT; None without members."""
        return self._best(fleet.by_role[Role.PREFILL] + fleet.by_role[Role.DECODE_TO_PREFILL], request)

    def _best(self, pool: list[InstanceView], request: RequestView) -> InstanceView | None:
        """Least delay (line 1), unless a cached prefix makes another one answer sooner."""
        best = self.predictor.least_delay(pool)
        if best is None or not request.cached:
            return best
        best_s = self.predictor.ttft_s(request, best)
        for instance in pool:
            if instance.index in request.cached:
                other_s = self.predictor.ttft_s(request, instance)
                if other_s < best_s:
                    best, best_s = instance, other_s
        return best

    def limit_tokens(self, instance: InstanceView) -> int:
        """Max Running Tokens. Raises KeyError for a profile without limit where there is no default."""
        if instance.steps is not None and self._running_tokens is not None:
            return self._own_limit(instance, instance.steps, self._running_tokens)
        limits = self.knobs.max_running_tokens
        found = limits.get(instance.profile)
        return limits[""] if found is None else found

    def _own_limit(self, instance: InstanceView, steps: StepTimes, find: Callable[[StepTimes, int], int]) -> int:
        known = self._own_limits.get(instance.index)
        if known is None or known[0] is not steps:
            known = self._own_limits[instance.index] = steps, find(steps, instance.kv_capacity_tokens)
        return known[1]

    def has_room(self, instance: InstanceView) -> bool:
        """The test of Algorithm 2: at most Max Running Tokens, and tokens at the wanted pace."""
        pace_s = self.pace_s(instance)
        return instance.decode_tokens() <= self.limit_tokens(instance) and (
            pace_s is None or pace_s <= self.knobs.tpot_slo_s
        )

    def _members(self, fleet: FleetView) -> list[InstanceView]:
        return fleet.by_role[Role.DECODE] + fleet.by_role[Role.PREFILL_TO_DECODE]

    def _decode_load_stays_low(self, fleet: FleetView, leaver: InstanceView) -> bool:
        """The others could hold what all hold now within ``low_load``, and keep pace now."""
        members = self._members(fleet)
        tokens = sum(instance.decode_tokens() for instance in members)
        room = sum(self.limit_tokens(instance) for instance in members) - self.limit_tokens(leaver)
        pace_s = self._mean_pace_s(members)
        low = self.knobs.flips.low_load
        return tokens <= low * room and (pace_s is None or pace_s <= self.knobs.tpot_slo_s)

    def _mean_pace_s(self, members: list[InstanceView]) -> float | None:
        """Mean token interval over members that have one."""
        paces = [pace_s for member in members if (pace_s := self.pace_s(member)) is not None]
        return sum(paces) / len(paces) if paces else None

    def _decode_is_busy(self, fleet: FleetView) -> bool:
        members = self._members(fleet)
        tokens = sum(instance.decode_tokens() for instance in members)
        return tokens > self.knobs.busy_load * sum(self.limit_tokens(instance) for instance in members)

    def _interval_is_over(self, fleet: FleetView, now_s: float) -> bool:
        """Trigger 2: above target at every tick for ``tpot_window_s``."""
        pace_s = self._mean_pace_s(self._members(fleet))
        if pace_s is None or pace_s <= self.knobs.tpot_slo_s:
            self._over_since_s = None
            return False
        if self._over_since_s is None:
            self._over_since_s = now_s
        return now_s - self._over_since_s >= self.knobs.tpot_window_s

    def _idle_prefill(self, fleet: FleetView, now_s: float) -> InstanceView | None:
        """The prefill instance that has been idle longest, if for ``idle_s``; seen at ticks."""
        members = movable(fleet.by_role[Role.PREFILL])
        idle = {instance.index: instance for instance in members if not instance.queued_prefills}
        self._idle_since_s = {index: self._idle_since_s.get(index, now_s) for index in idle}
        if not idle:
            return None
        index = min(self._idle_since_s, key=lambda key: (self._idle_since_s[key], key))
        return idle[index] if now_s - self._idle_since_s[index] >= self.knobs.idle_s else None

    # -- observations --------------------------------------------------------------------------------------------------

    def on_arrival(self, request: RequestView, now_s: float) -> None:
        self.guard.load.add(request.input_tokens, now_s)


def _count_prefills(fleet: FleetView) -> int:
    """Instances that get prefills."""
    return len(fleet.by_role[Role.PREFILL]) + len(fleet.by_role[Role.DECODE_TO_PREFILL])
