"""A room is one receiver's, once: who comes second is refused at once, and ends nothing of who came first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from receive_scene import ReceiveScene
from sglang.srt.disaggregation.base import KVPoll

from pla_sglang.fleet.stateless import scheduler_hooks as hooks
from pla_sglang.fleet.stateless.host.side_channel import GUARD
from pla_sglang.fleet.stateless.transfer import rooms as rooms_module
from pla_sglang.fleet.stateless.transfer.fence import ABORT, NO_ROOM
from pla_sglang.fleet.stateless.transfer.rooms import UsedRooms, aborts_of_another, refuses_receiver

FIRST, SECOND = ("10.0.0.8", 40), ("10.0.0.9", 41)


class FakeManager:
    """The host's sending manager: who is registered, and what it has of rooms."""

    def __init__(self) -> None:
        self.decode_kv_args_table = {
            name: SimpleNamespace(endpoint=host, dst_port=port) for name, (host, port) in (("f", FIRST), ("s", SECOND))
        }
        self.transfer_infos: dict[int, dict[str, Any]] = {}
        self.request_status: dict[int, Any] = {}
        self.refused: list[tuple[str, list[bytes]]] = []

    def asked(self, room: int, agent: str) -> None:
        self.transfer_infos.setdefault(room, {})[agent] = self.decode_kv_args_table[agent]

    def _send_multipart_locked(self, endpoint: str, message: list[bytes], *, is_ipv6: bool) -> None:
        self.refused.append((endpoint, message))


def asks(agent: str, room: int = 7) -> list[bytes]:
    host, port = FIRST if agent == "f" else SECOND
    return [GUARD, str(room).encode(), host.encode(), str(port).encode(), agent.encode(), b"", b"0", b"1"]


def gives_up(agent: str, room: int = 7) -> list[bytes]:
    return [ABORT, *asks(agent, room)[1:4]]


def test_our_word_for_its_messages_is_the_hosts() -> None:
    from sglang.srt.disaggregation.nixl import conn

    assert GUARD == conn.GUARD


def test_rooms_are_known_while_they_are_used_and_long_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms_module, "MOST_USED_ROOMS", 2)
    used = UsedRooms()
    used.begin(1)
    assert (1 in used, used.is_over(1)) == (True, False)
    for room in (1, 2, 3):
        used.end(room)
    assert [room in used for room in (1, 2, 3)] == [False, True, True]
    used.begin(3)
    assert not used.is_over(3)


@pytest.mark.parametrize(
    ("state", "listened_to"),
    [
        ("new", True),
        ("in use", True),
        ("over", False),
        ("another's", False),
        (KVPoll.WaitingForInput, True),
        (KVPoll.Transferring, False),
        (KVPoll.Success, False),
        (KVPoll.Failed, False),
    ],
)
def test_who_asks_for_a_room(state: Any, listened_to: bool) -> None:
    manager, used = FakeManager(), UsedRooms()
    if state == "in use":
        used.begin(7)
    elif state == "over":
        used.end(7)
    elif state == "another's":
        manager.asked(7, "f")
    elif state != "new":
        manager.request_status[7] = state
    assert refuses_receiver(manager, used, asks("s")) is not listened_to
    assert manager.refused == ([] if listened_to else [("tcp://10.0.0.9:41", [NO_ROOM, b"7"])])


def test_one_that_asks_twice_is_not_told_that_its_first_leg_has_no_room() -> None:
    manager = FakeManager()
    manager.asked(7, "f")
    assert refuses_receiver(manager, UsedRooms(), asks("f"))
    assert manager.refused == []


@pytest.mark.parametrize("message", [[GUARD], [b"x"], [], [GUARD, b"None", b"h", b"1", b"f"], gives_up("f")])
def test_other_messages_are_the_hosts(message: list[bytes]) -> None:
    assert not refuses_receiver(FakeManager(), UsedRooms(), message)


def test_a_room_is_given_up_by_whom_its_kv_goes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host takes anybody's word for it. Before somebody has asked, nobody can tell."""
    manager = FakeManager()
    assert not aborts_of_another(manager, gives_up("s"))
    manager.asked(7, "f")
    assert aborts_of_another(manager, gives_up("s"))
    assert not aborts_of_another(manager, gives_up("f"))
    given: list[list[bytes]] = []
    acknowledged: list[tuple[list[bytes], bool]] = []

    def acknowledge(manager: Any, message: list[bytes], *, has_host: bool) -> None:
        acknowledged.append((message, has_host))

    monkeypatch.setattr(hooks, "_engine", SimpleNamespace(used_rooms=UsedRooms()))
    monkeypatch.setattr(hooks, "_acknowledge_abort", acknowledge)

    def original(manager: Any, message: list[bytes]) -> bool:
        given.append(message)
        return message[0] == ABORT

    for message in (gives_up("s"), gives_up("f")):
        assert hooks.around_handle_abort(original, manager, message)
    assert given == [gives_up("f")]
    assert acknowledged == [(gives_up("s"), False), (gives_up("f"), True)], "both wait for that"
    assert hooks.around_handle_abort(original, manager, asks("s")), "not listened to"
    assert not hooks.around_handle_abort(original, manager, asks("s", 8)), "the host's to take"


def test_a_room_is_awaited_until_nothing_writes_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ReceiveScene(monkeypatch)
    assert not bench.receiver.waits_for(1)
    bench.add("a")
    assert bench.receiver.waits_for(1)
    bench.transfers.failing = {"a"}
    bench.receiver.pump()
    assert bench.receiver.waits_for(1), "in quarantine"
    bench.acknowledged.add(1)
    bench.deferred.sweep(0.0)
    assert not bench.receiver.waits_for(1)
