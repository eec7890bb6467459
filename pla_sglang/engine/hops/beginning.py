"""How a request begins at this instance: as its tags say, with the answer that it has from elsewhere, if any."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from pla_sglang.engine.hops.leaving import PREFILL_HOLD_ATTRIBUTE
from pla_sglang.engine.hops.replay import reason_against_moving, replay_answer
from pla_sglang.engine.hops.tags import NO_TAGS, HopTags, read_tags
from pla_sglang.engine.stateless.legs import GOES_ON_ATTRIBUTE, LegKind
from pla_sglang.errors import ConfigError, RefusedRequestError

LAST_TOKEN_ATTRIBUTE = "pla_last_token"  # of a pulled request: the token that comes with its KV


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
    tags = _read_valid_tags(req, kind)
    if tags.hold_room is not None:
        setattr(req, PREFILL_HOLD_ATTRIBUTE, (tags.hold_room, tags.hold_s))
    if tags.answer is None:
        return Begun.NEW
    if req.to_finish is not None:  # found wrong or aborted already
        if kind is LegKind.WHOLE:
            return Begun.NEW  # the host ends it with its prefill
        raise RefusedRequestError(HTTPStatus.BAD_REQUEST, getattr(req.to_finish, "message", "Aborted"))
    try:
        if (reason := reason_against_moving(req)) is not None:
            raise ConfigError(f"it cannot go on here: {reason}")
        replay_answer(req, tags.answer, think_end_ids)
    except ConfigError as error:
        raise RefusedRequestError(HTTPStatus.CONFLICT, str(error)) from None
    if kind is LegKind.WHOLE:
        req.update_finish_state()
        return Begun.COMPLETE if req.finished() else Begun.REDONE
    setattr(req, GOES_ON_ATTRIBUTE, True)
    setattr(req, LAST_TOKEN_ATTRIBUTE, tags.answer[-1])
    req.output_ids = array("q", tags.answer[:-1])  # the last token comes with the KV, as a first token does
    req.pd_rebootstrap_in_progress = True  # the host's word for: KV of prompt and these tokens is received
    return Begun.PULLED


def _read_valid_tags(req: Any, kind: LegKind) -> HopTags:
    try:
        tags = read_tags(req.sampling_params.custom_params, req.vocab_size)
        if kind is LegKind.PREFILL and tags != NO_TAGS:
            raise ConfigError("a prefill leg has no pla_tokens and no pla_hold: it ends when its KV was sent")
        if kind is LegKind.DECODE and tags.hold_room is not None:
            raise ConfigError("a request whose KV is received has no pla_hold")
    except ConfigError as error:
        raise RefusedRequestError(HTTPStatus.BAD_REQUEST, str(error)) from None
    return tags


def came_with_its_kv(req: Any) -> bool:
    """Whether the token that came with the KV of ``req`` is the one that its answer so far ends with."""
    wanted = getattr(req, LAST_TOKEN_ATTRIBUTE, None)
    return wanted is None or req.output_ids[-1] == wanted
