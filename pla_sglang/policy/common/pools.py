"""Arrow's four pools as one state machine (Arrow section 5.2 and the transition diagram of Figure 5).

A pool is the ``role`` of an instance: PREFILL, DECODE, and the two transitional ones, PREFILL_TO_DECODE (gets decodes,
still finishes prefills) and DECODE_TO_PREFILL. Every move is one of four events; ``transition`` is the only place that
knows which are legal. Below it are choices within a pool that several policies make.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence

from pla_sglang.common.errors import IllegalMoveError
from pla_sglang.policy.interface.decisions import SetRole
from pla_sglang.policy.interface.fleet import InstanceView, Role
from pla_sglang.policy.interface.reasons import FleetReason


class PoolEvent(enum.Enum):
    TO_PREFILL = "to_prefill"  # Algorithm 3
    TO_DECODE = "to_decode"  # Algorithm 4
    SETTLE = "settle"  # the old work of a transitional member is done
    UNITE = "unite"  # not in the paper: both phases from now on (``colocation.py``)


def transition(role: Role, event: PoolEvent, *, has_prefills: bool, has_decodes: bool) -> Role:
    """The pool after ``event``, given what the instance still has to finish.

    Raises IllegalMoveError where the diagram has no such edge.
    """
    if event is PoolEvent.TO_PREFILL and role in (Role.DECODE, Role.PREFILL_TO_DECODE, Role.MIXED):
        return Role.DECODE_TO_PREFILL if has_decodes else Role.PREFILL
    if event is PoolEvent.TO_DECODE and role in (Role.PREFILL, Role.DECODE_TO_PREFILL, Role.MIXED):
        return Role.PREFILL_TO_DECODE if has_prefills else Role.DECODE
    if event is PoolEvent.SETTLE and role is Role.PREFILL_TO_DECODE and not has_prefills:
        return Role.DECODE
    if event is PoolEvent.SETTLE and role is Role.DECODE_TO_PREFILL and not has_decodes:
        return Role.PREFILL
    if event is PoolEvent.UNITE and role is not Role.MIXED:
        return Role.MIXED
    raise IllegalMoveError(
        f"{event.value} from {role.value} with has_prefills={has_prefills}, has_decodes={has_decodes}"
    )


def after(instance: InstanceView, event: PoolEvent) -> Role:
    """``transition`` for an instance as it is now."""
    return transition(
        instance.role,
        event,
        has_prefills=instance.queued_prefills > 0,
        has_decodes=instance.running > 0 or instance.waiting_decodes > 0,
    )


def can_settle(instance: InstanceView) -> bool:
    """SETTLE is legal now."""
    if instance.role is Role.PREFILL_TO_DECODE:
        return instance.queued_prefills == 0
    if instance.role is Role.DECODE_TO_PREFILL:
        return instance.running == 0 and instance.waiting_decodes == 0
    return False


def movable(pool: Iterable[InstanceView]) -> list[InstanceView]:
    """Those whose role can change; live, instances of a fixed kind may stand beside stateless ones."""
    return [instance for instance in pool if not instance.fixed_role]


def switch_role(instance: InstanceView, event: PoolEvent, reason: FleetReason) -> SetRole:
    """The move along the transition diagram, from the role that the instance has now."""
    return SetRole(instance, after(instance, event), reason, instance.role_epoch)


def least_running(pool: Iterable[InstanceView]) -> InstanceView | None:
    """Least assigned decode tokens, the first of equals; None for an empty pool. Hot path.

    With those that are still to be prefilled elsewhere: else all of a burst would be named for one instance.
    """
    best: InstanceView | None = None
    best_tokens = math.inf
    for instance in pool:
        tokens = instance.context_tokens + instance.waiting_decode_tokens  # as assigned_decode_tokens()
        if tokens < best_tokens:
            best, best_tokens = instance, tokens
    return best


def least_loaded(members: Sequence[InstanceView], count: int) -> tuple[InstanceView, ...]:
    """The ``count`` instances with the least unfinished work, the newest of equals first."""

    def load(instance: InstanceView) -> tuple[int, int]:
        return instance.queued_tokens + instance.assigned_decode_tokens(), -instance.index

    return tuple(sorted(members, key=load)[:count])
