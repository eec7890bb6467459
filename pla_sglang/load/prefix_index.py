"""Estimates which prompt prefixes each instance has in its KV cache: for router, pools in a server and simulator.

A prompt is cut into blocks, and each block's key covers the prompt up to the block's end, so equal keys mean equal
prefixes. Callers that know only the dispatches (router, pools) use ``insert_prompt``. The eviction of the instances is
modelled by their capacity in tokens, least recently used first, and of one prompt its end before its beginning. So the
index also says how full a cache is, and how long ago the block was used that goes next. Callers that see every block
(the simulator) use ``add_block`` and ``remove_block``.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from pla_sglang.policy.interface.fleet import InstanceView

# Blocks of bytes: fine at the beginning, where system prompts end, then coarse, so that a long body has few.
FINE_BYTES, FINE_BLOCKS, COARSE_BYTES, COARSE_BLOCKS = 256, 64, 4096, 252
BLOCK_ENDS = (
    *(FINE_BYTES * (place + 1) for place in range(FINE_BLOCKS)),
    *(FINE_BYTES * FINE_BLOCKS + COARSE_BYTES * (place + 1) for place in range(COARSE_BLOCKS)),
)
MOST_BLOCKS = 200_000  # kept for an instance, whose capacity may be unknown


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


def _find_spans(block_ends: Sequence[int]) -> list[tuple[int, int]]:
    """First place and size of each row of blocks of one size, the last row first."""
    if isinstance(block_ends, range):
        return [(0, block_ends.step)]
    sizes = [end - start for start, end in itertools.pairwise((0, *block_ends))]
    return [(place, size) for place, size in enumerate(sizes) if not place or size != sizes[place - 1]][::-1]


class _Use:
    """Blocks of one size of one prompt, ``tokens`` each, were used at ``at_s``. They share it, to be small."""

    __slots__ = ("at_s", "tokens")

    def __init__(self, at_s: float, tokens: int) -> None:
        self.at_s = at_s
        self.tokens = tokens


class _Rest(_Use):
    """Room without a key: what a request had behind its prompt's last whole block ``after``, its answer included."""

    __slots__ = ("after",)

    def __init__(self, at_s: float, tokens: int, after: int | None) -> None:
        super().__init__(at_s, tokens)
        self.after = after


class _Cache:
    """The model of one instance's KV cache."""

    __slots__ = ("blocks", "kept_tokens", "rests", "uses")

    def __init__(self) -> None:
        self.blocks = self.kept_tokens = 0  # sums over ``uses``; a rest is no block
        self.uses: OrderedDict[int | _Rest, _Use] = OrderedDict()  # of blocks and rests, least recently used first
        self.rests: dict[int, _Rest] = {}  # by block, the latest behind it


