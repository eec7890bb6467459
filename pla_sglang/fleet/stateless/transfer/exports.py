"""Paused requests, and their KV for whoever asks for their rooms, over the host's PD protocol.

To the host's sender a paused request looks like a prefill of prompt and answer that has just sampled its first token: a
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
from pla_sglang.fleet.stateless.host.calls import SendPoll
from pla_sglang.fleet.stateless.transfer.deferred_free import DeferredFree
from pla_sglang.fleet.stateless.transfer.fence import place_fence
from pla_sglang.fleet.stateless.transfer.rooms import OpenRooms, give_back
from pla_sglang.plugin.engine.faults import Faults
from pla_sglang.plugin.engine.host.requests import set_extend

logger = logging.getLogger(__name__)


class PauseState(enum.Enum):
    """Where a paused request is. It keeps its KV, its request row and its stream in all states but the last."""

    LEAVING = "leaving"  # out of the batch; the step that it was in last is not processed yet
    HELD = "held"  # at a step boundary; its KV can be asked for under its room
    SENDING = "sending"  # an instance has asked; the KV is on its way
    SENT = "sent"  # that instance has the KV; the request is held until it is committed
    RETURNING = "returning"  # on its way back to the running batch: for a place, or until no transfer reads its KV
    FREEING = "freeing"  # its client is answered; its KV is kept until no transfer reads it
    ENDED = "ended"  # the host's again, or gone


PAUSE_MOVES: Mapping[PauseState, frozenset[PauseState]] = {
    PauseState.LEAVING: frozenset({PauseState.HELD, PauseState.RETURNING, PauseState.FREEING, PauseState.ENDED}),
    PauseState.HELD: frozenset({PauseState.SENDING, PauseState.RETURNING, PauseState.FREEING}),
    PauseState.SENDING: frozenset({PauseState.SENT, PauseState.HELD, PauseState.RETURNING, PauseState.FREEING}),
    PauseState.SENT: frozenset({PauseState.RETURNING, PauseState.FREEING}),
    PauseState.RETURNING: frozenset({PauseState.FREEING, PauseState.ENDED}),
    PauseState.FREEING: frozenset({PauseState.ENDED}),
    PauseState.ENDED: frozenset(),
}
AT_REST = frozenset({PauseState.HELD, PauseState.SENDING, PauseState.SENT})  # held, as commands understand it


@dataclasses.dataclass(slots=True, eq=False)
class PausedRequest:
    """A paused request.

    Attributes:
        req: the host's request; what it holds of the host is the hold's from ``LEAVING`` to ``ENDED``.
        room: under which its KV can be asked for.
        for_s: for how long at most.
        until_s: then it goes on by itself; on this process's monotonic clock. None while it leaves its batch.
        export_request: what the host's sender takes for the request, while its KV is offered under the room.
        readers: transfers that were given up and may still read its KV.
        why_not: why it could not be held.
        fault: what has raised with it, on this rank or on all; it ends when all ranks know. Empty: nothing.
    """

    req: Any
    room: int
    for_s: float
    until_s: float | None = None
    state: PauseState = PauseState.LEAVING
    export_request: Any = None
    readers: int = 0
    why_not: str = ""
    fault: str = ""

    def move(self, state: PauseState) -> None:
        """Raises IllegalMoveError."""
        if state not in PAUSE_MOVES[self.state]:
            raise IllegalMoveError(f"a paused request cannot go from {self.state.value} to {state.value}")
        self.state = state

    def note_fault(self, doing: str) -> None:
        self.fault = self.fault or f"an exception in its instance, while {doing}"

    @property
    def kv_tokens(self) -> int:
        """KV of prompt and answer, without the answer's last token: a step computes that."""
        return len(self.req.origin_input_ids) + max(0, len(self.req.output_ids) - 1)


