"""A custom logit processor sees as much of an answer as it would if its request were alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.request_fields import RequestFields

from pla_sglang.plugin.engine.hooks import running
from pla_sglang.plugin.engine.logit_processors import find_early_tokens, hidden

PROMPT = [5, 6, 7]


def request(known: int, step: int, **fields: Any) -> Any:
    """Of which ``known`` tokens are there when its ``step``-th token after the first one is sampled."""
    committed = len(PROMPT) + step  # the host commits before the pass
    own = {"origin_input_ids": PROMPT, "output_ids": list(range(known)), "kv_committed_len": committed}
    return RequestFields(**own, **({"custom_logit_processor": "one", "grammar": None} | fields))


def info(*reqs: Any) -> Any:
    return SimpleNamespace(custom_params=[None if req is None else {"__req__": req} for req in reqs])


@pytest.mark.parametrize("step", [0, 1, 2, 9])
def test_a_token_that_is_early_known_is_hidden_for_the_call(step: int) -> None:
    alone, beside = request(max(0, step - 1), step), request(step, step)
    early = find_early_tokens(info(None, alone, beside), overlap=True)
    with hidden(early):
        assert alone.output_ids == beside.output_ids
    assert len(beside.output_ids) == step


def test_without_overlap_and_with_a_grammar_every_token_is_known() -> None:
    assert find_early_tokens(info(request(4, 4)), overlap=False) == []
    assert find_early_tokens(info(request(4, 4, grammar=object())), overlap=True) == []
    assert find_early_tokens(info(request(4, 4, custom_logit_processor=None)), overlap=True) == []


def test_the_whole_answer_is_back_when_the_processor_raises() -> None:
    req = request(4, 4)
    with pytest.raises(RuntimeError, match="its own"), hidden([(req, 3)]):
        raise RuntimeError("its own")
    assert req.output_ids == [0, 1, 2, 3]


def test_what_cannot_be_hidden_is_left_to_the_host() -> None:
    calls, before = list[Any](), running.faults.count
    running.around_apply_custom_logit_processor(lambda *args: calls.append(args), "logits", "no information")
    assert (calls, running.faults.count) == ([("logits", "no information")], before + 1)
