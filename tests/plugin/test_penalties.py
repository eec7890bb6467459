"""Penalties are those of an undisturbed request, wherever its answer began, by SGLang's own penalizers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.request_fields import RequestFields

from pla_sglang.plugin.engine.penalties import count_again, count_due_tokens, find_due_token, order_penalizers

VOCABULARY, PROMPT, ANSWER = 8, [1, 6], (3, 3, 5, 3, 2)
LEAST_TOKENS, END = 4, 7


class Batch:
    """One request in a batch of its own, with SGLang's penalizers."""

    def __init__(self, *, overlap: bool) -> None:
        from sglang.srt.sampling import penaltylib

        params = SimpleNamespace(
            frequency_penalty=0.5,
            presence_penalty=0.25,
            repetition_penalty=1.0,
            min_new_tokens=LEAST_TOKENS,
            stop_token_ids={END},
        )
        tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=None)
        self.req: Any = RequestFields(
            sampling_params=params, origin_input_ids=PROMPT, output_ids=[], tokenizer=tokenizer, eos_token_ids=None
        )
        self.reqs, self.device, self.enable_overlap = [self.req], "cpu", overlap
        kinds = {
            penaltylib.BatchedFrequencyPenalizer,
            penaltylib.BatchedPresencePenalizer,
            penaltylib.BatchedMinNewTokensPenalizer,
        }
        self.orchestrator = penaltylib.BatchedPenalizerOrchestrator(vocab_size=VOCABULARY, batch=self, penalizers=kinds)
        self.sampling_info = SimpleNamespace(penalizer_orchestrator=self.orchestrator)

    def cumulate(self) -> None:
        """As the host does: the token that it knows to be the last."""
        last = (self.req.output_ids or self.req.origin_input_ids)[-1]
        self.orchestrator.cumulate_output_tokens(torch.tensor([last]))

    def logits(self) -> list[float]:
        logits = torch.zeros(1, VOCABULARY)
        self.orchestrator.apply(logits)
        return [round(value, 4) for value in logits[0].tolist()]

    def prefill(self) -> list[float]:
        """What the token after prompt and answer so far is decided from."""
        self.req.kv_committed_len = len(PROMPT) + len(self.req.output_ids)
        return self.logits()

    def decode(self, *, corrected: bool = True) -> list[float]:
        """The same for a step; the token itself is the caller's to add, before or after the next step's count."""
        if corrected:
            count_due_tokens(Batch.cumulate, self)
        else:
            self.cumulate()
        self.req.kv_committed_len += 1
        return self.logits()


def undisturbed(*, overlap: bool) -> list[list[float]]:
    """Of stock, on its own: penalties of each step. With overlap the token of a step is known after the next count."""
    batch, steps = Batch(overlap=overlap), []
    steps.append(batch.prefill())
    for token in ANSWER:
        if overlap:
            steps.append(batch.decode(corrected=False))
            batch.req.output_ids.append(token)
        else:
            batch.req.output_ids.append(token)
            steps.append(batch.decode(corrected=False))
    return steps


def go_on(batch: Batch, steps: list[list[float]]) -> list[list[float]]:
    """Decode to the end of ANSWER, with every token known before the next count: a prefill of others runs between."""
    while len(batch.req.output_ids) < len(ANSWER):
        batch.req.output_ids.append(ANSWER[len(batch.req.output_ids)])
        steps.append(batch.decode())
    return steps


@pytest.mark.parametrize("overlap", [True, False])
def test_what_is_due_does_not_depend_on_what_is_known(overlap: bool) -> None:
    batch = Batch(overlap=overlap)
    assert go_on(batch, [batch.prefill()]) == undisturbed(overlap=overlap)
    if overlap:
        stock = Batch(overlap=True)
        steps = [stock.prefill()]
        for token in ANSWER:
            stock.req.output_ids.append(token)
            steps.append(stock.decode(corrected=False))
        assert steps != undisturbed(overlap=True), "the host counts at once what it knows: else this test sees nothing"


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("begun", range(1, len(ANSWER) + 1))
def test_an_answer_that_is_computed_again_goes_on_as_if_it_had_never_stopped(overlap: bool, begun: int) -> None:
    batch = Batch(overlap=overlap)
    batch.req.output_ids = list(ANSWER[:begun])
    count_again(batch, steps_under_way=1)
    assert go_on(batch, [batch.prefill()]) == undisturbed(overlap=overlap)[begun:]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("begun", range(1, len(ANSWER)))
def test_a_request_that_joins_with_its_kv_goes_on_as_if_it_had_never_stopped(overlap: bool, begun: int) -> None:
    """``begun`` 1: a decode part, whose first token came with its KV."""
    batch = Batch(overlap=overlap)
    batch.req.output_ids = list(ANSWER[:begun])
    batch.req.kv_committed_len = len(PROMPT) + begun - 1
    count_again(batch, steps_under_way=0)
    assert go_on(batch, [batch.decode()]) == undisturbed(overlap=overlap)[begun:]


def test_the_host_counts_where_it_counts_the_same() -> None:
    batch, calls = Batch(overlap=True), []
    batch.prefill()
    count_due_tokens(calls.append, batch)
    assert calls == [batch]


def test_a_step_under_way_is_never_read_beyond_the_answer() -> None:
    req: Any = RequestFields(origin_input_ids=PROMPT, output_ids=[3], kv_committed_len=9)
    assert find_due_token(req, overlap=True) == 3


def test_without_penalties_nothing_is_touched() -> None:
    info = SimpleNamespace(penalizer_orchestrator=SimpleNamespace(is_required=False, penalizers={}))
    count_again(SimpleNamespace(sampling_info=info), steps_under_way=1)


@pytest.mark.parametrize("turned", [False, True])
def test_penalties_apply_in_one_order(turned: bool) -> None:
    """By SGLang's own penalizers, in whatever order its set of classes has in this process."""
    from sglang.srt.sampling import penaltylib

    batch = Batch(overlap=False)
    kinds = [penaltylib.BatchedRepetitionPenalizer, penaltylib.BatchedPresencePenalizer]
    batch.req.sampling_params.repetition_penalty = 2.0
    made = penaltylib.BatchedPenalizerOrchestrator(
        vocab_size=VOCABULARY, batch=batch, penalizers=kinds[::-1] if turned else kinds
    )
    order_penalizers(made)
    made.cumulate_output_tokens(torch.tensor([3]))
    logits = torch.full((1, VOCABULARY), 4.0)
    made.apply(logits)
    assert logits[0, 3] == (4.0 - 0.25) / 2
