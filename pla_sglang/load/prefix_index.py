"""Estimates which prompt prefixes each instance has in its KV cache: for router, pools in a server and simulator.

A prompt is cut into blocks, and each block's key covers the prompt up to the block's end, so equal keys mean equal
prefixes. Callers that know only the dispatches (router, pools) use ``insert_prompt``; the eviction of the instances is
modelled by a bound on the blocks kept for each, least recently used first. Callers that see every block (the
simulator) use ``add_block`` and ``remove_block``.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence

# Blocks of bytes: fine at the beginning, where system prompts end, then coarse, so that a long body has few.
FINE_BYTES, FINE_BLOCKS, COARSE_BYTES, COARSE_BLOCKS = 256, 64, 4096, 252
BLOCK_ENDS = (
    *(FINE_BYTES * (place + 1) for place in range(FINE_BLOCKS)),
    *(FINE_BYTES * FINE_BLOCKS + COARSE_BYTES * (place + 1) for place in range(COARSE_BLOCKS)),
)
CAPACITY_BLOCKS = 200_000


def byte_block_keys(prompt: bytes, *, salt: bytes = b"") -> list[int]:
    """Keys of the whole blocks of ``prompt``, first to last. ``salt`` separates prompts that are cached separately.

    Bytes instead of tokens: no tokenizer is needed, a body is hashed at gigabytes a second, and the same client writes
    the same prefix with the same bytes.
    """
    running = hashlib.blake2b(salt, digest_size=8)
    keys = []
    for start, end in itertools.pairwise((0, *BLOCK_ENDS)):
        if end > len(prompt):
            break
        running.update(prompt[start:end])
        keys.append(int.from_bytes(running.copy().digest(), "little"))
    return keys


def token_block_keys(tokens: Sequence[int], block_tokens: int, *, salt: object = None) -> list[int]:
    """Keys of the whole blocks of ``tokens``, valid in this process. ``salt`` separates prompts that share no cache."""
    packed = tokens if isinstance(tokens, array) else array("q", tokens)
    keys, key = [], hash(salt)
    for start in range(0, len(packed) - block_tokens + 1, block_tokens):
        key = hash((key, packed[start : start + block_tokens].tobytes()))
        keys.append(key)
    return keys


def even_block_ends(block_tokens: int) -> Sequence[int]:
    """Ends of blocks of one size, an infinite sequence."""
    return range(block_tokens, block_tokens << 40, block_tokens)


class PrefixIndex:
    """Blocks by instance. The instances that have a block are a set of bits, so a look-up is cheap.

    Args:
        block_ends: where the blocks of a prompt end, in bytes or tokens.
    """

    def __init__(self, block_ends: Sequence[int] = BLOCK_ENDS) -> None:
        self._block_ends = block_ends
        self._slots: dict[int, int] = {}  # instance -> its bit
        self._instances: list[int | None] = []  # by bit; None: free
        self._holders: dict[int, int] = {}  # block -> the bits of the instances that have it, never 0
        self._blocks: dict[int, OrderedDict[int, None]] = {}  # inserted, by instance, least recently used first

    def insert_prompt(self, instance: int, keys: Sequence[int], capacity_blocks: int = CAPACITY_BLOCKS) -> None:
        """The instance computes this prompt and then has it in its cache, of at most ``capacity_blocks``."""
        blocks, holders, bit = self._blocks.setdefault(instance, OrderedDict()), self._holders, self._bit_of(instance)
        for key in reversed(keys):  # the first block of a prompt is used last, so a prefix outlives its end
            if key in blocks:
                blocks.move_to_end(key)
            else:
                blocks[key] = None
                holders[key] = holders.get(key, 0) | bit
        while len(blocks) > capacity_blocks:
            self._drop_holder(blocks.popitem(last=False)[0], bit)

    def add_block(self, instance: int, key: int) -> None:
        self._holders[key] = self._holders.get(key, 0) | self._bit_of(instance)

    def remove_block(self, instance: int, key: int) -> None:
        """Remove a block that was added. Raises KeyError if it was not."""
        self._drop_holder(key, self._bit_of(instance))

    def lookup(self, keys: Sequence[int]) -> Mapping[int, int]:
        """Instance -> leading bytes or tokens of the prompt it probably has; instances without any are absent."""
        matched: dict[int, int] = {}
        holders, holding, depth = self._holders, -1, 0  # -1: every bit
        for key in keys:
            still = holding & holders.get(key, 0)
            if still != holding:
                if depth:
                    self._note_match(matched, holding ^ still, depth)
                if not still:
                    return matched
                holding = still
            depth += 1
        if depth:
            self._note_match(matched, holding, depth)
        return matched

    def forget_instance(self, instance: int) -> None:
        """The instance has lost its cache; removes the blocks of ``insert_prompt``."""
        slot = self._slots.pop(instance, None)
        if slot is None:
            return
        for key in self._blocks.pop(instance, ()):
            self._drop_holder(key, 1 << slot)
        self._instances[slot] = None

    def count_blocks(self) -> int:
        """Number of kept blocks over all instances."""
        return sum(map(len, self._blocks.values()))

    def _note_match(self, matched: dict[int, int], holding: int, depth: int) -> None:
        while holding:
            lowest = holding & -holding
            instance = self._instances[lowest.bit_length() - 1]
            assert instance is not None, "a free bit is set nowhere"
            matched[instance] = self._block_ends[depth - 1]
            holding ^= lowest

    def _bit_of(self, instance: int) -> int:
        slot = self._slots.get(instance)
        if slot is None:
            if None in self._instances:
                slot = self._instances.index(None)
                self._instances[slot] = instance
            else:
                slot = len(self._instances)
                self._instances.append(instance)
            self._slots[instance] = slot
        return 1 << slot

    def _drop_holder(self, key: int, bit: int) -> None:
        left = self._holders[key] & ~bit
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]
