"""Connecting to peers ahead, against a fake KV manager: nothing of it runs in the scheduler's thread."""

from __future__ import annotations

import dataclasses
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.common.conn import PrefillServerInfo
from support.serving import until

from pla_sglang.fleet.stateless.transfer import connecting
from pla_sglang.fleet.stateless.transfer.connecting import PeerConnector
from pla_sglang.fleet.stateless.transfer.peers import Peer, PeerBook, PeerConfig, PeerState

ANSWER: dict[str, Any] = {
    field.name: None if field.default is dataclasses.MISSING else field.default
    for field in dataclasses.fields(PrefillServerInfo)
}
PEER = Peer("b", "10.0.0.2", 9001, "i1")
ADDRESS = "10.0.0.2:9001"


class FakeManager:
    """``tp_size`` and ``misfit`` are what the peer answers."""

    attn_tp_size = 1

    def __init__(self, *, tp_size: int = 1, misfit: str | None = None) -> None:
        self.prefill_info_table: dict[str, Any] = {}
        self.connection_pool: dict[str, Any] = {}
        self.addr_to_rooms_tracker: dict[str, set[int]] = defaultdict(set)
        self.failure_records: dict[int, str] = {}
        self.threads: set[str] = set()
        self.failed_nodes: list[str] = []
        self._tp_size, self._misfit = tp_size, misfit

    def try_ensure_parallel_info(self, address: str) -> bool:
        self.threads.add(threading.current_thread().name)
        if self._misfit is not None:
            raise RuntimeError(self._misfit)
        info = SimpleNamespace(attn_tp_size=self._tp_size, target_cp_ranks=[0], target_tp_rank=0)
        self.prefill_info_table[address] = info
        return True

    def _handle_node_failure(self, address: str) -> None:
        self.failed_nodes.append(address)
        self.prefill_info_table.pop(address, None)
        self.connection_pool.clear()


class FakeReceiver:
    """Of the host: making one connects."""

    def __init__(self, mgr: FakeManager, bootstrap_addr: str, bootstrap_room: int) -> None:
        assert bootstrap_room < 0, "no request has such a room"
        self.manager, self.address, self.room = mgr, bootstrap_addr, bootstrap_room
        self.conclude_state: Any = None
        mgr.addr_to_rooms_tracker[bootstrap_addr].add(bootstrap_room)

    def init(self, rank: int) -> None:
        self.manager.connection_pool[f"{self.address}_{rank}_0_0"] = ["info"]

    def clear(self) -> None:
        pass


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Tells whether the peer's bootstrap server answers."""
    up = threading.Event()

    def get(url: str, timeout: float, *, allow_redirects: bool) -> Any:
        assert not allow_redirects, "a peer is told, and leads nowhere else"
        if not up.is_set():
            raise ConnectionError("nobody listens")
        return SimpleNamespace(status_code=200, json=lambda: ANSWER)

    monkeypatch.setattr("requests.get", get)
    monkeypatch.setattr(connecting, "RETRY_S", 0.01)
    monkeypatch.setattr(connecting, "LONGEST_RETRY_S", 0.01)
    return up


def told(manager: FakeManager) -> tuple[PeerBook, PeerConnector]:
    book = PeerBook("127.0.0.1", 9000)
    book.tell(PeerConfig(None, (PEER,)))
    connector = PeerConnector(manager, FakeReceiver, book)
    connector.connect(PEER)
    return book, connector


def test_a_peer_is_ready_once_it_answers(answers: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "PATIENCE_S", 0.0)
    manager = FakeManager()
    book, connector = told(manager)
    until(lambda: book.to_dict() == {"b": "failed: nobody listens"}, what="a peer that is called failed")
    assert not connector.is_connected(*PEER.address)
    answers.set()
    until(lambda: book.to_dict() == {"b": "ready"}, what="a peer that is ready")
    assert connector.is_connected(*PEER.address)
    assert manager.threads == {"pla-warm"}
    assert manager.addr_to_rooms_tracker[ADDRESS] == set(), "the room of the trial is forgotten"


