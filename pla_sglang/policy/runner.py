"""Runs one policy over one fleet: events in, answers out, actions through ``Effects``.

The router, the simulator, the replay of a recording and the pools inside one server each hold a runner, so that the
policy is asked and informed alike everywhere: each observer once an event, in a fixed order; the actions of an answer
carried out in order before anything else is asked; every decision, action and refusal counted with its reason.

A runner reads no clock and changes no instance: the driver that owns the views does, in its ``Effects``. Its callers
give it wall time; policies, recordings and effects get device time (``device_clock.py``), in which views, samples and
intervals are, too.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Protocol

from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.interface.decisions import (
    Dispatch,
    FleetAction,
    Hold,
    Migrate,
    Observer,
    Placement,
    PolicySet,
    PrefillSample,
    ScaleTo,
    SetLengthClass,
    SetRole,
)
from pla_sglang.policy.interface.fleet import FleetView, InstanceView, RequestView
from pla_sglang.policy.interface.reasons import Reason

MOVES_KEPT = 64


class Refusal(enum.Enum):
    """Why an action was not carried out."""

    LATE = "late"  # the role of the instance was set since
    REPEATED = "repeated"  # it has that role, or instances that were ordered are not known yet
    UNSUPPORTED = "unsupported"  # nothing in this fleet can do that
    DRY_RUN = "dry_run"  # the planner is only to show what it would do
    OUT_OF_BOUNDS = "out_of_bounds"  # there would be more instances than may be, or fewer
    ACTUATOR_AWAY = "actuator_away"  # what starts and stops instances does not answer
    NO_LEASE = "no_lease"  # another router scales this fleet
    NOT_MOVABLE = "not_movable"  # the request does not run at its source, or the target is not ready or has no room


class Effects:
    """What a driver can do to its fleet; whatever it does not override is refused.

    Each method returns None once the action is carried out or under way, otherwise why it is not.
    """

    def set_role(self, action: SetRole, now_s: float) -> Refusal | None:
        return Refusal.UNSUPPORTED

    def set_length_class(self, action: SetLengthClass, now_s: float) -> Refusal | None:
        return Refusal.UNSUPPORTED

    def migrate(self, action: Migrate, now_s: float) -> Refusal | None:
        return Refusal.UNSUPPORTED

    def scale(self, action: ScaleTo, now_s: float) -> Refusal | None:
        return Refusal.UNSUPPORTED


class Recording(Protocol):
    """Is told what the policy saw and answered, in order. A policy changes no view, so each call finds what it saw."""

    def write_views(self, now_s: float) -> None: ...

    def write_arrival(self, request: RequestView, now_s: float) -> None: ...

    def write_dispatch(
        self, request: RequestView, answer: Dispatch, now_s: float, *, hidden: Set[InstanceView]
    ) -> None: ...

    def write_placement(
        self, request: RequestView, answer: Placement, now_s: float, *, hidden: Set[InstanceView]
    ) -> None: ...

    def write_tick(self, controller: int, answer: list[FleetAction], now_s: float) -> None: ...

    def write_prefill(self, sample: PrefillSample, now_s: float) -> None: ...

    def write_first_token(self, request: RequestView, instance: InstanceView, now_s: float) -> None: ...

    def write_interval(self, instance: InstanceView, interval_s: float, now_s: float) -> None: ...

    def write_finish(self, request: RequestView, output_tokens: int, now_s: float) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class PoolMove:
    """An instance has changed its role or its pool, at a time of its driver's clock.

    ``signals``: what its driver measured just before. ``epoch``: how often the role of the instance was set then.
    """

    at_s: float
    instance: InstanceView
    role: str
    reason: str
    signals: Mapping[str, float] = dataclasses.field(default_factory=dict)
    epoch: int = 0

    def to_dict(self, now_s: float) -> dict[str, object]:
        """For operators, who do not share the driver's clock."""
        return {
            "ago_s": now_s - self.at_s,
            "instance": self.instance.name,
            "role": self.role,
            "reason": self.reason,
            "epoch": self.epoch,
        }


