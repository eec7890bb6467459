"""The states of a request's leg on a stateless instance, and the moves between them. Pure.

A *prefill part* computes the KV of a prompt and sends it away; a *decode part* receives the KV and generates. A request
that is served whole is no leg.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

from pla_sglang.common.errors import IllegalMoveError


class LegKind(enum.Enum):
    """What a request wants of the instance that it comes to."""

    WHOLE = "whole"
    PREFILL = "prefill"
    DECODE = "decode"


KIND_ATTRIBUTE = "pla_leg_kind"


def kind_of(req: Any) -> LegKind | None:
    """What a request of the host was found to want; None before, and on an instance that is not stateless."""
    return getattr(req, KIND_ATTRIBUTE, None)


SOURCE_ATTRIBUTE = "pla_source"  # of a decode part: the peer that was told at its address when it came
FAULT_ATTRIBUTE = "pla_fault"  # set on a decode part whose KV could not be taken over on this rank
LAST_TOKEN_ATTRIBUTE = "pla_last_token"  # of a pulled request: the token that comes with its KV
GOES_ON_ATTRIBUTE = "pla_goes_on"  # set on a request some tokens of which its client has before it joins a batch


def goes_on(req: Any) -> bool:
    """Tells whether ``req`` was held, here or elsewhere: what it joins a batch with was shown already."""
    return bool(getattr(req, GOES_ON_ATTRIBUTE, False))


def came_with_its_kv(req: Any) -> bool:
    """Tells whether the token that came with the KV of ``req`` is the one that its answer so far ends with."""
    wanted = getattr(req, LAST_TOKEN_ATTRIBUTE, None)
    return wanted is None or req.output_ids[-1] == wanted


class SendState(enum.Enum):
    """Where a prefill part is. It has a metadata buffer from ``QUEUED``, KV and a request row from ``PREFILL`` on."""

    HANDSHAKE = "handshake"  # its decode part has not said yet where the KV goes
    QUEUED = "queued"  # in the host's waiting queue
    PREFILL = "prefill"  # at least one of its passes was launched
    SENDING = "sending"  # computed; the last chunk is on its way
    LEAVING = "leaving"  # given up; its pages wait until no transfer reads them
    ENDED = "ended"


SEND_MOVES: Mapping[SendState, frozenset[SendState]] = {
    SendState.HANDSHAKE: frozenset({SendState.QUEUED, SendState.ENDED}),
    SendState.QUEUED: frozenset({SendState.PREFILL, SendState.ENDED}),
    SendState.PREFILL: frozenset({SendState.SENDING, SendState.LEAVING}),
    SendState.SENDING: frozenset({SendState.ENDED, SendState.LEAVING}),
    SendState.LEAVING: frozenset({SendState.ENDED}),
    SendState.ENDED: frozenset(),
}


@dataclasses.dataclass(slots=True, eq=False)
class SendLeg:
    """A prefill part.

    Attributes:
        req: the host's request; the leg owns what it holds from ``PREFILL`` to ``ENDED``.
        since_s: when it came, from ``SENDING`` on when its prompt was computed, on this process's monotonic clock.
        launched_tokens: leading tokens of the prompt whose passes were launched before the present scheduling pass.
        given_up: why it is to end at the next safe moment; None: it is not.
    """

    req: Any
    since_s: float
    state: SendState = SendState.HANDSHAKE
    launched_tokens: int = 0
    given_up: str | None = None

    def move(self, state: SendState) -> None:
        """Raises IllegalMoveError."""
        if state not in SEND_MOVES[self.state]:
            raise IllegalMoveError(f"a prefill part cannot go from {self.state.value} to {state.value}")
        self.state = state


@dataclasses.dataclass(frozen=True, slots=True)
class Caps:
    """The most KV and request rows that one end may hold. One request alone may exceed the tokens."""

    tokens: int
    requests: int

    @classmethod
    def of_share(cls, scheduler: Any, share: float) -> Caps:
        return cls(int(share * scheduler.max_total_num_tokens), max(1, int(share * scheduler.req_to_token_pool.size)))

    def has_room(self, held: Sequence[int], tokens: int) -> bool:
        """Tells whether a request with ``tokens`` fits beside those that are ``held``, of each its tokens."""
        return not held or (len(held) < self.requests and sum(held) + tokens <= self.tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class Uncounted:
    """What the host does not count: of transfers and of requests that are ready to join.

    ``paused``: requests that are held here and may go on.
    """

    tokens: int = 0
    requests: int = 0
    paused: int = 0
