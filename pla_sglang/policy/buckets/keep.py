"""Which graphs go when the memory budget is full."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from pla_sglang.policy.buckets.layouts import Bucket


@dataclasses.dataclass(slots=True)
class Held:
    """A captured graph as the budget sees it.

    Attributes:
        memory_bytes: what its capture took from the device.
        last_use: number of the lookup that last used it; the capture counts as a use.
        hits: lookups that used it.
    """

    bucket: Bucket
    memory_bytes: int
    last_use: int
    hits: int = 0


def victims(held: Iterable[Held], needed_bytes: int, budget_bytes: int) -> list[Bucket] | None:
    """Shapes to drop, least recently used first, so that ``needed_bytes`` more fit; None where that cannot be.

    Ties go to the shape with fewer hits, then to the smaller one. An empty list means: it fits.
    """
    if needed_bytes > budget_bytes:
        return None
    kept = sorted(held, key=lambda one: (one.last_use, one.hits, one.bucket))
    used = sum(one.memory_bytes for one in kept)
    gone = []
    for one in kept:
        if used + needed_bytes <= budget_bytes:
            break
        used -= one.memory_bytes
        gone.append(one.bucket)
    return gone
