"""Pages under a transfer: marks behind a worker's chunks, acknowledged aborts, time-outs, and what all ranks say."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from pla_sglang.fleet.stateless.host.side_channel import SideChannel
from pla_sglang.fleet.stateless.transfer import fence
from pla_sglang.fleet.stateless.transfer.deferred_free import TIMEOUT_S, DeferredFree
from pla_sglang.plugin.engine.faults import Faults


def sender(workers: int) -> SimpleNamespace:
    queues = [queue.Queue() for _ in range(workers)]
    receivers = {"receiver": SimpleNamespace(endpoint="10.0.0.2", dst_port=5000)}
    return SimpleNamespace(
        transfer_queues=queues,
        request_status={},
        decode_kv_args_table=receivers,
        told=[],
        _send_multipart_locked=None,
    )


@pytest.fixture(autouse=True)
def _no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "mark_failed", lambda manager, room: manager.request_status.update({room: "failed"}))
    monkeypatch.setattr(fence, "tcp_address", lambda host, port: (f"tcp://{host}:{port}", False))


def reach(manager: Any, worker: int) -> int:
    """What a worker does first with the next thing in its queue."""
    room: int = manager.transfer_queues[worker].get_nowait().room
    return room


def test_a_fence_is_passed_when_the_last_worker_is_there() -> None:
    manager = sender(3)
    placed = fence.place_fence(manager)
    for worker in (2, 0):
        assert manager.request_status[reach(manager, worker)] == "failed", "a worker skips rooms that have failed"
        assert not placed.passed
    reach(manager, 1)
    assert placed.passed


def test_an_abort_is_acknowledged_after_the_transfers_before_it() -> None:
    manager = sender(2)
    manager._send_multipart_locked = lambda endpoint, parts, is_ipv6: manager.told.append((endpoint, parts))
    fence.acknowledge_abort(manager, [b"ABORT", b"77", b"10.0.0.2", b"5000"], SideChannel())
    reach(manager, 0)
    assert manager.told == []
    reach(manager, 1)
    assert manager.told == [("tcp://10.0.0.2:5000", [fence.ACKNOWLEDGED, b"77"])]


def test_a_receiver_that_is_gone_does_not_end_the_worker() -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("nobody there")

    manager = sender(1)
    manager._send_multipart_locked = fail
    fence.acknowledge_abort(manager, [b"ABORT", b"77", b"10.0.0.2", b"5000"], SideChannel())
    assert reach(manager, 0) == fence.FENCE_ROOM


@pytest.mark.parametrize(("host", "port"), [(b"10.0.0.2", b"5001"), (b"10.0.0.3", b"5000")])
def test_only_receivers_that_have_registered_are_connected_to(host: bytes, port: bytes) -> None:
    """Nobody proves who has sent such a message."""
    manager, channel = sender(1), SideChannel()
    fence.acknowledge_abort(manager, [b"ABORT", b"77", host, port], channel)
    assert manager.transfer_queues[0].empty()
    assert channel.count_dropped()["unknown"] == 1


@pytest.mark.parametrize("message", [[b"ABORT"], [b"STAGING_RSP", b"1", b"h", b"1"]])
def test_other_messages_place_nothing(message: list[bytes]) -> None:
    manager = sender(1)
    fence.acknowledge_abort(manager, message, SideChannel())
    assert manager.transfer_queues[0].empty()


def test_only_what_was_said_of_rooms_that_are_waited_for_is_kept() -> None:
    """A leg that is aborted before it has memory tells its sender too, and nobody waits for the answer."""
    messages = [[kind, str(room).encode()] for kind in (fence.ACKNOWLEDGED, fence.NO_ROOM) for room in range(100)]
    read = threading.Event()

    def recv_multipart() -> list[bytes]:
        if not messages:
            read.set()
            raise zmq.ContextTerminated
        return messages.pop()

    socket = SimpleNamespace(recv_multipart=recv_multipart)
    acknowledged = fence.hear_senders(SimpleNamespace(server_socket=socket), SideChannel())
    assert read.wait(10)
    acknowledged.keep_only({5, 200})
    for said in (acknowledged.has, acknowledged.is_refused):
        assert [room for room in range(201) if said(room)] == [5]
    acknowledged.forget(5)
    assert not acknowledged.has(5)


def hold(deferred: DeferredFree, name: str, freed: list[str], *, through: list[bool]) -> None:
    deferred.hold(10, is_through=lambda: through[0], release=lambda: freed.append(name), now_s=0.0)


def test_pages_are_freed_once_when_the_sender_is_through() -> None:
    deferred, freed, through = DeferredFree(lambda flags: flags, Faults()), [], [False]
    hold(deferred, "a", freed, through=through)
    deferred.sweep(1.0)
    assert (freed, len(deferred), deferred.state()["kv_tokens"]) == ([], 1, 10)
    through[0] = True
    for _ in range(2):
        deferred.sweep(2.0)
    assert (freed, len(deferred), deferred.timeouts) == (["a"], 0, 0)


def test_a_sender_that_never_answers() -> None:
    deferred, freed = DeferredFree(lambda flags: flags, Faults()), []
    hold(deferred, "a", freed, through=[False])
    deferred.sweep(TIMEOUT_S - 0.1)
    assert freed == []
    deferred.sweep(TIMEOUT_S)
    assert (freed, deferred.timeouts) == (["a"], 1)


def test_nothing_is_freed_before_every_rank_says_so() -> None:
    others = [True, False]
    deferred = DeferredFree(lambda flags: [own and other for own, other in zip(flags, others, strict=True)], Faults())
    freed: list[str] = []
    for name in ("a", "b"):
        hold(deferred, name, freed, through=[True])
    deferred.sweep(1.0)
    assert (freed, len(deferred)) == (["a"], 1)
