"""Which ranks are likely to hold a prefix in their cache: a model, fed by what was sent where.

A prompt is cut into blocks; the hash of a block includes that of the block before, so equal hashes mean equal prefixes.
Per rank the latest blocks are kept, as many as its KV cache has room for. The ranks evict by their own order, so this
is an estimate; the rank itself classes a request again by what it really finds.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 64


def block_hashes(tokens: Sequence[int], salt: object = None, block: int = BLOCK_TOKENS) -> list[int]:
    """One for each whole block; ``salt`` tells apart what shares no cache (an adapter)."""
    packed = tokens if isinstance(tokens, array) else array("q", tokens)
    hashes, last = [], hash(salt)
    for start in range(0, len(packed) - block + 1, block):
        last = hash((last, packed[start : start + block].tobytes()))
        hashes.append(last)
    return hashes


class PrefixModel:
    """The blocks of one rank, least recently used first."""

    def __init__(self, block: int = BLOCK_TOKENS) -> None:
        self._block = block
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def matched_tokens(self, hashes: Sequence[int]) -> int:
        """Leading tokens that are likely cached."""
        count = 0
        for one in hashes:
            if one not in self._blocks:
                break
            count += 1
        return count * self._block

    def insert(self, hashes: Sequence[int], capacity_tokens: int) -> None:
        """A prompt was sent there. Its last blocks are evicted first, as leaves of a radix tree are."""
        blocks = self._blocks
        for one in reversed(hashes):
            blocks[one] = None
            blocks.move_to_end(one)
        while len(blocks) * self._block > capacity_tokens:
            blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()
