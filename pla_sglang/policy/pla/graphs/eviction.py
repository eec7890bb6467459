"""What the captured graphs take, and which of them to evict when that is more than the memory budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from pla_sglang.policy.pla.graphs.layouts import Bucket


@dataclasses.dataclass(slots=True)
class CachedGraph:
    """A captured graph as the budget sees it.

    Attributes:
        own_bytes: what its eviction frees.
        scratch_bytes: what its pass needs at its peak from the pool that all graphs share.
        last_use: number of the lookup that last used it; the capture counts as a use.
        hits: lookups that used it.
    """

    bucket: Bucket
    own_bytes: int
    scratch_bytes: int
    last_use: int
    hits: int = 0


@dataclasses.dataclass(slots=True)
class SharedBytes:
    """What graphs use together.

    Attributes:
        fixed_bytes: static buffers of inputs and results, there as long as the cache.
        attention_bytes: buffers of the attention backend by number of request slots, there while a graph uses them.
    """

    fixed_bytes: int = 0
    attention_bytes: dict[int, int] = dataclasses.field(default_factory=dict)


def total_bytes(held: Collection[CachedGraph], shared: SharedBytes) -> int:
    """Bytes of all these graphs: no two run at once, so the pool holds what the largest of them needs."""
    attention = used_attention_bytes(held, shared.attention_bytes)
    scratch = max((graph.scratch_bytes for graph in held), default=0)
    return shared.fixed_bytes + attention + scratch + sum(graph.own_bytes for graph in held)


def used_attention_bytes(held: Iterable[CachedGraph], attention_bytes: Mapping[int, int]) -> int:
    """Bytes of the buffers that some graph uses."""
    return sum(attention_bytes.get(slots, 0) for slots in {graph.bucket.slots for graph in held})


def victims(
    held: Collection[CachedGraph], new: CachedGraph, shared: SharedBytes, budget_bytes: int
) -> list[Bucket] | None:
    """Shapes to drop, least recently used first, so that ``new`` fits; None where it does not even alone.

    Ties go to the shape with fewer hits, then to the smaller one. An empty list means: it fits.
    """
    if total_bytes([new], shared) > budget_bytes:
        return None
    kept = sorted(held, key=lambda graph: (graph.last_use, graph.hits, graph.bucket))
    gone = []
    while total_bytes([*kept, new], shared) > budget_bytes:
        gone.append(kept.pop(0).bucket)
    return gone
