"""The role, and the pool for a length of prompts, with which an instance starts or joins a live fleet.

A policy says which roles a fleet of the size at the start has (``PolicySet.roles``). Live, instances come one after the
other, some come back, and more may come than were there at the start. PLA-Serve section 3.2 leaves open which pool one
starts in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pla_sglang.policy.interface.fleet import Role
from pla_sglang.policy.interface.prefill import PrefillClass

_PHASES = {Role.DECODE_TO_PREFILL: Role.PREFILL, Role.PREFILL_TO_DECODE: Role.DECODE}


def join_role(split: Sequence[Role], members: Iterable[Role]) -> Role:
    """The role of which ``members`` lack most, by share of what ``split`` has of it; the first such one of ``split``.

    Members in a transitional pool count for the phase that they get. Without ``split``: MIXED.
    """
    if not split:
        return Role.MIXED
    phases = [_PHASES.get(role, role) for role in members]
    return min(dict.fromkeys(split), key=lambda role: phases.count(role) / split.count(role))


def join_pools(members: Iterable[PrefillClass | None], newcomers: int) -> list[PrefillClass]:
    """The classes of ``newcomers`` beside ``members``.

    Each joins the smaller pool, the long one of equals, as a long prefill needs more.
    """
    classes = list(members)
    shorts, longs = classes.count(PrefillClass.SHORT), classes.count(PrefillClass.LONG)
    joined: list[PrefillClass] = []
    for _ in range(newcomers):
        smaller = PrefillClass.SHORT if shorts < longs else PrefillClass.LONG
        shorts, longs = shorts + (smaller is PrefillClass.SHORT), longs + (smaller is PrefillClass.LONG)
        joined.append(smaller)
    return joined


def split_ranks(ranks: int, short_ranks: int | None) -> list[PrefillClass]:
    """The first ``short_ranks`` are short, half of them by default. With one pool empty its class goes to the other."""
    shorts = ranks // 2 if short_ranks is None else short_ranks
    return [PrefillClass.SHORT] * shorts + [PrefillClass.LONG] * (ranks - shorts)
