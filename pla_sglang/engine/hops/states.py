"""The states of a request that is held, and the moves between them. Pure."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from pla_sglang.errors import IllegalMoveError


class HoldState(enum.Enum):
    """Of a held request. It keeps its KV, its request row and its stream in all states but the last."""

    LEAVING = "leaving"  # out of the batch; the step that it was in last is not processed yet
    HELD = "held"  # at a step boundary; its KV can be asked for under its room
    SENDING = "sending"  # an instance has asked; the KV is on its way
    SENT = "sent"  # that instance has the KV; the request is held until it is committed
    RETURNING = "returning"  # on its way back to the running batch: for a place, or until no transfer reads its KV
    FREEING = "freeing"  # its client is answered; its KV is kept until no transfer reads it
    ENDED = "ended"  # the host's again, or gone


HOLD_MOVES: Mapping[HoldState, frozenset[HoldState]] = {
    HoldState.LEAVING: frozenset({HoldState.HELD, HoldState.RETURNING, HoldState.FREEING, HoldState.ENDED}),
    HoldState.HELD: frozenset({HoldState.SENDING, HoldState.RETURNING, HoldState.FREEING}),
    HoldState.SENDING: frozenset({HoldState.SENT, HoldState.HELD, HoldState.RETURNING, HoldState.FREEING}),
    HoldState.SENT: frozenset({HoldState.HELD, HoldState.RETURNING, HoldState.FREEING}),
    HoldState.RETURNING: frozenset({HoldState.FREEING, HoldState.ENDED}),
    HoldState.FREEING: frozenset({HoldState.ENDED}),
    HoldState.ENDED: frozenset(),
}
AT_REST = frozenset({HoldState.HELD, HoldState.SENDING, HoldState.SENT})  # held, as commands understand it


@dataclasses.dataclass(slots=True, eq=False)
class Hold:
    """A held request.

    Attributes:
        req: the host's request; what it holds of the host is the hold's from ``LEAVING`` to ``ENDED``.
        room: under which its KV can be asked for; another one with each hold command that names it again.
        for_s: for how long at most.
        until_s: then it goes on by itself; on this process's monotonic clock. None while it leaves its batch.
        shadow: what the host's sender takes for the request, while its KV is offered under the room.
        readers: transfers that were given up and may still read its KV.
        why_not: why it could not be held.
        fault: what has raised with it, on this rank or on all; it ends when all ranks know. Empty: nothing.
    """

    req: Any
    room: int
    for_s: float
    until_s: float | None = None
    state: HoldState = HoldState.LEAVING
    shadow: Any = None
    readers: int = 0
    why_not: str = ""
    fault: str = ""

    def move(self, state: HoldState) -> None:
        """Raises IllegalMoveError."""
        if state not in HOLD_MOVES[self.state]:
            raise IllegalMoveError(f"a held request cannot go from {self.state.value} to {state.value}")
        self.state = state

    def note_fault(self, doing: str) -> None:
        self.fault = self.fault or f"an exception in its instance, while {doing}"

    @property
    def kv_tokens(self) -> int:
        """KV of prompt and answer, without the answer's last token: a step computes that."""
        return len(self.req.origin_input_ids) + max(0, len(self.req.output_ids) - 1)
