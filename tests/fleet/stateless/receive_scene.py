"""The receiving end against a fake host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fakes import FakeRequest

from pla_sglang.fleet.stateless.host import calls
from pla_sglang.fleet.stateless.transfer.deferred_free import DeferredFree
from pla_sglang.fleet.stateless.transfer.legs import Uncounted
from pla_sglang.fleet.stateless.transfer.peers import Peer, PeerBook, PeerConfig
from pla_sglang.fleet.stateless.transfer.receiving import Receiver
from pla_sglang.plugin.engine.faults import Faults

PEER = Peer("b", "10.0.0.2", 9001, "i1")


class FakeReceiver:
    """Of one request."""

    bootstrap_addr = "10.0.0.2:9001"

    def __init__(self) -> None:
        self.aborted = self.cleared = 0

    def abort(self) -> None:
        self.aborted += 1

    def clear(self) -> None:
        self.cleared += 1

    def failure_exception(self) -> None:
        raise ConnectionError("the link is down")


class FakeReceiveQueue:
    def __init__(self) -> None:
        self.queue: list[Any] = []
        self.pending_reqs: list[Any] = []
        self.agree = lambda flags: flags
        self.reservations = SimpleNamespace(sort_ready=list)
        self.kv_manager = SimpleNamespace(
            transfer_statuses={1: "x"},
            failure_records={1: "x"},
            addr_to_rooms_tracker={FakeReceiver.bootstrap_addr: {1}},
        )

    def add(self, req: FakeRequest) -> None:
        self.queue.append(SimpleNamespace(req=req, kv_receiver=FakeReceiver(), metadata_buffer_index=0))

    def take_broken(self) -> tuple[Any, ...]:
        return ()

    def reserve(self, held: Uncounted) -> tuple[list[Any], list[Any]]:
        self.held = held
        started, self.queue = self.queue, []
        return started, []


class FakeTransfers:
    def __init__(self) -> None:
        self.queue: list[Any] = []
        self.arrived: set[str] = set()
        self.failing: set[str] = set()
        self.metadata_buffers = SimpleNamespace(bootstrap_room={0: 1})
        self.freed_slots: list[int] = []
        self.misfits: dict[str, str] = {}  # of what has arrived, by request
        self.req_to_metadata_buffer_idx_allocator = SimpleNamespace(free=self.freed_slots.append)

    def extend(self, entries: list[Any]) -> None:
        self.queue += entries

    def pop_transferred(self) -> list[FakeRequest]:
        done = [entry.req for entry in self.queue if entry.req.rid in self.arrived]
        self.queue = [entry for entry in self.queue if entry.req.rid not in self.arrived]
        return done

    def find_misfit(self, req: FakeRequest) -> str | None:
        return self.misfits.get(req.rid)

    def take_failed(self) -> list[Any]:
        failed = [entry for entry in self.queue if entry.req.rid in self.failing]
        self.queue = [entry for entry in self.queue if entry.req.rid not in self.failing]
        return failed


class ReceiveScene:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queue, self.transfers = FakeReceiveQueue(), FakeTransfers()
        self.faults = Faults()
        self.deferred, self.acknowledged = DeferredFree(lambda flags: flags, self.faults), set[int]()
        self.book = PeerBook("127.0.0.1", 9000)
        self.book.tell(PeerConfig(None, (PEER,)))
        self.refused = set[int]()
        acknowledged = SimpleNamespace(
            has=self.acknowledged.__contains__,
            is_refused=self.refused.__contains__,
            forget=self.acknowledged.discard,
            keep_only=self.acknowledged.intersection_update,
        )
        self.scheduler = SimpleNamespace(max_running_requests=2)
        self.receiver = Receiver(
            self.scheduler,
            self.queue,
            self.transfers,
            deferred=self.deferred,
            book=self.book,
            acknowledged=acknowledged,  # type: ignore[arg-type]
            faults=self.faults,
        )
        self.freed: list[str] = []
        self.answers: list[tuple[str, str]] = []
        monkeypatch.setattr(calls, "release_kv", lambda scheduler, req, keep_prefix: self.freed.append(req.rid))
        monkeypatch.setattr(calls, "end_aborted", lambda scheduler, req, reason: self._answer(req, "aborted"))
        monkeypatch.setattr(calls, "end_with_error", lambda scheduler, req, reason, status: self._answer(req, reason))

    def _answer(self, req: FakeRequest, what: str) -> None:
        assert not req.finished(), "answered twice"
        req.finished_reason = what
        self.answers.append((req.rid, what))

    def add(self, rid: str) -> FakeRequest:
        req = FakeRequest(rid)
        req.bootstrap_host, req.bootstrap_port = PEER.address
        req.req_pool_idx = 1
        req.time_stats.set_decode_prealloc_queue_entry_time = lambda: None
        self.receiver.add(req)
        return req
