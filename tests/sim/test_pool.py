"""KV pool: sharing, eviction order, and a model-based property."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pla_sglang.sim.core.errors import SimError
from pla_sglang.sim.core.pool import KvPool


def hold(pool: KvPool, ids: tuple[int, ...]) -> None:
    """A request computes these blocks and shares them."""
    matched = pool.match(ids)
    pool.lock(ids[:matched])
    fresh = ids[matched:]
    pool.take(len(fresh) * pool.block_tokens)
    pool.share(fresh)


def test_blocks_are_shared_kept_and_evicted_deepest_and_oldest_first() -> None:
    went: list[int] = []
    pool = KvPool(50, 10, lambda block, came: None if came else went.append(block))
    hold(pool, (1, 2, 3))
    pool.unlock((1, 2, 3))
    hold(pool, (4,))
    pool.unlock((4,))
    assert (pool.used_tokens, pool.available_tokens, pool.match((1, 2, 9))) == (0, 50, 2)
    pool.lock((1,))  # used again, so it must stay
    assert pool.room_after_lock((2,)) == 30
    pool.take(25)
    assert went == [3, 2]
    assert pool.match((1, 2)) == 1
    assert pool.match((4,)) == 1
    pool.take(15)
    assert went == [3, 2, 4]
    with pytest.raises(SimError, match="1 KV tokens were taken with 0 available"):
        pool.take(1)
    pool.check_integrity()


def test_a_block_that_two_computed_at_once_is_kept_once() -> None:
    pool = KvPool(100, 10)
    pool.take(20)  # two requests compute the same first block
    pool.share((7,))
    pool.share((7,))
    assert (pool.private_tokens, pool.used_tokens) == (0, 10)
    pool.unlock((7,))
    assert pool.used_tokens == 10
    pool.unlock((7,))
    pool.check_integrity(empty=True)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 4)), max_size=60))
def test_any_order_of_requests_leaves_the_counts_right(steps: list[tuple[int, int, int]]) -> None:
    """Requests of four chats come, grow and go; who watches knows just what is there."""
    known: set[int] = set()
    pool = KvPool(200, 10, lambda block, came: known.add(block) if came else known.discard(block))
    open_: list[tuple[tuple[int, ...], int]] = []
    for chat, depth, growth in steps:
        ids = tuple(chat * 10 + level for level in range(depth))
        matched = pool.match(ids)
        if pool.room_after_lock(ids[:matched]) >= (depth - matched) * 10 + growth:
            hold(pool, ids)
            pool.take(growth)
            open_.append((ids, growth))
        elif open_:
            gone, grown = open_.pop(0)
            pool.give(grown)
            pool.unlock(gone)
        pool.check_integrity()
        assert all(pool.match(ids) == len(ids) for ids, _ in open_), "a block in use was evicted"
        assert all((pool.match((block,)) == 1) == (block in known) for block in range(40))
    for ids, grown in open_:
        pool.give(grown)
        pool.unlock(ids)
    pool.check_integrity(empty=True)
    pool.clear()
    assert not known
