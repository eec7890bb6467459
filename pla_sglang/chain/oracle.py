"""What the chain model answers, without an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from pla_sglang.chain.algebra import A_INVERSE, MASK, SEED, A, powers, step, token_hashes, word_of
from pla_sglang.chain.vocab import ASK_HIGH, ASK_LOW, EOS, VOCAB_SIZE, WORD_BASE

BLOCK = 1 << 15  # tokens folded at once; bounds the tables of powers


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """The output token ids, EOS included, and why they end: "stop" or "length"."""

    tokens: tuple[int, ...]
    finish: str


def expected(prompt_ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = False) -> Expected:
    """The greedy output for ``prompt_ids``.

    Raises:
        ValueError: the prompt is empty or holds an id outside the vocabulary.
    """
    ids = np.asarray(prompt_ids, dtype=np.int64)
    if len(ids) == 0 or ids.min() < 0 or ids.max() >= VOCAB_SIZE:
        raise ValueError(f"a prompt needs ids from 0 to {VOCAB_SIZE - 1}, and at least one")
    state = state_after(ids)
    end = asked_end(ids)
    tokens: list[int] = []
    position = len(ids) - 1
    while len(tokens) < max_new_tokens:
        token = EOS if position == end else word_of(state)
        tokens.append(token)
        if token == EOS and not ignore_eos:
            return Expected(tuple(tokens), "stop")
        state = step(state, token)
        position += 1
    return Expected(tuple(tokens), "length")


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


def asked_end(ids: np.ndarray) -> int:
    """Position whose next token is EOS, by the last wish in ``ids``; -1 without one."""
    high, low = ids[:-1], ids[1:]
    pairs = (high >= ASK_HIGH) & (high < ASK_LOW) & (low >= ASK_LOW) & (low < WORD_BASE)
    asked = (high - ASK_HIGH) * 256 + (low - ASK_LOW)
    found = np.flatnonzero(pairs & (asked > 0))
    if len(found) == 0:
        return -1
    last = int(found[-1])
    return last + 1 + int(asked[last]) - 1
