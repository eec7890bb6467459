"""The sending end: prefill parts, from their arrival until their KV is gone.

A leg runs in the host's aggregated loop like any request. Two things keep the loop from ending it with its first token:
its own ``update_finish_state`` never says so, and after its last chunk was launched it is taken out of the batch before
the host would let it decode. It ends when its KV has been sent, as on a prefill instance.

All ranks have the same legs. So an exception with one leg, which may befall one rank alone, fails the transfer of that
leg and no more: in the next poll all ranks see that, and end it. A leg that ends leaves the list first, whatever comes
of its answer and of what it holds.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from pla_sglang.common.errors import PlaError
from pla_sglang.fleet.stateless.host import calls
from pla_sglang.fleet.stateless.host.calls import SendPoll
from pla_sglang.fleet.stateless.transfer.deferred_free import DeferredFree
from pla_sglang.fleet.stateless.transfer.fence import place_fence
from pla_sglang.fleet.stateless.transfer.legs import Caps, SendLeg, SendState
from pla_sglang.fleet.stateless.transfer.rooms import forget_room, give_back, send_refusal
from pla_sglang.plugin.engine.faults import Faults
from pla_sglang.plugin.engine.host.requests import extend_end, pool_row

logger = logging.getLogger(__name__)

ABORTED = "Aborted"
FAULT = "an exception in its instance"


class GivenUpError(PlaError):
    """The decode part of a prefill part that comes now has given up already."""


def _ends_with_its_transfer(new_accepted_len: int = 1) -> None:
    """In place of a prefill part's ``update_finish_state``."""