class FleetRunner:
    """One policy over one fleet.

    Args:
        recording: None: nothing is recorded.
        on_action: called with kind and reason of every action, refused ones included.
        move_signals: what is kept with a move, read before it is carried out.
        clock: of a fleet of slowed devices; None: wall time is device time.

    Attributes:
        hidden: requests are dispatched and placed as if these were not ready; set by drivers. Controllers see them all.
    """

    def __init__(
        self,
        policy: PolicySet,
        fleet: FleetView,
        effects: Effects,
        *,
        recording: Recording | None = None,
        on_action: Callable[[str, str], None] | None = None,
        move_signals: Callable[[], Mapping[str, float]] = dict,
        clock: DeviceClock | None = None,
    ) -> None:
        self.policy = policy
        self.fleet = fleet
        self.hidden: Set[InstanceView] = frozenset()
        self.decisions: Counter[Reason] = Counter()  # of dispatches
        self.placements: Counter[Reason] = Counter()
        self.actions: Counter[str] = Counter()  # "kind:reason"; of refused ones "kind.refused:reason"
        self.refusals: Counter[Refusal] = Counter()
        self.moved: Counter[str] = Counter()  # instances that changed role or pool, by reason
        self.moves: deque[PoolMove] = deque(maxlen=MOVES_KEPT)
        observers = policy.observers()
        self._on_arrival = [part.on_arrival for part in observers if _overrides(part, "on_arrival")]
        self._on_prefill = [part.on_prefill for part in observers if _overrides(part, "on_prefill")]
        self._on_first_token = [part.on_first_token for part in observers if _overrides(part, "on_first_token")]
        self._on_interval = [part.on_token_interval for part in observers if _overrides(part, "on_token_interval")]
        self._on_finish = [part.on_finish for part in observers if _overrides(part, "on_finish")]
        self._effects = effects
        self._recording = recording
        self._on_action = on_action
        self._move_signals = move_signals
        self._clock = clock

    # -- decisions ---------------------------------------------------------------------------------------------------

    def arrive(self, request: RequestView, now_s: float) -> None:
        """Once a request, before its first ``dispatch``."""
        now_s = self._device_s(now_s)
        if self._recording is not None:
            self._recording.write_arrival(request, now_s)
        for on_arrival in self._on_arrival:
            on_arrival(request, now_s)

    def visible(self) -> FleetView:
        """What dispatches and placements see of the fleet."""
        return self.fleet.without(self.hidden) if self.hidden else self.fleet

    def dispatch(self, request: RequestView, now_s: float) -> Dispatch:
        """The dispatcher's answer, its actions carried out. Call again while it names no prefill instance."""
        answer = self._ask_dispatch(request, self._device_s(now_s))
        self.decisions[answer.reason] += 1
        if answer.prefill is not None:
            request.predicted_ttft_s = answer.predicted_ttft_s
        return answer

    def place_decode(self, request: RequestView, now_s: float) -> Placement:
        """The answer for a request whose ``prefilled_on`` is set, its actions carried out."""
        return self._ask_placement(request, self._device_s(now_s))

    def _ask_placement(self, request: RequestView, now_s: float) -> Placement:
        answer = self.policy.dispatcher.place_decode(request, self.visible(), now_s)
        if self._recording is not None:
            self._recording.write_placement(request, answer, now_s, hidden=self.hidden)
        self.placements[answer.reason] += 1
        if answer.actions:
            self._apply(answer.actions, now_s)
        return answer

    def tick(self, number: int, now_s: float) -> list[FleetAction]:
        """Asks controller ``number`` and carries out what it wants."""
        now_s = self._device_s(now_s)
        actions = self.policy.controllers[number].tick(self.fleet, now_s)
        if self._recording is not None:
            self._recording.write_tick(number, actions, now_s)
        self._apply(actions, now_s)
        return actions

    def _ask_dispatch(self, request: RequestView, now_s: float) -> Dispatch:
        request.prefilled_on = None
        answer = self.policy.dispatcher.dispatch(request, self.visible(), now_s)
        if self._recording is not None:
            self._recording.write_dispatch(request, answer, now_s, hidden=self.hidden)
        if answer.actions:
            self._apply(answer.actions, now_s)
        return answer

    # -- what happens ------------------------------------------------------------------------------------------------

    def record_views(self, now_s: float) -> None:
        """A role or a state has changed; keeps the order of such changes in the recording."""
        if self._recording is not None:
            self._recording.write_views(self._device_s(now_s))

    def prefilled(self, sample: PrefillSample, now_s: float) -> None:
        """A cold instance's passes teach nobody: slow as they are, they would make a whole kind of instances slow."""
        now_s = self._device_s(now_s)
        if sample.instance.is_cold(now_s):
            return
        if self._recording is not None:
            self._recording.write_prefill(sample, now_s)
        for on_prefill in self._on_prefill:
            on_prefill(sample, now_s)

    def first_token(self, request: RequestView, instance: InstanceView, now_s: float) -> None:
        now_s = self._device_s(now_s)
        if self._recording is not None:
            self._recording.write_first_token(request, instance, now_s)
        for on_first_token in self._on_first_token:
            on_first_token(request, instance, now_s)

    def token_interval(self, instance: InstanceView, interval_s: float, now_s: float) -> None:
        now_s = self._device_s(now_s)
        if instance.is_cold(now_s):
            return
        if self._recording is not None:
            self._recording.write_interval(instance, interval_s, now_s)
        for on_interval in self._on_interval:
            on_interval(instance, interval_s, now_s)

    def finish(self, request: RequestView, output_tokens: int, now_s: float) -> None:
        now_s = self._device_s(now_s)
        if self._recording is not None:
            self._recording.write_finish(request, output_tokens, now_s)
        for on_finish in self._on_finish:
            on_finish(request, output_tokens, now_s)

    def _device_s(self, now_s: float) -> float:
        return now_s if self._clock is None else self._clock.device_s(now_s)

    # -- actions -----------------------------------------------------------------------------------------------------

    def _apply(self, actions: Iterable[FleetAction], now_s: float) -> None:
        for action in actions:
            self._apply_one(action, now_s)

    def _apply_one(self, action: FleetAction, now_s: float) -> Refusal | None:
        kind = type(action).__name__
        refusal = self._carry_out(action, now_s)
        if refusal is not None:
            self.refusals[refusal] += 1
            kind = f"{kind}.refused"
        self.actions[f"{kind}:{action.reason.value}"] += 1
        if self._on_action is not None:
            self._on_action(kind, action.reason.value)
        return refusal

    def _carry_out(self, action: FleetAction, now_s: float) -> Refusal | None:
        match action:
            case Hold():
                return None
            case Migrate():
                return self._effects.migrate(action, now_s)
            case ScaleTo():
                return self._effects.scale(action, now_s)
        signals = self._move_signals()
        match action:
            case SetRole():
                pool, refusal = action.role.value, self._effects.set_role(action, now_s)
                if self._recording is not None:
                    self._recording.write_views(now_s)
            case SetLengthClass():
                pool = "both" if action.length_class is None else action.length_class.value
                refusal = self._effects.set_length_class(action, now_s)
        if refusal is None:
            at_s = now_s if self._clock is None else self._clock.wall_s(now_s)
            epoch = action.instance.role_epoch
            self.note_move(PoolMove(at_s, action.instance, pool, action.reason.value, signals, epoch))
        return refusal

    def note_move(self, move: PoolMove) -> None:
        """Keeps a move; called by drivers for moves that an operator has ordered."""
        self.moved[move.reason] += 1
        self.moves.append(move)

    def reasons(self) -> Counter[str]:
        """How often each reason was given, over dispatches, placements and actions."""
        total: Counter[str] = Counter()
        for counter in (self.decisions, self.placements):
            total.update({reason.value: count for reason, count in counter.items()})
        for key, count in self.actions.items():
            total[key.partition(":")[2]] += count
        return total


def _overrides(part: Observer, event: str) -> bool:
    return getattr(type(part), event) is not getattr(Observer, event)
