"""The chain model's answers, computed without an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from pla_sglang.sim.chain.algebra import A_INVERSE, MASK, SEED, A, powers, step, token_hashes, word_of
from pla_sglang.sim.chain.vocab import ASK_HIGH, ASK_LOW, EOS, VOCAB_SIZE, WORD_BASE

BLOCK = 1 << 15  # tokens folded at once; bounds the tables of powers


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """The output token ids, EOS included, and the finish reason: "stop" or "length"."""

    tokens: tuple[int, ...]
    finish: str


def expected(
    prompt_ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = False, repeats: bool = False
) -> Expected:
    """The greedy output for ``prompt_ids``; ``repeats``: of a model that repeats a text (``repeat.py``).

    Raises:
        ValueError: the prompt is empty or holds an id outside the vocabulary, or the text to be repeated holds a wish.
    """
    ids = check_prompt(prompt_ids)
    state = state_after(ids)
    end = asked_end(ids)
    text = text_before_wish(ids) if repeats else ()
    tokens: list[int] = []
    position = len(ids) - 1
    while len(tokens) < max_new_tokens:
        if position == end:
            token = EOS
        else:
            token = text[len(text) - (end - position)] if 0 < end - position <= len(text) else word_of(state)
        tokens.append(token)
        if token == EOS and not ignore_eos:
            return Expected(tuple(tokens), "stop")
        state = step(state, token)
        position += 1
    return Expected(tuple(tokens), "length")


def check_prompt(prompt_ids: Sequence[int]) -> np.ndarray:
    """[n] int64. Raises ValueError: it is empty, or holds an id outside the vocabulary."""
    ids = np.asarray(prompt_ids, dtype=np.int64)
    if len(ids) == 0 or ids.min() < 0 or ids.max() >= VOCAB_SIZE:
        raise ValueError(f"a prompt needs ids from 0 to {VOCAB_SIZE - 1}, and at least one")
    return ids


def state_after(ids: np.ndarray, state: int = SEED) -> int:
    """The state after all of ``ids`` ([n] integers), starting from ``state``."""
    hashes = token_hashes()
    for start in range(0, len(ids), BLOCK):
        block = hashes[ids[start : start + BLOCK]]
        count = len(block)
        shifted = powers(A_INVERSE, count + 1)[1:] * block
        total = (state + int(np.sum(shifted, dtype=np.uint64))) & MASK
        state = (pow(A, count, 1 << 64) * total) & MASK
    return state


def text_before_wish(ids: np.ndarray) -> tuple[int, ...]:
    """The tokens that a model repeats: those before the last wish, one fewer than it asks for, or all that there are.

    Raises ValueError for a text with a wish in it: repeated, it would count.
    """
    place, asked = last_wish(ids)
    if place < 0:
        return ()
    text = ids[max(0, place + 1 - asked) : place]
    if last_wish(text)[0] >= 0:
        raise ValueError("the text to be repeated holds a wish for a length")
    return tuple(int(token) for token in text)


def asked_end(ids: np.ndarray) -> int:
    """Position whose next token is EOS, by the last requested length in ``ids``; -1 without one."""
    place, asked = last_wish(ids)
    return -1 if place < 0 else place + asked


def last_wish(ids: np.ndarray) -> tuple[int, int]:
    """Place of the first half of the last wish for a length, and the length; -1 and 0 without one."""
    high, low = ids[:-1], ids[1:]
    pairs = (high >= ASK_HIGH) & (high < ASK_LOW) & (low >= ASK_LOW) & (low < WORD_BASE)
    asked = (high - ASK_HIGH) * 256 + (low - ASK_LOW)
    found = np.flatnonzero(pairs & (asked > 0))
    return (-1, 0) if len(found) == 0 else (int(found[-1]), int(asked[found[-1]]))
