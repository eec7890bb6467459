"""When a fleet has roles: where prefill and decode instances bear more requests than instances that do both.

Roles keep prefills from stopping decodes. Their cost is KV memory and compute that the other phase cannot use, the
transfer, and prefixes on instances that cannot use them. Which form bears more follows from the traffic, the targets
and the step times, in closed form (``forms.py``). Traffic is what recent requests and answers were like; a usual chat
until there were some.

* Roles are introduced where they bear ``margin`` times what the colocated fleet does; as many prefill instances as are
  best then, those with the fewest decodes. From then on Arrow's flips adapt their number, by one at most.
* They are also introduced where prefills stop decodes and a short answer outlasts few of them (``stalls``): a burst of
  prompts then stops it for longer than it tolerates, which closed forms of steady traffic do not see. Only while roles
  bear ``spare`` times the present rate, and most of a prompt is computed anew: with roles fewer prefixes are found.
* They are dropped where the colocated fleet bears as much, and answers outlast twice as many prefills or the rate is
  more than roles bear.
* Between two changes there are at least ``rest_s``.

Instances that are not stateless keep their roles.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import deque
from collections.abc import Sequence

from pla_sglang.common.checks import Range, check_fields, knob, require_order
from pla_sglang.policy.arrow.policy import ArrowPolicy
from pla_sglang.policy.combined.forms import FleetShape, Traffic, bears_colocated, disaggregated_rps, find_prompt_s
from pla_sglang.policy.common.pools import PoolEvent, switch_role
from pla_sglang.policy.interface.decisions import FleetAction
from pla_sglang.policy.interface.fleet import FleetView, InstanceKind, InstanceView, RequestView, Role
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.policy.interface.step_times import StepTimes


@dataclasses.dataclass(frozen=True)
class ColocationKnobs:
    """Attributes:
    margin: roles are introduced where they bear so many times as much. Closed forms know steady traffic alone: where
        they gave roles up to 1.15 times as much, roles could lose, and where they gave them 1.5 and more, they won.
    rest_s: between two changes.
    memory_share: of the KV cache that the closed forms fill.
    memory: recent requests and answers that the traffic is averaged over.
    prior: so many of them does the usual chat count for, before there were any.
    refresh: answers between two looks at what a short answer is, a twentieth of ``memory``.
    stalls: prefills that a short answer outlasts at least where the fleet is to do without roles. Of 32 prompts a
        sixth more or less come by accident, and bursts bring more.
    spare: see above; between it and 1 there is room for the rate to change.

    What half and twice of each decide is in bench/lab/docs/fleets.md, and of the last two, on engines without mixed
    batches, under ``combined`` in bench/lab/docs/rules.md.
    """

    margin: float = knob(1.25, allowed=Range(1))
    rest_s: float = knob(60.0, allowed=Range(0))
    memory_share: float = knob(0.9, allowed=Range(0, 1, above=True))
    memory: int = knob(500, allowed=Range(1))
    prior: int = knob(20, allowed=Range(1))
    refresh: int = knob(25, allowed=Range(1))
    stalls: float = knob(32.0, allowed=Range(0))
    spare: float = knob(1.5, allowed=Range(1))

    def __post_init__(self) -> None:
        check_fields(self, "unite")
        require_order("unite prior", self.prior, "memory", self.memory)


RATE_MEMORY_S = 1.0  # at least, where changes need no rest
SHORT_ANSWERS = 0.1  # quantile of recent answers that counts as a short one
USUAL = Traffic(
    new_tokens=1024.0,
    history_tokens=0.0,
    attention=1024.0 * 1024.0,
    output_tokens=256.0,
    short_output_tokens=32.0,
    context_tokens=1152.0,
)
_ROLES_BY = {
    PoolEvent.TO_PREFILL: (Role.PREFILL, Role.DECODE_TO_PREFILL),
    PoolEvent.TO_DECODE: (Role.DECODE, Role.PREFILL_TO_DECODE),
}


class FleetMode(enum.Enum):
    UNITED = "united"
    ROLES = "roles"


class TrafficMeter:
    """What recent requests and answers were like: running means, which start as those of ``USUAL``."""

    def __init__(self, memory: int, prior: int, refresh: int) -> None:
        self._memory, self._refresh = memory, refresh
        self._requests = self._answers = prior
        self._new, self._history = USUAL.new_tokens, USUAL.history_tokens
        self._squared, self._attention = 2 * USUAL.new_tokens**2, USUAL.attention
        self._output, self._short = USUAL.output_tokens, USUAL.short_output_tokens
        self._recent: deque[int] = deque(maxlen=memory)

    @property
    def output_tokens(self) -> float:
        """The mean of recent answers."""
        return self._output

    def on_request(self, new_tokens: int, history_tokens: int) -> None:
        self._requests += 1
        weight = 1 / min(self._requests, self._memory)
        self._new += weight * (new_tokens - self._new)
        self._history += weight * (history_tokens - self._history)
        self._squared += weight * (new_tokens * new_tokens - self._squared)
        self._attention += weight * (new_tokens * (new_tokens + 2 * history_tokens) - self._attention)

    def on_answer(self, tokens: int) -> None:
        tokens = max(1, tokens)
        self._answers += 1
        self._output += (tokens - self._output) / min(self._answers, self._memory)
        self._recent.append(tokens)
        if len(self._recent) >= self._refresh and self._answers % self._refresh == 0:
            self._short = sorted(self._recent)[int(SHORT_ANSWERS * len(self._recent))]

    def traffic(self) -> Traffic:
        """As it was lately. A running request holds its prompt and, on average, half of its answer."""
        return Traffic(
            new_tokens=self._new,
            history_tokens=self._history,
            attention=self._attention,
            output_tokens=self._output,
            short_output_tokens=self._short,
            context_tokens=self._new + self._history + self._output / 2,
            variation=max(0.0, self._squared / self._new**2 - 1),
        )


class RecentRate:
    """Requests a second, where a request of ``memory_s`` ago counts for 1/e of one of now."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._count = 0.0
        self._begun_s = self._counted_s = math.nan

    def on_arrival(self, now_s: float) -> None:
        if math.isnan(self._begun_s):
            self._begun_s = self._counted_s = now_s
        self._count = 1.0 + self._count * self._left(now_s - self._counted_s)
        self._counted_s = now_s

    def per_s(self, now_s: float) -> float:
        """Infinite until there is a span to tell it of."""
        if not now_s > self._begun_s:
            return math.inf
        share_seen = 1 - self._left(now_s - self._begun_s)
        return self._count * self._left(now_s - self._counted_s) / (self._memory_s * share_seen)

    def _left(self, span_s: float) -> float:
        return math.exp(-span_s / self._memory_s)