def make_export_request(req: Any, room: int) -> Any:
    """What the host's sender is given in place of ``req``, all KV of which is computed."""
    export_request = copy.copy(req)
    export_request.sampling_params = copy.copy(req.sampling_params)  # the sender sets how many tokens are wanted
    export_request.bootstrap_room = room
    export_request.origin_input_ids = req.origin_input_ids + req.output_ids[:-1]
    export_request.output_ids = req.output_ids[-1:]
    set_extend(export_request, 0, len(export_request.origin_input_ids))
    export_request.start_send_idx, export_request.metadata_buffer_index = 0, -1
    return export_request


class KvExports:
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

    def open(self, hold: PausedRequest) -> bool:
        """Make a sender for the KV of ``hold`` under its room; False where no metadata buffer is free."""
        export_request = make_export_request(hold.req, hold.room)
        if not self._queue.ensure_metadata_buffer(export_request):
            return False
        try:
            self._queue.create_sender(export_request, self._scheduler.model_config.num_key_value_heads)
        except Exception:
            calls.free_metadata(self._scheduler, export_request)
            raise
        hold.export_request = export_request
        self._queue.rooms.begin(hold.room)
        self.rooms.open(hold.room)
        return True

    def pump(self, holds: Sequence[PausedRequest]) -> None:
        """Begin to send what is asked for, and follow what is under way."""
        offered = [hold for hold in holds if hold.export_request is not None and hold.state is not PauseState.SENT]
        if not offered:
            return
        outcomes = calls.poll_senders(self._scheduler, [hold.export_request.disagg_kv_sender for hold in offered])
        self._faults.for_each(
            zip(offered, outcomes, strict=True),
            lambda step: self._follow(*step),
            "offering the KV of a paused request",
            lambda step: step[0].note_fault("offering its KV"),
        )

    def _follow(self, hold: PausedRequest, outcome: SendPoll) -> None:
        if outcome is SendPoll.FAILED:
            self._fail(hold)
        elif outcome is SendPoll.DONE and hold.state is PauseState.SENDING:
            hold.move(PauseState.SENT)
            self.sent += 1
        elif outcome is SendPoll.ASKED and hold.state is PauseState.HELD:
            self._begin(hold)

    def _begin(self, hold: PausedRequest) -> None:
        hold.move(PauseState.SENDING)
        try:
            self._queue.finalize_bootstrap(hold.export_request)  # it has its metadata buffer
            self._scheduler.send_kv_chunk(hold.export_request, last_chunk=True, end_idx=None)
        except Exception:
            logger.exception("pla_sglang: sending the KV of paused request %s", hold.req.rid)
            hold.export_request.disagg_kv_sender.abort()  # it has failed when all ranks have seen that

    def _fail(self, hold: PausedRequest) -> None:
        """The request stays held, and its KV cannot be asked for any more: it goes on here."""
        logger.warning("pla_sglang: the KV of paused request %s was not sent (room %d)", hold.req.rid, hold.room)
        self.failed += 1
        self.close(hold)
        if hold.state is PauseState.SENDING:
            hold.move(PauseState.HELD)

    def close(self, hold: PausedRequest) -> None:
        """No more under this room: an instance that has asked and has not got all of it is told so.

        A transfer under way is cut off, and counts as a reader until it is through.
        """
        export_request, hold.export_request = hold.export_request, None
        if export_request is None:
            return
        self._queue.rooms.end(hold.room)
        self.rooms.close(hold.room, refuse=hold.state is not PauseState.SENT)
        if hold.state is not PauseState.SENDING:
            give_back(self._scheduler, self._queue.kv_manager, export_request)
            return
        export_request.disagg_kv_sender.abort()  # workers skip what they have not begun
        fence = place_fence(self._queue.kv_manager)
        hold.readers += 1
        self._deferred.hold(
            0,  # its pages are the hold's
            is_through=lambda: fence.passed,
            release=functools.partial(self._end_reading, hold, export_request),
            now_s=self._scheduler.pla_fleet.now_s(),
        )

    def _end_reading(self, hold: PausedRequest, export_request: Any) -> None:
        hold.readers -= 1
        give_back(self._scheduler, self._queue.kv_manager, export_request)