@pytest.mark.parametrize("answer", [ANSWER | {"of_a_later_version": 1}, dict(list(ANSWER.items())[1:])])
def test_a_peer_of_another_transfer_protocol(
    answers: threading.Event,
    answer: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its host's own questions would find nothing, or would be asked for ever."""
    said = SimpleNamespace(status_code=200, json=lambda: answer)
    monkeypatch.setattr("requests.get", lambda *args, **options: said)
    manager = FakeManager()
    book, connector = told(manager)
    until(lambda: "another transfer protocol" in book.to_dict()["b"], what="a peer that does not fit")
    connector.reconnect()
    assert book.state_of(*PEER.address) == (PeerState.MISFIT, book.to_dict()["b"].removeprefix("failed: "))
    assert not manager.threads, "nobody of the host has asked"
    assert caplog.text.count("does not fit") == 1


def test_a_peer_that_is_forgotten_while_it_answers_leaves_nothing(answers: threading.Event) -> None:
    manager, asked, go_on = FakeManager(), threading.Event(), threading.Event()
    ask = manager.try_ensure_parallel_info

    def ask_slowly(address: str) -> bool:
        asked.set()
        assert go_on.wait(10)
        return ask(address)

    manager.try_ensure_parallel_info = ask_slowly  # type: ignore[method-assign]
    answers.set()
    book, connector = told(manager)
    assert asked.wait(10)
    book.tell(PeerConfig(None, ()))
    book.forget_unlisted()
    go_on.set()
    until(lambda: manager.failed_nodes == [ADDRESS], what="a peer that is dropped")
    assert not connector.is_connected(*PEER.address)


def test_a_peer_whose_thread_has_ended_is_warmed_when_it_is_told_again(answers: threading.Event) -> None:
    """It was forgotten and told again between two looks of its thread."""
    book, connector = told(FakeManager())
    book.tell(PeerConfig(None, ()))
    book.forget_unlisted()
    until(lambda: not connector._running, what="the end of the thread")
    book.tell(PeerConfig(None, (PEER,)))
    answers.set()
    connector.reconnect()
    until(lambda: book.to_dict() == {"b": "ready"}, what="a peer that is ready")


def test_many_silent_peers_take_few_threads_and_hold_up_nobody(
    answers: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, each had a thread of its own."""
    asked: list[str] = []

    def get(url: str, timeout: float, *, allow_redirects: bool) -> Any:
        asked.append(url)
        if ADDRESS not in url:
            raise ConnectionError("nobody listens")
        return SimpleNamespace(status_code=200, json=lambda: ANSWER)

    monkeypatch.setattr("requests.get", get)
    monkeypatch.setattr(connecting, "RETRY_S", 0.05)
    monkeypatch.setattr(connecting, "LONGEST_RETRY_S", 60.0)
    book, silent = PeerBook("127.0.0.1", 9000), [Peer(f"p{port}", "10.0.0.9", port) for port in range(1, 401)]
    book.tell(PeerConfig(None, (*silent, PEER)))
    connector = PeerConnector(FakeManager(), FakeReceiver, book)
    before = threading.active_count()
    for peer in (*silent, PEER):
        connector.connect(peer)
    assert threading.active_count() - before <= connecting.THREADS
    until(lambda: book.to_dict()["b"] == "ready", what="the one that answers")
    until(lambda: len(asked) > 800, what="the others asked again")
    assert {question.wait_s for question in connector._waiting} & {0.1, 0.2, 0.4}, "after growing pauses"
    book.tell(PeerConfig(None, ()))
    book.forget_unlisted()
    for question in connector._waiting:
        question.due_s = 0.0
    with connector._changed:
        connector._changed.notify_all()
    until(lambda: not connector._running and not connector._threads, what="the end of the threads")


@pytest.mark.parametrize("status", [301, 302, 307, 404, 503])
def test_a_peer_that_leads_elsewhere_or_is_not_well_is_asked_on(
    answers: threading.Event, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    said = [status, 200]

    def get(url: str, timeout: float, *, allow_redirects: bool) -> Any:
        assert not allow_redirects
        return SimpleNamespace(status_code=said.pop(0), json=lambda: ANSWER)

    monkeypatch.setattr("requests.get", get)
    book, _ = told(FakeManager())
    until(lambda: book.to_dict() == {"b": "ready"}, what="a peer that is well")
    assert said == []


def test_what_was_cached_of_a_peer_goes_with_it(answers: threading.Event) -> None:
    answers.set()
    manager = FakeManager()
    _, connector = told(manager)
    until(lambda: connector.is_connected(*PEER.address) and not connector._running, what="a peer that is ready")
    connector.drop(PEER)
    assert manager.failed_nodes == [ADDRESS]
    assert not connector.is_connected(*PEER.address)
    connector.drop(Peer("c", "10.0.0.3", 9001, "x"))
    assert manager.failed_nodes == [ADDRESS], "nothing was cached of that one"


def test_a_connection_that_the_host_gave_up_is_made_again(answers: threading.Event) -> None:
    answers.set()
    manager = FakeManager()
    book, connector = told(manager)
    until(lambda: book.to_dict() == {"b": "ready"} and not connector._running, what="a peer that is ready")
    manager._handle_node_failure(ADDRESS)
    connector.reconnect()
    until(lambda: connector.is_connected(*PEER.address), what="a new connection")
    until(lambda: book.to_dict() == {"b": "ready"}, what="a peer that is ready again")


def manager_with_sglangs_check(monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]) -> FakeManager:
    """``other``: what the peer's bootstrap server says that is not as here."""
    from sglang.srt.disaggregation.common.conn import CommonKVManager

    said = {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "page_size": 1, "kv_cache_dtype": "auto"}
    answer = SimpleNamespace(
        status_code=200,
        json=lambda: ANSWER | said | {"follow_bootstrap_room": True} | other,
        raise_for_status=lambda: None,
    )
    monkeypatch.setattr("requests.get", lambda url, timeout, allow_redirects=True: answer)
    manager: Any = FakeManager()
    manager.kv_args, manager.kv_cache_dtype_str = SimpleNamespace(page_size=1, engine_rank=0), "auto"
    manager.attn_cp_size, manager.attn_cp_rank, manager.pp_size, manager.pp_rank, manager.dcp_size = 1, 0, 1, 0, 1
    manager.kv_layout = manager.dsv41_spec_layout = None
    manager.is_mla_backend = manager.is_hybrid_mla_backend = manager.enable_all_cp_ranks_for_transfer = False
    manager._resolve_rank_mapping = lambda info: CommonKVManager._resolve_rank_mapping(manager, info)
    manager.try_ensure_parallel_info = lambda address: CommonKVManager.try_ensure_parallel_info(manager, address)
    return manager


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"page_size": 16}, "Page size mismatch"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "KV cache dtype mismatch"),
        ({"attn_tp_size": 2}, "it has --tp-size 2, this instance 1"),
    ],
)
def test_sglangs_own_check_of_a_peer_that_does_not_fit(
    answers: threading.Event, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any], reason: str
) -> None:
    book, connector = told(manager_with_sglangs_check(monkeypatch, other))
    until(lambda: reason in book.to_dict()["b"], what="a peer that does not fit")
    assert book.list_in(PeerState.MISFIT) == [PEER]
    assert not connector.is_connected(*PEER.address)


def test_the_same_check_lets_a_peer_pass_that_fits(answers: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    book, connector = told(manager_with_sglangs_check(monkeypatch, {}))
    until(lambda: book.to_dict() == {"b": "ready"}, what="a peer that is ready")
    assert connector.is_connected(*PEER.address)
