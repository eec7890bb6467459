"""Which instance a request goes to while both of its phases run on one: the one with the least cost.

The cost is in shares of targets, so that seconds of waiting and of decoding can be added:

    cost = (wait + own) / TTFT target              its own first token
         + work_weight * work / TTFT target        others wait for the same device time
         + (1 + work_weight) * loss / TTFT target  what it throws out of the cache, when that is computed again
         + decode_weight * (step - alone) / (TPOT target - alone)   what decodes there take of each other's time
         + room / TTFT target                      where the KV cache is full, until enough of it is free

``own`` is the prefill of what is not cached there, so a cached prefix counts with all that it saves. ``work`` is what
that takes on a usual instance: a second of a slow one is worth less. ``step`` is its decode step there, ``alone`` that
on an empty instance of the kind. ``loss`` is that of ``common/eviction.py``.

A full instance is not left out: where it holds the prefix of a request, others would need more memory for it. It costs
what waiting for room takes: by Little's law, used tokens are freed once in the life of an answer. Where engines run
small prefills first, ``wait``, ``room`` and ``step`` only count those that go before it (``sized_backlog.py``): the
others come later, and under overload some of them never.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Sequence

from pla_sglang.common.checks import Range, check_fields, knob
from pla_sglang.policy.arrow.policy import ArrowPolicy
from pla_sglang.policy.combined.sized_backlog import SizedBacklog
from pla_sglang.policy.common.eviction import EvictionCost
from pla_sglang.policy.interface.fleet import FleetView, InstanceView, RequestView, Role
from pla_sglang.policy.interface.step_times import StepTimes

# Of the TPOT target, so that the cost stays finite where a device cannot keep it. There 60 decodes weigh as much as a
# queue that takes the whole TTFT target; with half of it 35, with twice as much 110.
LEAST_SPARE = 0.1
Ahead = tuple[int, int, int, int]  # prefills, their new tokens, attention, history tokens
COMPARED = 64  # instances whose cost is worked out: in a fleet of 1,000 a decision would take 5 ms for all
HELD_WEIGHT = 0.01  # of what caches hold, as a share of a target: so little that load decides, and all are filled


@dataclasses.dataclass(frozen=True)
class CostKnobs:
    """Attributes:
    work_weight: of device time, its own first token having 1: four others wait for it. A prefix that saves 0.4 s is
        worth a queue of 2 s; with half of it one of 1.2, with twice as much one of 3.6.
    decode_weight: of decode steps: a share of either target is worth as much as of the other. 250 ms of a TTFT target
        of 1 s weigh as much as 100 decodes that take 10 of 40 ms; with half of it 200, with twice as much 50.
    memory_share: of the KV cache that prompts may fill before they wait for room; the rest is for running answers,
        which grow. With half of it they wait from 45 % on.
    """

    work_weight: float = knob(4.0, allowed=Range(0))
    decode_weight: float = knob(1.0, allowed=Range(0))
    memory_share: float = knob(0.9, allowed=Range(0, 1, above=True))

    def __post_init__(self) -> None:
        check_fields(self, "cost")


class InstanceCost:
    """The choice of an instance by cost.

    Args:
        arrow: its targets and predictor are used.
        steps: step times of instances without their own.
        small_first: as in ``Setup``.

    Attributes:
        backlog: what was sent to instances; None where they run prefills in the order in which they come.
    """

    def __init__(
        self, knobs: CostKnobs, arrow: ArrowPolicy, steps: StepTimes, eviction: EvictionCost, *, small_first: bool
    ) -> None:
        self.knobs = knobs
        self.backlog = SizedBacklog() if small_first else None
        self._arrow = arrow
        self._steps = steps
        self._eviction = eviction
        self._chosen_for: RequestView | None = None
        self._predicted_s: dict[int, float] = {}  # TTFT of that request, by instance, as its choice saw it

    def choose(self, request: RequestView, fleet: FleetView, now_s: float, answer_tokens: float) -> InstanceView | None:
        """The MIXED instance with the least cost, of equals the one whose cache holds least; None without any.

        ``answer_tokens``: of a typical answer.
        """
        self._chosen_for, self._predicted_s = request, {}
        best, best_cost, best_held = None, math.inf, math.inf
        members = fleet.by_role[Role.MIXED]
        for instance in members if len(members) <= COMPARED else self._find_likely(request, members):
            cost = self._cost(request, instance, members[len(members) // 2], now_s, answer_tokens)
            if cost > best_cost:
                continue
            held = _held_share(instance)
            if cost < best_cost or held < best_held:
                best, best_cost, best_held = instance, cost, held
        return best

    def _find_likely(self, request: RequestView, members: Sequence[InstanceView]) -> Iterable[InstanceView]:
        """Those that may have the least cost: who has some of its prompt, and the least loaded of the others.

        Load is in tokens alone: what is queued by the time that it takes, what decodes by the step that it makes.
        """
        targets, usual = self._arrow.knobs, members[len(members) // 2]
        queued = self._arrow.predictor.curve(usual).c1_s / targets.ttft_slo_s
        longer_s = self._steps.decode_s(64, 64_000) - self._steps.decode_s(1, 1_000)
        decoded = self.knobs.decode_weight * longer_s / 63_000 / targets.tpot_slo_s

        def load(instance: InstanceView) -> float:
            decodes = instance.context_tokens + instance.waiting_decode_tokens
            return queued * instance.queued_tokens + decoded * decodes + HELD_WEIGHT * _held_share(instance)

        likely = {instance.index: instance for instance in heapq.nsmallest(COMPARED, members, load)}
        likely |= {instance.index: instance for instance in members if instance.index in request.cached}
        return likely.values()

    def note(self, request: RequestView, chosen: InstanceView, fleet: FleetView, now_s: float) -> None:
        """``request`` goes there."""
        self._eviction.note(request.new_tokens(chosen), len(fleet.ready), now_s)
        if self.backlog is not None:
            self.backlog.add(request, chosen)

    def forget(self, request: RequestView) -> None:
        """Its prefill has ended, or it has."""
        if self.backlog is not None:
            self.backlog.remove(request)

    def predict_ttft_s(self, request: RequestView, instance: InstanceView) -> float:
        """From now until the first token; of the request that was chosen for last, from its choice."""
        if request is self._chosen_for and (known_s := self._predicted_s.get(instance.index)) is not None:
            return known_s
        wait_s = self._wait_s(instance, self._ahead_of(request, instance))
        return wait_s + self._arrow.predictor.own_s(request, instance)

    def _cost(
        self, request: RequestView, instance: InstanceView, usual: InstanceView, now_s: float, answer_tokens: float
    ) -> float:
        knobs, targets, predictor = self.knobs, self._arrow.knobs, self._arrow.predictor
        new_tokens = request.new_tokens(instance)
        work_s = predictor.curve(usual).time_s(new_tokens, request.input_tokens - new_tokens) * predictor.factor(usual)
        own_s = predictor.own_s(request, instance)
        loss_s = new_tokens * self._eviction.token_s(instance, now_s)
        ahead = self._ahead_of(request, instance)
        step_s = self._step_with_s(request, instance, ahead)
        room_s = self._room_s(new_tokens, instance, ahead, answer_tokens * step_s)
        ttft_s = self._wait_s(instance, ahead) + own_s
        self._predicted_s[instance.index] = ttft_s
        first_s = ttft_s + room_s
        first_s += knobs.work_weight * work_s + (1 + knobs.work_weight) * loss_s
        alone_s = self._alone_s(request.input_tokens, instance)
        return first_s / targets.ttft_slo_s + knobs.decode_weight * (step_s - alone_s) / self._spare_s(alone_s)

    def _ahead_of(self, request: RequestView, instance: InstanceView) -> Ahead:
        """What goes before ``request`` there."""
        if self.backlog is not None:
            return self.backlog.ahead_of(request, instance)
        queued = instance.queued_prefills, instance.queued_tokens
        return *queued, instance.queued_attention, instance.queued_history_tokens

    def _wait_s(self, instance: InstanceView, ahead: Ahead) -> float:
        predictor = self._arrow.predictor
        return predictor.delay_s(instance) if self.backlog is None else predictor.backlog_s(instance, *ahead)

    def _room_s(self, new_tokens: int, instance: InstanceView, ahead: Ahead, answer_s: float) -> float:
        """Until there is room for its prompt; 0 where there is. ``answer_s``: what a typical answer takes there."""
        used, (_, tokens_ahead, _, _) = instance.kv_used_tokens, ahead
        lacking = used + tokens_ahead + new_tokens - self.knobs.memory_share * instance.kv_capacity_tokens
        return max(0.0, lacking) * answer_s / max(used, 1)

    def _alone_s(self, context_tokens: int, instance: InstanceView) -> float:
        """Decode step of one request with so many tokens, with nobody else there."""
        return (instance.steps or self._steps).decode_s(1, context_tokens)

    def _spare_s(self, alone_s: float) -> float:
        """What the TPOT target leaves to others; a tenth of it where one request alone takes more."""
        target_s = self._arrow.knobs.tpot_slo_s
        return max(target_s - alone_s, LEAST_SPARE * target_s)

    def _step_with_s(self, request: RequestView, instance: InstanceView, ahead: Ahead) -> float:
        """Decode step once ``request`` decodes with those that decode there before it."""
        prefills, new_tokens, _, history_tokens = ahead
        batch = instance.requests() - instance.queued_prefills + prefills + 1
        tokens = instance.assigned_decode_tokens() + new_tokens + history_tokens + request.input_tokens
        return (instance.steps or self._steps).decode_s(batch, tokens)


def _held_share(instance: InstanceView) -> float:
    """Share of its KV cache that is in use or kept."""
    return (instance.kv_used_tokens + instance.kv_cached_tokens) / instance.kv_capacity_tokens
