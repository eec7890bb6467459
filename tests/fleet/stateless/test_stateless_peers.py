"""Who may be named, what a changed list drops, and bodies that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from pla_sglang.common.errors import ConfigError, IllegalMoveError
from pla_sglang.fleet.stateless.transfer.legs import LegKind, SendLeg, SendState
from pla_sglang.fleet.stateless.transfer.peers import (
    MOST_PEERS,
    Peer,
    PeerBook,
    PeerConfig,
    PeerState,
    UnknownPeerError,
    agree_on_states,
    parse_peer_config,
)
from pla_sglang.plugin.engine.request_rows import RowsWanted

B = Peer("b", "10.0.0.2", 9001, "i1")
C = Peer("c", "10.0.0.3", 9002, "i1")


def book_with(*peers: Peer) -> PeerBook:
    book = PeerBook("0.0.0.0", 9000)
    book.tell(PeerConfig(Peer("a", "10.0.0.1", 9000), peers))
    return book


def test_the_address_says_what_a_request_wants() -> None:
    book = book_with(B)
    assert book.kind_of(None, None) is LegKind.WHOLE
    assert book.kind_of("10.0.0.1", 9000) is LegKind.PREFILL
    assert book.kind_of("127.0.0.1", 9000) is LegKind.PREFILL
    assert book.kind_of("10.0.0.2", 9001) is LegKind.DECODE


@pytest.mark.parametrize("address", [("10.0.0.2", 9000), ("10.0.0.3", 9002), ("10.0.0.2", None), ("0.0.0.0", 9000)])
def test_any_other_address_is_refused(address: tuple[str, Any]) -> None:
    with pytest.raises(UnknownPeerError, match="neither this instance's own"):
        book_with(B).kind_of(*address)


def test_before_anybody_told_only_the_own_address_is_known() -> None:
    book = PeerBook("192.168.0.9", 9000)
    assert book.kind_of("192.168.0.9", 9000) is LegKind.PREFILL
    with pytest.raises(UnknownPeerError):
        book.kind_of("10.0.0.2", 9001)


def test_the_same_list_again_changes_nothing() -> None:
    book = book_with(B, C)
    book.set_state(B, PeerState.READY)
    assert book.tell(PeerConfig(None, (C, B))) == ([], [])
    assert book.to_dict() == {"b": "ready", "c": "warming"}


def test_a_new_incarnation_replaces_the_old_one() -> None:
    book = book_with(B, C)
    book.set_state(B, PeerState.READY)
    again = Peer("b", "10.0.0.2", 9001, "i2")
    assert book.tell(PeerConfig(None, (again, C))) == ([B], [again])
    assert not book.is_current(B)
    book.set_state(B, PeerState.READY)  # a warming thread of the old one comes late
    assert book.to_dict() == {"b": "warming", "c": "warming"}
    book.set_state(again, PeerState.SILENT, "refused")
    assert book.to_dict()["b"] == "failed: refused"


def test_a_peer_that_is_not_in_the_list_any_more_gets_no_new_legs_and_keeps_its_connection() -> None:
    """A list may be short of peers that are well: that of a router that has just started, or of a second one."""
    book = book_with(B, C)
    book.set_state(B, PeerState.READY)
    assert book.tell(PeerConfig(None, (C,))) == ([], [])
    with pytest.raises(UnknownPeerError):
        book.kind_of(*B.address)
    assert (book.to_dict(), book.count_states()) == ({"c": "warming"}, {PeerState.WARMING: 1})
    assert (book.is_current(B), book.at(*B.address), book.list_in(PeerState.READY)) == (True, B, [B])
    assert book.tell(PeerConfig(None, (B, C))) == ([], []), "nothing was lost"
    assert book.to_dict() == {"b": "ready", "c": "warming"}


def test_a_peer_that_is_told_no_more_is_forgotten_once_it_is_not_in_use() -> None:
    book = book_with(B, C)
    book.tell(PeerConfig(None, (C,)))
    assert book.forget_unlisted({B.address, C.address}) == []
    assert book.forget_unlisted() == [B]
    assert (book.is_current(B), book.at(*B.address), book.state_of(*B.address)) == (False, None, None)
    assert book.tell(PeerConfig(None, (B, C))) == ([], [B]), "it is connected to again"


def test_another_process_replaces_a_peer_that_was_told_no_more() -> None:
    book = book_with(B)
    book.tell(PeerConfig(None, ()))
    again = Peer("b", "10.0.0.2", 9001, "i2")
    assert book.tell(PeerConfig(None, (again,))) == ([B], [again])


def test_an_incarnation_is_remembered_over_a_list_without_it() -> None:
    book, again = book_with(B), Peer("b", "10.0.0.2", 9001, "i2")
    assert book.tell(PeerConfig(None, (Peer("b", "10.0.0.2", 9001),))) == ([], [])
    assert book.tell(PeerConfig(None, (again,))) == ([B], [again])


@pytest.mark.parametrize(
    ("told", "is_replaced"),
    [
        (Peer("b", "10.0.0.2", 9001, "i2"), True),
        (Peer("renamed", "10.0.0.2", 9001, "i1"), False),
        (Peer("b", "10.0.0.2", 9001), False),  # by hand, without what only the peer knows
        (Peer("b", "10.0.0.2", 9002, "i2"), False),
    ],
)
def test_what_says_that_a_process_was_replaced(told: Peer, *, is_replaced: bool) -> None:
    book = book_with(B)
    assert not book.is_replaced(B)
    replaced, _ = book.tell(PeerConfig(None, (told,)))
    assert replaced == ([B] if is_replaced else [])
    assert book.is_replaced(B) is is_replaced
    assert book.is_current(B) is not is_replaced


def test_an_instance_is_not_its_own_peer() -> None:
    book = PeerBook("10.0.0.1", 9000)
    assert book.tell(PeerConfig(None, (Peer("a", "10.0.0.1", 9000, "x"), B))) == ([], [B])


def test_what_is_told_survives_the_way_to_the_schedulers() -> None:
    """By the host's own encoding."""
    from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode

    from pla_sglang.fleet.stateless.requests.messages import PlaPeers, register_messages

    register_messages()
    for told in (
        PeerConfig(Peer("a", "10.0.0.1", 9000), (B, C)),
        PeerConfig(None, ()),
        PeerConfig(None, (B,), RowsWanted(0.5, 7)),
    ):
        assert msgpack_decode(msgpack_encode(PlaPeers(told=told))).told == told


