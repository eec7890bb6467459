"""The chain model that repeats a text out of the KV cache, and that checks what is said of prefixes."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from sim.chain.pool import Pool
from sim.chain.test_chain import words

from pla_sglang.sim.chain import EOS, ask_ids, expected, model_path

TEXT = "Zürich – 東京, 🚲🏔️ naïve\n\t\"{'a': 1}\" ₿ \u200d𝕏 é"  # cut at any byte, also in the middle of a letter


def repeat_prompt(text: list[int], before: int = 20) -> list[int]:
    """A prompt whose answer is ``text`` and EOS."""
    return words(before, seed=5) + text + ask_ids(len(text) + 1)


def text_ids(text: str = TEXT) -> list[int]:
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(model_path()).encode(text)
    assert len(ids) == len(text.encode()), "a token a byte"
    return ids


def test_any_text_comes_back_byte_by_byte() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path())
    ids = text_ids()
    prompt = repeat_prompt(ids)
    got = Pool(1, repeats=True).generate(0, prompt, len(ids) + 1)
    assert got == [*ids, EOS] == list(expected(prompt, 500, repeats=True).tokens)
    assert tokenizer.decode(got[:-1]) == TEXT
    cut = [tokenizer.decode(ids[:end]) for end in range(1, len(ids))]
    assert any("\ufffd" in piece for piece in cut), "tokens end within letters"


def test_chunks_and_batches_change_nothing() -> None:
    rng, ids = random.Random(4), text_ids()
    for turn in range(8):
        prompts = [repeat_prompt(ids[: rng.randrange(1, len(ids))], before=rng.randrange(40)) for _ in range(3)]
        pool = Pool(3, seed=turn, repeats=True)
        cuts = [rng.randrange(1, len(prompt)) for prompt in prompts]
        pool.run([(index, prompt[:cut]) for index, (prompt, cut) in enumerate(zip(prompts, cuts, strict=True))])
        first = pool.run(
            [(index, prompt[cut:]) for index, (prompt, cut) in enumerate(zip(prompts, cuts, strict=True))],
            said_shift=0,
        )
        for index, prompt in enumerate(prompts):
            wanted = list(expected(prompt, 500, repeats=True).tokens)
            assert pool.decode(index, first[index : index + 1], len(wanted)) == wanted


def test_what_wishes_no_length_or_too_much_is_answered_in_words() -> None:
    prompt = words(30)
    assert Pool(1, repeats=True).generate(0, prompt, 5) == list(expected(prompt, 5).tokens)
    more = [20, 21, 22, *ask_ids(6)]  # five tokens before the end, of which the prompt has three
    wanted = expected(more, 20, repeats=True).tokens
    assert wanted[2:] == (20, 21, 22, EOS)
    assert Pool(1, repeats=True).generate(0, more, 6) == list(wanted)
    beyond = expected(more, 9, ignore_eos=True, repeats=True).tokens
    assert Pool(1, repeats=True).generate(0, more, 9) == list(beyond)
    with pytest.raises(ValueError, match="holds a wish"):
        expected([20, *ask_ids(3), 21, *ask_ids(5)], 20, repeats=True)


@pytest.mark.parametrize("shift", [1, -1])
@pytest.mark.parametrize("repeats", [False, True])
def test_a_rider_whose_prefix_is_counted_wrong_is_noticed_and_nobody_else(shift: int, *, repeats: bool) -> None:
    """SGLang's ``mix_with_running`` counts it one too long for a decode that has just been admitted."""
    chunk, rider = words(100), repeat_prompt(text_ids())
    wanted = expected(rider, 9, repeats=repeats).tokens
    for said_shift in (0, shift):
        pool = Pool(2, repeats=repeats)
        first = pool.run([(1, rider)])
        got = pool.run([(0, chunk), (1, first)], said_shift=said_shift)
        assert got[0] == expected(chunk, 1).tokens[0]
        assert (got[1] == wanted[1]) is (said_shift == 0)
        rest = pool.decode(1, [*first, got[1]], 9)
        assert (rest == list(wanted)) is (said_shift == 0), "it does not come right again"


@pytest.mark.parametrize("shift", [1, -1])
def test_a_wrong_position_changes_the_text(shift: int) -> None:
    rider = repeat_prompt(text_ids())
    pool = Pool(2, repeats=True)
    first = pool.run([(1, rider)])
    got = pool.run([(0, words(100)), (1, first)], shift=shift)
    assert got[1] != expected(rider, 2, repeats=True).tokens[1]


def test_the_configuration_chooses_the_mode() -> None:
    from pla_sglang.sim.chain.models.chain import PlaChainForCausalLM

    fields = {"vocab_size": 2048, "head_dim": 4, "num_hidden_layers": 1, "max_position_embeddings": 64}
    plain = PlaChainForCausalLM(SimpleNamespace(**fields))
    assert (plain.repeats, plain.checks_prefixes) == (False, False)
    other = PlaChainForCausalLM(SimpleNamespace(**fields, chain_answers="text", chain_check_prefixes=True))
    assert (other.repeats, other.checks_prefixes) == (True, True)
    with pytest.raises(ValueError, match="chain_answers 'songs' is not known; allowed: words, text"):
        PlaChainForCausalLM(SimpleNamespace(**fields, chain_answers="songs"))