class Sender:
    """Owned by the scheduler thread.

    Args:
        queue: legs before their handshake, and the rooms that this instance has used.
        caps: what legs may hold.
    """

    def __init__(
        self,
        scheduler: Any,
        queue: Any,
        deferred: DeferredFree,
        *,
        faults: Faults,
        caps: Caps,
    ) -> None:
        self._scheduler = scheduler
        self._queue = queue
        self._deferred = deferred
        self._faults = faults
        self._caps = caps
        self._chunk: SendLeg | None = None  # its next chunk is due in the present pass
        self.legs: dict[int, SendLeg] = {}  # by id of the request, which the leg holds
        self.sent = self.failed = 0

    # -- a leg comes -----------------------------------------------------------------------------------------------

    def add(self, req: Any, now_s: float) -> None:
        """Take over a request whose KV is wanted elsewhere.

        Raises:
            GivenUpError: on this rank, and then it is to be refused on all.
        """
        scheduler = self._scheduler
        if scheduler._abort_on_queued_limit(req):
            return
        if calls.has_failed(self._queue.kv_manager, req.bootstrap_room):
            raise GivenUpError
        req.update_finish_state = _ends_with_its_transfer
        req.stream = False  # one answer, when the KV is gone
        self._queue.add(req, scheduler.model_config.num_key_value_heads)
        if not req.finished():  # too long for the pool: answered
            req.time_stats.set_prefill_bootstrap_queue_entry_time()
            self.legs[id(req)] = SendLeg(req, now_s)
            self._queue.rooms.begin(req.bootstrap_room)

    def forget(self, req: Any) -> None:
        """A request that could not be taken over, on this rank or another: it holds nothing."""
        self._queue.queue = [other for other in self._queue.queue if other is not req]
        if self.legs.pop(id(req), None) is not None:
            self._queue.rooms.end(req.bootstrap_room)
            req.disagg_kv_sender.abort()
            req.disagg_kv_sender.clear()
        forget_room(self._queue.kv_manager, req.bootstrap_room)

    def list_held(self) -> list[int]:
        """KV tokens of each leg that holds some or is about to; prompts as a whole, whatever of them the cache has."""
        return [
            len(leg.req.origin_input_ids)
            for leg in self.legs.values()
            if leg.state is not SendState.HANDSHAKE or leg.req.metadata_buffer_index >= 0  # which the host gives first
        ]

    def state(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "legs": dict(Counter(leg.state.value for leg in self.legs.values())),
            "kv_tokens": sum(self.list_held()),
            "sent": self.sent,
            "failed": self.failed,
        }

    # -- around the host's choice of the next batch ----------------------------------------------------------------

    def before_pass(self, running_batch: Any, last_batch: Any) -> None:
        """Legs that were in the last batch leave it, so that the host does not let them decode."""
        if not self.legs:
            self._chunk = None
            return
        chunked = self._scheduler.chunked_req
        chunk = self._chunk = self.legs.get(id(chunked))
        if chunk is not None and chunk.given_up is not None:
            self._end_chunk(chunk, chunk.given_up)
            chunked = self._chunk = None
        elif chunk is not None:
            chunk.launched_tokens = min(extend_end(chunked) or 0, len(chunked.origin_input_ids))
        if last_batch is None or not last_batch.reqs or not last_batch.forward_mode.is_extend():
            return
        stay = [index for index, req in enumerate(last_batch.reqs) if id(req) not in self.legs or req is chunked]
        if len(stay) < len(last_batch.reqs):
            last_batch.filter_batch(keep_indices=stay)
            running_batch.batch_is_full = False

    def after_pass(self) -> None:
        """The host has chosen: who was admitted, who was taken out of the queue by the host, and a chunk to send."""
        if not self.legs:
            return
        queued = self._in(SendState.QUEUED)
        if queued:
            waiting = set(map(id, self._scheduler.waiting_queue))
            follow = functools.partial(self._follow_queued, waiting)
            self._faults.for_each(queued, follow, "following a prefill part", self._fail)
        chunk = self._chunk
        if chunk is not None and not self._scheduler.enable_overlap and chunk.state is SendState.PREFILL:
            self._send(chunk, chunk.launched_tokens)  # its result is in; the host has cached it just now

    def _follow_queued(self, waiting: set[int], leg: SendLeg) -> None:
        if pool_row(leg.req) is not None:
            leg.move(SendState.PREFILL)
        elif id(leg.req) not in waiting:  # aborted or timed out, and answered, by the host
            self._end(leg)
            self._give_back(leg)

    def on_result(self, batch: Any) -> None:
        """The host has processed a pass: KV of legs in it can go out."""
        if not self.legs or not batch.forward_mode.is_extend():
            return
        legs = [self.legs[id(req)] for req in batch.reqs if id(req) in self.legs]
        self._faults.for_each(legs, self._send_computed, "sending KV", self._fail)

    def _send_computed(self, leg: SendLeg) -> None:
        if leg.state is SendState.LEAVING:
            return
        if leg.state is SendState.QUEUED:  # without overlap its only pass may be over already
            leg.move(SendState.PREFILL)
        if leg.req.output_ids:
            self._finish_prefill(leg)
        elif self._scheduler.enable_overlap:
            self._send(leg, leg.launched_tokens)

    def _finish_prefill(self, leg: SendLeg) -> None:
        if leg.given_up is not None or leg.req.to_finish:
            self._leave(leg, leg.given_up or ABORTED)
            return
        leg.move(SendState.SENDING)
        leg.since_s = self._scheduler.pla_fleet.now_s()
        leg.req.time_stats.set_prefill_transfer_queue_entry_time()
        self._send(leg, None)

    def _send(self, leg: SendLeg, end: int | None) -> None:
        """KV up to ``end`` tokens of the prompt, or the rest of it with the first token."""
        try:
            self._scheduler.send_kv_chunk(leg.req, last_chunk=end is None, end_idx=end)
        except Exception:
            logger.exception("pla_sglang: sending the KV of %s", leg.req.rid)
            self._fail_transfer(leg, "its KV could not be sent")  # it ends when all ranks have seen that

    # -- transfers ---------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Start legs whose decode part has said where the KV goes, end those whose KV is gone or cannot be sent."""
        polled = [leg for leg in self.legs.values() if leg.state is not SendState.LEAVING and leg.given_up is None]
        if not polled:
            return
        outcomes = calls.poll_senders(self._scheduler, [leg.req.disagg_kv_sender for leg in polled])
        steps = zip(polled, outcomes, strict=True)
        self._faults.for_each(
            steps, lambda step: self._follow(*step), "following a prefill part", lambda step: self._fail(step[0])
        )

    def _follow(self, leg: SendLeg, outcome: SendPoll) -> None:
        if leg.state is SendState.HANDSHAKE:
            if outcome is SendPoll.ASKED:
                self._start(leg)
            elif outcome is SendPoll.FAILED:
                self._end_unasked(leg)
            elif outcome is not SendPoll.OPEN:  # nothing was sent of this leg yet
                self._fail_transfer(leg, f"room {leg.req.bootstrap_room} is in use")
        elif outcome is SendPoll.FAILED:
            self._tell_receivers(leg)  # the host forgets who they are when it is asked what has failed
            failed = f"Prefill transfer failed for request {leg.req.rid}"
            self.give_up(leg, calls.explain_failure(leg.req.disagg_kv_sender, failed))
        elif outcome is SendPoll.DONE and leg.state is SendState.SENDING:
            self._complete(leg)

    def _start(self, leg: SendLeg) -> None:
        """It enters the host's queue, unless this end holds its share of memory: then it waits on."""
        req = leg.req
        if req.metadata_buffer_index < 0 and not self._caps.has_room(self.list_held(), len(req.origin_input_ids)):
            return
        if not self._queue.ensure_metadata_buffer(req):
            return
        leg.move(SendState.QUEUED)
        self._queue.queue = [other for other in self._queue.queue if other is not req]
        self._scheduler.waiting_queue.append(req)
        self._queue.finalize_bootstrap(req)
        req.time_stats.set_wait_queue_entry_time()

    def _end_unasked(self, leg: SendLeg) -> None:
        """Its handshake has failed: the host answers it."""
        self._end(leg)
        self.failed += 1
        steps = (
            functools.partial(self._tell_receivers, leg),
            functools.partial(self._scheduler.handle_bootstrap_failure, leg.req),
            functools.partial(self._give_back, leg),
        )
        self._faults.run_all(steps, "ending a prefill part without a handshake")

    def _complete(self, leg: SendLeg) -> None:
        req = leg.req
        self._end(leg)
        self.sent += 1
        steps = (
            functools.partial(calls.release_kv, self._scheduler, req),
            functools.partial(calls.end_sent, self._scheduler, req),
            req.disagg_kv_sender.clear,
            functools.partial(calls.free_metadata, self._scheduler, req),
        )
        self._faults.run_all(steps, "ending a prefill part whose KV is gone")

    # -- giving up ---------------------------------------------------------------------------------------------------

    def give_up(self, leg: SendLeg, reason: str) -> None:
        """End a leg with an error as soon as that is safe. One that computes ends with the pass under way."""
        req, scheduler = leg.req, self._scheduler
        if leg.state in (SendState.HANDSHAKE, SendState.QUEUED):
            scheduler.waiting_queue = [other for other in scheduler.waiting_queue if other is not req]
            self._end(leg)
            self.failed += reason != ABORTED
            self._end_with(leg, reason, functools.partial(self._give_back, leg))
        elif leg.state is SendState.PREFILL and not req.output_ids:
            leg.given_up = leg.given_up or reason
            req.disagg_kv_sender.abort()
        elif leg.state in (SendState.PREFILL, SendState.SENDING):
            self._leave(leg, reason)  # of the former the pass was over when an exception came

    def abort(self, matches: Callable[[str], bool], fault: str | None = None) -> None:
        """Client aborts. The host has dealt with its own queue already.

        Args:
            fault: it is no client's: what has befallen these legs. They end with 500.
        """
        met = [leg for leg in list(self.legs.values()) if matches(leg.req.rid)]
        # One in the host's queue was taken out of it and answered by the host; ``after_pass`` sees that.
        over = {SendState.LEAVING} if fault is not None else {SendState.QUEUED, SendState.LEAVING}
        ending = [leg for leg in met if leg.state not in over]
        self._faults.for_each(ending, lambda leg: self.give_up(leg, fault or ABORTED), "aborting a prefill part")
        if id(self._scheduler._pending_chunked_abort_req) in self.legs:
            self._scheduler._pending_chunked_abort_req = None  # the host would free its pages under its transfer

    def expire(self, *, waiting_s: float, sending_s: float) -> None:
        """Legs whose handshake has taken since before ``waiting_s``, and whose transfer has since ``sending_s``.

        Clocks of ranks differ, so a leg only fails here; it ends when all ranks have seen that.
        """
        for leg in self._in(SendState.HANDSHAKE):
            if leg.since_s < waiting_s:
                self._fail_transfer(leg, "Request waiting timeout reached.")
        for leg in self._in(SendState.SENDING):
            if leg.since_s < sending_s:
                self._fail_transfer(leg, "Request running timeout reached.")

    def _fail(self, leg: SendLeg) -> None:
        """After an exception with it, on this rank or on all."""
        self._fail_transfer(leg, FAULT)

    def _fail_transfer(self, leg: SendLeg, reason: str) -> None:
        leg.req.disagg_kv_sender.abort()
        self._queue.kv_manager.failure_records[leg.req.bootstrap_room] = reason

    def _end_chunk(self, leg: SendLeg, reason: str) -> None:
        """Between two passes: no further chunk of a leg that was given up."""
        self._scheduler.chunked_req = None
        if leg.state is SendState.QUEUED:
            leg.move(SendState.PREFILL)
        self._leave(leg, reason)

    def _leave(self, leg: SendLeg, reason: str) -> None:
        """Answer now, free the pages when no worker reads them any more."""
        req = leg.req
        leg.move(SendState.LEAVING)
        self.failed += 1
        req.disagg_kv_sender.abort()
        req.to_finish = None
        fence = place_fence(self._queue.kv_manager)
        self._deferred.hold(
            len(req.origin_input_ids),
            is_through=lambda: fence.passed,
            release=functools.partial(self._release, leg),
            now_s=self._scheduler.pla_fleet.now_s(),
        )
        self._end_with(leg, reason)

    def _release(self, leg: SendLeg) -> None:
        self._end(leg)
        steps = [functools.partial(self._give_back, leg)]
        if pool_row(leg.req) is not None:
            steps.append(functools.partial(calls.release_kv, self._scheduler, leg.req, keep_prefix=False))
        self._faults.run_all(steps, "freeing what a prefill part holds")

    def _end_with(self, leg: SendLeg, reason: str, *steps: Callable[[], None]) -> None:
        """Tell everybody who waits; an abort is ordered at both instances. Then take ``steps``."""
        told = () if reason == ABORTED else (functools.partial(self._tell_receivers, leg),)
        answer = functools.partial(self._answer, leg.req, reason)
        self._faults.run_all((answer, *told, *steps), "giving up a prefill part")

    def _answer(self, req: Any, reason: str) -> None:
        """Tell the front that the request has ended without success."""
        if req.finished():
            return
        if reason == ABORTED:
            calls.end_aborted(self._scheduler, req, reason)
            return
        logger.warning("pla_sglang: %s", reason)
        calls.end_with_error(self._scheduler, req, reason, HTTPStatus.INTERNAL_SERVER_ERROR)

    def _tell_receivers(self, leg: SendLeg) -> None:
        """Whoever has asked for the KV of a leg that has failed need not wait on."""
        room, manager = leg.req.bootstrap_room, self._queue.kv_manager
        for receiver in list(manager.transfer_infos.get(room, {}).values()):
            send_refusal(manager, (receiver.endpoint, receiver.dst_port), room)

    def _give_back(self, leg: SendLeg) -> None:
        """The sender's entry and the metadata buffer of a leg that no transfer reads."""
        leg.req.disagg_kv_sender.abort()
        give_back(self._scheduler, self._queue.kv_manager, leg.req)

    def _in(self, *states: SendState) -> list[SendLeg]:
        return [leg for leg in self.legs.values() if leg.state in states]

    def _end(self, leg: SendLeg) -> None:
        """It is in no list of this end any more, nor in its handshake."""
        leg.move(SendState.ENDED)
        self.legs.pop(id(leg.req), None)
        self._queue.queue = [other for other in self._queue.queue if other is not leg.req]
        self._queue.rooms.end(leg.req.bootstrap_room)
