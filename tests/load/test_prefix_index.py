"""One index of prompt prefixes: what was sent where, or what really came and went."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pla_sglang.load.prefix_index import PrefixIndex, even_block_ends, token_block_keys

BLOCK = 4


def keys_of(tokens: list[int], salt: object = None) -> list[int]:
    return token_block_keys(tokens, BLOCK, salt=salt)


def tokens_index() -> PrefixIndex:
    return PrefixIndex(even_block_ends(BLOCK))


def test_prefixes_are_found_block_by_block() -> None:
    index = tokens_index()
    index.insert_prompt(0, keys_of([1, 2, 3, 4, 5, 6, 7, 8, 9]), 25)
    assert index.lookup(keys_of([1, 2, 3, 4, 5, 6, 7, 8])) == {0: 8}
    assert index.lookup(keys_of([1, 2, 3, 4, 0, 6, 7, 8])) == {0: 4}
    assert index.lookup(keys_of([0, 2, 3, 4, 5, 6, 7, 8])) == {}
    assert index.lookup(keys_of([1, 2, 3, 4], salt="adapter")) == {}
    assert keys_of([1, 2, 3]) == []
    assert index.lookup([]) == {}


def test_the_model_of_a_cache_is_no_larger_than_the_cache() -> None:
    index = tokens_index()
    first, second = keys_of([1] * 16), keys_of([2] * 16)
    index.insert_prompt(7, first, 6)
    index.insert_prompt(7, second, 6)
    assert index.count_blocks() == 6
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
        index.insert_prompt(instance, keys)
        index.forget_instance(instance)
    index.forget_instance(12)
    assert index.count_blocks() == 0
    index.insert_prompt(400, keys[:1])
    assert index.lookup(keys) == {400: 4}


class Plain:
    """The same by one ordered dictionary for each instance."""

    def __init__(self) -> None:
        self.blocks: dict[int, dict[int, None]] = {}

    def insert(self, instance: int, keys: list[int], capacity: int) -> None:
        blocks = self.blocks.setdefault(instance, {})
        for key in reversed(keys):
            blocks.pop(key, None)
            blocks[key] = None
        while len(blocks) > capacity:
            del blocks[next(iter(blocks))]

    def lookup(self, keys: list[int]) -> dict[int, int]:
        depths = {}
        for instance, blocks in self.blocks.items():
            depth = next((place for place, key in enumerate(keys) if key not in blocks), len(keys))
            if depth:
                depths[instance] = depth * BLOCK
        return depths


PROMPTS = st.lists(st.integers(0, 1), max_size=8).map(
    lambda path: [hash(tuple(path[: n + 1])) for n in range(len(path))]
)


@given(st.lists(st.tuples(st.sampled_from(["insert", "forget", "lookup"]), st.integers(0, 4), PROMPTS), max_size=40))
def test_the_same_as_one_list_for_each_instance(steps: list[tuple[str, int, list[int]]]) -> None:
    index, plain = tokens_index(), Plain()
    for action, instance, keys in steps:
        if action == "insert":
            index.insert_prompt(instance, keys, 10)
            plain.insert(instance, keys, 10)
        elif action == "forget":
            index.forget_instance(instance)
            plain.blocks.pop(instance, None)
        assert index.lookup(keys) == plain.lookup(keys)
    assert index.count_blocks() == sum(map(len, plain.blocks.values()))