GOOD: dict[str, Any] = {"name": "b", "host": "h", "bootstrap_port": 9001, "incarnation": "x"}
BAD_BODIES = [
    ([], "expected"),
    ({}, "expected"),
    ({"peers": {}}, "peers"),
    ({"peers": [], "more": 1}, "expected"),
    ({"peers": [GOOD | {"bootstrap_port": 0}]}, "bootstrap_port"),
    ({"peers": [GOOD | {"bootstrap_port": 70000}]}, "70000"),
    ({"peers": [GOOD | {"bootstrap_port": True}]}, "bootstrap_port"),
    ({"peers": [GOOD | {"host": ""}]}, "host"),
    ({"peers": [GOOD | {"name": 3}]}, "name 3"),
    ({"peers": [GOOD | {"port": 3}]}, "peers"),
    ({"peers": [GOOD, GOOD]}, "two with the same name"),
    ({"peers": [GOOD, GOOD | {"name": "c"}]}, "two with the same address"),
    ({"self": {"name": "a"}, "peers": []}, "self"),
    ({"peers": [], "rows": {"every_s": 0.0, "most": 5}}, "every_s"),
    ({"peers": [], "rows": 5}, "rows"),
    ({"peers": [GOOD] * (MOST_PEERS + 1)}, "513 are too many; allowed: 512"),
    *(({"peers": [GOOD | {"name": text}]}, "name") for text in ("a\nb", "\x1b[31m", "\ud800", "x" * 256, "")),
    ({"peers": [GOOD | {"incarnation": "a\nINFO"}]}, "incarnation"),
    ({"self": GOOD | {"host": "0.0.0.0"}, "peers": []}, "self: host"),
    *(
        ({"peers": [GOOD | {"host": host}]}, "peers: host")
        for host in (
            "127.0.0.1:39811/path?x=",
            "user:pw@127.0.0.1",
            "127.0.0.1/",
            "127.0.0.1#",
            "127.0.0.1\r\nX: y",
            "file:///etc/passwd#",
            "\0",
            "a b",
            "a" * 300,
            "0x7f.1",
            "2130706433",
            "127.1",
            "0.0.0.0",
            "::",
            "fe80::1%eth0",
            "[::1]",
            "b\u00fccher",
        )
    ),
]


@pytest.mark.parametrize(("body", "named"), BAD_BODIES)
def test_a_bad_body_is_refused(body: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_peer_config(body)


def test_a_good_body() -> None:
    told = parse_peer_config({"self": {"name": "a", "host": "h", "bootstrap_port": 1}, "peers": [GOOD]})
    assert told == PeerConfig(Peer("a", "h", 1), (Peer("b", "h", 9001, "x"),))
    for host in ("10.0.0.2", "::1", "Pod-1.ns_a.svc.", "localhost"):
        assert parse_peer_config({"peers": [GOOD | {"host": host}]}).peers[0].host == host, "as the router will name it"
    assert parse_peer_config({"peers": [], "rows": {"every_s": 2, "most": 9}}) == PeerConfig(
        None, (), RowsWanted(2.0, 9)
    )


def test_a_prefill_leg_sends_nothing_before_it_was_computed() -> None:
    with pytest.raises(IllegalMoveError):
        SendLeg(None, 0.0, SendState.QUEUED).move(SendState.SENDING)


@pytest.mark.parametrize(
    ("own", "is_ready", "is_sound", "shown"),
    [
        (PeerState.READY, True, True, "ready"),
        (PeerState.READY, False, True, "warming"),
        (PeerState.READY, False, False, "failed: another rank has no connection to it"),
        (PeerState.WARMING, True, True, "warming"),
        (PeerState.WARMING, False, False, "failed: another rank has no connection to it"),
        (PeerState.SILENT, True, True, "failed: nobody there"),
    ],
)
def test_a_peer_is_ready_once_every_rank_is_connected(
    own: PeerState, shown: str, *, is_ready: bool, is_sound: bool
) -> None:
    """``is_ready``, ``is_sound``: what another rank says of the first of two peers."""
    agree = lambda flags: [a and b for a, b in zip(flags, (is_ready, True, is_sound, True), strict=True)]  # noqa: E731
    assert agree_on_states({}, agree) == {}
    book = book_with(B, C)
    book.set_state(B, own, "nobody there" if own is PeerState.SILENT else "")
    book.set_state(C, PeerState.READY)
    assert agree_on_states(book.to_dict(), agree) == {"b": shown, "c": "ready"}
