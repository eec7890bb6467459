"""The chain model's third way to answer: with logits that lie close together, so that what changes them shows.

In the other ways one token has all the weight, and neither a penalty nor a temperature changes an answer. Here
``CANDIDATES`` words have logits that the state draws from a fine grid, different from each other and exact in float32.
So each token depends on all penalties so far, log probabilities differ from step to step, and sampling is sampling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from pla_sglang.sim.chain.algebra import MASK, A, mix, mix_array, step
from pla_sglang.sim.chain.oracle import Expected, asked_end, check_prompt, state_after
from pla_sglang.sim.chain.vocab import EOS, VOCAB_SIZE, WORD_BASE

CANDIDATES = 16  # words that an answer is made of; few, so that they come back and penalties bite
LEAST_LOGIT = 8.0
GRID = 16  # steps a unit
STEPS = 64  # of the grid: logits spread over four units
EOS_LOGIT = 1000.0  # where the wished length is over; no penalty reaches it
TIES = 1024  # candidate i stands i/1024 above the grid, so no two are equal


@dataclasses.dataclass(frozen=True, slots=True)
class Penalties:
    """As SGLang names them.

    Attributes:
        overlap: of a server with the overlap schedule. Before each decode step SGLang 0.5.17 counts there the last
            token that it knows, which is the last but one; before the first step it is the prompt's last one.
    """

    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0
    overlap: bool = True


def salts() -> np.ndarray:
    """One for each candidate: [candidates] uint64."""
    return mix_array(np.arange(1, CANDIDATES + 1, dtype=np.uint64) * np.uint64(A))


def spread_logits(state: int, *, is_end: bool = False) -> np.ndarray:
    """The logits of the token after ``state``: [vocabulary] float32. ``is_end``: the wished length is over with it."""
    logits = np.zeros(VOCAB_SIZE, dtype=np.float32)
    drawn = mix_array(salts() ^ np.uint64(mix(state & MASK))) >> np.uint64(40)
    places = (drawn % np.uint64(STEPS)).astype(np.float32) / GRID
    logits[WORD_BASE : WORD_BASE + CANDIDATES] = LEAST_LOGIT + places + np.arange(CANDIDATES, dtype=np.float32) / TIES
    if is_end:
        logits[EOS] = EOS_LOGIT
    return logits


def expected_spread(prompt_ids: Sequence[int], max_new_tokens: int, penalties: Penalties | None = None) -> Expected:
    """The greedy answer of a model with such logits. Raises ValueError as ``expected`` does."""
    ids, penalties = check_prompt(prompt_ids), penalties or Penalties()
    state, end, position = state_after(ids), asked_end(ids), len(ids) - 1
    counted = _Counts(penalties)
    tokens: list[int] = []
    late = [int(ids[-1])] if penalties.overlap else []  # counted a step later than it is known
    while len(tokens) < max_new_tokens:
        if tokens:
            late.append(tokens[-1])
            counted.add_token(late.pop(0))
        token = int(np.argmax(counted.penalize(spread_logits(state, is_end=position == end))))
        tokens.append(token)
        if token == EOS:
            return Expected(tuple(tokens), "stop")
        state = step(state, token)
        position += 1
    return Expected(tuple(tokens), "length")


class _Counts:
    """What SGLang's penalizers have cumulated: [vocabulary] float32 each."""

    def __init__(self, penalties: Penalties) -> None:
        self._penalties = penalties
        self._frequency = np.zeros(VOCAB_SIZE, dtype=np.float32)
        self._presence = np.zeros(VOCAB_SIZE, dtype=np.float32)
        self._repetition = np.ones(VOCAB_SIZE, dtype=np.float32)

    def add_token(self, token: int) -> None:
        self._frequency[token] += np.float32(self._penalties.frequency)
        self._presence[token] = self._penalties.presence
        self._repetition[token] = self._penalties.repetition

    def penalize(self, logits: np.ndarray) -> np.ndarray:
        """In the order of SGLang's: what is subtracted first, then what is divided by."""
        lower = logits - (self._frequency + self._presence)
        return np.where(lower < 0, lower * self._repetition, lower / self._repetition)