class PrefixIndex:
    """Blocks by instance. The instances that have a block are a set of bits, so a look-up is cheap.

    Args:
        block_ends: where the blocks of a prompt end, in bytes or tokens.
    """

    def __init__(self, block_ends: Sequence[int] = BLOCK_ENDS) -> None:
        self._block_ends = block_ends
        self._spans = _find_spans(block_ends)
        self._slots: dict[int, int] = {}  # instance -> its bit
        self._instances: list[int | None] = []  # by bit; None: free
        self._holders: dict[int, int] = {}  # block -> the bits of the instances that have it, never 0
        self._caches: dict[int, _Cache] = {}  # of what was inserted, by instance

    def insert_prompt(
        self,
        instance: int,
        keys: Sequence[int],
        tokens: int,
        *,
        size: int,
        now_s: float,
        capacity_tokens: int,
        answer_tokens: int | None = None,
    ) -> None:
        """The instance computes this prompt and then has it in its cache; to be called again at the request's end.

        Args:
            keys: of the whole blocks, none if there are none.
            tokens, size: of the prompt; ``size`` in the unit of ``block_ends``.
            capacity_tokens: of the cache.
            answer_tokens: of the request that has ended now: they lie behind the prompt; None: it is yet to run.
        """
        cache = self._caches.get(instance)
        if cache is None:
            cache = self._caches[instance] = _Cache()
        bit, tokens_each = self._bit_of(instance), tokens / size
        if cache.rests:
            self._drop_continued(cache, keys, tokens, tokens_each)
        rows = self._list_rows(len(keys), tokens_each, now_s)
        if answer_tokens is not None:
            behind = tokens + answer_tokens - sum((end - first) * use.tokens for first, end, use in rows)
            if behind:
                self._add_rest(cache, _Rest(now_s, behind, keys[-1] if keys else None))
        self._use_blocks(cache, keys, rows, bit)
        self._evict(cache, capacity_tokens, bit)

    def count_tokens(self, instance: int) -> int:
        """Tokens that the instance keeps of what was inserted, never more than its capacity."""
        cache = self._caches.get(instance)
        return 0 if cache is None else cache.kept_tokens

    def evicted_next_s(self, instance: int) -> float | None:
        """When the block was used last that goes next; None without one."""
        cache = self._caches.get(instance)
        return None if cache is None else next((use.at_s for use in cache.uses.values()), None)

    def show_cache(self, view: InstanceView) -> None:
        """Enters into ``view`` how full its cache is with prefixes that can be evicted, as far as that is known.

        Kept are also prompts that run or are queued there; of these the view has counts.
        """
        busy_tokens = view.kv_used_tokens + view.queued_tokens
        room_tokens = view.kv_capacity_tokens - view.kv_used_tokens
        view.kv_cached_tokens = max(0, min(self.count_tokens(view.index) - busy_tokens, room_tokens))
        view.evicted_next_s = self.evicted_next_s(view.index) if view.kv_cached_tokens else None

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
        cache = self._caches.pop(instance, None)
        for key in () if cache is None else cache.uses:
            if not isinstance(key, _Rest):
                self._drop_holder(key, 1 << slot)
        self._instances[slot] = None

    def count_blocks(self) -> int:
        """Number of kept blocks over all instances."""
        return sum(cache.blocks for cache in self._caches.values())

    # -- the model of a cache ----------------------------------------------------------------------------------------

    def _list_rows(self, blocks: int, tokens_each: float, now_s: float) -> list[tuple[int, int, _Use]]:
        """The blocks of a prompt by size: first and end place of each row, the last row first. Of what is rounded down
        the rest takes care."""
        rows, end = [], blocks
        for first, size in self._spans:
            if first < end:
                rows.append((first, end, _Use(now_s, int(size * tokens_each))))
                end = first
        return rows

    def _use_blocks(self, cache: _Cache, keys: Sequence[int], rows: Sequence[tuple[int, int, _Use]], bit: int) -> None:
        """The first block of a prompt is used last, so a prefix outlives its end."""
        uses, holders, added, before = cache.uses, self._holders, 0, len(cache.uses)
        for first, end, use in rows:
            for key in reversed(keys[first:end]):
                old = uses.get(key)
                uses[key] = use
                if old is None:
                    holders[key] = holders.get(key, 0) | bit
                    added += use.tokens
                else:
                    uses.move_to_end(key)
                    added += use.tokens - old.tokens
        cache.kept_tokens += added
        cache.blocks += len(uses) - before

    def _drop_continued(self, cache: _Cache, keys: Sequence[int], tokens: int, tokens_each: float) -> None:
        """Where this prompt goes on behind a former one, that one's rest is in its blocks, and not kept twice.

        Taken for that is a prompt that is as long behind the last block that both have as the former one's rest.
        """
        uses = cache.uses
        # Kept is always the beginning of a prompt: no block is used without those before it.
        depth = bisect.bisect_left(range(len(keys)), True, key=lambda place: keys[place] not in uses)
        if not depth:
            return
        rest = cache.rests.get(keys[depth - 1])
        if rest is not None and tokens - self._block_ends[depth - 1] * tokens_each >= rest.tokens:
            del uses[rest]
            self._forget_rest(cache, rest)

    def _add_rest(self, cache: _Cache, rest: _Rest) -> None:
        cache.uses[rest] = rest
        cache.kept_tokens += rest.tokens
        if rest.after is not None:
            cache.rests[rest.after] = rest

    def _forget_rest(self, cache: _Cache, rest: _Rest) -> None:
        cache.kept_tokens -= rest.tokens
        if rest.after is not None and cache.rests.get(rest.after) is rest:
            del cache.rests[rest.after]

    def _evict(self, cache: _Cache, capacity_tokens: int, bit: int) -> None:
        uses = cache.uses
        while uses and (cache.kept_tokens > capacity_tokens or len(uses) > MOST_BLOCKS):
            key, use = uses.popitem(last=False)
            if isinstance(key, _Rest):
                self._forget_rest(cache, key)
            else:
                cache.kept_tokens -= use.tokens
                cache.blocks -= 1
                self._drop_holder(key, bit)

    # -- who has a block ---------------------------------------------------------------------------------------------

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
