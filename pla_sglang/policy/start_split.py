"""The role with which an instance joins a live fleet, where it is free to have any.

A policy says which roles a fleet of the size at the start has (``PolicySet.roles``). Live, instances come one after the
other, some come back, and more may come than were there at the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pla_sglang.policy.interface.fleet import Role

_PHASES = {Role.DECODE_TO_PREFILL: Role.PREFILL, Role.PREFILL_TO_DECODE: Role.DECODE}


def join_role(split: Sequence[Role], members: Iterable[Role]) -> Role:
    """The role of which ``members`` lack most, by share of what ``split`` has of it; the first such one of ``split``.

    Members in a transitional pool count for the phase that they get. Without ``split``: MIXED.
    """
    if not split:
        return Role.MIXED
    phases = [_PHASES.get(role, role) for role in members]
    return min(dict.fromkeys(split), key=lambda role: phases.count(role) / split.count(role))
