"""Requests that migrate: the commands that a router gives, and their place in each turn of the scheduler's loop.

Commands are carried out between two passes, in the order in which they came. All is answered, also what raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from pla_sglang.fleet.stateless.host import calls
from pla_sglang.fleet.stateless.host.calls import Agree
from pla_sglang.fleet.stateless.host.side_channel import read_receiver
from pla_sglang.fleet.stateless.requests.commands import HOLD, RESUME, Answer, Command, Job
from pla_sglang.fleet.stateless.requests.messages import send_answers
from pla_sglang.fleet.stateless.requests.pausing import HELD_BACK, PausedRequests
from pla_sglang.fleet.stateless.transfer.deferred_free import DeferredFree
from pla_sglang.fleet.stateless.transfer.exports import AT_REST, KvExports, PausedRequest, PauseState
from pla_sglang.fleet.stateless.transfer.legs import Caps, LegKind, kind_of
from pla_sglang.fleet.stateless.transfer.rooms import OpenRooms, send_refusal
from pla_sglang.plugin.engine.faults import Faults

MOST_TRIES = 64
UNKNOWN_ROOM: Answer = {"status": "unknown", "code": int(HTTPStatus.GONE)}


class MigrationSide:
    """What a scheduler has for requests that migrate. Owned by its thread.

    ``on_pull`` is called by the thread that reads what receivers say.

    Args:
        queue: the sending end's (transfer.queues.SendQueue), with the rooms that this instance has used.
        list_waiting: requests that are here and do not run: in queues, legs that wait for their handshake or KV.
        caps: what paused requests may keep.
    """

    def __init__(
        self,
        scheduler: Any,
        queue: Any,
        deferred: DeferredFree,
        *,
        faults: Faults,
        agree: Agree,
        list_waiting: Callable[[], Iterable[Any]],
        caps: Caps,
    ) -> None:
        self._scheduler = scheduler
        self._list_waiting = list_waiting
        self._faults = faults
        self._jobs: list[Job] = []
        self.rooms = OpenRooms(functools.partial(send_refusal, queue.kv_manager))
        exports = KvExports(scheduler, queue, deferred, self.rooms, faults)
        self.holder = PausedRequests(scheduler, exports, agree, queue.rooms, faults, caps)

    def on_pull(self, message: list[bytes]) -> None:
        """A receiver asks for a paused request; nothing where that cannot be read."""
        if (pull := read_receiver(message)) is not None:
            self.rooms.on_pull(*pull)

    def before_batches(self, running_batch: Any, last_batch: Any, now_s: float) -> None:
        """Before the host chooses: holds that were begun are made, and commands are carried out."""
        self.holder.settle(now_s)
        self.run(running_batch, last_batch)
        self.holder.settle(now_s)  # without a step under way a hold is made at once
        self.run(running_batch, last_batch)
        self.holder.pump(running_batch, now_s)

    def take_message(self, message: Any) -> None:
        """From the broadcast, as every rank gets it."""
        self._jobs.append(Job(message.ticket, message.commands))
        if self._scheduler._engine_paused:  # no pass comes before the engine continues
            self.run(None, None)

    def run(self, running_batch: Any, last_batch: Any) -> None:
        """As far as that is possible now; None and None: the engine is paused, and no batch is touched."""
        for job in list(self._jobs):
            while (command := job.next_command) is not None:
                try:
                    answer = self._carry_out(job, command, running_batch, last_batch)
                except Exception:
                    answer = self._answer_fault(command)
                if answer is None:
                    break
                job.answer(answer)
            if job.next_command is None:
                self._jobs.remove(job)
                send_answers(self._scheduler, job.ticket, job.answers)

    def _answer_fault(self, command: Command) -> Answer:
        """The request that the command is about ends when all ranks know; the other commands are carried out."""
        self._faults.note(f"{command.do} of room {command.room}")
        holds = [hold for hold in self.holder.holds.values() if command.names(hold)]
        for hold in holds:
            hold.note_fault(f"a {command.do} was carried out")
        return {"status": "failed", "code": int(HTTPStatus.INTERNAL_SERVER_ERROR)}

    def _carry_out(self, job: Job, command: Command, running_batch: Any, last_batch: Any) -> Answer | None:
        """None: to be asked again in the next pass."""
        if command.do == HOLD:
            return self._hold_when_clear(job, command, running_batch, last_batch)
        hold = self.holder.holds.get(command.room)
        if hold is not None and hold.state is PauseState.LEAVING:
            return None
        if hold is None or hold.state not in AT_REST:
            return UNKNOWN_ROOM
        if command.do == RESUME:
            self.holder.resume(hold, "command")
            return {"status": "resumed"}
        self.holder.totals["committed"] += 1
        self.holder.let_go(hold, functools.partial(calls.end_moved, self._scheduler, hold.req))
        return {"status": "committed"}

    # -- hold ----------------------------------------------------------------------------------------------------------

    def _hold_when_clear(self, job: Job, command: Command, running_batch: Any, last_batch: Any) -> Answer | None:
        """A request that could not be held as its client lacks a part of its text is tried again a step later."""
        hold = job.waits_for
        if hold is not None and hold.why_not == HELD_BACK and not hold.req.finished() and job.tries < MOST_TRIES:
            if hold.state is not PauseState.ENDED:
                return None  # on its way back to its batch
            job.waits_for = None
            job.tries += 1
        if job.waits_for is None and (answer := self._hold(job, command, running_batch, last_batch)) is not None:
            return answer
        return None if job.waits_for is None else _say_how_it_went(job.waits_for)

    def _hold(self, job: Job, command: Command, running_batch: Any, last_batch: Any) -> Answer | None:
        """None: ``job`` waits for the hold to be made."""
        if any(hold.req.rid == command.rid for hold in self.holder.holds.values()):
            return _refuse("it is held already, or on its way to or from a hold")
        if running_batch is None:
            return _refuse("the engine is paused")
        batches = [running_batch]
        if last_batch is not None and last_batch is not running_batch and last_batch.forward_mode.is_extend():
            batches.append(last_batch)
        req = next((req for batch in batches for req in batch.reqs if req.rid == command.rid), None)
        if req is None or req.is_retracted or req in calls.list_chunked(self._scheduler, last_batch):
            return self._look_elsewhere(req, command.rid)
        if req.finished() or req.to_finish is not None:
            return {"status": "finished"}
        if kind_of(req) is LegKind.PREFILL:
            return _refuse("a prefill part ends when its KV was sent")
        if (reason := self.holder.reason_against(req, command.room)) is not None:
            self.holder.totals["refused"] += 1
            return _refuse(reason)
        job.waits_for = self.holder.take(req, command.room, command.for_s, batches)
        running_batch.batch_is_full = False
        return None

    def _look_elsewhere(self, req: Any, rid: str) -> Answer:
        here = [req, self._scheduler.chunked_req, *self._list_waiting()]  # a chunk may be parked, in no batch
        waiting = [other for other in here if other is not None and other.rid == rid]
        if not waiting:
            return {"status": "unknown"}
        if kind_of(waiting[0]) is LegKind.PREFILL:
            return _refuse("a prefill part ends when its KV was sent")
        return {"status": "waiting"}


def _say_how_it_went(hold: PausedRequest) -> Answer | None:
    """The answer to the command that made ``hold``; None: its last step is under way."""
    if hold.state is PauseState.LEAVING:
        return None
    if hold.state in AT_REST:
        return {"status": "held", "tokens": len(hold.req.output_ids), "kv_tokens": hold.kv_tokens}
    if hold.req.finished():
        return {"status": "finished"}
    return _refuse(hold.why_not or "it went on before it was held")


def _refuse(reason: str) -> Answer:
    return {"status": "refused", "reason": reason}
