"""The receiving end: decode parts, until they join the running batch. From then on they are requests like any other."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from pla_sglang.fleet.stateless.host import calls
from pla_sglang.fleet.stateless.host.adapters import split_joining
from pla_sglang.fleet.stateless.host.calls import Agree
from pla_sglang.fleet.stateless.transfer.deferred_free import DeferredFree
from pla_sglang.fleet.stateless.transfer.fence import Acknowledged
from pla_sglang.fleet.stateless.transfer.legs import (
    FAULT_ATTRIBUTE,
    SOURCE_ATTRIBUTE,
    Uncounted,
    came_with_its_kv,
    goes_on,
)
from pla_sglang.fleet.stateless.transfer.peers import Address, Peer, PeerBook
from pla_sglang.fleet.stateless.transfer.rooms import announce_pull
from pla_sglang.plugin.engine.faults import Faults
from pla_sglang.plugin.engine.host.requests import pool_row
from pla_sglang.plugin.engine.host.transfers import forget_received, is_acknowledged

logger = logging.getLogger(__name__)

NO_KV = "its source has no KV for it under this room"


class Receiver:
    """Owned by the scheduler thread.

    Args:
        queue: legs without memory yet (queues.ReceiveQueue), with what all ranks say together.
        transfers: legs whose KV is on its way (queues.TransferQueue).
    """

    def __init__(
        self,
        scheduler: Any,
        queue: Any,
        transfers: Any,
        *,
        deferred: DeferredFree,
        book: PeerBook,
        acknowledged: Acknowledged,
        faults: Faults,
    ) -> None:
        self._scheduler = scheduler
        self._queue, self._transfers = queue, transfers
        self._deferred = deferred
        self._book = book
        self._acknowledged = acknowledged
        self._agree: Agree = queue.agree
        self._faults = faults
        self._deferred_rooms: set[int] = set()
        self.ready: list[Any] = []  # KV is here; owned by this list until they are admitted
        self.received = self.failed = self.pulled = 0

    def add(self, req: Any) -> None:
        """A request whose KV another instance computes."""
        setattr(req, SOURCE_ATTRIBUTE, self._book.at(req.bootstrap_host, req.bootstrap_port))
        self._queue.add(req)
        if not req.finished():  # too long for the pool: answered
            calls.note_receiving(req)

    def forget(self, req: Any) -> None:
        """A request that could not be taken over, on this rank or another: it holds nothing."""
        for entry in (entry for entry in self._queue.queue if entry.req is req):
            entry.kv_receiver.abort()
            entry.kv_receiver.clear()
            manager = self._queue.kv_manager
            manager.failure_records.pop(req.bootstrap_room, None)
            manager.addr_to_rooms_tracker[entry.kv_receiver.bootstrap_addr].discard(req.bootstrap_room)
        self._queue.queue = [entry for entry in self._queue.queue if entry.req is not req]
        self._queue.pending_reqs = [entry for entry in self._queue.pending_reqs if entry.req is not req]

    def waits_for(self, room: int) -> bool:
        """Tells whether KV of ``room`` is awaited here, or may still be written to given-up pages.

        What the host knows of a transfer it knows by the room: of two, one would get the KV and the other the word.
        """
        return room in self._deferred_rooms or any(entry.req.bootstrap_room == room for entry in self._list_entries())

    def _list_entries(self) -> list[Any]:
        """Legs whose KV is not here yet."""
        return [*self._queue.queue, *self._transfers.queue]

    def list_sources(self) -> set[Address]:
        """Who is connected to, or will be, for the KV of legs that are here."""
        return {(entry.req.bootstrap_host, entry.req.bootstrap_port) for entry in self._list_entries()}

    def requests_with_memory(self) -> list[Any]:
        """They will want memory for each further token, and the host does not know of them."""
        return [*(entry.req for entry in self._transfers.queue), *self.ready]

    def list_here(self) -> list[Any]:
        """Requests that are here and do not run."""
        return [*(entry.req for entry in self._list_entries()), *self.ready]

    def state(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "legs": {
                "connecting": len(self._queue.queue),
                "transferring": len(self._transfers.queue),
                "ready": len(self.ready),
            },
            "kv_tokens": sum(map(_count_tokens, self.requests_with_memory())),
            "received": self.received,
            "reserved": dict(self._queue.reservations.reasons),
            "failed": self.failed,
        }

    def pump(self, paused: int = 0) -> None:
        """One step of every leg: connect, reserve memory, watch the transfer.

        ``paused``: requests that are held here and may go on.
        """
        if self._queue.queue:
            held = self.requests_with_memory()
            started, failed = self._queue.reserve(Uncounted(sum(map(_count_tokens, held)), len(held), paused))
            self._transfers.extend(started)
            self.failed += len(failed)
            self._end_broken(self._queue.take_broken())
            pulls = [entry.kv_receiver for entry in started if goes_on(entry.req)]
            self._faults.for_each(pulls, announce_pull, "announcing a pull")
        if self._transfers.queue:
            for entry in self._transfers.queue:
                if self._acknowledged.is_refused(entry.req.bootstrap_room):
                    self._fail(entry, NO_KV)
            self._take_done(self._transfers.pop_transferred())
            self._take_failed(self._transfers.take_failed())

    def _take_done(self, reqs: list[Any]) -> None:
        """KV is here for them, and no queue of the host has them any more.

        It is looked at before it is used: a request that it does not belong to ends, on all ranks where one says so,
        and nothing of it is cached.
        """
        if not reqs:
            return
        whole = [not getattr(req, FAULT_ATTRIBUTE, False) for req in reqs]
        misfits = [self._find_misfit(req) if is_whole else None for req, is_whole in zip(reqs, whole, strict=True)]
        said = self._agree([*whole, *(misfit is None for misfit in misfits)])
        judged = list(zip(reqs, misfits, said[: len(reqs)], said[len(reqs) :], strict=True))
        done = [req for req, _, is_whole, fits in judged if is_whole and fits]
        self.ready += done
        self.received += len(done)
        self.pulled += sum(map(goes_on, done))
        over = [(req, misfit, is_whole) for req, misfit, is_whole, fits in judged if not (is_whole and fits)]
        self.failed += len(over)
        self._faults.for_each(over, lambda one: self._answer_useless(*one), "ending a request without KV of its own")
        self._faults.for_each(over, lambda one: self._free(one[0]), "freeing its KV")

    def _find_misfit(self, req: Any) -> str | None:
        """Why the KV that has come for ``req`` is not its own, on this rank."""
        try:
            if not came_with_its_kv(req):  # the paused request has gone on since its tokens were counted
                return "it is of another answer"
            misfit: str | None = self._transfers.find_misfit(req)
            return misfit
        except Exception:
            self._faults.note("comparing what KV is of")
            return "what it is of could not be told"

    def take_ready(self, places: int, may_join: Callable[[Any], bool]) -> list[Any]:
        """At most ``places`` requests that ``may_join`` the running batch now: the caller's from here on."""
        joining, self.ready = split_joining(self._queue.reservations.sort_ready(self.ready), places, may_join)
        return joining

    # -- giving up ---------------------------------------------------------------------------------------------------

    def abort(self, matches: Callable[[str], bool], fault: str | None = None) -> None:
        """Client aborts. Those that hold a connection end when all ranks have seen it.

        Args:
            fault: it is no client's: what has befallen these legs. They end with 500.
        """
        met = [entry for entry in self._list_entries() if matches(entry.req.rid)]
        self._faults.for_each(met, lambda entry: self._fail(entry, fault), "aborting a decode part")
        over = [req for req in self.ready if matches(req.rid)]
        self.ready = [req for req in self.ready if not matches(req.rid)]
        self.failed += len(over)
        answer = self._answer_aborted if fault is None else self._answer_fault
        self._faults.for_each(over, answer, "answering an aborted decode part")
        self._faults.for_each(over, self._free, "freeing its KV")

    def expire(self, *, legs_s: float, pulls_s: float) -> None:
        """Those that have waited for memory or for their KV since before then."""
        for entry in self._list_entries():
            before_s = pulls_s if goes_on(entry.req) else legs_s
            if getattr(entry, "pla_since_s", before_s) < before_s:
                self._fail(entry, "Request waiting timeout reached.")

    def _fail(self, entry: Any, reason: str | None) -> None:
        """On this rank: it ends when all have seen that. ``reason`` None: the host's own, that of an ordered abort."""
        entry.kv_receiver.abort()
        if reason is not None:
            self._queue.kv_manager.failure_records[entry.req.bootstrap_room] = reason

    def _end_broken(self, entries: Sequence[Any]) -> None:
        """Legs with which the host has raised when it reserved memory for them."""
        self.failed += len(entries)
        self._faults.for_each(entries, self._keep_pages, "keeping the pages of a decode part")
        self._faults.for_each((entry.req for entry in entries), self._answer_fault, "answering a decode part")
        receivers = [entry.kv_receiver for entry in entries if entry.kv_receiver is not None]
        self._faults.for_each(receivers, lambda receiver: receiver.abort(), "telling the source of a failed leg")

    def _answer_fault(self, req: Any) -> None:
        if not req.finished():
            reason = f"Decode transfer failed for request {req.rid}: an exception in its instance"
            calls.end_with_error(self._scheduler, req, reason, HTTPStatus.INTERNAL_SERVER_ERROR)

    def _answer_useless(self, req: Any, misfit: str | None, is_whole: bool) -> None:
        """``misfit`` None: another rank has said that it does not fit."""
        if not is_whole:
            self._answer_fault(req)
            return
        reason = f"the KV of room {req.bootstrap_room} does not fit: {misfit or 'another rank says so'}"
        logger.warning("pla_sglang: %s: %s", req.rid, reason)
        calls.end_with_error(self._scheduler, req, reason, HTTPStatus.CONFLICT)

    def _answer_aborted(self, req: Any) -> None:
        calls.end_aborted(self._scheduler, req, "Aborted")

    def _free(self, req: Any) -> None:
        calls.release_kv(self._scheduler, req, keep_prefix=False)

    def _take_failed(self, entries: Sequence[Any]) -> None:
        """Answer now; the pages stay until the sender is known to be through."""
        if not entries:
            return
        self.failed += len(entries)
        self._faults.for_each(entries, self._keep_pages, "keeping the pages of a failed transfer")
        served = self._agree([not self._acknowledged.is_refused(entry.req.bootstrap_room) for entry in entries])
        ended = zip(entries, served, strict=True)
        self._faults.for_each(ended, lambda one: self._answer_failed(*one), "answering a failed decode part")
        # Behind the answer: it records another reason. It says nothing to a source that was told before.
        self._faults.for_each(entries, lambda entry: entry.kv_receiver.abort(), "telling the source of a failed leg")

    def _answer_failed(self, entry: Any, is_served: bool) -> None:
        """``is_served``: no rank has heard that the room is not held."""
        req, receiver = entry.req, entry.kv_receiver
        reason = calls.explain_failure(receiver, f"Decode transfer failed for request {req.rid}")
        logger.warning("pla_sglang: %s", reason)
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        if not is_served and goes_on(req):
            status, reason = HTTPStatus.GONE, f"room {req.bootstrap_room} is not held at {receiver.bootstrap_addr}"
        if not req.finished():
            calls.end_with_error(self._scheduler, req, reason, status)

    def _keep_pages(self, entry: Any) -> None:
        req, source = entry.req, getattr(entry.req, SOURCE_ATTRIBUTE)
        self._deferred_rooms.add(req.bootstrap_room)
        self._deferred.hold(
            _count_tokens(req),
            is_through=functools.partial(self._is_through, entry.kv_receiver, req.bootstrap_room, source),
            release=functools.partial(self._release, entry),
            now_s=time.monotonic(),
        )

    def _is_through(self, receiver: Any, room: int, source: Peer) -> bool:
        """The sender has said so, by its host or by us, or its process is not there any more."""
        return self._acknowledged.has(room) or is_acknowledged(receiver) or self._book.is_replaced(source)

    def _release(self, entry: Any) -> None:
        """The end of an entry that failed: pages, row, metadata buffer, and what the host's manager has of its room."""
        self._deferred_rooms.discard(entry.req.bootstrap_room)
        steps = (self._release_pages, self._release_slot, self._forget_transfer)
        self._faults.run_all([functools.partial(step, entry) for step in steps], "freeing what a decode part held")

    def _release_pages(self, entry: Any) -> None:
        if pool_row(entry.req) is not None:
            calls.release_kv(self._scheduler, entry.req, keep_prefix=False)

    def _release_slot(self, entry: Any) -> None:
        slot, transfers = entry.metadata_buffer_index, self._transfers
        if slot < 0:
            return
        transfers.metadata_buffers.bootstrap_room[slot] = 0  # as the host: the next owner must not see a stale room
        transfers.req_to_metadata_buffer_idx_allocator.free(slot)

    def _forget_transfer(self, entry: Any) -> None:
        room, manager = entry.req.bootstrap_room, self._queue.kv_manager
        self._acknowledged.forget(room)
        forget_received(manager, room)
        manager.failure_records.pop(room, None)
        if entry.kv_receiver is not None:
            entry.kv_receiver.clear()
            manager.addr_to_rooms_tracker[entry.kv_receiver.bootstrap_addr].discard(room)

    def forget_said(self) -> None:
        """What senders have said of rooms whose transfer is neither under way nor over with pages kept."""
        under_way = {entry.req.bootstrap_room for entry in self._transfers.queue}
        self._acknowledged.keep_only(under_way | self._deferred_rooms)


def _count_tokens(req: Any) -> int:
    return len(req.origin_input_ids) + len(req.output_ids)
