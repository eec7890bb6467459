"""Drives the policy of a live fleet: the same objects, calls and order as the simulator's cluster.

What the protocol of stock SGLang forbids is refused here, so that policies need not know of it: both instances of a
pair are named when the request is sent (so ``place_decode`` is asked at once), a prefill instance cannot decode, a
unified one takes no hand-off, and roles are fixed at start-up.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from pla_sglang.policy.arrow.predictor import TtftPredictor
from pla_sglang.policy.decisions import (
    Dispatch,
    FleetAction,
    Hold,
    Migrate,
    Observer,
    PrefillSample,
    ScaleTo,
    SetLengthClass,
    SetRole,
)
from pla_sglang.policy.fleet import FleetView, InstanceKind, InstanceView, RequestView
from pla_sglang.policy.reasons import FleetReason
from pla_sglang.policy.registry import PolicySet
from pla_sglang.policy.types import PrefillClass
from pla_sglang.router.control.recorder import Recorder

# Policies of the registry that need nothing which stock instances cannot do.
LIVE_POLICIES = (
    "round-robin",
    "least-requests",
    "least-tokens",
    "two-choices",
    "cache-aware",
    "static-pd-round-robin",
    "static-pd",
    "minimal-load",
    "pla",
    "arrow-no-flips",
)
# They look at neither lengths nor prefixes, so a relay's estimate will do.
LENGTH_BLIND = frozenset({"round-robin", "least-requests", "least-tokens", "two-choices", "static-pd-round-robin"})
_PREFILLS = frozenset({InstanceKind.UNIFIED, InstanceKind.PREFILL, InstanceKind.STATELESS})
_TAKES_HANDOFFS = frozenset({InstanceKind.DECODE, InstanceKind.STATELESS})
# Named once: CPython 3.11 takes 0.2 us to look a member up in its class, and every request meets these.
_UNIFIED = InstanceKind.UNIFIED
_NO_INSTANCE, _KEEP_LOCAL = FleetReason.NO_INSTANCE, FleetReason.KEEP_LOCAL
MOVES_KEPT = 64
SetClass = Callable[[InstanceView, PrefillClass | None], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """An instance has changed its role or its pool."""

    at_s: float
    instance: str
    role: str
    reason: str

    def to_dict(self, now_s: float) -> dict[str, object]:
        """For operators, whose clock is another one."""
        return {"ago_s": now_s - self.at_s, "instance": self.instance, "role": self.role, "reason": self.reason}


class Choice(msgspec.Struct, frozen=True, gc=False):
    """Where a request goes. ``decode`` is ``prefill`` itself on an instance that does both."""

    prefill: InstanceView
    decode: InstanceView
    reason: FleetReason
    placement: FleetReason
    predicted_ttft_s: float | None
    actions: tuple[FleetAction, ...] = ()

    def expected_s(self, request: RequestView, predictor: TtftPredictor | None) -> tuple[float | None, float | None]:
        """The TTFT, and of it the time of the request's own prefill; None: nobody predicts it."""
        if predictor is None:
            return self.predicted_ttft_s, None
        own_s = predictor.own_s(request, self.prefill)
        if self.predicted_ttft_s is not None:
            return self.predicted_ttft_s, own_s
        return predictor.delay_s(self.prefill) + own_s, own_s


def _listens(observer: Observer, event: str) -> bool:
    """Whether a policy does anything at an event: most do not at most, and each call costs every request."""
    return getattr(type(observer), event) is not getattr(Observer, event)


