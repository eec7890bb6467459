"""Gives a request that has not run here the answer that it already has, with all that the host derives from it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from pla_sglang.errors import ConfigError


def reason_against_moving(req: Any) -> str | None:
    """Why ``req`` cannot go on at another instance exactly where it stopped; None: it can."""
    rules = (
        (req.return_logprob, "it returns log probabilities, and those of its earlier tokens do not travel"),
        (req.session is not None or req.session_id is not None, "it belongs to a session"),
        (req.multimodal_inputs is not None, "its prompt is multimodal"),
        (req.input_embeds is not None or req.positional_embed_overrides is not None, "its prompt has embeddings"),
        (req.custom_logit_processor is not None, "a custom logit processor may have a state of its own"),
        (
            bool(req.return_hidden_states) or req.return_routed_experts or req.return_indexer_topk,
            "it returns states of its earlier tokens, which do not travel",
        ),
        (req.return_sampling_mask, "it returns sampling masks, and those of its earlier tokens do not travel"),
    )
    return next((reason for broken, reason in rules if broken), None)


def replay_answer(req: Any, answer: Sequence[int], think_end_ids: Sequence[int] | None) -> None:
    """Let ``req`` have generated ``answer``: its grammar, its count of reasoning tokens, and what counts its length.

    It must not have run yet, and its grammar must be compiled.

    Raises:
        ConfigError: the answer does not fit the request, which must not run then.
    """
    most_tokens = req.sampling_params.max_new_tokens
    if len(answer) > most_tokens:
        raise ConfigError(f"the answer so far has {len(answer)} tokens; at most {most_tokens} are allowed here")
    if req.grammar is not None:
        for place, token in enumerate(answer):
            try:
                req.grammar.accept_token(token)
            except ValueError as error:
                raise ConfigError(f"token {place} of the answer so far is not in the grammar: {error}") from None
    if req.require_reasoning and think_end_ids:
        req.update_reasoning_tokens(list(answer), think_end_ids)
    req.output_ids = array("q", answer)
