"""Both instances of a request at once, as stock SGLang's protocol wants them: they are named when the request is sent.

What that protocol forbids is clamped here, so that policies need not know of it: ``place_decode`` is asked at once, a
prefill instance cannot decode, a unified one takes no hand-off, and one whose instances are not connected (yet) stays
whole on the stateless one of them.

Where running requests can move, ``place_decode`` may be asked when the prefill is done instead (``places_late``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from pla_sglang.common.errors import IllegalMoveError
from pla_sglang.policy.common.pools import PoolEvent, after
from pla_sglang.policy.common.predictor import TtftPredictor
from pla_sglang.policy.interface.decisions import Dispatch, FleetAction, SetRole
from pla_sglang.policy.interface.fleet import InstanceKind, InstanceView, RequestView, Role
from pla_sglang.policy.interface.reasons import FleetReason, Reason
from pla_sglang.policy.runner import FleetRunner, Refusal

PREFILLS = frozenset({InstanceKind.UNIFIED, InstanceKind.PREFILL, InstanceKind.STATELESS})
SERVES_WHOLE = frozenset({InstanceKind.UNIFIED, InstanceKind.STATELESS})
TAKES_HANDOFFS = frozenset({InstanceKind.DECODE, InstanceKind.STATELESS})
# Named once: see ``fast_enum``.
_UNIFIED = InstanceKind.UNIFIED
_STATELESS = InstanceKind.STATELESS
_NO_INSTANCE, _KEEP_LOCAL, _NOT_CONNECTED = (
    FleetReason.NO_INSTANCE,
    FleetReason.KEEP_LOCAL,
    FleetReason.NOT_CONNECTED,
)
_WHEN_PREFILLED, _NOT_MOVABLE = FleetReason.WHEN_PREFILLED, FleetReason.NOT_MOVABLE
_FOR_PREFILL = frozenset({Role.PREFILL, Role.DECODE_TO_PREFILL})
_FOR_DECODE = frozenset({Role.DECODE, Role.PREFILL_TO_DECODE})


@dataclasses.dataclass(slots=True)
class PairChoice:
    """Where a request goes. ``decode`` is ``prefill`` itself on an instance that does both."""

    prefill: InstanceView
    decode: InstanceView
    reason: Reason
    placement: Reason
    predicted_ttft_s: float | None
    actions: tuple[FleetAction, ...] = ()

    def expected_s(self, request: RequestView, predictor: TtftPredictor | None) -> tuple[float | None, float | None]:
        """The TTFT, and of it the time of the request's own prefill, by the device; None: without a predictor."""
        if predictor is None:
            return self.predicted_ttft_s, None
        own_s = predictor.own_s(request, self.prefill)
        if self.predicted_ttft_s is not None:
            return self.predicted_ttft_s, own_s
        return predictor.delay_s(self.prefill) + own_s, own_s


