"""The host's three PD queues with the budgets and the ownership of a stateless instance.

Subclasses of SGLang's: what they override is named in docs/protocol.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeTransferQueue
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
from sglang.srt.disaggregation.utils import MetadataBuffers

from pla_sglang.fleet.stateless.host.calls import Agree
from pla_sglang.fleet.stateless.transfer.connecting import PeerConnector
from pla_sglang.fleet.stateless.transfer.fingerprints import (
    UNSAID,
    Fingerprint,
    Fingerprints,
    find_misfit,
    read_fingerprint,
    write_fingerprint,
)
from pla_sglang.fleet.stateless.transfer.legs import FAULT_ATTRIBUTE, SOURCE_ATTRIBUTE, Caps, Uncounted
from pla_sglang.fleet.stateless.transfer.peers import FAILED, PeerBook, PeerState
from pla_sglang.fleet.stateless.transfer.reservations import Reservations
from pla_sglang.fleet.stateless.transfer.rooms import UsedRooms
from pla_sglang.plugin.engine.faults import Faults
from pla_sglang.plugin.engine.host.requests import extend_end, pool_row
from pla_sglang.plugin.engine.host.transfers import wants_kv

SENT_ATTRIBUTE = "pla_sent"  # of a decode part whose KV is here: the fingerprint that came with it


class SendQueue(PrefillBootstrapQueue):
    """Prefill parts before their decode part has said where the KV goes. ``rooms``: those that this instance has
    used."""

    def __init__(self, **host_arguments: Any) -> None:
        self.rooms = UsedRooms()
        super().__init__(**host_arguments)

    def finalize_bootstrap(self, req: Any) -> bool:
        """A receiver with more of its prompt than there is of ``req``, or that lacks nothing, is of another prompt.

        The host would send it nothing, ever. It gets the fingerprint alone, which says so.
        """
        manager, room, tokens = self.kv_manager, req.bootstrap_room, len(req.origin_input_ids)
        infos = list(manager.transfer_infos.get(room, {}).values())
        pages = [len(info.dst_kv_indices) for info in infos if wants_kv(info)]
        has_all = bool(pages) and not any(pages)
        if has_all or manager.req_to_decode_prefix_len.get(room, 0) > tokens:
            manager.req_to_decode_prefix_len[room] = tokens
        return bool(super().finalize_bootstrap(req))


class SendBuffers(MetadataBuffers):
    """Metadata buffers of the sending end: they say of what the KV is that goes out with them."""

    def __init__(self, fingerprints: Fingerprints, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fingerprints = fingerprints

    def set_buf(self, req: Any) -> None:
        super().set_buf(req)
        write_fingerprint(self, req.metadata_buffer_index, self._fingerprints.of_kv(req, req.origin_input_ids))


class ReceiveQueue(DecodePreallocQueue):
    """Decode parts before memory is reserved for their KV.

    Args:
        book: who may be received from.
        receiver_class: the host's receiver of its backend.
        caps: what the receiving end may hold; one request alone may exceed the tokens.
        faults: of this process.
    """

    queue: list[Any]
    pending_reqs: list[Any]

    def __init__(
        self, *, book: PeerBook, receiver_class: Any, caps: Caps, agree: Agree, faults: Faults, **host_arguments: Any
    ) -> None:
        self.book, self.caps, self.agree, self.faults = book, caps, agree, faults
        self._held = Uncounted()
        self._fresh_tokens = self._fresh_requests = 0
        self._broken: tuple[Any, ...] = ()
        super().__init__(**host_arguments)
        self.reservations = Reservations(self.scheduler)
        self.connector = PeerConnector(self.kv_manager, receiver_class, book)

    def reserve(self, held: Uncounted) -> tuple[list[Any], list[Any]]:
        """Reserve memory for as many legs as may have it: entries that begin to receive, and those that have failed."""
        self._held = held
        popped: tuple[list[Any], list[Any]] = self.pop_preallocated()
        return popped

    def pop_preallocated(self, *args: Any, **kwargs: Any) -> Any:
        """As the host's, which loses what it has done when one of the queue raises."""
        self._fresh_tokens = self._fresh_requests = 0
        for entry in self.queue:
            entry.pla_since_s = getattr(entry, "pla_since_s", None) or time.monotonic()
        self.queue = self.reservations.begin(self.queue)
        entries = list(self.queue)
        popped = self._try_to_pop(*args, **kwargs)
        if self.agree([popped is not None])[0]:
            return self._let_pass(popped, *args, **kwargs)
        started, failed = self._settle(entries)
        waiting: list[Any] = []
        for entry in list(self.queue):  # those that nothing was done for: each by itself, so that one ends by itself
            self.queue = [entry]
            popped = self._try_to_pop(*args, **kwargs)
            if not self.agree([popped is not None])[0]:
                popped = self._settle([entry])
                self._break(self.queue)
                self.queue = []
            started, failed = started + popped[0], failed + popped[1]
            waiting += self.queue
        self.queue = waiting
        return started, failed

    def _let_pass(self, popped: tuple[list[Any], list[Any]], *args: Any, **kwargs: Any) -> Any:
        """The host stops at the first that has no room: others may go before it now. Returns what was done in all."""
        self.reservations.note_started(popped[0])
        order = self.reservations.let_pass(self.queue)
        if order is None:
            return popped
        self.queue = order
        more = self._try_to_pop(*args, **kwargs)
        if not self.agree([more is not None])[0]:
            more = self._settle(order)
        self.reservations.note_started(more[0])
        return popped[0] + more[0], popped[1] + more[1]

    def _try_to_pop(self, *args: Any, **kwargs: Any) -> Any:
        """None: the host has raised, on this rank.

        Some versions look at adapters here, and count those of the waiting queue: prefills wait in it, and legs would
        wait for them. Ours are looked at as they join the running batch (``AdapterPlaces``).
        """
        scheduler = self.scheduler
        scheduler.enable_lora, enable_lora = False, scheduler.enable_lora
        try:
            return super().pop_preallocated(*args, **kwargs)
        except Exception:
            self.faults.note("reserving memory for decode parts")
            return None
        finally:
            scheduler.enable_lora = enable_lora

    def _settle(self, entries: list[Any]) -> tuple[list[Any], list[Any]]:
        """What became of ``entries`` on all ranks when one raised: who has started, and who has ended.

        Those that nothing was done for stay in the queue. Those that were dealt with in part, or on some ranks only,
        are broken.
        """
        over = self.agree([entry.kv_receiver is None for entry in entries])
        begun = self.agree([bool(getattr(entry.kv_receiver, "started_transfer", False)) for entry in entries])
        clean = self.agree([entry.kv_receiver is not None and pool_row(entry.req) is None for entry in entries])
        self.queue = [entry for entry, fresh in zip(entries, clean, strict=True) if fresh]
        started = [entry for entry, is_begun in zip(entries, begun, strict=True) if is_begun]
        failed = [entry for entry, is_over in zip(entries, over, strict=True) if is_over]
        settled = {id(entry) for entry in (*self.queue, *started, *failed)}
        self._break([entry for entry in entries if id(entry) not in settled])
        left = {id(entry) for entry in self.queue}
        self.pending_reqs = [entry for entry in self.pending_reqs if id(entry) in left]
        return started, failed

    def _break(self, entries: Sequence[Any]) -> None:
        self._broken = (*self._broken, *entries)
        gone = {id(entry) for entry in entries}
        self.pending_reqs = [entry for entry in self.pending_reqs if id(entry) not in gone]

    def take_broken(self) -> tuple[Any, ...]:
        """Entries with which the host has raised, on any rank. They are in no queue; the caller owns them."""
        broken, self._broken = self._broken, ()
        return broken

    def _update_handshake_waiters(self, *args: Any, **kwargs: Any) -> None:
        """As the host's, which answers every failure with 500, and raises where a room is further than its leg."""
        for entry in self.queue:
            if entry.kv_receiver.poll() > KVPoll.WaitingForInput:
                entry.kv_receiver.abort()
        self._doubt_failed()
        before = {id(entry) for entry in self.queue if entry.req.finished()}
        super()._update_handshake_waiters(*args, **kwargs)
        ended = [entry for entry in self.queue if entry.req.finished() and id(entry) not in before]
        if not ended:
            return
        statuses = (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.CONFLICT)  # of which a rank may know for itself alone
        said = self.agree([getattr(entry, "pla_status", None) != status for status in statuses for entry in ended])
        for place, is_unsaid in enumerate(said):
            if not is_unsaid:
                ended[place % len(ended)].req.finished_reason.status_code = statuses[place // len(ended)]

    def _doubt_failed(self) -> None:
        """Legs that have failed on any rank are asked again, on all of them.

        The host asks once more only where it knows of a failure, and then with all ranks. A connection that is lost, or
        a time-out, is known to one rank first: the others would not come to that poll, and nobody would go on.
        """
        if not self.queue or not all(entry.waiting_for_input for entry in self.queue):
            return  # the host asks: all ranks know as much
        fine = self.agree([entry.kv_receiver.conclude_state != KVPoll.Failed for entry in self.queue])
        for entry, sound in zip(self.queue, fine, strict=True):
            entry.waiting_for_input = sound

    def _pre_alloc(self, req: Any, *args: Any, **kwargs: Any) -> Any:
        indices = super()._pre_alloc(req, *args, **kwargs)
        self._fresh_tokens += len(req.origin_input_ids) + len(req.output_ids)
        self._fresh_requests += 1
        return indices

    def _active_req_count(self, extra_reserved_reqs: int = 0) -> int:
        """Requests that grow token by token. The host counts the waiting queue too: here prefills wait in it."""
        growing = len(self.scheduler.running_batch.reqs) + self._held.requests + self._held.paused
        return growing + extra_reserved_reqs

    def _allocatable_token_budgets(self, *args: Any, **kwargs: Any) -> int:
        """As the host's, less what a prefill under way still needs, and never over the cap of this end."""
        budget = int(super()._allocatable_token_budgets(*args, **kwargs))
        chunk = self.scheduler.chunked_req
        if chunk is not None and (computed_tokens := extend_end(chunk)) is not None:
            page = self.token_to_kv_pool_allocator.page_size
            budget -= max(0, len(chunk.origin_input_ids) - computed_tokens) + page
        requests = self._held.requests + self._fresh_requests
        if requests >= self.caps.requests:
            return -1
        if requests:
            budget = min(budget, self.caps.tokens - self._held.tokens - self._fresh_tokens)
        return budget

    def _resolve_prefill_dp_rank(self, req: Any) -> int | None:
        """0 where the peer is connected to already: then a receiver asks nobody. Else it waits for the warming."""
        return 0 if self.connector.is_connected(req.bootstrap_host, req.bootstrap_port) else None

    def _ensure_prefill_info(self, addr_to_reqs: dict[str, list[Any]]) -> tuple[dict[str, list[Any]], list[Any]]:
        """Never asks the network: legs of peers that are still warmed wait, those of failed ones end."""
        ready: dict[str, list[Any]] = {}
        waiting: list[Any] = []
        for address, entries in addr_to_reqs.items():
            req = entries[0].req
            if self.connector.is_connected(req.bootstrap_host, req.bootstrap_port):
                ready[address] = entries
                continue
            peer = self.book.at(req.bootstrap_host, req.bootstrap_port)
            state = self.book.state_of(req.bootstrap_host, req.bootstrap_port)
            if peer is None or state is None or state[0] in FAILED:
                silent = state is not None and state[0] is PeerState.SILENT
                reason = "it is no longer configured" if state is None else state[1]
                for entry in entries:
                    entry.pla_status = HTTPStatus.SERVICE_UNAVAILABLE if silent else HTTPStatus.CONFLICT
                    entry.kv_receiver.abort()
                    self.kv_manager.record_failure(entry.req.bootstrap_room, f"peer at {address}: {reason}")
                continue
            self.connector.connect(peer)  # a connection that was lost meanwhile
            waiting += entries
        return ready, waiting


class TransferQueue(DecodeTransferQueue):
    """Decode parts whose KV is on its way. Failed ones are not freed here: they are handed out with their pages."""

    queue: list[Any]

    def __init__(self, *, fingerprints: Fingerprints, faults: Faults, **host_arguments: Any) -> None:
        self.fingerprints, self.faults = fingerprints, faults
        self._failed: tuple[Any, ...] = ()
        super().__init__(**host_arguments)

    def _commit_transfer_to_req(self, decode_req: Any) -> None:
        """As the host's, which would leave the whole queue behind an exception, with entries that have no receiver."""
        try:
            super()._commit_transfer_to_req(decode_req)
        except Exception:
            self.faults.note(f"taking over the KV of {decode_req.req.rid}")
            setattr(decode_req.req, FAULT_ATTRIBUTE, True)
            decode_req.kv_receiver = None

    def _poll_with_metadata_gate(self) -> list[int]:
        polls = super()._poll_with_metadata_gate()
        self._failed = tuple(entry for entry, poll in zip(self.queue, polls, strict=True) if poll == int(KVPoll.Failed))
        for entry, poll in zip(self.queue, polls, strict=True):
            if poll == int(KVPoll.Success):  # the host clears the buffer as it takes the KV over
                sent = read_fingerprint(self.metadata_buffers, entry.metadata_buffer_index)
                setattr(entry.req, SENT_ATTRIBUTE, sent)
        return [int(KVPoll.Transferring) if poll == int(KVPoll.Failed) else poll for poll in polls]

    def find_misfit(self, req: Any) -> str | None:
        """Why the KV that has come for ``req``, with one token, is not its own on this rank; None: it is."""
        sent: Fingerprint = getattr(req, SENT_ATTRIBUTE, UNSAID)
        wanted = self.fingerprints.of_kv(req, (req.origin_input_ids + req.output_ids)[:-1])
        source = getattr(req, SOURCE_ATTRIBUTE, None)
        return find_misfit(sent, wanted, ours=source is not None and bool(source.incarnation))

    def take_failed(self) -> tuple[Any, ...]:
        """Entries that the last poll found failed, all ranks agreeing. They leave the queue; the caller owns them."""
        failed, self._failed = self._failed, ()
        gone = {id(entry) for entry in failed}
        if failed:
            self.queue = [entry for entry in self.queue if id(entry) not in gone]
        return failed
