"""Which instance probably has which prompt prefix: an estimate, from what the router has sent where.

A prompt is cut into blocks of its bytes, and each block's key is a hash over all bytes up to its end, so equal keys
mean equal prefixes. Bytes instead of tokens: no tokenizer is needed, a body is hashed at gigabytes a second, and the
same client writes the same prefix with the same bytes. The instances' own eviction is imitated by a bound on what is
remembered for each, oldest use first.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence

# Ends of blocks: fine at the beginning, where system prompts end, then coarse, so that a long body has few.
FINE_BYTES, FINE_BLOCKS, COARSE_BYTES, COARSE_BLOCKS = 256, 64, 4096, 252
BLOCK_ENDS = (
    *(FINE_BYTES * (place + 1) for place in range(FINE_BLOCKS)),
    *(FINE_BYTES * FINE_BLOCKS + COARSE_BYTES * (place + 1) for place in range(COARSE_BLOCKS)),
)


def block_keys(prompt: bytes, *, salt: bytes = b"") -> list[int]:
    """Keys of the whole blocks of ``prompt``, first to last. ``salt`` keeps apart what instances keep apart."""
    running = hashlib.blake2b(salt, digest_size=8)
    keys = []
    for start, end in itertools.pairwise((0, *BLOCK_ENDS)):
        if end > len(prompt):
            break
        running.update(prompt[start:end])
        keys.append(int.from_bytes(running.copy().digest(), "little"))
    return keys


class PrefixIndex:
    """Block keys by instance, each with its last use.

    Args:
        capacity_blocks: remembered for one instance.
    """

    def __init__(self, capacity_blocks: int = 200_000) -> None:
        self._capacity_blocks = capacity_blocks
        self._blocks: dict[int, OrderedDict[int, None]] = {}  # instance -> blocks, least recently used first

    def insert(self, instance: int, keys: Sequence[int]) -> None:
        """The instance computes this prompt, and will have it then."""
        blocks = self._blocks.setdefault(instance, OrderedDict())
        for key in reversed(keys):  # the first block of a prompt is used last, so a prefix outlives its end
            blocks[key] = None
            blocks.move_to_end(key)
        while len(blocks) > self._capacity_blocks:
            blocks.popitem(last=False)

    def lookup(self, keys: Sequence[int]) -> Mapping[int, int]:
        """Instance -> leading bytes of the prompt it probably has; instances without any are absent."""
        found = {}
        for instance, blocks in self._blocks.items():
            count = 0
            for key in keys:
                if key not in blocks:
                    break
                count += 1
            if count:
                found[instance] = BLOCK_ENDS[count - 1]
        return found

    def forget(self, instance: int) -> None:
        """It has lost its cache."""
        self._blocks.pop(instance, None)

    def size(self) -> int:
        """Blocks over all instances."""
        return sum(map(len, self._blocks.values()))
