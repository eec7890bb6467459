"""Moves requests that run, from one stateless instance to another, exact to the token.

Their KV cache is pulled. Where none can ever go to the target, as it runs another version of SGLang, the target
computes prompt and answer so far again; all else is the same.

    HOLDING ──held──► PULLING ──first event of the next attempt──► over: the one left is told to commit
       │                 │ the target cannot, or the request has gone on by itself
       └─► failed ◄──────┘   over: the one that holds it is told to resume, and the request rests

The instance where the request is owns it until it is told to commit: when the time of its hold is over it goes on by
itself, whoever has died. So nothing here has to happen for a request to live. One move of a request at a time.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from pla_sglang.fleet.router.control.booking import Booking
from pla_sglang.fleet.router.control.requests.ledger import order_aborts
from pla_sglang.fleet.router.control.requests.moves import note_failed_move, rests_from_failure
from pla_sglang.fleet.router.control.requests.relay_messages import assign_message
from pla_sglang.fleet.router.control.requests.request_record import (
    LEAVING,
    STREAMING,
    Attempt,
    MoveKind,
    RequestRecord,
)
from pla_sglang.fleet.router.control.workers.abort_order import AbortOrder
from pla_sglang.fleet.router.control.workers.errors import ControlError
from pla_sglang.fleet.router.control.workers.exclusions import find_unfit
from pla_sglang.fleet.router.control.workers.instance_client import InstanceClient
from pla_sglang.fleet.router.control.workers.peering import Peering
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerState
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.fleet.router.wire.rids import rid_at_instance
from pla_sglang.policy.interface.fast_enum import FastEnum

logger = logging.getLogger(__name__)
HOLD_S = 10.0  # at most; then a paused request goes on by itself
_PULL, _REDO = MoveKind.PULL, MoveKind.REDO
_RESUMED, _FIRST_TOKEN = m.Cause.RESUMED, m.Milestone.FIRST_TOKEN
# Of a pull that was not sent, or that its instance has answered with an error: it holds nothing.
_OVER = frozenset({m.Cause.NOT_SENT, m.Cause.FULL, m.Cause.REFUSED, m.Cause.ABORTED})
_NOT_THERE = frozenset({WorkerState.DEAD, WorkerState.SUSPECT})


class MoveState(FastEnum):
    HOLDING = "holding"  # its instance was told to hold it
    PULLING = "pulling"  # its relay was told where it goes on


HOLDING, PULLING = MoveState  # named once: see ``fast_enum``


@dataclasses.dataclass(slots=True, eq=False)
class RunningMove:
    """One request on its way. ``rid``: under which id its source knows it; ``attempt``: at ``target``."""

    record: RequestRecord
    source: Worker
    target: Worker
    rid: str
    room: int
    attempt: Attempt
    state: MoveState = HOLDING


class Migration:
    """Orders the steps of each move, and keeps it until it is over.

    Args:
        send_message: to a relay by its number.
        order_abort: at an instance.
        peering: knows between which instances KV cache can go.
        on_over: called with the time when a move is over, whatever has come of it.

    Attributes:
        failed: moves that were under way and have come to nothing.
    """

    def __init__(
        self,
        booking: Booking,
        peering: Peering,
        client: InstanceClient,
        *,
        send_message: Callable[[int, m.FromControl], None],
        order_abort: Callable[[AbortOrder], None],
        on_over: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self._booking, self._ledger, self._series = booking, booking.ledger, booking.series
        self._peering, self._client, self._clock = peering, client, clock
        self._send_message, self._order_abort, self._on_over = send_message, order_abort, on_over
        self._moves: dict[str, RunningMove] = {}
        self.failed = 0

    def move_request(self, rid: str, target: Worker, reason: str) -> str | None:
        """Moves the request that the router knows as ``rid``. None: it is under way; otherwise why it cannot be."""
        record = self._ledger.records.get(rid)
        why_not = "it is not open" if record is None else self.find_obstacle(record, target)
        if record is None or why_not is not None:
            return why_not
        source = record.present.decode
        assert source is not None
        record.candidate = attempt = record.next_attempt(reason, how=self.find_way(source, target))
        attempt.prefill = attempt.decode = target
        room = self._ledger.open_candidate(record, target.number, self._clock())
        move = RunningMove(record, source, target, rid_at_instance(*record.key), room, attempt)
        self._moves[rid] = move
        self._client.spawn(self._hold(move))
        return None

    def count_leaving(self, source: Worker) -> int:
        """Moves under way that leave ``source``."""
        return sum(move.source is source for move in self._moves.values())

    def count_unbooked(self, target: Worker) -> int:
        """Those that are to come to ``target``, and that its load does not show yet."""
        return sum(move.target is target and move.state is HOLDING for move in self._moves.values())

    def sweep_moves(self) -> None:
        """Called a few times a second: forgets moves of requests that have ended."""
        for move in list(self._moves.values()):
            if self._is_current(move) and move.state is PULLING and move.target.state in _NOT_THERE:
                # Its relay may not notice, as a machine that vanished closes nothing. Tokens of the source win.
                self._client.spawn(self._resume(move))

    def find_obstacle(self, record: RequestRecord, target: Worker) -> str | None:
        """Why the request cannot move there now."""
        source = record.present.decode
        if record.state is not STREAMING or source is None or not record.movable:
            return "its stream cannot go on elsewhere"
        if record.candidate is not None:
            return "it is on its way already"
        if rests_from_failure(record, self._clock(), self._booking.clock):
            return "it is in its cool-down, as its last move failed"
        if source.state is WorkerState.DEAD:
            return "its instance cannot be asked"
        if target is source or not target.is_ready() or target.description is None or not target.description.hops:
            return "the target cannot take it"
        if target.view in find_unfit(record.ask, self._peering.table):
            return "the target cannot serve it"
        return "no KV cache can go to the target" if self.find_way(source, target) is None else None

    def find_way(self, source: Worker, target: Worker) -> MoveKind | None:
        """How a request goes from the one to the other, both being well; None: not now."""
        if self._peering.is_connected(source.view, target.view):
            return _PULL
        return _REDO if self._peering.never_connects(source.view, target.view) else None

    # -- what comes of it --------------------------------------------------------------------------------------------

    async def _hold(self, move: RunningMove) -> None:
        command = {"do": "hold", "rid": move.rid, "room": move.room, "for_s": HOLD_S}
        response = await self._order(move.source, command)
        record = move.record
        if not self._is_current(move):  # it has ended, or its instance is lost
            return
        if response.get("status") != "held":
            status = str(response.get("status"))
            self._fail(move, status, str(response.get("reason", "")), resume=response.get("status") is None)
            return
        if move.target.state is WorkerState.DEAD:
            self._fail(move, "dead", resume=True)
            return
        move.state, attempt = PULLING, move.attempt
        tokens, attempt.delivered_tokens = int(response["kv_tokens"]), int(response["tokens"])
        attempt.kv_tokens = tokens if attempt.how is _PULL else 0
        self._booking.begin_candidate(record, tokens + 1, self._clock())
        source = move.source if attempt.how is _PULL else None
        delivered = attempt.delivered_tokens
        held = assign_message(record, attempt, source, reason=attempt.cause, held_tokens=delivered)
        self._send_message(record.relay, held)

    def on_progress(self, progress: m.Progress, now_s: float) -> bool:
        """True if it is about the candidate of a move, which is the answer from its first token on."""
        move = self._moves.get(progress.rid)
        if move is None or not self._is_current(move) or move.attempt.number != progress.attempt:
            return False
        if progress.milestone is _FIRST_TOKEN:
            self._join(move, progress, now_s)
        return True

    def _join(self, move: RunningMove, progress: m.Progress, now_s: float) -> None:
        del self._moves[progress.rid]
        record, attempt = move.record, move.attempt
        self._booking.end_at(record, record.present, now_s)
        left = self._ledger.join_candidate(record, now_s)
        left.ended_s = now_s
        attempt.first_token_s, attempt.gap_s = progress.at_s, progress.gap_s
        record.movable = progress.movable
        move.target.load.start_request(record.key, now_s)
        self._booking.note_prompt(record, move.target, now_s)
        assert attempt.how is not None
        self._series.migrations.inc(attempt.how.value, attempt.cause)
        self._series.migration_gap_s.observe(progress.gap_s or 0.0)
        self._client.spawn(self._commit(move, left))
        self._on_over(now_s)

    def on_dropped(self, dropped: m.Dropped, now_s: float) -> None:
        """Nothing comes of a candidate; the present attempt goes on."""
        move = self._moves.get(dropped.rid)
        if move is not None and self._is_current(move) and move.attempt.number == dropped.attempt:
            why = dropped.cause
            self._fail(move, why.label, dropped.detail, resume=why is not _RESUMED, over=why in _OVER)

    def on_ask(self, ask: m.Ask) -> None:
        """Where the present attempt is over, nothing comes of its move."""
        move = self._moves.get(ask.rid)
        if move is None or ask.over is None or not self._is_current(move):
            return
        if ask.over.attempt == move.record.present.number:
            self._fail(move, "source_lost", resume=False)

    def _is_current(self, move: RunningMove) -> bool:
        """True if the move is still under way; else it is forgotten."""
        if move.record.candidate is move.attempt and move.record.state is STREAMING:
            return True
        if self._moves.get(move.record.rid) is move:
            del self._moves[move.record.rid]
        return False

    def _fail(self, move: RunningMove, why: str, detail: str = "", *, resume: bool, over: bool = False) -> None:
        """The request goes on where it is, and rests. ``over``: the target holds nothing of it."""
        del self._moves[move.record.rid]
        record, now_s = move.record, self._clock()
        self._booking.end_at(record, move.attempt, now_s)
        for order in self._ledger.drop_candidate(record, now_s, over=over):
            self._order_abort(order)
        move.attempt.ended_s, move.attempt.failure = now_s, f"{why}: {detail}" if detail else why
        self.failed += 1
        note_failed_move(record, now_s, self._booking.clock)
        self._series.migration_failures.inc(why)
        if resume:
            self._client.spawn(self._resume(move))
        self._on_over(now_s)

    async def _resume(self, move: RunningMove) -> None:
        await self._order(move.source, {"do": "resume", "room": move.room})

    async def _commit(self, move: RunningMove, left: Attempt) -> None:
        """The instance that was left ends its stream and frees the KV cache. Where it does not say so, it is told to
        abort, until it confirms or is dead. The request may have ended meanwhile."""
        response = await self._order(move.source, {"do": "commit", "room": move.room})
        open_legs = [leg for leg in left.legs if leg.state is LEAVING]
        if response.get("status") == "committed":
            for leg in open_legs:
                self._ledger.finish_leg(move.record, left, leg.worker, self._clock())
            return
        for order in order_aborts(move.record, left, open_legs, self._clock()):
            self._order_abort(order)

    async def _order(self, worker: Worker, command: dict[str, Any]) -> dict[str, Any]:
        """The answer; empty where there is none."""
        try:
            return (await self._client.order_commands(worker, [command]))[0]
        except ControlError as error:
            logger.warning("%s at %s: %s", command["do"], worker.view.name, error)
            return {}
