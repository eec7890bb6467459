"""Held requests, and their KV for whoever asks for their rooms, over the host's PD protocol.

To the host's sender a held request looks like a prefill of prompt and answer that has just sampled its first token: a
copy of it, the *export request*, says so. Nothing is computed, and the request itself is not touched.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pla_sglang.common.errors import IllegalMoveError
from pla_sglang.fleet.stateless.host import calls
from pla_sglang.fleet.stateless.host.calls import Outcome
from pla_sglang.fleet.stateless.transfer.deferred_free import DeferredFree
from pla_sglang.fleet.stateless.transfer.fence import Fence, place_fence
from pla_sglang.fleet.stateless.transfer.rooms import OpenRooms, forget_room
from pla_sglang.plugin.engine.faults import Faults
from pla_sglang.plugin.engine.host.requests import set_extend
from pla_sglang.plugin.engine.host.transfers import forget_sent

logger = logging.getLogger(__name__)


class HoldState(enum.Enum):
    """Where a paused request is. It keeps its KV, its request row and its stream in all states but the last."""

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
    HoldState.SENT: frozenset({HoldState.RETURNING, HoldState.FREEING}),
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
        room: under which its KV can be asked for.
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


def make_shadow(req: Any, room: int) -> Any:
    """What the host's sender is given in place of ``req``, all KV of which is computed."""
    shadow = copy.copy(req)
    shadow.sampling_params = copy.copy(req.sampling_params)  # the sender sets how many tokens are wanted
    shadow.bootstrap_room = room
    shadow.origin_input_ids = req.origin_input_ids + req.output_ids[:-1]
    shadow.output_ids = req.output_ids[-1:]
    set_extend(shadow, 0, len(shadow.origin_input_ids))
    shadow.start_send_idx, shadow.metadata_buffer_index = 0, -1
    return shadow


class Offers:
    """Owned by the scheduler thread.

    Args:
        queue: the sending end's (transfer.queues.SendQueue).
        rooms: which are open; told here.
    """

    def __init__(self, scheduler: Any, queue: Any, deferred: DeferredFree, rooms: OpenRooms, faults: Faults) -> None:
        self._scheduler = scheduler
        self._queue = queue
        self._deferred = deferred
        self._faults = faults
        self.rooms = rooms
        self.sent = self.failed = 0

    def open(self, hold: Hold) -> bool:
        """Make a sender for the KV of ``hold`` under its room; False where no metadata buffer is free."""
        shadow = make_shadow(hold.req, hold.room)
        if not self._queue.ensure_metadata_buffer(shadow):
            return False
        try:
            self._queue.create_sender(shadow, self._scheduler.model_config.num_key_value_heads)
        except Exception:
            calls.free_metadata(self._scheduler, shadow)
            raise
        hold.shadow = shadow
        self._queue.rooms.begin(hold.room)
        self.rooms.open(hold.room)
        return True

    def pump(self, holds: Sequence[Hold]) -> None:
        """Begin to send what is asked for, and follow what is under way."""
        offered = [hold for hold in holds if hold.shadow is not None and hold.state is not HoldState.SENT]
        if not offered:
            return
        outcomes = calls.poll_senders(self._scheduler, [hold.shadow.disagg_kv_sender for hold in offered])
        self._faults.for_each(
            zip(offered, outcomes, strict=True),
            lambda step: self._follow(*step),
            "offering the KV of a held request",
            lambda step: step[0].note_fault("offering its KV"),
        )

    def _follow(self, hold: Hold, outcome: Outcome) -> None:
        if outcome is Outcome.FAILED:
            self._fail(hold)
        elif outcome is Outcome.DONE and hold.state is HoldState.SENDING:
            hold.move(HoldState.SENT)
            self.sent += 1
        elif outcome is Outcome.ASKED and hold.state is HoldState.HELD:
            self._begin(hold)

    def _begin(self, hold: Hold) -> None:
        hold.move(HoldState.SENDING)
        try:
            self._queue.finalize_bootstrap(hold.shadow)  # it has its metadata buffer
            self._scheduler.send_kv_chunk(hold.shadow, last_chunk=True, end_idx=None)
        except Exception:
            logger.exception("pla_sglang: sending the KV of held request %s", hold.req.rid)
            hold.shadow.disagg_kv_sender.abort()  # it has failed when all ranks have seen that

    def _fail(self, hold: Hold) -> None:
        """The request stays held, and its KV cannot be asked for any more: it goes on here."""
        logger.warning("pla_sglang: the KV of held request %s was not sent (room %d)", hold.req.rid, hold.room)
        self.failed += 1
        self.close(hold)
        if hold.state is HoldState.SENDING:
            hold.move(HoldState.HELD)

    def close(self, hold: Hold) -> None:
        """No more under this room: an instance that has asked and has not got all of it is told so.

        A transfer under way is cut off, and counts as a reader until it is through.
        """
        shadow, hold.shadow = hold.shadow, None
        if shadow is None:
            return
        self._queue.rooms.end(hold.room)
        self.rooms.close(hold.room, refuse=hold.state is not HoldState.SENT)
        if hold.state is not HoldState.SENDING:
            self._give_back(shadow)
            return
        shadow.disagg_kv_sender.abort()  # workers skip what they have not begun
        fence = place_fence(self._queue.kv_manager)
        hold.readers += 1
        self._deferred.hold(
            0,  # its pages are the hold's
            is_through=functools.partial(_has_passed, fence),
            release=functools.partial(self._end_reading, hold, shadow),
            now_s=self._scheduler.pla_fleet.now_s(),
        )

    def _end_reading(self, hold: Hold, shadow: Any) -> None:
        hold.readers -= 1
        self._give_back(shadow)

    def _give_back(self, shadow: Any) -> None:
        """Sender entry and metadata buffer of a shadow that no transfer reads."""
        manager = self._queue.kv_manager
        shadow.disagg_kv_sender.clear()
        forget_sent(manager, shadow.bootstrap_room)
        forget_room(manager, shadow.bootstrap_room)
        calls.free_metadata(self._scheduler, shadow)


def _has_passed(fence: Fence) -> bool:
    return fence.passed
