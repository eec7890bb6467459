"""What the router asks of a request that may move: ``pla_*`` members of its ``custom_params``. Pure.

Names: docs/protocol.md.

The process that serves HTTP reads all of them, a scheduler the answer so far alone. Only a router may set them: whoever
else does is refused before they are looked at (``http_frontend``).
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.stateless.requests.delivered import Shown, read_seen

MOVABLE = "pla_movable"
TOKENS = "pla_tokens"
SEEN = "pla_seen"
ANSWER_ID = "pla_answer_id"
PROMPT = "pla_prompt"


@dataclasses.dataclass(frozen=True, slots=True)
class RequestTags:
    """The tags of one request.

    Attributes:
        movable: its stream carries its token ids.
        answer: token ids of its answer so far, from other instances; None: it begins here.
        seen: what the client was shown of that answer.
        answer_id: what its events give as their id; None: the id that it has here.
        prompt: what its prompt was at the first instance (``prompt_mark``); None: not told.
    """

    movable: bool = False
    answer: tuple[int, ...] | None = None
    seen: Shown = dataclasses.field(default_factory=Shown)
    answer_id: str | None = None
    prompt: str | None = None


def find_custom_params(obj: Any) -> Mapping[str, Any] | None:
    """The ``custom_params`` of the host's request; None where it has none, or is a batch with lists of them."""
    params = obj.sampling_params
    custom = params.get("custom_params") if isinstance(params, dict) else None
    return custom if isinstance(custom, Mapping) else None


def read_tags(custom_params: Mapping[str, Any]) -> RequestTags:
    """Raises ConfigError."""
    movable, answer = custom_params.get(MOVABLE), custom_params.get(TOKENS)
    if movable not in (None, 0, 1):
        raise ConfigError(f"custom_params.{MOVABLE} {movable!r} is not valid; allowed: 1")
    if answer is not None and not _is_list_of_ids(answer):
        raise ConfigError(f"custom_params.{TOKENS} is not valid; allowed: a list of token ids")
    return RequestTags(
        movable=bool(movable) or answer is not None,
        answer=None if answer is None else tuple(answer),
        seen=read_seen(_read_text(custom_params, SEEN) or "", f"custom_params.{SEEN}"),
        answer_id=_read_text(custom_params, ANSWER_ID),
        prompt=_read_text(custom_params, PROMPT),
    )


def _is_list_of_ids(answer: Any) -> bool:
    return isinstance(answer, list) and all(type(token) is int and token >= 0 for token in answer)


def _read_text(custom_params: Mapping[str, Any], tag: str) -> str | None:
    text = custom_params.get(tag)
    if text is not None and not isinstance(text, str):
        raise ConfigError(f"custom_params.{tag} {text!r} is not valid; allowed: a string")
    return text


def prompt_mark(prompt_ids: Iterable[int]) -> str:
    """``LENGTH:HASH`` of a prompt's token ids, the same in every process."""
    ids = prompt_ids if isinstance(prompt_ids, array) and prompt_ids.typecode == "q" else array("q", prompt_ids)
    return f"{len(ids)}:{hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()}"


def read_answer(custom_params: Any, vocabulary: int) -> tuple[int, ...] | None:
    """The answer so far that a request brings to a scheduler; None: it begins here.

    Raises:
        ConfigError: it is not valid. A token id outside of the vocabulary would end the scheduler with an IndexError.
    """
    tokens = custom_params.get(TOKENS) if isinstance(custom_params, Mapping) else None
    if tokens is None:
        return None
    if not _is_list_of_ids(tokens) or max(tokens, default=0) >= vocabulary:
        raise ConfigError(f"custom_params.{TOKENS} is not valid; allowed: a list of token ids, 0 to {vocabulary - 1}")
    return tuple(tokens) or None
