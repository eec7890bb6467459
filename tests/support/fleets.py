"""Short ways to write fleets and requests in tables, and a driver that applies decisions to a view."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pla_sglang.policy.common.curve import PrefillCurve
from pla_sglang.policy.common.predictor import TtftPredictor
from pla_sglang.policy.interface.decisions import FleetAction, SetLengthClass, SetRole
from pla_sglang.policy.interface.fleet import FleetView, InstanceView, RequestView, Role

# 10 ms a request and 1 ms a token: numbers that can be checked in the head.
CURVE = PrefillCurve(0.010, 0.001, 0.0)


class LinearSteps:
    """Step times for policies: prefill 10 ms + 1 ms a token, decode 10 ms + 0.1 ms a request + 1 us a token."""

    def prefill_s(self, new_tokens: float, attention: float, history_tokens: float, requests: int) -> float:
        return 0.010 * requests + 0.001 * new_tokens

    def decode_s(self, batch: int, context_tokens: float) -> float:
        return 0.010 + 1e-4 * batch + 1e-6 * context_tokens

    def mixed_s(
        self,
        new_tokens: float,
        attention: float,
        history_tokens: float,
        requests: int,
        batch: int,
        context_tokens: float,
    ) -> float:
        return self.prefill_s(new_tokens + batch, attention, history_tokens, requests) + 1e-6 * context_tokens


def predictor() -> TtftPredictor:
    return TtftPredictor({"": CURVE})


def instance(index: int, role: Role = Role.MIXED, **fields: Any) -> InstanceView:
    view = InstanceView(index, f"i{index}", role=role, **fields)
    if view.queued_tokens and not view.queued_prefills:
        view.queued_prefills = 1
    if view.context_tokens and not view.running:
        view.running = 1
    return view


def fleet(*members: tuple[Role, dict[str, Any]]) -> FleetView:
    """Instances i0, i1, ... from (role, fields)."""
    return FleetView([instance(index, role, **fields) for index, (role, fields) in enumerate(members)])


def prefill(**fields: Any) -> tuple[Role, dict[str, Any]]:
    return Role.PREFILL, fields


def decode(**fields: Any) -> tuple[Role, dict[str, Any]]:
    return Role.DECODE, fields


def p2d(**fields: Any) -> tuple[Role, dict[str, Any]]:
    return Role.PREFILL_TO_DECODE, fields


def d2p(**fields: Any) -> tuple[Role, dict[str, Any]]:
    return Role.DECODE_TO_PREFILL, fields


def mixed(**fields: Any) -> tuple[Role, dict[str, Any]]:
    return Role.MIXED, fields


def request(input_tokens: int = 100, arrival_s: float = 0.0, **fields: Any) -> RequestView:
    return RequestView(str(fields.pop("rid", "r")), input_tokens, arrival_s, **fields)


def apply(view: FleetView, actions: Iterable[FleetAction], now_s: float) -> list[FleetAction]:
    """Does what a driver does with label changes; returns the other actions."""
    rest: list[FleetAction] = []
    for action in actions:
        if isinstance(action, SetRole):
            view.set_role(action.instance, action.role, now_s)
        elif isinstance(action, SetLengthClass):
            action.instance.length_class = action.length_class
        else:
            rest.append(action)
    return rest


def names(instances: Sequence[InstanceView]) -> list[str]:
    return [member.name for member in instances]
