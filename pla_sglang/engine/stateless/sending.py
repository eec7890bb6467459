"""The sending end: prefill legs, from their arrival until their KV is gone.

A leg runs in the host's aggregated loop like any request. Two things keep the loop from ending it with its first token:
its own ``update_finish_state`` never says so, and after its last chunk was launched it is taken out of the batch before
the host would let it decode. It ends when its KV has been sent, as on a prefill instance.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from pla_sglang.engine.stateless import host
from pla_sglang.engine.stateless.fence import Fence, place_fence
from pla_sglang.engine.stateless.host import Outcome
from pla_sglang.engine.stateless.legs import SendLeg, SendState
from pla_sglang.engine.stateless.quarantine import Quarantine
from pla_sglang.engine.stateless.rooms import UsedRooms, forget_room
from pla_sglang.errors import PlaError

logger = logging.getLogger(__name__)

ABORTED = "Aborted"


class GivenUpError(PlaError):
    """The decode leg of a prefill leg that comes now has given up already."""


def _ends_with_its_transfer(new_accepted_len: int = 1) -> None:
    """In place of a prefill leg's ``update_finish_state``."""


class Sender:
    """Owned by the scheduler thread.

    Args:
        queue: legs before their handshake; ``may_start`` is set here.
        used: rooms of legs are told there when they come.
        cap_tokens, cap_requests: KV and request rows that legs may hold; a single leg may exceed the first.
    """

    def __init__(
        self,
        scheduler: Any,
        queue: Any,
        quarantine: Quarantine,
        *,
        used: UsedRooms,
        cap_tokens: int,
        cap_requests: int,
    ) -> None:
        self._scheduler = scheduler
        self._queue = queue
        self._quarantine = quarantine
        self._used = used
        self._cap_tokens = cap_tokens
        self._cap_requests = cap_requests
        self._chunk: SendLeg | None = None  # its next chunk is due in the present pass
        self.legs: dict[int, SendLeg] = {}  # by id of the request, which the leg holds
        self.sent = self.failed = 0
        queue.may_start = self._may_start

    # -- a leg comes -----------------------------------------------------------------------------------------------

    def add(self, req: Any, now_s: float) -> None:
        """Take over a request whose KV is wanted elsewhere.

        Raises:
            GivenUpError: on this rank, and then it is to be refused on all.
        """
        scheduler = self._scheduler
        if scheduler._abort_on_queued_limit(req):
            return
        if host.has_failed(self._queue.kv_manager, req.bootstrap_room):
            raise GivenUpError
        self._used.add(req.bootstrap_room)
        req.update_finish_state = _ends_with_its_transfer
        req.stream = False  # one answer, when the KV is gone
        self._queue.add(req, scheduler.model_config.num_key_value_heads)
        if not req.finished():  # too long for the pool: answered
            req.time_stats.set_prefill_bootstrap_queue_entry_time()
            self.legs[id(req)] = SendLeg(req, now_s)

    def forget(self, req: Any) -> None:
        """A request that could not be taken over, on this rank or another: it holds nothing."""
        self._queue.queue = [other for other in self._queue.queue if other is not req]
        if self.legs.pop(id(req), None) is not None:
            req.disagg_kv_sender.abort()
            req.disagg_kv_sender.clear()
        self._forget_room(req.bootstrap_room)

    def is_leg(self, req: Any) -> bool:
        return id(req) in self.legs

    @property
    def held_tokens(self) -> int:
        """KV tokens that legs hold or are about to take; prompts as a whole, whatever of them the cache has."""
        return sum(len(leg.req.origin_input_ids) for leg in self._holding())

    def _holding(self) -> list[SendLeg]:
        """Legs that were let start: the host gives such a metadata buffer first."""
        return [
            leg
            for leg in self.legs.values()
            if leg.state is not SendState.HANDSHAKE or leg.req.metadata_buffer_index >= 0
        ]

    def _may_start(self, req: Any) -> bool:
        holding = self._holding()
        if not holding:
            return True
        tokens = sum(len(leg.req.origin_input_ids) for leg in holding) + len(req.origin_input_ids)
        return len(holding) < self._cap_requests and tokens <= self._cap_tokens

    # -- around the host's choice of the next batch ----------------------------------------------------------------

    def before_pass(self, running_batch: Any, last_batch: Any) -> None:
        """Legs that were in the last batch leave it, so that the host does not let them decode."""
        if not self.legs:
            self._chunk = None
            return
        self._end_given_up_chunk()
        chunked = self._scheduler.chunked_req
        self._chunk = None if chunked is None else self.legs.get(id(chunked))
        if self._chunk is not None:
            self._chunk.launched_tokens = min(chunked.extend_range.end, len(chunked.origin_input_ids))
        if last_batch is None or not last_batch.reqs or not last_batch.forward_mode.is_extend():
            return
        stay = [index for index, req in enumerate(last_batch.reqs) if id(req) not in self.legs or req is chunked]
        if len(stay) < len(last_batch.reqs):
            last_batch.filter_batch(keep_indices=stay)
            running_batch.batch_is_full = False

    def start_bootstrapped(self) -> None:
        """Legs whose decode leg has said where the KV goes enter the host's queue."""
        if not self._queue.queue:
            return
        for req in self._queue.pop_bootstrapped():
            leg = self.legs.get(id(req))
            if leg is None:
                continue  # forgotten
            leg.move(SendState.QUEUED)
            self._scheduler.waiting_queue.append(req)
        for leg in self._in(SendState.HANDSHAKE):
            if leg.req.finished():  # the host has answered: its handshake failed
                self._end(leg)
                self.failed += 1

    def after_pass(self) -> None:
        """The host has chosen: who was admitted, who was taken out of the queue by the host, and a chunk to send."""
        if not self.legs:
            return
        queued = self._in(SendState.QUEUED)
        if queued:
            waiting = set(map(id, self._scheduler.waiting_queue))
            for leg in queued:
                if leg.req.req_pool_idx is not None:
                    leg.move(SendState.PREFILL)
                elif id(leg.req) not in waiting:  # aborted or timed out, and answered, by the host
                    self._give_back(leg)
                    self._end(leg)
        chunk = self._chunk
        if chunk is not None and not self._scheduler.enable_overlap and chunk.state is SendState.PREFILL:
            self._send(chunk, chunk.launched_tokens)  # its result is in; the host has cached it just now

    def on_result(self, batch: Any) -> None:
        """The host has processed a pass: KV of legs in it can go out."""
        if not self.legs or not batch.forward_mode.is_extend():
            return
        for req in batch.reqs:
            leg = self.legs.get(id(req))
            if leg is None or leg.state is SendState.LEAVING:
                continue
            if leg.state is SendState.QUEUED:  # without overlap its only pass may be over already
                leg.move(SendState.PREFILL)
            if req.output_ids:
                self._finish_prefill(leg)
            elif self._scheduler.enable_overlap:
                self._send(leg, leg.launched_tokens)

    def _finish_prefill(self, leg: SendLeg) -> None:
        if leg.given_up is not None or leg.req.to_finish:
            self._leave(leg, leg.given_up or ABORTED)
            return
        leg.move(SendState.SENDING)
        leg.since_s = self._scheduler.pla_stateless.now_s()
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
        """End legs whose KV is gone, and those that cannot be sent any more."""
        states = (SendState.QUEUED, SendState.PREFILL, SendState.SENDING)
        polled = [leg for leg in self._in(*states) if leg.given_up is None]
        if not polled:
            return
        outcomes = host.poll_senders(self._scheduler, [leg.req.disagg_kv_sender for leg in polled])
        for leg, outcome in zip(polled, outcomes, strict=True):
            if outcome is Outcome.DONE and leg.state is SendState.SENDING:
                self._complete(leg)
            elif outcome is Outcome.FAILED:
                self.give_up(leg, self._failure(leg))

    def _complete(self, leg: SendLeg) -> None:
        req = leg.req
        host.release_kv(self._scheduler, req)
        host.end_sent(self._scheduler, req)
        req.disagg_kv_sender.clear()
        host.free_metadata(self._scheduler, req)
        self._end(leg)
        self.sent += 1

    def _failure(self, leg: SendLeg) -> str:
        try:
            leg.req.disagg_kv_sender.failure_exception()
        except Exception as error:
            return f"Prefill transfer failed for request {leg.req.rid}: {error}"
        return f"Prefill transfer failed for request {leg.req.rid}"

    # -- giving up ---------------------------------------------------------------------------------------------------

    def give_up(self, leg: SendLeg, reason: str) -> None:
        """End a leg with an error as soon as that is safe. One that computes ends with the pass under way."""
        req, scheduler = leg.req, self._scheduler
        if leg.state is SendState.HANDSHAKE:
            req.disagg_kv_sender.abort()
            self._queue.queue = [other for other in self._queue.queue if other is not req]
            self._give_back(leg)
            self._answer(req, reason)
            self._end(leg)
        elif leg.state is SendState.QUEUED:
            scheduler.waiting_queue = [other for other in scheduler.waiting_queue if other is not req]
            self._give_back(leg)
            self._answer(req, reason)
            self._end(leg)
        elif leg.state is SendState.PREFILL:
            leg.given_up = leg.given_up or reason
            req.disagg_kv_sender.abort()
        elif leg.state is SendState.SENDING:
            self._leave(leg, reason)

    def abort(self, matches: Callable[[str], bool]) -> int:
        """Client aborts: how many legs they meet. The host has dealt with its own queue already."""
        met = [leg for leg in list(self.legs.values()) if matches(leg.req.rid)]
        for leg in met:
            # One in the host's queue was taken out of it and answered by the host; ``after_pass`` sees that.
            if leg.state not in (SendState.QUEUED, SendState.LEAVING):
                self.give_up(leg, ABORTED)
        if self.is_leg(self._scheduler._pending_chunked_abort_req):
            self._scheduler._pending_chunked_abort_req = None  # the host would free its pages under its transfer
        return len(met)

    def expire(self, *, waiting_s: float, sending_s: float | None) -> None:
        """Legs whose handshake has taken since before ``waiting_s``, and whose transfer has since ``sending_s``.

        Clocks of ranks differ, so a leg only fails here; it ends when all ranks have seen that.
        """
        for leg in self._in(SendState.HANDSHAKE):
            if leg.since_s < waiting_s:
                self._fail_transfer(leg, "Request waiting timeout reached.")
        for leg in self._in(SendState.SENDING):
            if sending_s is not None and leg.since_s < sending_s:
                self._fail_transfer(leg, "Request running timeout reached.")

    def _fail_transfer(self, leg: SendLeg, reason: str) -> None:
        leg.req.disagg_kv_sender.abort()
        self._queue.kv_manager.failure_records[leg.req.bootstrap_room] = reason

    def _end_given_up_chunk(self) -> None:
        """Between two passes: no further chunk of a leg that was given up."""
        chunked = self._scheduler.chunked_req
        leg = None if chunked is None else self.legs.get(id(chunked))
        if leg is not None and leg.given_up is not None:
            self._scheduler.chunked_req = None
            if leg.state is SendState.QUEUED:
                leg.move(SendState.PREFILL)
            self._leave(leg, leg.given_up)

    def _leave(self, leg: SendLeg, reason: str) -> None:
        """Answer now, free the pages when no worker reads them any more."""
        req = leg.req
        leg.move(SendState.LEAVING)
        req.disagg_kv_sender.abort()
        req.to_finish = None
        self._answer(req, reason)
        self.failed += 1
        fence = place_fence(self._queue.kv_manager)
        self._quarantine.hold(
            len(req.origin_input_ids),
            is_through=functools.partial(_has_passed, fence),
            release=functools.partial(self._release, leg),
            now_s=self._scheduler.pla_stateless.now_s(),
        )

    def _release(self, leg: SendLeg) -> None:
        if leg.req.req_pool_idx is not None:
            host.release_kv(self._scheduler, leg.req, keep_prefix=False)
        self._give_back(leg)
        self._end(leg)

    def _answer(self, req: Any, reason: str) -> None:
        """Tell the front that the request has ended without success."""
        if req.finished():
            return
        if reason == ABORTED:
            host.end_aborted(self._scheduler, req, reason)
            return
        logger.warning("pla_sglang: %s", reason)
        host.end_with_error(self._scheduler, req, reason, HTTPStatus.INTERNAL_SERVER_ERROR)

    def _give_back(self, leg: SendLeg) -> None:
        """The sender's entry and the metadata buffer of a leg that no transfer reads."""
        leg.req.disagg_kv_sender.abort()
        leg.req.disagg_kv_sender.clear()
        self._forget_room(leg.req.bootstrap_room)
        host.free_metadata(self._scheduler, leg.req)

    def _forget_room(self, room: int) -> None:
        manager = self._queue.kv_manager
        manager.exceptions.pop(room, None)
        forget_room(manager, room)

    def _in(self, *states: SendState) -> list[SendLeg]:
        return [leg for leg in self.legs.values() if leg.state in states]

    def _end(self, leg: SendLeg) -> None:
        leg.move(SendState.ENDED)
        self.legs.pop(id(leg.req), None)


def _has_passed(fence: Fence) -> bool:
    return fence.passed
