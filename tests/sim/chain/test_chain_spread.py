"""The chain model with logits that lie close together: model and oracle agree, and SGLang's penalties show."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sim.chain.test_chain import words

from pla_sglang.sim.chain import EOS, Penalties, ask_ids, expected_spread
from pla_sglang.sim.chain.algebra import step
from pla_sglang.sim.chain.oracle import state_after
from pla_sglang.sim.chain.spread import CANDIDATES, EOS_LOGIT, spread_logits
from pla_sglang.sim.chain.spread_tensors import spread_logits as spread_tensors
from pla_sglang.sim.chain.vocab import WORD_BASE

PENALTIES = [
    Penalties(frequency=0.7),
    Penalties(presence=1.1),
    Penalties(repetition=1.3),
    Penalties(frequency=0.3, presence=0.4, repetition=1.1),
]


def test_the_model_and_the_oracle_have_the_same_logits() -> None:
    rng = random.Random(3)
    states = [rng.getrandbits(64) for _ in range(50)]
    signed = torch.tensor([state - (1 << 64) if state >> 63 else state for state in states])
    ends = torch.tensor([index % 7 == 0 for index in range(50)])
    got = spread_tensors(signed, ends).numpy()
    for index, state in enumerate(states):
        assert np.array_equal(got[index], spread_logits(state, is_end=bool(ends[index])))


def test_candidates_are_apart_and_close() -> None:
    logits = spread_logits(12345)[WORD_BASE : WORD_BASE + CANDIDATES]
    assert len(set(logits.tolist())) == CANDIDATES
    assert logits.max() - logits.min() < 5
    assert set(spread_logits(12345).nonzero()[0]) == set(range(WORD_BASE, WORD_BASE + CANDIDATES))
    assert spread_logits(12345, is_end=True).argmax() == EOS
    assert spread_logits(12345, is_end=True)[EOS] == EOS_LOGIT


def test_an_answer_ends_where_it_is_asked_to() -> None:
    prompt = [*words(20), *ask_ids(30)]
    answer = expected_spread(prompt, 100, Penalties(frequency=2.0))
    assert (len(answer.tokens), answer.tokens[-1], answer.finish) == (30, EOS, "stop")
    assert expected_spread(prompt, 10).finish == "length"


class Batch:
    """What SGLang's penalizers ask of one."""

    reqs: list[SimpleNamespace]
    device = "cpu"


def penalized_by_sglang(prompt: Sequence[int], count: int, penalties: Penalties, *, late: bool) -> list[int]:
    """The answer with SGLang's own penalizers; ``late``: cumulated as under the overlap schedule."""
    from sglang.srt.sampling.penaltylib import (
        BatchedFrequencyPenalizer,
        BatchedPenalizerOrchestrator,
        BatchedPresencePenalizer,
        BatchedRepetitionPenalizer,
    )

    params = SimpleNamespace(
        frequency_penalty=penalties.frequency,
        presence_penalty=penalties.presence,
        repetition_penalty=penalties.repetition,
    )
    batch = Batch()
    batch.reqs = [SimpleNamespace(sampling_params=params)]
    kinds = {BatchedFrequencyPenalizer, BatchedPresencePenalizer, BatchedRepetitionPenalizer}
    orchestrator = BatchedPenalizerOrchestrator(2048, batch, kinds)
    tokens: list[int] = []
    state = state_after(np.asarray(prompt))
    while len(tokens) < count:
        if tokens:
            known = [prompt[-1], *tokens[:-1]] if late else tokens
            orchestrator.cumulate_output_tokens(torch.tensor([known[-1]]))
        logits = torch.from_numpy(spread_logits(state))[None]
        orchestrator.accumulate_additive_penalties(logits)
        scaling = orchestrator.accumulate_scaling_penalties()
        if scaling is not None:
            logits = torch.where(logits < 0, logits * scaling, logits / scaling)
        tokens.append(int(logits.argmax()))
        state = step(state, tokens[-1])
    return tokens


@pytest.mark.parametrize("penalties", PENALTIES)
def test_the_oracle_counts_as_sglang_does(penalties: Penalties) -> None:
    prompt = [*words(30), WORD_BASE + 3]  # its last token is counted under overlap
    plain = list(expected_spread(prompt, 60).tokens)
    answers = []
    for late in (True, False):
        changed = Penalties(penalties.frequency, penalties.presence, penalties.repetition, overlap=late)
        answers.append(list(expected_spread(prompt, 60, changed).tokens))
        assert answers[-1] == penalized_by_sglang(prompt, 60, penalties, late=late)
    assert plain not in answers
    assert answers[0] != answers[1], "a token earlier or later shows"
