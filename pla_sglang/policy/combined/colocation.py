"""When a fleet drops roles: both phases of a request on one instance, while decodes tolerate prefills beside them.

Roles keep prefills from stopping decodes. Their cost is KV memory and compute that the other phase cannot use, the
transfer, and prefixes on instances that cannot use them. If stalls make no request late, roles only have a cost.

*United*, all instances are MIXED, and a request goes to the instance with the least

    cost = TTFT there / TTFT target
         + work_weight * its prefill time there / TTFT target
         + decode_weight * decode step once it runs there / TPOT target
         + stall_weight * its prefill time there * decodes of an average instance / time budget of a median answer

Where engines run small prefills first, its TTFT waits only for those ahead of it (``sized_backlog.py``). The terms with
its prefill time favour a cached prefix; without one they are the same for all instances. One is for the decodes beside
it, the other for those that come later: what is computed again delays them, not this request.

*Would stalls make answers late?* Each prefill is assigned to a virtual lane (one per instance), the one that is free
first, whether the fleet is united or not. An answer of n tokens tolerates n * (target - step) seconds of stalls, and
lives for at most n * target seconds. So for a few quantiles of recent answers a lane sums its prefill seconds, decaying
with time constant n * target; that answer is late if the sum exceeds ``bears_share`` of the stalls that it tolerates.
Where decodes are piggybacked, a prefill counts with the part of its time that they lose (``stalls.py``), here
and in the last term of the cost: such a fleet stays united unless TPOT targets are tight.
``late_share`` is the share of late quantiles, averaged over recent arrivals.

* Roles are introduced when ``late_share`` reaches ``split_share``, if they would help: decodes fit into fewer
  instances, and the others could finish all waiting prefills within ``queue_share`` of the TTFT target.
* They are dropped when ``late_share`` has been at most ``unite_share`` for ``calm_s``. Introducing them again within
  ``regret_s`` doubles that time, up to ``calm_max_s``.

A fleet starts united: the need for roles is visible within one burst, because short answers end soon, the need for a
united fleet only when long answers have ended. Instances that are not stateless keep their roles.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import deque
from collections.abc import Sequence

from pla_sglang.common.checks import Range, check_fields, knob, require_order
from pla_sglang.policy.arrow.policy import ArrowPolicy
from pla_sglang.policy.combined.sized_backlog import SizedBacklog
from pla_sglang.policy.combined.stalls import Stalls
from pla_sglang.policy.common.pools import PoolEvent, switch_role
from pla_sglang.policy.interface.decisions import FleetAction
from pla_sglang.policy.interface.fleet import FleetView, InstanceKind, InstanceView, RequestView, Role
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.policy.interface.step_times import StepTimes


@dataclasses.dataclass(frozen=True)
class ColocationKnobs:
    """Attributes:
    split_share, unite_share: shares of late answers at which roles are introduced and dropped.
    bears_share: share of the stalls that an answer tolerates above which it counts as late.
    memory: recent arrivals for the average of the share.
    judge_after: answers that must have ended before the first decision.
    calm_s, calm_max_s, regret_s: how long the share must have been low; doubled after a reversal, up to the maximum.
    queue_share: share of the TTFT target in which prefill instances must be able to finish the waiting prefills.
    work_weight, decode_weight, stall_weight: in the choice of an instance; the TTFT has 1.
    memory_share: of the KV cache that prompts may fill; fuller instances come last.
    answers, refresh: recent answers for the quantiles, and number of answers between two updates.
    """

    split_share: float = knob(0.2, allowed=Range(0, 1, above=True))
    unite_share: float = knob(0.02, allowed=Range(0, 1))
    bears_share: float = knob(0.7, allowed=Range(0, 1, above=True))
    memory: int = knob(50, allowed=Range(1))
    judge_after: int = knob(50, allowed=Range(1))
    calm_s: float = knob(120.0, allowed=Range(0))
    calm_max_s: float = knob(3600.0, allowed=Range(0))
    regret_s: float = knob(600.0, allowed=Range(0))
    queue_share: float = knob(0.5, allowed=Range(0))
    work_weight: float = knob(4.0, allowed=Range(0))
    decode_weight: float = knob(1.0, allowed=Range(0))
    stall_weight: float = knob(0.5, allowed=Range(0))
    memory_share: float = knob(0.9, allowed=Range(0, 1))
    answers: int = knob(500, allowed=Range(1))
    refresh: int = knob(50, allowed=Range(1))

    def __post_init__(self) -> None:
        check_fields(self, "unite")
        require_order("unite unite_share", self.unite_share, "split_share", self.split_share)
        require_order("unite calm_s", self.calm_s, "calm_max_s", self.calm_max_s)


QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)  # of recent answers, each standing for a fifth of them
MIDDLE = 2
FULL = 1e6  # cost of an instance without room, above all others


class FleetMode(enum.Enum):
    UNITED = "united"
    ROLES = "roles"


@dataclasses.dataclass(slots=True)
class _Lane:
    """A virtual instance: free from ``free_s`` on; decaying prefill seconds by quantile, as of ``at_s``."""

    free_s: float
    at_s: float
    sums_s: list[float]


class ColocationMode:
    """Mode of a fleet, its criterion, and the choice of an instance while united.

    Args:
        arrow: its targets, predictor and Max Running Tokens are used.
        steps: step times of an instance.
        riding_tokens, small_first: as in ``Setup``.

    Attributes:
        backlog: what was sent to united instances; None where they run prefills in the order in which they come.
    """

    def __init__(
        self,
        knobs: ColocationKnobs,
        arrow: ArrowPolicy,
        steps: StepTimes,
        riding_tokens: int | None = None,
        *,
        small_first: bool = False,
    ) -> None:
        self.knobs = knobs
        self.mode = FleetMode.UNITED
        self.late_share = 0.0
        self.backlog = SizedBacklog() if small_first else None
        self._arrow = arrow
        self._steps = steps
        self._stalls = Stalls(steps, riding_tokens)
        self._lanes: list[_Lane] = []
        self._answers: deque[int] = deque(maxlen=knobs.answers)
        self._ended = 0
        self._tokens: tuple[int, ...] = ()
        self._step_s = 0.0
        self._running = 0.0  # of an instance, on average
        self._calm_since_s: float | None = None
        self._calm_s = knobs.calm_s
        self._united_s = float("-inf")

    # -- requests ------------------------------------------------------------------------------------------------------

    def choose(self, request: RequestView, fleet: FleetView) -> InstanceView | None:
        """While united: the instance with the least cost, the first of equals; None if roles are in use."""
        if self.mode is FleetMode.ROLES:
            return None
        best, best_cost = None, math.inf
        for instance in fleet.by_role[Role.MIXED]:
            cost = self._cost(request, instance)
            if cost < best_cost:
                best, best_cost = instance, cost
        return best

    def predict_ttft_s(self, request: RequestView, instance: InstanceView) -> float:
        """From now until the first token."""
        return self._delay_s(request, instance) + self._arrow.predictor.own_s(request, instance)

    def _delay_s(self, request: RequestView, instance: InstanceView) -> float:
        predictor = self._arrow.predictor
        if self.backlog is None:
            return predictor.delay_s(instance)
        return predictor.backlog_s(instance, *self.backlog.ahead_of(request, instance))

    def _cost(self, request: RequestView, instance: InstanceView) -> float:
        knobs, targets = self.knobs, self._arrow.knobs
        own_s = self._arrow.predictor.own_s(request, instance)
        cost = (self._delay_s(request, instance) + (1 + knobs.work_weight) * own_s) / targets.ttft_slo_s
        cost += knobs.decode_weight * self._step_with_s(request, instance) / targets.tpot_slo_s
        if self._tokens:
            stall_s = own_s * self._stalls.share(targets.tpot_slo_s - self._step_s)
            cost += knobs.stall_weight * stall_s * self._running / (self._tokens[MIDDLE] * targets.tpot_slo_s)
        filled = instance.kv_used_tokens + instance.queued_tokens + request.new_tokens(instance)
        return cost + FULL if filled > knobs.memory_share * instance.kv_capacity_tokens else cost

    def _step_with_s(self, request: RequestView, instance: InstanceView) -> float:
        """Decode step once ``request`` decodes with all requests of the instance."""
        batch = instance.requests() + 1
        queued = instance.queued_tokens + instance.queued_history_tokens
        tokens = instance.assigned_decode_tokens() + queued + request.input_tokens
        return (instance.steps or self._steps).decode_s(batch, tokens)

    def note(self, request: RequestView, fleet: FleetView, now_s: float) -> None:
        """``request`` is being dispatched, in either mode; assuming the largest cached prefix."""
        ready = fleet.ready
        if not ready:
            return
        cached = request.cached
        holder = max(ready, key=lambda one: cached.get(one.index, 0)) if cached else ready[0]
        own_s = self._arrow.predictor.own_s(request, holder)
        if len(self._lanes) != len(ready):
            self._resize(len(ready), now_s)
        lane = min(self._lanes, key=lambda one: one.free_s)
        lane.free_s = max(lane.free_s, now_s) + own_s
        if self._tokens:
            stall_s = own_s * self._stalls.share(self._arrow.knobs.tpot_slo_s - self._step_s)
            late = self._add(lane, stall_s, now_s) / len(self._tokens)
            self.late_share += (late - self.late_share) / self.knobs.memory

    def _add(self, lane: _Lane, stall_s: float, now_s: float) -> int:
        """Adds a prefill that takes ``stall_s`` from decodes; the number of quantiles that are late in ``lane`` now."""
        target_s, late = self._arrow.knobs.tpot_slo_s, 0
        for place, tokens in enumerate(self._tokens):
            keep = math.exp((lane.at_s - now_s) / (tokens * target_s))
            lane.sums_s[place] = lane.sums_s[place] * keep + stall_s
            late += lane.sums_s[place] > self.knobs.bears_share * tokens * (target_s - self._step_s)
        lane.at_s = now_s
        return late

    def _resize(self, count: int, now_s: float) -> None:
        del self._lanes[count:]
        while len(self._lanes) < count:
            self._lanes.append(_Lane(now_s, now_s, [0.0] * len(QUANTILES)))

    def on_answer(self, tokens: int) -> None:
        """A request has finished with this many tokens."""
        knobs = self.knobs
        self._answers.append(max(1, tokens))
        self._ended += 1
        if self._ended >= knobs.judge_after and (not self._tokens or self._ended % knobs.refresh == 0):
            ordered = sorted(self._answers)
            self._tokens = tuple(ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in QUANTILES)

    # -- instances -----------------------------------------------------------------------------------------------------

    def tick(self, fleet: FleetView, now_s: float) -> list[FleetAction]:
        """Role changes that the mode requires."""
        ready = fleet.ready
        if not ready:
            return []
        self._measure(ready)
        if any(one.kind is not InstanceKind.STATELESS for one in ready):
            return []
        if self.mode is FleetMode.ROLES:
            if not self._is_calm(now_s):
                return self._place_newcomer(fleet)
            self.mode, self._united_s = FleetMode.UNITED, now_s
        apart: list[FleetAction] = [
            switch_role(one, PoolEvent.UNITE, FleetReason.UNITE) for one in ready if one.role is not Role.MIXED
        ]
        if apart or self.late_share < self.knobs.split_share:
            return apart
        actions = self._roles(ready)
        if actions:
            self._split(now_s)
        return actions

    def _measure(self, ready: Sequence[InstanceView]) -> None:
        """The decode step of an average instance of a united fleet."""
        running, context = sum(one.running for one in ready), sum(one.context_tokens for one in ready)
        self._running = running / len(ready)
        self._step_s = self._steps.decode_s(math.ceil(self._running), context // len(ready)) if running else 0.0

    def _split(self, now_s: float) -> None:
        """Change the mode; after a reversal the next change waits twice as long."""
        knobs = self.knobs
        again = now_s - self._united_s < max(knobs.regret_s, self._calm_s)
        self._calm_s = min(2 * self._calm_s, knobs.calm_max_s) if again else knobs.calm_s
        self.mode, self._calm_since_s = FleetMode.ROLES, None

    def _is_calm(self, now_s: float) -> bool:
        if self.late_share > self.knobs.unite_share:
            self._calm_since_s = None
            return False
        if self._calm_since_s is None:
            self._calm_since_s = now_s
        return now_s - self._calm_since_s >= self._calm_s

    def _roles(self, ready: Sequence[InstanceView]) -> list[FleetAction]:
        """Decode instances, those with the most decodes, as few as can hold all; empty if roles would not help."""
        arrow = self._arrow
        ordered = sorted(ready, key=lambda one: -one.assigned_decode_tokens())
        tokens = sum(one.assigned_decode_tokens() for one in ready)
        low = arrow.knobs.flips.low_load
        decodes, room = 1, low * arrow.limit_tokens(ordered[0])
        while decodes < len(ordered) and room < tokens:
            room += low * arrow.limit_tokens(ordered[decodes])
            decodes += 1
        prefills = len(ordered) - decodes
        waiting_s = sum(arrow.predictor.delay_s(one) for one in ready)
        if not prefills or waiting_s > prefills * self.knobs.queue_share * arrow.knobs.ttft_slo_s:
            return []
        events = [PoolEvent.TO_DECODE] * decodes + [PoolEvent.TO_PREFILL] * prefills
        return [switch_role(one, event, FleetReason.SPLIT) for one, event in zip(ordered, events, strict=True)]

    @staticmethod
    def _place_newcomer(fleet: FleetView) -> list[FleetAction]:
        """Roles are in use: a MIXED instance joins the phase that lacks one, else decode; Arrow does the rest."""
        roles = fleet.by_role
        mixed, prefills = roles[Role.MIXED], roles[Role.PREFILL] or roles[Role.DECODE_TO_PREFILL]
        decodes = roles[Role.DECODE] or roles[Role.PREFILL_TO_DECODE]
        if not mixed or (len(mixed) == 1 and not prefills and not decodes):
            return []  # the last instance of all does both
        event = PoolEvent.TO_DECODE if prefills else PoolEvent.TO_PREFILL
        return [switch_role(mixed[0], event, FleetReason.SPLIT)]