class PolicyDriver:
    """One policy over one fleet.

    Args:
        set_class: carries out a move between the short and the long pool; the view is changed here.
        recorder: None: nothing is recorded.
        on_action: told of every action, by kind and reason; also of those that were only counted.
    """

    def __init__(
        self,
        policy: PolicySet,
        fleet: FleetView,
        set_class: SetClass,
        *,
        recorder: Recorder | None = None,
        on_action: Callable[[str, str], None] | None = None,
    ) -> None:
        self.policy = policy
        self.fleet = fleet
        self.decisions: Counter[FleetReason] = Counter()
        self.actions: Counter[str] = Counter()  # "kind:reason"
        self.flips = 0
        self.moves: deque[Move] = deque(maxlen=MOVES_KEPT)
        observers = policy.observers()
        self._on_arrival = [one.on_arrival for one in observers if _listens(one, "on_arrival")]
        self._on_prefill = [one.on_prefill for one in observers if _listens(one, "on_prefill")]
        self._on_first_token = [one.on_first_token for one in observers if _listens(one, "on_first_token")]
        self._on_interval = [one.on_token_interval for one in observers if _listens(one, "on_token_interval")]
        self._on_finish = [one.on_finish for one in observers if _listens(one, "on_finish")]
        self._set_class = set_class
        self._recorder = recorder
        self._on_action = on_action

    # -- decisions ---------------------------------------------------------------------------------------------------

    def arrive(self, request: RequestView, now_s: float) -> None:
        """Once a request, before its first ``choose``."""
        if self._recorder is not None:
            self._recorder.views(now_s)
            self._recorder.arrival(request, now_s)
        for on_arrival in self._on_arrival:
            on_arrival(request, now_s)

    def choose(self, request: RequestView, now_s: float) -> Choice | FleetReason:
        """Both instances of a request, or the reason why nobody can take it now: then ask again later."""
        request.prefilled_on = None
        if self._recorder is not None:
            self._recorder.views(now_s)
        answer = self.policy.dispatcher.dispatch(request, self.fleet, now_s)
        if self._recorder is not None:
            self._recorder.dispatched(request, answer, now_s)
        if answer.actions:
            self._apply(answer.actions, now_s)
        prefill = answer.prefill
        if prefill is None or prefill.kind not in _PREFILLS or not self.fleet.is_ready(prefill):
            self.decisions[_NO_INSTANCE] += 1
            return _NO_INSTANCE
        choice = self._complete(request, answer, prefill, now_s)
        reason = _NO_INSTANCE if choice is None else answer.reason
        self.decisions[reason] += 1
        if choice is None:
            return reason
        request.predicted_ttft_s = answer.predicted_ttft_s
        request.prefilled_on = prefill
        return choice

    def whole(self) -> list[InstanceView]:
        """Ready instances that do both phases of a request themselves."""
        return [one for one in self.fleet.ready if one.kind is _UNIFIED]

    def choose_whole(self, request: RequestView) -> Choice | None:
        """The least loaded of ``whole``; the policy is not asked, as it may answer with a pair."""
        found = min(self.whole(), key=InstanceView.requests, default=None)
        if found is None:
            return None
        self.decisions[_KEEP_LOCAL] += 1
        request.predicted_ttft_s, request.prefilled_on = None, found
        return Choice(found, found, _KEEP_LOCAL, _KEEP_LOCAL, None)

    def choose_other(self, request: RequestView, prefill: InstanceView, decode: InstanceView) -> Choice | None:
        """Instances other than these two, as far as there are others; None where no pair is ready.

        The least loaded, of the same pool where it can be. The policy is not asked: it might answer as before.
        """
        prefills = [one for one in self.fleet.ready if one.kind in _PREFILLS]
        decodes = [one for one in self.fleet.ready if one.kind in _TAKES_HANDOFFS]
        to = min(
            prefills,
            key=lambda one: (one is prefill, one.length_class is not prefill.length_class, one.queued_tokens),
            default=None,
        )
        at = to if to is not None and to.kind is _UNIFIED else None
        if at is None:
            at = min(decodes, key=lambda one: (one is decode, one.requests()), default=None)
        if to is None or at is None:
            return None
        self.decisions[FleetReason.OTHER_PAIR] += 1
        request.predicted_ttft_s, request.prefilled_on = None, to
        placement = _KEEP_LOCAL if to is at else FleetReason.OTHER_PAIR
        return Choice(to, at, FleetReason.OTHER_PAIR, placement, None)

    def _complete(self, request: RequestView, answer: Dispatch, prefill: InstanceView, now_s: float) -> Choice | None:
        """With the decode instance, as the policy says now; None where nobody can take the KV."""
        if prefill.kind is _UNIFIED:
            return Choice(prefill, prefill, answer.reason, _KEEP_LOCAL, answer.predicted_ttft_s)
        decode, placement = answer.decode, _KEEP_LOCAL
        actions = answer.actions
        if decode is None:
            request.prefilled_on = prefill
            if self._recorder is not None:
                self._recorder.views(now_s)
            placed = self.policy.dispatcher.place_decode(request, self.fleet, now_s)
            if self._recorder is not None:
                self._recorder.placed(request, placed, now_s)
            decode, placement = placed.decode, placed.reason
            if placed.actions:
                self._apply(placed.actions, now_s)
                actions += placed.actions
        if decode is None or decode.kind not in _TAKES_HANDOFFS or not self.fleet.is_ready(decode):
            return None
        return Choice(prefill, decode, answer.reason, placement, answer.predicted_ttft_s, actions)

    def tick(self, number: int, now_s: float) -> list[FleetAction]:
        """Asks controller ``number`` and carries out what it wants."""
        if self._recorder is not None:
            self._recorder.views(now_s)
        actions = self.policy.controllers[number].tick(self.fleet, now_s)
        if self._recorder is not None:
            self._recorder.ticked(number, actions, now_s)
        self._apply(tuple(actions), now_s)
        return actions

    def intervals_s(self) -> list[float]:
        """Of the controllers, in their order."""
        return [controller.interval_s for controller in self.policy.controllers]

    # -- what happens ------------------------------------------------------------------------------------------------

    def listed(self, now_s: float) -> None:
        """A role or a state has changed; kept in order in the recording."""
        if self._recorder is not None:
            self._recorder.views(now_s)

    def prefilled(self, sample: PrefillSample, now_s: float) -> None:
        if self._recorder is not None:
            self._recorder.views(now_s)
            self._recorder.prefilled(sample, now_s)
        for on_prefill in self._on_prefill:
            on_prefill(sample, now_s)

    def first_token(self, request: RequestView, instance: InstanceView, now_s: float) -> None:
        if self._recorder is not None:
            self._recorder.views(now_s)
            self._recorder.first_token(request, instance, now_s)
        for on_first_token in self._on_first_token:
            on_first_token(request, instance, now_s)

    def interval(self, instance: InstanceView, interval_s: float, now_s: float) -> None:
        if self._recorder is not None:
            self._recorder.views(now_s)
            self._recorder.interval(instance, interval_s, now_s)
        for on_interval in self._on_interval:
            on_interval(instance, interval_s, now_s)

    def finish(self, request: RequestView, output_tokens: int, now_s: float) -> None:
        if self._recorder is not None:
            self._recorder.finish(request, output_tokens, now_s)
        for on_finish in self._on_finish:
            on_finish(request, output_tokens, now_s)

    # -- actions -----------------------------------------------------------------------------------------------------

    def _apply(self, actions: tuple[FleetAction, ...], now_s: float) -> None:
        for action in actions:
            kind = type(action).__name__
            match action:
                case SetRole() if action.instance.kind is InstanceKind.STATELESS:
                    self._moved(action.instance, action.role.value, action.reason, now_s)
                    self.fleet.set_role(action.instance, action.role, now_s)
                    self.listed(now_s)
                case SetLengthClass():
                    pool = "both" if action.length_class is None else action.length_class.value
                    self._moved(action.instance, pool, action.reason, now_s)
                    action.instance.length_class = action.length_class
                    self._set_class(action.instance, action.length_class)
                case Hold():
                    pass
                case SetRole() | Migrate() | ScaleTo():
                    kind = f"{kind}.refused"  # no instance of this fleet can do that
            self.actions[f"{kind}:{action.reason.value}"] += 1
            if self._on_action is not None:
                self._on_action(kind, action.reason.value)

    def _moved(self, instance: InstanceView, role: str, reason: FleetReason, now_s: float) -> None:
        self.flips += 1
        self.moves.append(Move(now_s, instance.name, role, reason.value))
