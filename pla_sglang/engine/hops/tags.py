"""What the router asks of a request that moves: ``pla_*`` members of its ``custom_params``. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pla_sglang.errors import ConfigError

LEAST_HOLD_S, MOST_HOLD_S, DEFAULT_HOLD_S = 0.1, 300.0, 10.0
MOST_ROOM = 2**63 - 1


@dataclasses.dataclass(frozen=True, slots=True)
class HopTags:
    """Of one request.

    Attributes:
        answer: its answer so far, from other instances; None: it begins here.
        hold_room: hold it under this room when its prefill ends; None: do not.
        hold_s: for how long at most.
    """

    answer: tuple[int, ...] | None = None
    hold_room: int | None = None
    hold_s: float = DEFAULT_HOLD_S


NO_TAGS = HopTags()


def read_tags(custom_params: Any, vocabulary: int) -> HopTags:
    """Raises ConfigError. A token id outside of the vocabulary would end the scheduler with an IndexError."""
    if not isinstance(custom_params, Mapping):
        return NO_TAGS
    answer = _read_answer(custom_params.get("pla_tokens"), vocabulary)
    room = custom_params.get("pla_hold")
    return HopTags(
        answer,
        None if room is None else check_room(room, "custom_params.pla_hold"),
        check_hold_s(custom_params.get("pla_hold_s", DEFAULT_HOLD_S), "custom_params.pla_hold_s"),
    )


def check_room(room: Any, where: str) -> int:
    """Raises ConfigError."""
    if isinstance(room, bool) or not isinstance(room, int) or not 0 <= room <= MOST_ROOM:
        raise ConfigError(f"{where} {room!r} is not valid; allowed: a whole number from 0 to {MOST_ROOM}")
    return room


def check_hold_s(hold_s: Any, where: str) -> float:
    """Raises ConfigError."""
    number = float("nan") if isinstance(hold_s, bool) or not isinstance(hold_s, (int, float)) else float(hold_s)
    if not LEAST_HOLD_S <= number <= MOST_HOLD_S:
        raise ConfigError(f"{where} {hold_s!r} is not valid; allowed: {LEAST_HOLD_S} to {MOST_HOLD_S:.0f} seconds")
    return number


def _read_answer(tokens: Any, vocabulary: int) -> tuple[int, ...] | None:
    if tokens is None:
        return None
    whole = isinstance(tokens, list) and all(type(token) is int for token in tokens)
    if not whole or (tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary):
        raise ConfigError(f"custom_params.pla_tokens is not valid; allowed: a list of token ids, 0 to {vocabulary - 1}")
    return tuple(tokens) or None
