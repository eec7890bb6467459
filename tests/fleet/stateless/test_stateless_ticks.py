"""What the engine looks at about once a second, before a pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pla_sglang.fleet.stateless.engine import StatelessEngine
from pla_sglang.fleet.stateless.host import calls
from pla_sglang.fleet.stateless.transfer.peers import PeerBook
from pla_sglang.fleet.stateless.transfer.rooms import KEPT_S, UnclaimedRooms
from pla_sglang.plugin.engine.faults import Faults

TABLES = ("transfer_infos", "request_status", "req_to_decode_prefix_len")  # of rooms


def nothing(*args: Any, **kwargs: Any) -> list[Any]:
    return []


def idle_engine(*, leg_room: int, held_room: int) -> Any:
    """One with a prefill part and a paused request, and rooms 1 to 3 that receivers have announced."""
    engine: Any = object.__new__(StatelessEngine)
    leg = SimpleNamespace(req=SimpleNamespace(bootstrap_room=leg_room))
    engine.sender = SimpleNamespace(legs={1: leg}, before_pass=nothing, poll=nothing, expire=nothing)
    engine.receiver = SimpleNamespace(
        pump=nothing,
        list_sources=set,
        forget_said=nothing,
        expire=nothing,
        take_ready=nothing,
    )
    engine.migration = SimpleNamespace(before_batches=nothing)
    engine.holder = SimpleNamespace(holds={held_room: None}, take_returning=nothing, list_growing=nothing)
    engine.adapters = SimpleNamespace(count_used=nothing, take=None)
    engine.deferred = SimpleNamespace(sweep=nothing)
    engine.book, engine.connector = PeerBook("127.0.0.1", 9000), SimpleNamespace(reconnect=nothing)
    manager = SimpleNamespace(
        failure_records={},
        **{name: dict.fromkeys((1, 2, 3)) for name in TABLES},
    )
    engine._sending = SimpleNamespace(kv_manager=manager)
    engine._scheduler = SimpleNamespace(max_running_requests=4)
    engine._rooms, engine._tick_s, engine._series, engine.faults = UnclaimedRooms(), 0.0, None, Faults()
    return engine


def test_rooms_that_nobody_claims_are_forgotten_and_those_of_legs_and_holds_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "timeouts_s", lambda: (None, None))
    engine, running = idle_engine(leg_room=1, held_room=2), SimpleNamespace(reqs=[])
    rooms = engine._sending.kv_manager.transfer_infos
    for now_s in (100.0, 100.0 + KEPT_S / 2):
        engine.now_s = lambda now_s=now_s: now_s
        assert engine.before_pass(running, None) is running
        assert (sorted(rooms), len(engine._rooms)) == ([1, 2, 3], 1)
    engine.now_s = lambda: 100.0 + KEPT_S
    engine.before_pass(running, None)
    assert engine.faults.count == 0
    assert [sorted(getattr(engine._sending.kv_manager, name)) for name in TABLES] == [[1, 2]] * 3
