"""One index of prompt prefixes: what was sent where, or what really came and went."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pla_sglang.load.prefix_index import BLOCK_ENDS, PrefixIndex, even_block_ends, token_block_keys
from pla_sglang.policy.interface.fleet import InstanceView

BLOCK = 4


def keys_of(tokens: list[int], salt: object = None) -> list[int]:
    return token_block_keys(tokens, BLOCK, salt=salt)


def tokens_index() -> PrefixIndex:
    return PrefixIndex(even_block_ends(BLOCK))


def insert(
    index: PrefixIndex,
    instance: int,
    keys: list[int],
    *,
    rest: int = 0,
    now_s: float = 0.0,
    capacity_tokens: int = 1 << 60,
    answer_tokens: int | None = None,
) -> None:
    """A prompt of these blocks and ``rest`` tokens behind them, by tokens."""
    tokens = len(keys) * BLOCK + rest
    index.insert_prompt(
        instance,
        keys,
        tokens,
        size=tokens or 1,
        now_s=now_s,
        capacity_tokens=capacity_tokens,
        answer_tokens=answer_tokens,
    )


def test_prefixes_are_found_block_by_block() -> None:
    index = tokens_index()
    insert(index, 0, keys_of([1, 2, 3, 4, 5, 6, 7, 8, 9]), rest=1)
    assert index.lookup(keys_of([1, 2, 3, 4, 5, 6, 7, 8])) == {0: 8}
    assert index.lookup(keys_of([1, 2, 3, 4, 0, 6, 7, 8])) == {0: 4}
    assert index.lookup(keys_of([0, 2, 3, 4, 5, 6, 7, 8])) == {}
    assert index.lookup(keys_of([1, 2, 3, 4], salt="adapter")) == {}
    assert keys_of([1, 2, 3]) == []
    assert index.lookup([]) == {}


def test_the_model_of_a_cache_is_no_larger_than_the_cache() -> None:
    index = tokens_index()
    first, second = keys_of([1] * 16), keys_of([2] * 16)
    insert(index, 7, first, capacity_tokens=24, now_s=1.0)
    insert(index, 7, second, capacity_tokens=24, now_s=2.0)
    assert (index.count_blocks(), index.count_tokens(7), index.evicted_next_s(7)) == (6, 24, 1.0)
    assert index.lookup(second) == {7: 16}
    assert index.lookup(first) == {7: 8}, "the leaves went first"


def test_blocks_that_come_and_go() -> None:
    index = tokens_index()
    keys = keys_of(list(range(16)))
    for instance, depth in ((3, 4), (900, 2)):
        for key in keys[:depth]:
            index.add_block(instance, key)
    assert index.lookup(keys) == {3: 16, 900: 8}
    index.remove_block(900, keys[0])
    assert index.lookup(keys) == {3: 16}
    with pytest.raises(KeyError):
        index.remove_block(3, 12345)


def test_a_place_that_was_forgotten_is_given_to_the_next() -> None:
    index = tokens_index()
    keys = keys_of([5] * 8)
    for instance in range(1, 400):
        insert(index, instance, keys)
        index.forget_instance(instance)
    index.forget_instance(12)
    assert index.count_blocks() == 0
    insert(index, 400, keys[:1])
    assert index.lookup(keys) == {400: 4}


def test_a_prompt_in_bytes_takes_its_tokens() -> None:
    index, keys = PrefixIndex(), list(range(70))
    index.insert_prompt(0, keys, 10_600, size=42_400, now_s=0.0, capacity_tokens=20_000, answer_tokens=50)
    assert index.count_tokens(0) == 64 * 64 + 6 * 1024 + (42_400 - BLOCK_ENDS[69]) // 4 + 50
    index.insert_prompt(0, [-1], 19_000, size=256, now_s=1.0, capacity_tokens=20_000)
    assert index.lookup(keys) == {0: 15 * 256}, "the answer went first, then the end"
    assert index.count_tokens(0) == 19_000 + 15 * 64


def test_an_answer_takes_room_until_it_is_a_part_of_the_next_prompt() -> None:
    index = tokens_index()
    keys = keys_of(list(range(40)))
    insert(index, 0, keys[:4], rest=2)
    assert index.count_tokens(0) == 16, "it has not been computed whole"
    insert(index, 0, keys[:4], rest=2, answer_tokens=12, now_s=5.0)
    assert index.count_tokens(0) == 30
    insert(index, 0, keys[:3], rest=3, now_s=6.0)
    assert index.count_tokens(0) == 30, "shorter than the answer: not the next turn"
    insert(index, 0, keys[:9], now_s=7.0)
    assert index.count_tokens(0) == 36
    assert index.evicted_next_s(0) == 7.0


def test_a_view_is_told_what_can_be_evicted() -> None:
    index, view = tokens_index(), InstanceView(2, "two", kv_capacity_tokens=100)
    index.show_cache(view)
    assert (view.kv_cached_tokens, view.evicted_next_s) == (0, None)
    insert(index, 2, keys_of([1] * 60), now_s=3.0, capacity_tokens=100)
    insert(index, 2, keys_of([2] * 20), now_s=4.0, capacity_tokens=100)
    view.queued_tokens = 20
    index.show_cache(view)
    assert (view.kv_cached_tokens, view.evicted_next_s) == (60, 3.0)
    view.queued_tokens, view.kv_used_tokens = 0, 30
    index.show_cache(view)
    assert view.kv_cached_tokens == 50, "of what is kept, 30 are in use"
    view.kv_used_tokens = 95
    index.show_cache(view)
    assert (view.kv_cached_tokens, view.evicted_next_s) == (0, None)


class Plain:
    """The same by a list for each instance: of (block or none, its tokens, last use, block before a rest)."""

    def __init__(self) -> None:
        self.caches: dict[int, list[tuple[int | None, int, float, int | None]]] = {}

    def insert(self, instance: int, keys: list[int], rest: int, capacity: int, now_s: float, answer: int) -> None:
        cache = self.caches.setdefault(instance, [])
        known = {entry[0] for entry in cache}
        depth = next((place for place, key in enumerate(keys) if key not in known), len(keys))
        behind = [entry for entry in cache if depth and entry[3] == keys[depth - 1]]
        if behind and (len(keys) - depth) * BLOCK + rest >= behind[-1][1] and behind[-1] in self.latest(cache):
            cache.remove(behind[-1])
        if rest + answer:
            cache.append((None, rest + answer, now_s, keys[-1] if keys else None))
        for key in reversed(keys):
            cache[:] = [entry for entry in cache if entry[0] != key]
            cache.append((key, BLOCK, now_s, None))
        while self.tokens(instance) > capacity:
            del cache[0]

    @staticmethod
    def latest(cache: list[tuple[int | None, int, float, int | None]]) -> list[object]:
        return list({entry[3]: entry for entry in cache if entry[0] is None}.values())

    def tokens(self, instance: int) -> int:
        return sum(entry[1] for entry in self.caches.get(instance, ()))

    def oldest_s(self, instance: int) -> float | None:
        return next((entry[2] for entry in self.caches.get(instance, ())), None)

    def lookup(self, keys: list[int]) -> dict[int, int]:
        depths = {}
        for instance, cache in self.caches.items():
            blocks = {entry[0] for entry in cache}
            depth = next((place for place, key in enumerate(keys) if key not in blocks), len(keys))
            if depth:
                depths[instance] = depth * BLOCK
        return depths


PROMPTS = st.lists(st.integers(0, 1), max_size=8).map(
    lambda path: [hash(tuple(path[: n + 1])) for n in range(len(path))]
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "forget", "lookup"]),
        st.integers(0, 2),
        PROMPTS,
        st.integers(0, BLOCK - 1),
        st.integers(0, 9),
    ),
    max_size=40,
)


@given(STEPS, st.integers(0, 60))
def test_the_same_as_one_list_for_each_instance(
    steps: list[tuple[str, int, list[int], int, int]], capacity: int
) -> None:
    index, plain = tokens_index(), Plain()
    for second, (action, instance, keys, rest, answer) in enumerate(steps):
        if action == "insert":
            insert(
                index,
                instance,
                keys,
                rest=rest,
                now_s=float(second),
                capacity_tokens=capacity,
                answer_tokens=answer,
            )
            plain.insert(instance, keys, rest, capacity, float(second), answer)
        elif action == "forget":
            index.forget_instance(instance)
            plain.caches.pop(instance, None)
        assert index.lookup(keys) == plain.lookup(keys)
        for one in range(3):
            assert index.count_tokens(one) == plain.tokens(one) <= capacity
            assert index.evicted_next_s(one) == plain.oldest_s(one)
    blocks = [entry for cache in plain.caches.values() for entry in cache if entry[0] is not None]
    assert index.count_blocks() == len(blocks)
