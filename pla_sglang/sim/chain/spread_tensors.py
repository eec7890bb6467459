"""``spread.spread_logits`` on tensors, for the model."""

from __future__ import annotations

import functools

import torch

from pla_sglang.sim.chain.batch import mix_states, shift_right
from pla_sglang.sim.chain.spread import CANDIDATES, EOS_LOGIT, GRID, LEAST_LOGIT, STEPS, TIES, salts
from pla_sglang.sim.chain.vocab import EOS, VOCAB_SIZE, WORD_BASE


@functools.cache
def _salts() -> torch.Tensor:
    return torch.from_numpy(salts().view("int64").copy())


def spread_logits(states: torch.Tensor, is_end: torch.Tensor) -> torch.Tensor:
    """``states``: [requests] int64, ``is_end``: [requests] bool. [requests, vocabulary] float32."""
    drawn = shift_right(mix_states(_salts() ^ mix_states(states)[:, None]), 40) % STEPS
    logits = torch.zeros(len(states), VOCAB_SIZE)
    ties = torch.arange(CANDIDATES, dtype=torch.float32) / TIES
    logits[:, WORD_BASE : WORD_BASE + CANDIDATES] = LEAST_LOGIT + drawn.float() / GRID + ties
    logits[is_end, EOS] = EOS_LOGIT
    return logits
