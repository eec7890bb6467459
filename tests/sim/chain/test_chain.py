"""The chain model against its oracle, and the oracle's teeth: every kind of damage to the cache changes the output."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from make_chain_model import build, config_json
from sim.chain.pool import Pool

from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.chain import EOS, MAX_ASK, VOCAB_SIZE, ask_ids, expected, model_path, prompt_of
from pla_sglang.sim.chain.algebra import SEED, mix, mix_array, step, word_of
from pla_sglang.sim.chain.oracle import asked_end, state_after
from pla_sglang.sim.chain.vocab import ASK_HIGH, ASK_LOW, WORD_BASE

PAGE = 16
ANSWER = 12


def words(count: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(WORD_BASE, VOCAB_SIZE), k=count)


def test_closed_form_equals_the_recurrence() -> None:
    ids = words(1000)
    state = SEED
    for token in ids:
        state = step(state, token)
    assert state_after(np.array(ids)) == state
    assert state_after(np.array(ids[400:]), state_after(np.array(ids[:400]))) == state
    assert expected(ids, 1).tokens == (word_of(state),)


def test_mix_is_the_same_on_arrays() -> None:
    values = [0, 1, 1 << 63, (1 << 64) - 1, 12345678901234567890]
    assert mix_array(np.array(values, dtype=np.uint64)).tolist() == [mix(value) for value in values]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_batching_and_chunking_gives_the_expected_tokens(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 1 << 30))
    rng = random.Random(seed)
    count = data.draw(st.integers(1, 5))
    prompts = [prompt_of(rng.randint(3, 60), rng.randint(1, 20), rng) for _ in range(count)]
    wanted = [list(expected(prompt, 40).tokens) for prompt in prompts]
    pool, left, got = Pool(count, seed=seed), [list(p) for p in prompts], [[] for _ in prompts]  # type: ignore[var-annotated]
    while any(tokens[-1:] != [EOS] for tokens in got):
        chosen = [r for r in range(count) if got[r][-1:] != [EOS] and rng.random() < 0.7]
        chunks = []
        for request in chosen:
            cut = rng.randint(1, 25)
            chunks.append((request, left[request][:cut] or got[request][-1:]))
            left[request] = left[request][cut:]
        answers = pool.run(chunks) if chunks else []
        for (request, _), token in zip(chunks, answers, strict=True):
            if not left[request]:
                got[request].append(token)
    assert got == wanted


@pytest.mark.parametrize("asked", [1, 2, 255, 256, 300])
def test_a_prompt_gets_the_length_it_asks_for(asked: int) -> None:
    answer = expected([*words(5), *ask_ids(asked)], 1000)
    assert len(answer.tokens) == asked
    assert answer.tokens[-1] == EOS
    assert EOS not in answer.tokens[:-1]
    assert answer.finish == "stop"


def test_the_last_wish_counts_and_halves_do_not() -> None:
    assert asked_end(np.array([*ask_ids(9), *words(3), *ask_ids(4)])) == 6 + 3
    assert asked_end(np.array([ASK_HIGH, WORD_BASE, ASK_LOW + 5])) == -1
    assert asked_end(np.array([ASK_LOW + 5, ASK_HIGH])) == -1
    assert asked_end(np.array([ASK_HIGH, ASK_LOW])) == -1  # asks for none


def test_without_a_wish_or_ignoring_it_the_limit_ends() -> None:
    assert expected(words(4), 7).finish == "length"
    assert len(expected(words(4), 7).tokens) == 7
    answer = expected([*words(4), *ask_ids(2)], 5, ignore_eos=True)
    assert len(answer.tokens) == 5
    assert answer.tokens[1] == EOS


@pytest.mark.parametrize("bad", [[], [-1], [VOCAB_SIZE]])
def test_the_oracle_refuses_what_is_no_prompt(bad: list[int]) -> None:
    with pytest.raises(ValueError, match="a prompt needs ids"):
        expected(bad, 1)


@pytest.mark.parametrize("bad", [0, MAX_ASK + 1])
def test_wishes_out_of_range_are_refused(bad: int) -> None:
    with pytest.raises(ValueError, match=f"output_tokens {bad} is out of range"):
        ask_ids(bad)


def corrupt_one_slot(pool: Pool) -> None:
    pool.keys[pool.slots_of(0, 37, 38), 0] ^= 1


def corrupt_one_value(pool: Pool) -> None:
    pool.values[pool.slots_of(0, 50, 51), 2] ^= 1


def swap_two_pages(pool: Pool) -> None:
    first, second = pool.slots_of(0, PAGE, 2 * PAGE), pool.slots_of(0, 3 * PAGE, 4 * PAGE)
    for rows in (pool.keys, pool.values):
        rows[torch.cat((first, second))] = rows[torch.cat((second, first))]


def drop_one_page(pool: Pool) -> None:
    for rows in (pool.keys, pool.values):
        rows[pool.slots_of(0, 2 * PAGE, 3 * PAGE)] = 0


def stale_prefix(pool: Pool) -> None:
    """The first two pages hold another, itself intact, prompt."""
    for rows in (pool.keys, pool.values):
        rows[pool.slots_of(0, 0, 2 * PAGE)] = rows[pool.slots_of(1, 0, 2 * PAGE)]


def other_request(pool: Pool) -> None:
    """The whole cache is that of another request of the same length."""
    for rows in (pool.keys, pool.values):
        rows[pool.slots_of(0, 0, 100)] = rows[pool.slots_of(1, 0, 100)]


def lose_the_last_slot(pool: Pool) -> None:
    for rows in (pool.keys, pool.values):
        rows[pool.slots_of(0, 99, 100)] = 0


DAMAGE = [
    corrupt_one_slot,
    corrupt_one_value,
    swap_two_pages,
    drop_one_page,
    stale_prefix,
    other_request,
    lose_the_last_slot,
]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("audit_tokens", [1 << 20, 0])
def test_damage_changes_the_output(damage: Callable[[Pool], None], audit_tokens: int) -> None:
    """Also with the smallest audit windows, where it may take some tokens to show."""
    count = ANSWER if audit_tokens else 150
    prompt = words(100)
    pool = Pool(2)
    first = pool.run([(0, prompt), (1, words(100, seed=2))])[:1]
    damage(pool)
    got = pool.decode(0, first, count, audit_tokens=audit_tokens)
    assert got != list(expected(prompt, count).tokens)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_a_cached_prefix_changes_the_first_token(damage: Callable[[Pool], None]) -> None:
    prompt = words(130)
    pool = Pool(2)
    pool.run([(0, prompt[:100]), (1, words(100, seed=2))])
    damage(pool)
    assert pool.run([(0, prompt[100:])]) != [expected(prompt, 1).tokens[0]]


@pytest.mark.parametrize("shift", [1, -1])
def test_a_wrong_position_changes_the_output_of_its_request_alone(shift: int) -> None:
    """As of a decode that rides beside a chunk with its prefix counted one too long, or one short."""
    chunk, rider = words(100), words(40, seed=2)
    pool = Pool(2)
    first = pool.run([(1, rider)])
    got = pool.run([(0, chunk), (1, first)], shift=shift)
    assert got[0] == expected(chunk, 1).tokens[0]
    assert got[1] != expected(rider, 2).tokens[1]


def test_without_damage_small_audits_change_nothing() -> None:
    prompt = words(100)
    assert Pool(1).generate(0, prompt, 150, audit_tokens=0) == list(expected(prompt, 150).tokens)


def test_wide_rows_are_filled_and_checked() -> None:
    prompt = words(40)
    pool = Pool(1, width=32)
    first = pool.run([(0, prompt)])
    assert (pool.keys[pool.slots_of(0, 0, 40)] != 0).float().mean() > 0.9
    pool.values[pool.slots_of(0, 10, 11), -1] ^= 1
    assert pool.decode(0, first, ANSWER) != list(expected(prompt, ANSWER).tokens)


def test_the_packaged_model_is_what_the_script_builds(tmp_path: pytest.TempPathFactory) -> None:
    build(tmp_path)  # type: ignore[arg-type]
    for file in sorted(model_path().iterdir()):
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()  # type: ignore[operator]


@pytest.mark.parametrize(("kv_bytes", "layers"), [(31, 1), (24, 1), (32, 2), (40, 0)])
def test_impossible_kv_sizes_are_refused(kv_bytes: int, layers: int) -> None:
    with pytest.raises(ConfigError, match=f"kv-bytes-per-token {kv_bytes} is not allowed"):
        config_json(kv_bytes, layers)


def test_kv_size_is_as_asked() -> None:
    config = config_json(1024, 2)
    assert config["head_dim"] * 2 * 4 * 2 == 1024  # type: ignore[operator]


def test_text_goes_through_the_tokenizer_and_back() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path())
    prompt = prompt_of(50, 20, random.Random(3))
    answer = list(expected(prompt, 50).tokens)[:-1]
    assert tokenizer.encode(tokenizer.decode(answer)) == answer
    assert tokenizer.encode(tokenizer.decode(prompt)) == prompt