class ColocationMode:
    """The form that a fleet has now, and its changes.

    Args:
        arrow: its targets and predictor are used.
        steps: step times of instances without their own.
        mixes: decodes join prefill passes.
    """

    def __init__(self, knobs: ColocationKnobs, arrow: ArrowPolicy, steps: StepTimes, *, mixes: bool) -> None:
        self.knobs = knobs
        self.mode = FleetMode.UNITED
        self.meter = TrafficMeter(knobs.memory, knobs.prior, knobs.refresh)
        self._arrow = arrow
        self._steps = steps
        self._mixes = mixes
        self._rate = RecentRate(max(RATE_MEMORY_S, knobs.rest_s))
        self._changed_s = -math.inf

    def note(self, request: RequestView, now_s: float) -> None:
        """``request`` is being dispatched, in either form; assuming the largest cached prefix."""
        self._rate.on_arrival(now_s)
        history = min(max(request.cached.values(), default=0), request.input_tokens - 1)
        self.meter.on_request(request.input_tokens - history, history)

    def on_finish(self, output_tokens: int) -> None:
        self.meter.on_answer(output_tokens)

    def tick(self, fleet: FleetView, now_s: float) -> list[FleetAction]:
        """Role changes that the form requires."""
        ready = fleet.ready
        if not ready or any(one.kind is not InstanceKind.STATELESS for one in ready):
            return []
        prefills = self._judge(ready, now_s)
        if self.mode is FleetMode.ROLES:
            return self._give_roles(ready, prefills) if prefills else self._place_newcomer(fleet)
        return [switch_role(one, PoolEvent.UNITE, FleetReason.UNITE) for one in ready if one.role is not Role.MIXED]

    def _judge(self, ready: Sequence[InstanceView], now_s: float) -> int:
        """Changes the form where the other one bears more; the number of prefill instances where it then has roles."""
        knobs = self.knobs
        one, targets, traffic = ready[len(ready) // 2], self._arrow.knobs, self.meter.traffic()
        steps = one.steps or self._steps
        shape = FleetShape(
            len(ready),
            knobs.memory_share * one.kv_capacity_tokens,
            targets.ttft_slo_s,
            targets.tpot_slo_s,
            mixes=self._mixes,
        )
        with_roles_rps, prefills = disaggregated_rps(steps, traffic, shape)
        self._arrow.planned = prefills
        if now_s - self._changed_s < knobs.rest_s:
            return 0
        margin, stalls, spare = knobs.margin, knobs.stalls, knobs.spare
        if self.mode is FleetMode.ROLES:
            margin, stalls, spare = 1.0, 2 * stalls, 1.0
        safer = self._stops_short_answers(steps, traffic, stalls) and with_roles_rps > spare * self._rate.per_s(now_s)
        wanted = FleetMode.UNITED
        if prefills and (safer or not bears_colocated(with_roles_rps / margin, steps, traffic, shape)):
            wanted = FleetMode.ROLES
        if wanted is self.mode:
            return 0
        self.mode, self._changed_s = wanted, now_s
        return prefills if wanted is FleetMode.ROLES else 0

    def _stops_short_answers(self, steps: StepTimes, traffic: Traffic, stalls: float) -> bool:
        """Tells whether so many prefills last longer than a short answer may, and most of a prompt is computed anew."""
        if self._mixes or traffic.history_tokens > traffic.new_tokens:
            return False
        short_s = traffic.short_output_tokens * self._arrow.knobs.tpot_slo_s
        return short_s < stalls * find_prompt_s(steps, traffic)

    @staticmethod
    def _give_roles(ready: Sequence[InstanceView], prefills: int) -> list[FleetAction]:
        """Those with the fewest decodes become prefill instances. One that has joined with its role may have it yet."""
        ordered = sorted(ready, key=lambda one: one.assigned_decode_tokens())
        events = [PoolEvent.TO_PREFILL] * prefills + [PoolEvent.TO_DECODE] * (len(ordered) - prefills)
        return [
            switch_role(one, event, FleetReason.SPLIT)
            for one, event in zip(ordered, events, strict=True)
            if one.role not in _ROLES_BY[event]
        ]

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