class PairRunner(FleetRunner):
    """A runner for drivers that name both instances of a request when they send it.

    Attributes:
        is_connected: whether KV cache can go from the first instance to the second now; set by drivers.
        places_late: requests that can move are sent whole to the instance of their prefill, and their decode is placed
            when that is done (``place_prefilled``), unless the policy has named it before; set by drivers.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_connected: Callable[[InstanceView, InstanceView], bool] = lambda prefill, decode: True
        self.places_late = False
        self._changed: list[tuple[InstanceView, Role]] = []  # since the last dispatch began, with their former roles

    def choose(self, request: RequestView, now_s: float, *, can_move: bool = False) -> PairChoice | FleetReason:
        """Both instances of a request, or the reason why nobody can take it now: then ask again later.

        ``can_move``: as far as is known, it can go on elsewhere once it runs.
        """
        now_s = self._device_s(now_s)
        self._changed.clear()
        try:
            answer = self._ask_dispatch(request, now_s)
            choice = self._complete(request, answer, now_s, late=self.places_late and can_move)
        except Exception:
            self._roll_back(now_s)
            raise
        if choice is None:
            self._roll_back(now_s)
            self.decisions[_NO_INSTANCE] += 1
            return _NO_INSTANCE
        self.decisions[answer.reason] += 1
        request.predicted_ttft_s, request.prefilled_on = answer.predicted_ttft_s, choice.prefill
        return choice

    def _complete(self, request: RequestView, answer: Dispatch, now_s: float, *, late: bool) -> PairChoice | None:
        """With the decode instance, as the policy says now, or is to say when the prefill is done if that may be
        ``late``; None: one of the two cannot take its part, and none can serve the request whole."""
        prefill = answer.prefill
        if prefill is None or prefill.kind not in PREFILLS or not self._can_take(prefill):
            return None
        if prefill.kind is _UNIFIED:
            return PairChoice(prefill, prefill, answer.reason, _KEEP_LOCAL, answer.predicted_ttft_s)
        placement: Reason = _KEEP_LOCAL
        decode, actions = answer.decode, answer.actions
        if decode is None and late and prefill.kind is _STATELESS:
            return PairChoice(prefill, prefill, answer.reason, _WHEN_PREFILLED, answer.predicted_ttft_s, actions)
        if decode is None:
            request.prefilled_on = prefill
            placed = self._ask_placement(request, now_s)
            decode, placement, actions = placed.decode, placed.reason, actions + placed.actions
        takes = decode is not None and decode.kind in TAKES_HANDOFFS and self._can_take(decode)
        if takes and decode is not None and (decode is prefill or self.is_connected(prefill, decode)):
            return PairChoice(prefill, decode, answer.reason, placement, answer.predicted_ttft_s, actions)
        both = prefill if prefill.kind in SERVES_WHOLE else decode if takes else None
        if both is None or both.kind not in SERVES_WHOLE:
            pair = self._find_pair(prefill, decode) if takes and decode is not None else None
            if pair is None:
                return None
            to, at = pair
            predicted_s = answer.predicted_ttft_s if to is prefill else None
            return PairChoice(to, at, answer.reason, FleetReason.OTHER_PAIR, predicted_s, actions)
        predicted_s = answer.predicted_ttft_s if both is prefill else None
        return PairChoice(both, both, answer.reason, _NOT_CONNECTED, predicted_s, actions)

    def place_prefilled(
        self, request: RequestView, now_s: float, *, move: Callable[[InstanceView, Reason], bool]
    ) -> Reason:
        """Asks where a request is to decode whose prefill is done, and has it moved there. Why it goes there, or stays
        at ``request.prefilled_on``, which serves it whole.

        ``move``: whether it is on its way to this instance now; where it is not, what roles were changed for it are
        taken back.
        """
        source, now_s = request.prefilled_on, self._device_s(now_s)
        self._changed.clear()
        try:
            placed = self._ask_placement(request, now_s)
            target = placed.decode
            if target is source and source is not None:
                return placed.reason
            stays = self._why_not(source, target)
            if target is not None and stays is None:
                stays = None if move(target, placed.reason) else _NOT_MOVABLE
        except Exception:
            self._roll_back(now_s)
            raise
        if stays is None:
            return placed.reason
        self._roll_back(now_s)
        return stays

    def _why_not(self, source: InstanceView | None, target: InstanceView | None) -> FleetReason | None:
        """Why a running request cannot go from the one to the other, as far as is known here."""
        if target is None or not self._can_take(target):
            return _NO_INSTANCE
        if source is None or target.kind is not _STATELESS:
            return _NOT_MOVABLE
        return None if self.is_connected(source, target) else _NOT_CONNECTED

    def _carry_out(self, action: FleetAction, now_s: float) -> Refusal | None:
        former = action.instance.role if isinstance(action, SetRole) else None
        refusal = super()._carry_out(action, now_s)
        if refusal is None and isinstance(action, SetRole) and former is not None:
            self._changed.append((action.instance, former))
        return refusal

    def _roll_back(self, now_s: float) -> None:
        """The request that roles were changed for goes nowhere, and its next dispatch would change others."""
        for instance, former in list(reversed(self._changed)):
            self._apply_one(SetRole(instance, former, FleetReason.ROLLED_BACK, instance.role_epoch), now_s)
        self._changed.clear()

    def order_role(
        self, instance: InstanceView, event: PoolEvent, now_s: float, *, epoch: int | None = None
    ) -> Refusal | None:
        """An operator's order; why it changes nothing. ``epoch``: as in ``SetRole``."""
        if instance.fixed_role:
            return Refusal.UNSUPPORTED
        try:
            role = after(instance, event)
        except IllegalMoveError:
            role = instance.role
        return self._apply_one(SetRole(instance, role, FleetReason.OPERATOR, epoch), self._device_s(now_s))

    def _can_take(self, instance: InstanceView) -> bool:
        return self.fleet.is_ready(instance) and instance not in self.hidden

    def whole(self) -> list[InstanceView]:
        """Ready instances that can do both phases of a request themselves."""
        return [instance for instance in self.visible().ready if instance.kind in SERVES_WHOLE]

    def choose_whole(self, request: RequestView) -> PairChoice | None:
        """The least loaded of ``whole``; the policy is not asked, as it may answer with a pair."""
        least = min(self.whole(), key=InstanceView.requests, default=None)
        return None if least is None else self._take(request, PairChoice(least, least, _KEEP_LOCAL, _KEEP_LOCAL, None))

    def choose_other(self, request: RequestView, prefill: InstanceView, decode: InstanceView) -> PairChoice | None:
        """Instances other than these two, as far as there are others; None while no connected pair is ready.

        The least loaded, of the same pool and with the role of the phase if possible. The policy is not asked: it might
        answer as before.
        """
        pair = self._find_pair(prefill, decode)
        if pair is None:
            return None
        placement = _KEEP_LOCAL if pair[0] is pair[1] else FleetReason.OTHER_PAIR
        return self._take(request, PairChoice(*pair, FleetReason.OTHER_PAIR, placement, None))

    def _find_pair(self, prefill: InstanceView, decode: InstanceView) -> tuple[InstanceView, InstanceView] | None:
        """As ``choose_other``: where a request is prefilled and decoded."""
        ready = self.visible().ready

        def prefill_cost(view: InstanceView) -> tuple[bool, bool, bool, int]:
            other_pool = view.length_class is not prefill.length_class
            return view is prefill, view.role in _FOR_DECODE, other_pool, view.queued_tokens

        takers = [view for view in ready if view.kind in TAKES_HANDOFFS]
        for to in sorted((view for view in ready if view.kind in PREFILLS), key=prefill_cost):
            if to.kind is _UNIFIED:
                return to, to
            connected = [view for view in takers if view is to or self.is_connected(to, view)]
            at = min(connected, key=lambda v: (v is decode, v.role in _FOR_PREFILL, v.requests()), default=None)
            if at is not None:
                return to, at
        return None

    def _take(self, request: RequestView, choice: PairChoice) -> PairChoice:
        self.decisions[choice.reason] += 1
        request.predicted_ttft_s, request.prefilled_on = None, choice.prefill
        return choice
