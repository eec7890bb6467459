"""Which pool an instance starts in or joins (PLA-Serve section 3.2 leaves it open)."""

from __future__ import annotations

from collections.abc import Iterable

from pla_sglang.policy.interface.prefill import PrefillClass


def join_pools(members: Iterable[PrefillClass | None], newcomers: int) -> list[PrefillClass]:
    """The classes of ``newcomers`` beside ``members``: each joins the smaller pool, the long one of equals, as a long
    prefill needs more."""
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
