"""KV memory of one instance: private tokens of requests, and prefix blocks that requests share.

Ownership: a block is *locked* while at least one request uses it, else *idle* and free to be evicted, least recently
used first. ``private_tokens`` belong to requests that are on the instance. Free memory is what neither holds.
Blocks are keyed by their prefix id (``Trace.hash_ids``), so a locked block's predecessors are locked too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from pla_sglang.sim.core.errors import SimError

Watcher = Callable[[int, bool], None]  # block id, whether it came (True) or went
Clock = Callable[[], float]


def ignore_block(block: int, came: bool) -> None:
    """A watcher that nobody needs."""


class KvPool:
    """Counts tokens; where they lie does not matter to the time of a step.

    Args:
        capacity_tokens: of the pool.
        block_tokens: tokens of a prefix block.
        watcher: told of every block that comes and goes, for the index of who caches what.
        clock: seconds now, to know since when a block is idle.
    """

    def __init__(
        self,
        capacity_tokens: int,
        block_tokens: int,
        watcher: Watcher = ignore_block,
        clock: Clock = lambda: 0.0,
    ) -> None:
        self.capacity_tokens = capacity_tokens
        self.block_tokens = block_tokens
        self.private_tokens = 0
        self.version = 0  # changes with the set of blocks, so that matches can be kept until then
        self._locked: dict[int, int] = {}  # block id -> users
        self._idle: OrderedDict[int, float] = OrderedDict()  # block id -> idle since; least recently used first
        self._watcher = watcher
        self._clock = clock

    @property
    def used_tokens(self) -> int:
        """What cannot be evicted."""
        return self.private_tokens + len(self._locked) * self.block_tokens

    @property
    def idle_tokens(self) -> int:
        """Tokens of idle blocks, which can be evicted."""
        return len(self._idle) * self.block_tokens

    @property
    def evicted_next_s(self) -> float | None:
        """Since when the block is idle that is evicted next; None without one."""
        return next(iter(self._idle.values()), None)

    @property
    def available_tokens(self) -> int:
        """Free, or freed by evicting idle blocks."""
        return self.capacity_tokens - self.used_tokens

    def match(self, ids: Sequence[int]) -> int:
        """How many leading blocks are here."""
        locked, idle = self._locked, self._idle
        count = 0
        for block in ids:
            if block not in locked and block not in idle:
                break
            count += 1
        return count

    def room_after_lock(self, ids: Sequence[int]) -> int:
        """What would be available after ``lock(ids)``: idle blocks that are locked can no longer be evicted."""
        idle = self._idle
        return self.available_tokens - self.block_tokens * sum(block in idle for block in ids)

    def lock(self, ids: Sequence[int]) -> None:
        """Another user of blocks that are here."""
        locked, idle = self._locked, self._idle
        for block in ids:
            if block in locked:
                locked[block] += 1
            else:
                del idle[block]
                locked[block] = 1

    def unlock(self, ids: Sequence[int]) -> None:
        """One user less. The deepest blocks become idle first, so that they are evicted before what they extend."""
        locked, idle, now_s = self._locked, self._idle, self._clock()
        for block in reversed(ids):
            users = locked[block]
            if users > 1:
                locked[block] = users - 1
            else:
                del locked[block]
                idle[block] = now_s

    def take(self, tokens: int) -> None:
        """More private tokens. Raises SimError when there is no room: callers ask ``available_tokens`` first."""
        if tokens > self.available_tokens:
            raise SimError(f"{tokens} KV tokens were taken with {self.available_tokens} available")
        self.private_tokens += tokens
        self._evict()

    def give(self, tokens: int) -> None:
        """Private tokens are freed."""
        assert 0 <= tokens <= self.private_tokens, f"{tokens} tokens freed of {self.private_tokens}"
        self.private_tokens -= tokens

    def share(self, ids: Sequence[int]) -> None:
        """Private tokens of one request become blocks with that request as user.

        Where another request has brought the same block meanwhile, the private copy is freed.
        """
        self.give(len(ids) * self.block_tokens)
        for block in ids:
            if block in self._locked:
                self._locked[block] += 1
            elif block in self._idle:
                del self._idle[block]
                self._locked[block] = 1
            else:
                self._locked[block] = 1
                self.version += 1
                self._watcher(block, True)

    def keep(self, ids: Sequence[int]) -> None:
        """A context whose request has ended stays as idle blocks, as far as there is room for it."""
        held = self.match(ids)
        self.lock(ids[:held])
        fresh = ids[held : held + self.available_tokens // self.block_tokens]
        self.take(len(fresh) * self.block_tokens)
        self.share(fresh)
        self.unlock(ids[: held + len(fresh)])

    def clear(self) -> None:
        """Everything is lost (the instance has ended)."""
        for block in (*self._locked, *self._idle):
            self._watcher(block, False)
        self._locked.clear()
        self._idle.clear()
        self.private_tokens = 0
        self.version += 1

    def _evict(self) -> None:
        room = self.capacity_tokens - self.used_tokens
        while self.idle_tokens > room:
            block, _ = self._idle.popitem(last=False)
            self.version += 1
            self._watcher(block, False)

    def check_integrity(self, *, empty: bool = False) -> None:
        """Asserts that the counts agree; ``empty``: that no request holds anything."""
        assert 0 <= self.used_tokens <= self.capacity_tokens, f"{self.used_tokens} of {self.capacity_tokens} used"
        assert self.used_tokens + self.idle_tokens <= self.capacity_tokens
        assert not self._locked.keys() & self._idle.keys()
        assert all(users > 0 for users in self._locked.values())
        if empty:
            assert not self.private_tokens, f"{self.private_tokens} private tokens are left"
            assert not self._locked, f"{len(self._locked)} blocks are still locked"
