"""How a request arrives at this instance: as its tags say, with the answer that it has from elsewhere, if any.

Its answer so far is replayed: what the host derives from generated tokens is as if they had been generated here.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from pla_sglang.common.errors import ConfigError, RefusedRequestError
from pla_sglang.fleet.stateless.requests.tags import read_answer
from pla_sglang.fleet.stateless.transfer.legs import GOES_ON_ATTRIBUTE, LAST_TOKEN_ATTRIBUTE, LegKind


class Begun(enum.Enum):
    """What becomes of a request."""

    NEW = "new"  # nothing of it was computed elsewhere
    REDONE = "redone"  # prompt and answer so far are prefilled here
    COMPLETE = "complete"  # the answer that it brings has an end already
    PULLED = "pulled"  # the KV of prompt and answer so far is received


def begin(req: Any, kind: LegKind, think_end_ids: Sequence[int] | None) -> Begun:
    """Give ``req``, which has not run, what its tags say. What it streams first is its answer from the first token on.

    Raises:
        RefusedRequestError: with 400 for tags that are not valid, 409 for what cannot go on here.
    """
    answer = _read_valid_answer(req, kind)
    if answer is None:
        return Begun.NEW
    if req.to_finish is not None:  # found wrong or aborted already
        if kind is LegKind.WHOLE:
            return Begun.NEW  # the host ends it with its prefill
        raise RefusedRequestError(HTTPStatus.BAD_REQUEST, getattr(req.to_finish, "message", "Aborted"))
    try:
        if (reason := reason_against_moving(req)) is not None:
            raise ConfigError(f"it cannot go on here: {reason}")
        replay_answer(req, answer, think_end_ids)
    except ConfigError as error:
        raise RefusedRequestError(HTTPStatus.CONFLICT, str(error)) from None
    if kind is LegKind.WHOLE:
        req.update_finish_state()
        return Begun.COMPLETE if req.finished() else Begun.REDONE
    setattr(req, GOES_ON_ATTRIBUTE, True)
    setattr(req, LAST_TOKEN_ATTRIBUTE, answer[-1])
    req.output_ids = array("q", answer[:-1])  # the last token comes with the KV, as a first token does
    req.pd_rebootstrap_in_progress = True  # the host's word for: KV of prompt and these tokens is received
    return Begun.PULLED


def _read_valid_answer(req: Any, kind: LegKind) -> tuple[int, ...] | None:
    try:
        answer = read_answer(req.sampling_params.custom_params, req.vocab_size)
        if kind is LegKind.PREFILL and answer is not None:
            raise ConfigError("a prefill part has no pla_tokens: it ends when its KV was sent")
    except ConfigError as error:
        raise RefusedRequestError(HTTPStatus.BAD_REQUEST, str(error)) from None
    return answer


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
