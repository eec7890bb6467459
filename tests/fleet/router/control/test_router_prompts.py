"""Lengths and prefixes of prompts, as far as a router can know them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pla_sglang.fleet.router.control.requests.prompts import Prompts, load_tokenizer, prompt_texts
from pla_sglang.fleet.router.wire.messages import Ask, Endpoint
from pla_sglang.load.prefix_index import BLOCK_ENDS, FINE_BYTES, PrefixIndex, byte_block_keys
from pla_sglang.policy.interface.fleet import InstanceView
from pla_sglang.sim.chain import model_path


def ask(body: object, endpoint: Endpoint = Endpoint.CHAT, **fields: object) -> Ask:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    values = {"input_tokens": 77, "body": data} | fields
    return Ask("r", 0, endpoint, True, 0.0, len(data), **values)  # type: ignore[arg-type]


def prompts(tokenize_bytes: int = 8192) -> Prompts:
    made = Prompts(PrefixIndex(), tokenize_bytes=tokenize_bytes)
    made.encode = lambda text: len(text.split())
    return made


def insert(index: PrefixIndex, instance: int, prompt: bytes, capacity_tokens: int = 1 << 60) -> None:
    """A token is four bytes."""
    tokens, size = len(prompt) // 4, len(prompt)
    keys = byte_block_keys(prompt)
    index.insert_prompt(instance, keys, tokens, size=size, now_s=0.0, capacity_tokens=capacity_tokens)


@given(st.binary(max_size=6000), st.binary(max_size=6000), st.binary(max_size=6000))
def test_equal_prefixes_have_equal_keys_and_others_do_not(prefix: bytes, one: bytes, other: bytes) -> None:
    first, second = byte_block_keys(prefix + one), byte_block_keys(prefix + other)
    common = 0
    for left, right in zip(prefix + one, prefix + other, strict=False):
        if left != right:
            break
        common += 1
    shared = sum(end <= common for end in BLOCK_ENDS)
    assert first[:shared] == second[:shared]
    assert all(left != right for left, right in zip(first[shared:], second[shared:], strict=False))


def test_salt_keeps_apart() -> None:
    assert byte_block_keys(b"x" * 300) != byte_block_keys(b"x" * 300, salt=b"s")


def test_an_instance_has_the_prefix_that_was_sent_there() -> None:
    index = PrefixIndex()
    long = bytes(range(256)) * 40
    insert(index, 3, long)
    insert(index, 5, long[: FINE_BYTES * 2])
    assert index.lookup(byte_block_keys(long)) == {3: len(long) // FINE_BYTES * FINE_BYTES, 5: FINE_BYTES * 2}
    assert index.lookup(byte_block_keys(b"other" * 200)) == {}
    index.forget_instance(3)
    assert index.lookup(byte_block_keys(long)) == {5: FINE_BYTES * 2}


def test_what_was_used_least_is_forgotten_and_a_prefix_outlives_its_end() -> None:
    index = PrefixIndex()
    old, new = b"a" * FINE_BYTES * 3, b"b" * FINE_BYTES * 3
    insert(index, 0, old, FINE_BYTES)
    insert(index, 0, new, FINE_BYTES)
    assert index.lookup(byte_block_keys(new)) == {0: 3 * FINE_BYTES}
    assert index.lookup(byte_block_keys(old)) == {0: FINE_BYTES}
    assert index.count_blocks() == 4


@pytest.mark.parametrize(
    ("endpoint", "body", "texts"),
    [
        (Endpoint.CHAT, {"messages": [{"role": "user", "content": "a b"}]}, ["a b"]),
        (Endpoint.CHAT, {"messages": [{"content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]}, ["x"]),
        (Endpoint.CHAT, {"messages": []}, None),
        (Endpoint.CHAT, {"messages": "no"}, None),
        (Endpoint.COMPLETIONS, {"prompt": "a"}, ["a"]),
        (Endpoint.COMPLETIONS, {"prompt": ["a", "b"]}, ["a", "b"]),
        (Endpoint.COMPLETIONS, {"prompt": [1, 2]}, None),
        (Endpoint.GENERATE, {"text": "a"}, ["a"]),
        (Endpoint.GENERATE, {"input_ids": [1]}, None),
        (Endpoint.GENERATE, [], None),
        (Endpoint.RESPONSES, {"instructions": "be brief", "input": "a b"}, ["be brief", "a b"]),
        (Endpoint.RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]}, ["a"]),
        (Endpoint.MESSAGES, {"system": "s", "messages": [{"role": "user", "content": "a"}]}, ["s", "a"]),
        (Endpoint.OLLAMA_GENERATE, {"prompt": "a"}, ["a"]),
        (Endpoint.EMBEDDINGS, {"input": ["a", "b"]}, ["a", "b"]),
        (Endpoint.EMBEDDINGS, {"input": [1, 2]}, None),
        (Endpoint.CLASSIFY, {"text": "a"}, ["a"]),
        (Endpoint.ENCODE, {"input_ids": [1], "text": "a"}, None),
        (Endpoint.SCORE, {"query": "a", "items": ["b"]}, None),
    ],
)
def test_texts_of_a_body(endpoint: Endpoint, body: object, texts: list[str] | None) -> None:
    assert prompt_texts(msgspec.json.encode(body), endpoint) == texts


def test_a_broken_body_has_none() -> None:
    assert prompt_texts(b"{", Endpoint.CHAT) is None


def test_short_texts_are_tokenized_once() -> None:
    made = prompts()
    body = {"prompt": "one two three"}
    for _ in range(3):
        found = made.measure_prompt(ask(body, Endpoint.COMPLETIONS))
        assert (found.tokens, found.exact) == (3, True)
    assert (made.tokenized, made.hits) == (1, 2)


def test_the_messages_of_a_chat_cost_something_too() -> None:
    body = {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]}
    assert prompts().measure_prompt(ask(body)).tokens == 3 + 2 * 5


def test_long_texts_are_estimated_by_what_short_ones_have_taught() -> None:
    made = prompts(tokenize_bytes=2000)
    made.measure_prompt(ask({"prompt": "abcd " * 100}, Endpoint.COMPLETIONS))
    assert made.bytes_per_token == pytest.approx(5.0)
    found = made.measure_prompt(ask({"prompt": "abcd " * 1000}, Endpoint.COMPLETIONS))
    assert not found.exact
    assert found.tokens == pytest.approx(1000, rel=0.02)
    assert made.estimated == 1


def test_token_ids_and_missing_bodies_are_taken_from_the_relay() -> None:
    made = prompts()
    found = made.measure_prompt(ask({"input_ids": [1, 2, 3]}, Endpoint.GENERATE, exact_tokens=True))
    assert (found.tokens, found.exact) == (77, True)
    found = made.measure_prompt(Ask("r", 0, Endpoint.CHAT, True, 0.0, 30, 77))
    assert (found.tokens, found.exact, found.keys) == (77, False, ())


def test_the_relays_count_of_many_token_ids_is_better_than_their_size() -> None:
    found = prompts().measure_prompt(ask({"input_ids": [100_000] * 20_000}, Endpoint.GENERATE))
    assert (found.tokens, found.exact) == (77, False)


def test_the_next_turn_of_a_chat_finds_the_last_one() -> None:
    made = prompts(tokenize_bytes=0)
    history = [{"role": "system", "content": "s" * 3000}]
    first = made.measure_prompt(ask({"messages": history, "model": "m"}))
    view = InstanceView(2, "two", kv_capacity_tokens=100_000)
    made.note_use(first, view, 1.0)
    made.note_use(first, view, 2.0, answer_tokens=100)
    assert (view.kv_cached_tokens, view.evicted_next_s) == (first.tokens + 100, 2.0)
    second = made.measure_prompt(ask({"messages": [*history, {"role": "user", "content": "u" * 1000}], "model": "m"}))
    cached = made.find_cached(second)[2]
    assert 0.6 * second.tokens < cached < 0.8 * second.tokens


def test_the_tokenizer_of_a_model_folder() -> None:
    encode = load_tokenizer(str(model_path()))
    assert encode is not None
    assert encode("abc") == 3
    assert load_tokenizer("/nowhere/at/all") is None
