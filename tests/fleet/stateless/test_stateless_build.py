"""What both ends are made of, with SGLang's own metadata buffers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pla_sglang.fleet.stateless.host import calls
from pla_sglang.fleet.stateless.transfer import build, queues
from pla_sglang.fleet.stateless.transfer.legs import Caps
from pla_sglang.fleet.stateless.transfer.peers import PeerBook
from pla_sglang.plugin.engine.faults import Faults


class FakeEnd:
    """One of the host's queues."""

    def __init__(self, scheduler: Any, req_to_metadata_buffer_idx_allocator: Any, metadata_buffers: Any) -> None:
        self.allocator, self.buffers = req_to_metadata_buffer_idx_allocator, metadata_buffers


class FakeReceivingEnd(FakeEnd):
    def __init__(
        self,
        scheduler: Any,
        req_to_metadata_buffer_idx_allocator: Any,
        metadata_buffers: Any,
        transfer_queue: Any,
        tp_size: int,
    ) -> None:
        super().__init__(scheduler, req_to_metadata_buffer_idx_allocator, metadata_buffers)
        self.transfers = transfer_queue


class OurEnd(FakeEnd):
    """One of ours, which takes more than the host's."""

    def __init__(self, *, fingerprints: Any = None, faults: Any = None, **host_arguments: Any) -> None:
        super().__init__(**host_arguments)


class OurReceivingEnd(FakeReceivingEnd):
    def __init__(
        self, *, book: Any, receiver_class: Any, caps: Any, agree: Any, faults: Any, **host_arguments: Any
    ) -> None:
        super().__init__(**host_arguments)


def test_each_end_has_metadata_buffers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that got a slot which a sender has freed would find a stale room in it."""
    for name in ("SendQueue", "TransferQueue"):
        monkeypatch.setattr(queues, name, OurEnd)
    monkeypatch.setattr(queues, "ReceiveQueue", OurReceivingEnd)
    monkeypatch.setattr(calls, "class_of_receivers", lambda scheduler: None)
    pool = SimpleNamespace(maybe_get_custom_mem_pool=lambda: None)
    scheduler: Any = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(size=3),
        server_args=SimpleNamespace(sampling_mask_max_tokens=0),
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool, need_sort=False),
    )
    monkeypatch.setattr(build, "_common", lambda scheduler: {"scheduler": scheduler, "tp_size": 1})
    caps = Caps(100, 4)
    sending, receiving, transfers = build.build_ends(
        scheduler, book=PeerBook("127.0.0.1", 9000), receive_caps=caps, agree=lambda flags: flags, faults=Faults()
    )
    assert sending.buffers is not receiving.buffers
    assert sending.allocator is not receiving.allocator
    for buffers in (sending.buffers, receiving.buffers):
        assert len(buffers.bootstrap_room) == build.METADATA_PER_ROW * 3
    assert receiving.transfers is transfers
    assert (transfers.buffers, transfers.allocator) == (receiving.buffers, receiving.allocator)
    host = (scheduler.req_to_metadata_buffer_idx_allocator, scheduler.disagg_metadata_buffers)
    assert host == (sending.allocator, sending.buffers), "the host's sending functions look there"
    assert sending.allocator.alloc() == receiving.allocator.alloc() == 0, "neither takes slots of the other"
