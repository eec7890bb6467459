"""Which instance has which prefix block: what a router would know from KV events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class CacheIndex:
    """Block id -> instances that have it."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._holders: dict[int, dict[int, None]] = {}

    def change(self, instance: int, block: int, came: bool) -> None:
        """A block came to an instance, or went."""
        if came:
            self._holders.setdefault(block, {})[instance] = None
            return
        holders = self._holders[block]
        del holders[instance]
        if not holders:
            del self._holders[block]

    def lookup(self, ids: Sequence[int]) -> Mapping[int, int]:
        """Instance -> leading prompt tokens it has; instances without any are absent."""
        found: dict[int, int] = {}
        alive: dict[int, None] | None = None
        for depth, block in enumerate(ids, 1):
            holders = self._holders.get(block)
            if not holders:
                break
            alive = dict(holders) if alive is None else {one: None for one in alive if one in holders}
            if not alive:
                break
            tokens = depth * self._block_tokens
            for one in alive:
                found[one] = tokens
        return found
