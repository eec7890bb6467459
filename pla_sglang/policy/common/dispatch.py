"""The frame of plain dispatchers, and the choice by least load that several policies start from.

Roles decide which instances may prefill and which may decode: on MIXED instances both phases stay together
(data parallel serving); with PREFILL and DECODE roles the same dispatcher serves a static P/D split. ``split_roles``
makes such a split.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

from pla_sglang.common.checks import require
from pla_sglang.policy.interface.decisions import Dispatch, Placement
from pla_sglang.policy.interface.fleet import FleetView, InstanceView, RequestView, Role
from pla_sglang.policy.interface.reasons import FleetReason, Reason

Pool = Sequence[InstanceView]
_MIXED = Role.MIXED


def split_roles(count: int, prefills: int) -> list[Role]:
    """A static P/D split: ``prefills`` of ``count`` instances prefill. 0 makes all of them MIXED.

    Raises ConfigError unless 0 <= prefills < count.
    """
    require("instances", count, 1)
    require("prefill instances", prefills, 0, count - 1)
    if prefills == 0:
        return [Role.MIXED] * count
    return [Role.PREFILL] * prefills + [Role.DECODE] * (count - prefills)


def unfinished_tokens(instance: InstanceView) -> int:
    """Prompt tokens to compute and KV tokens that decode."""
    return instance.queued_tokens + instance.context_tokens + instance.waiting_decode_tokens


class PoolDispatcher(abc.ABC):
    """The frame of all plain dispatchers: pools by role, a request stays on a MIXED instance."""

    reason: Reason = FleetReason.ROUND_ROBIN

    @abc.abstractmethod
    def choose_prefill(self, pool: Pool, request: RequestView) -> tuple[InstanceView, Reason]:
        """From a pool that is not empty."""

    @abc.abstractmethod
    def choose_decode(self, pool: Pool, request: RequestView) -> InstanceView:
        """From a pool that is not empty."""

    def predicted_ttft_s(self, request: RequestView, instance: InstanceView) -> float | None:
        return None

    def dispatch(self, request: RequestView, fleet: FleetView, now_s: float) -> Dispatch:
        pool = fleet.prefill_capable() or fleet.ready
        if not pool:
            return Dispatch(None, None, FleetReason.NO_INSTANCE)
        chosen, reason = self.choose_prefill(pool, request)
        decode = chosen if chosen.role is _MIXED else None
        return Dispatch(chosen, decode, reason, self.predicted_ttft_s(request, chosen))

    def place_decode(self, request: RequestView, fleet: FleetView, now_s: float) -> Placement:
        source = request.prefilled_on
        if source is not None and source.role is _MIXED and fleet.is_ready(source):
            return Placement(source, FleetReason.KEEP_LOCAL)
        pool = fleet.decode_capable() or fleet.ready
        if not pool:
            return Placement(None, FleetReason.NO_INSTANCE)
        return Placement(self.choose_decode(pool, request), self.reason)


class LeastLoad(PoolDispatcher):
    """Least of any load function, the first of equals."""

    def __init__(self, load: Callable[[InstanceView], float], reason: Reason) -> None:
        self._load = load
        self.reason = reason

    def choose_prefill(self, pool: Pool, request: RequestView) -> tuple[InstanceView, Reason]:
        return min(pool, key=self._load), self.reason

    def choose_decode(self, pool: Pool, request: RequestView) -> InstanceView:
        return min(pool, key=self._load)


def least_tokens() -> LeastLoad:
    return LeastLoad(unfinished_tokens, FleetReason.LEAST_TOKENS)
