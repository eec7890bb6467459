"""All four systems combined: which part decides what, and precedence.

What each part does:

* Arrow dispatches requests, holds the pools and flips instances within seconds (``arrow``);
* PLA-Serve splits the prefill pool into short and long instances, sizes the split, and batches inside an engine;
* STAR moves running requests from instances whose caches would be full;
* DOPD prefills ultra-short prompts in place, and plans the *number* of instances over minutes.

Precedence in case of conflict:

1. liveness: a phase without an instance is repaired first (Arrow's REPAIR);
2. current targets: a flip for a predicted TTFT or a measured TPOT violation; for ``quiet_s`` after it, DOPD does
   not drain instances and the pressure controller does not move any: both would work with counts about to change;
3. plan: DOPD's scaling. On a fleet of fixed size its ratio (eq. 15), which Arrow's flips leave by one at most;
4. optimisation: PLA's length classes, then STAR's moves. STAR never moves a request to an instance that Arrow empties
   (D->P), nor to one that would then hold more than Max Running Tokens or have too little KV cache left, and it stops
   while decode is being flipped.

Where instances that do both phases bear as much, the fleet has no roles (``colocation.py``): a request goes to the
instance with the least cost of both phases (``cost.py``), and STAR is the only active part. The rest is for a fleet
with roles. On stock engines, which keep their kind and their requests, only Arrow's request scheduling, ``unite`` and
``cost`` are given (``fleet.py``).

A request takes the first possible of these. The first, the third and the last are prefills in place
(``stall_budget.py``), on a decode instance that has memory and whose decodes tolerate the stall:

1. an ultra-short prompt (DOPD): few new tokens, computed faster than their KV cache would be handed over;
2. if it would wait in the prefill pool for more than ``flip_share`` of the time that it has: Arrow's TTFT flip, made
   before the target is missed, under the same conditions;
3. if it would wait for more than ``ease_share`` of that time, and would be done sooner in place, with the hand-over;
4. its length class (PLA), when the PREFILL pool has at least ``split_from`` instances, no instance has a prefix of it,
   and the predicted TTFT in the class is within ``comfort_share`` of the target. A busier class shares
   the whole pool: two separate queues waste the idle time of one of them, and above some load that decides whether
   targets are met;
5. Arrow's Algorithm 1 over all;
6. if even that would be late: in place, with the larger share of the stall budget.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from pla_sglang.common.checks import Range, check_fields, knob
from pla_sglang.policy.arrow.policy import ArrowPolicy
from pla_sglang.policy.combined.colocation import ColocationMode, FleetMode
from pla_sglang.policy.combined.cost import InstanceCost
from pla_sglang.policy.combined.stall_budget import InPlace
from pla_sglang.policy.common.joining import join_pools
from pla_sglang.policy.common.plan_log import Look
from pla_sglang.policy.common.predictor import TtftPredictor
from pla_sglang.policy.dopd.dispatch import DopdDispatcher
from pla_sglang.policy.dopd.planner import DopdController
from pla_sglang.policy.interface.decisions import (
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
from pla_sglang.policy.interface.fleet import FleetView, InstanceKind, InstanceView, RequestView, Role
from pla_sglang.policy.interface.prefill import PrefillClass
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.policy.pla.pressure import PressureController
from pla_sglang.policy.pla.spatial import SpatialDispatcher
from pla_sglang.policy.slo.knobs import SloKnobs
from pla_sglang.policy.star.policy import StarRescheduler

_URGENT = {
    FleetReason.FLIP_TTFT,
    FleetReason.FLIP_NO_ROOM,
    FleetReason.FLIP_TPOT,
    FleetReason.REPAIR,
    FleetReason.SPLIT,
}
_POOL_REASONS = {PrefillClass.SHORT: FleetReason.PRESSURE_SHORT, PrefillClass.LONG: FleetReason.PRESSURE_LONG}


@dataclasses.dataclass(frozen=True)
class CombinedKnobs:
    """Attributes:
    quiet_s: pause of the slower parts after an urgent flip: eight ticks, in which the counts change and are seen.
    split_from: minimum number of prefill instances for a split by length; 0: never. Of two, either class would have
        one, and wait for it alone.
    comfort_share: share of the TTFT target up to which a length class keeps its requests in its own pool.
    class_memory: recent requests by which it is judged whether classes are in use; pools that most of them do not
        keep to are not sized. One half is then known within 4 %.
    ease_share: share of what its own prefill leaves of the TTFT target; relief in place is used for longer waits.
    flip_share: the same for Arrow's TTFT flip, which disturbs more, and so comes at twice that; 1: when the target is
        missed.
    reserve_share: of the KV cache, that a move leaves free on its target: what engines keep for new requests.
    interval_s: of the common tick; each part has its own interval in addition. On ``burst`` half as long took 0.3
        points from those in target, and twice as long gave 0.1. Half and twice of the others moved no share in target
        on five named workloads (bench/lab/docs/fleets.md).
    """

    quiet_s: float = knob(2.0, allowed=Range(0))
    split_from: int = knob(3, allowed=Range(0))
    comfort_share: float = knob(0.05, allowed=Range(0, 1))
    class_memory: int = knob(200, allowed=Range(1))
    ease_share: float = knob(0.25, allowed=Range(0, 1))
    flip_share: float = knob(0.5, allowed=Range(0, 1))
    reserve_share: float = knob(SloKnobs.kv_share, allowed=Range(0, 1))
    interval_s: float = knob(0.25, allowed=Range(0, above=True))

    def __post_init__(self) -> None:
        check_fields(self, "combined")


@dataclasses.dataclass
class Parts:
    """The parts; None for an unused part. ``local`` needs ``in_place``; ``unite`` and ``cost`` go together; ``planner``
    plans counts of roles, so there is no ``unite`` beside it."""

    arrow: ArrowPolicy
    in_place: InPlace | None = None
    local: DopdDispatcher | None = None
    spatial: SpatialDispatcher | None = None
    pressure: PressureController | None = None
    star: StarRescheduler | None = None
    planner: DopdController | None = None
    unite: ColocationMode | None = None
    cost: InstanceCost | None = None

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

    @property
    def moves_requests(self) -> bool:
        """Running requests are to be listed for it."""
        return self.parts.star is not None

    @property
    def predictor(self) -> TtftPredictor:
        """What drivers explain predictions with."""
        return self.parts.arrow.predictor

    def predict_ttft_s(self, request: RequestView, instance: InstanceView) -> float:
        """From now until the first token there, as the choice in force sees it."""
        unite, cost = self.parts.unite, self.parts.cost
        if unite is None or cost is None or unite.mode is FleetMode.ROLES:
            return self.predictor.ttft_s(request, instance)
        return cost.predict_ttft_s(request, instance)

    # -- requests ------------------------------------------------------------------------------------------------------

    def dispatch(self, request: RequestView, fleet: FleetView, now_s: float) -> Dispatch:
        if (united := self._united(request, fleet, now_s)) is not None:
            return united
        left_s = self._target_s(request) - (now_s - request.arrival_s)
        found = (
            self._ultra_short(request, fleet, now_s)
            or self._early_switch(request, fleet, now_s)
            or self._relief(request, fleet, now_s, left_s)
            or self._own_class(request, fleet, now_s)
        )
        if found is not None:
            return found
        answer = self.parts.arrow.dispatch(request, fleet, now_s)
        self._note(answer.actions, now_s)
        if answer.reason is FleetReason.PREFILL_FALLBACK:
            return self._put(request, _decodes(fleet), left_s, now_s, FleetReason.SPARE_LATE) or answer
        return answer

    def place_decode(self, request: RequestView, fleet: FleetView, now_s: float) -> Placement:
        answer = self.parts.arrow.place_decode(request, fleet, now_s)
        self._note(answer.actions, now_s)
        return answer

    def _united(self, request: RequestView, fleet: FleetView, now_s: float) -> Dispatch | None:
        """The instance with the least cost of both phases, if the fleet has no roles."""
        unite, cost = self.parts.unite, self.parts.cost
        if unite is None or cost is None:
            return None
        unite.note(request, now_s)
        if unite.mode is FleetMode.ROLES:
            return None
        chosen = cost.choose(request, fleet, now_s, unite.meter.output_tokens)
        if chosen is None:
            return None
        ttft_s = cost.predict_ttft_s(request, chosen)
        cost.note(request, chosen, fleet, now_s)
        if self.parts.in_place is not None:
            self.parts.in_place.note(chosen)
        return Dispatch(chosen, None, FleetReason.UNITED, ttft_s)

    def _ultra_short(self, request: RequestView, fleet: FleetView, now_s: float) -> Dispatch | None:
        """DOPD's answer if it is in place. DOPD considers each prompt alone; the stall budget adds them up."""
        local, in_place = self.parts.local, self.parts.in_place
        if local is None or in_place is None:
            return None
        most_cached = max(request.cached.values(), default=0)
        if request.input_tokens > local.knobs.local_max_tokens + most_cached:
            return None
        answer = local.dispatch(request, fleet, now_s)
        if answer.reason is not FleetReason.DOPD_LOCAL or not self._on_time(answer, request, now_s):
            return None
        if answer.decode is None or not in_place.can_take(request, answer.decode, now_s):
            return None
        in_place.take(request, answer.decode, now_s)
        return answer

    def _early_switch(self, request: RequestView, fleet: FleetView, now_s: float) -> Dispatch | None:
        """Arrow's TTFT flip, before the target is missed."""
        arrow, target_s = self.parts.arrow, self._target_s(request)
        best = arrow.best_prefill(request, fleet)
        if best is None or not self._waits(request, best, self.knobs.flip_share):
            return None
        move = arrow.move_for(request, fleet, now_s, target_s - (now_s - request.arrival_s))
        if not isinstance(move, SetRole):
            return None
        self._note((move,), now_s)
        ttft_s = arrow.predictor.ttft_s(request, move.instance)
        return Dispatch(move.instance, None, FleetReason.PREFILL_FLIP, ttft_s, (move,))

    def _relief(self, request: RequestView, fleet: FleetView, now_s: float, left_s: float) -> Dispatch | None:
        """A decode instance that is faster than a busy prefill pool."""
        arrow, local = self.parts.arrow, self.parts.local
        best = arrow.best_prefill(request, fleet)
        best_s = None if best is None else arrow.predictor.ttft_s(request, best)
        if best is not None and not self._waits(request, best, self.knobs.ease_share):
            return None
        hand_over_s = 0.0 if local is None else local.transfer_s(request)
        before_s = left_s if best_s is None else min(left_s, best_s + hand_over_s)
        return self._put(request, _decodes(fleet), before_s, now_s, FleetReason.SPARE_DECODE)

    def _waits(self, request: RequestView, best: InstanceView, share: float) -> bool:
        """Its wait there takes more than ``share`` of what its own prefill leaves of the TTFT target.

        A long prefill takes as long anywhere else: it is no reason to disturb those that decode.
        """
        predictor = self.parts.arrow.predictor
        own_s = predictor.own_s(request, best)
        wait_s = predictor.ttft_s(request, best) - own_s
        return wait_s > share * max(0.0, self._target_s(request) - own_s)

    def _put(
        self, request: RequestView, pool: list[InstanceView], before_s: float, now_s: float, reason: FleetReason
    ) -> Dispatch | None:
        """In place where the first token comes soonest, if before ``before_s``."""
        in_place = self.parts.in_place
        if in_place is None or not pool:
            return None
        late = reason is FleetReason.SPARE_LATE
        chosen = in_place.soonest(request, pool, before_s, now_s, late=late)
        if chosen is None:
            return None
        ttft_s = self.parts.arrow.predictor.ttft_s(request, chosen)
        in_place.take(request, chosen, now_s, late=late)
        return Dispatch(chosen, chosen, reason, ttft_s)

    def _own_class(self, request: RequestView, fleet: FleetView, now_s: float) -> Dispatch | None:
        """PLA's answer if there are length classes and the request's class is within ``comfort_share``."""
        spatial = self.parts.spatial
        if spatial is None or request.cached or not self._is_split(fleet):
            return None
        answer = spatial.dispatch(request, fleet, now_s)
        follows = answer.reason in (FleetReason.PLA_SHORT, FleetReason.PLA_LONG) and self._on_time(
            answer, request, now_s, self.knobs.comfort_share
        )
        self._classed.append(follows)
        return answer if follows else None

    def _on_time(self, answer: Dispatch, request: RequestView, now_s: float, share: float = 1.0) -> bool:
        """The predicted TTFT is within ``share`` of the target, counted from arrival."""
        left_s = share * self._target_s(request) - (now_s - request.arrival_s)
        return answer.predicted_ttft_s is not None and answer.predicted_ttft_s <= left_s

    def _target_s(self, request: RequestView) -> float:
        """TTFT target of ``request``."""
        return request.ttft_slo_s if request.ttft_slo_s is not None else self.parts.arrow.knobs.ttft_slo_s

    def _is_split(self, fleet: FleetView) -> bool:
        members = fleet.by_role[Role.PREFILL]
        if not self.knobs.split_from or len(members) < self.knobs.split_from:
            return False
        return any(member.length_class is not None for member in members)

    # -- instances -----------------------------------------------------------------------------------------------------

    def tick(self, fleet: FleetView, now_s: float) -> list[FleetAction]:
        """Arrow first; the others when they are due and no part with precedence prevents it."""
        unite = self.parts.unite
        actions = ([] if unite is None else unite.tick(fleet, now_s)) or self.parts.arrow.tick(fleet, now_s)
        self._note(actions, now_s)
        if any(isinstance(action, SetRole) for action in actions):
            return actions  # the pools change; the others see them at the next tick
        actions += self._plan(fleet, now_s)
        if any(isinstance(action, ScaleTo) for action in actions):
            return actions
        actions += self._split(fleet, now_s)
        actions += self._level(fleet, now_s)
        return actions

    @property
    def look(self) -> Look | None:
        """Its planner's, for ``plan_log.py``."""
        return None if self.parts.planner is None else self.parts.planner.look

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
        """PLA's pools: created when the prefill pool is large enough, removed when it no longer is, else sized."""
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
        """Pools for the instances without class."""
        classes = join_pools((instance.length_class for instance in members), len(lacking))
        return [
            SetLengthClass(instance, joined, _POOL_REASONS[joined])
            for instance, joined in zip(lacking, classes, strict=True)
        ]

    def _level(self, fleet: FleetView, now_s: float) -> list[FleetAction]:
        star = self.parts.star
        if star is None or not self._is_due("star", star, now_s):
            return []
        if self._is_urgent(now_s):
            return [Hold(FleetReason.VETO)]
        return [self._unless_full(action) for action in star.tick(fleet, now_s)]

    def _unless_full(self, action: FleetAction) -> FleetAction:
        """STAR's move is allowed if Arrow could place that decode on the target, and if it leaves ``reserve_share`` of
        the KV cache there: if all instances are above Max Running Tokens, or full, balancing makes all requests late
        instead of some."""
        if not isinstance(action, Migrate):
            return action
        target = action.target
        most_used = (1 - self.knobs.reserve_share) * target.kv_capacity_tokens
        fits = target.assigned_decode_tokens() + action.tokens <= self.parts.arrow.limit_tokens(target)
        leaves_reserve = target.kv_used_tokens + action.tokens <= most_used
        return action if fits and leaves_reserve else Hold(FleetReason.VETO)

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
        self.parts.arrow.on_first_token(request, instance, now_s)
        self._forget_prefill(request)

    def on_token_interval(self, instance: InstanceView, interval_s: float, now_s: float) -> None:
        if self.parts.in_place is not None:
            self.parts.in_place.on_report(instance)

    def on_finish(self, request: RequestView, output_tokens: int, now_s: float) -> None:
        if self.parts.in_place is not None:
            self.parts.in_place.on_answer(output_tokens)
        if self.parts.unite is not None:
            self.parts.unite.on_finish(output_tokens)
        self._forget_prefill(request)
        for part in self.parts.observers():
            part.on_finish(request, output_tokens, now_s)

    def _forget_prefill(self, request: RequestView) -> None:
        if self.parts.cost is not None:
            self.parts.cost.forget(request)


def _decodes(fleet: FleetView) -> list[InstanceView]:
    """Ready instances that decode, and could prefill; those that have just joined included."""
    pool = fleet.by_role[Role.DECODE] + fleet.by_role[Role.PREFILL_TO_DECODE]
    return [instance for instance in pool if instance.kind is not InstanceKind.DECODE]
