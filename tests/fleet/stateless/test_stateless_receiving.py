"""The receiving end against a fake host: who holds memory, failed transfers, aborts, and faults of our own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fakes import FakeBatch, FakeRequest
from receive_scene import PEER, FakeReceiver, ReceiveScene
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from support.fake_scheduler import FakeAdder

from pla_sglang.fleet.stateless import scheduler_hooks as hooks
from pla_sglang.fleet.stateless.engine import StatelessEngine
from pla_sglang.fleet.stateless.host import calls
from pla_sglang.fleet.stateless.requests.messages import PlaPeers
from pla_sglang.fleet.stateless.transfer.legs import FAULT_ATTRIBUTE, GOES_ON_ATTRIBUTE, KIND_ATTRIBUTE, LegKind
from pla_sglang.fleet.stateless.transfer.peers import Peer, PeerBook, PeerConfig
from pla_sglang.fleet.stateless.transfer.rooms import UsedRooms
from pla_sglang.plugin.engine import backlog
from pla_sglang.plugin.engine.faults import Faults

AGAIN = Peer("b", "10.0.0.2", 9001, "i2")
NO_HOLDS: Any = SimpleNamespace(abort=lambda matches: 0, list_growing=list, list_returning=list, holds={})
ACCEPTING = SimpleNamespace(
    _set_or_validate_priority=lambda req: True, model_config=SimpleNamespace(think_end_ids=None)
)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ReceiveScene:
    return ReceiveScene(monkeypatch)


def test_what_is_held_until_a_request_runs(bench: ReceiveScene) -> None:
    for rid in ("a", "b"):
        bench.add(rid)
    assert bench.receiver.requests_with_memory() == []
    bench.transfers.arrived = {"a"}
    bench.receiver.pump()
    assert [req.rid for req in bench.receiver.ready] == ["a"]
    held = bench.receiver.requests_with_memory()
    assert (len(held), sum(len(req.origin_input_ids) + len(req.output_ids) for req in held)) == (2, 200)


def test_no_more_join_than_there_are_places(bench: ReceiveScene) -> None:
    bench.receiver.ready = [FakeRequest(rid) for rid in "abc"]
    joining = bench.receiver.take_ready(1, lambda req: True)
    assert ([req.rid for req in joining], [req.rid for req in bench.receiver.ready]) == (["a"], ["b", "c"])


def test_a_leg_that_is_let_go_leaves_nothing_and_its_source_hears_of_it(bench: ReceiveScene) -> None:
    """Another rank could not take it over."""
    other, req = bench.add("other"), bench.add("a")
    other.bootstrap_room, receiver = 2, bench.queue.queue[1].kv_receiver
    bench.receiver.forget(req)
    assert [entry.req.rid for entry in bench.queue.queue] == ["other"]
    assert (receiver.aborted, receiver.cleared) == (1, 1)
    manager = bench.queue.kv_manager
    assert (manager.failure_records, manager.addr_to_rooms_tracker) == ({}, {FakeReceiver.bootstrap_addr: set()})


def test_a_pull_that_is_refused_to_another_rank_says_so(bench: ReceiveScene) -> None:
    """Each rank hears of it by a connection of its own, and the answer is that of the first rank."""
    bench.receiver._agree = lambda flags: [False] * len(flags)
    setattr(bench.add("a"), GOES_ON_ATTRIBUTE, True)
    bench.transfers.failing = {"a"}
    bench.receiver.pump()
    assert bench.answers == [("a", f"room 1 is not held at {FakeReceiver.bootstrap_addr}")]


@pytest.mark.parametrize("way", ["acknowledged", "replaced after", "replaced before"])
def test_pages_of_a_failed_transfer_wait_for_the_sender(bench: ReceiveScene, way: str) -> None:
    """A new process at the sender's address may be told after the transfer has failed, or make it fail."""
    bench.add("a")
    bench.transfers.failing = {"a"}
    if way == "replaced before":
        bench.transfers.queue, bench.queue.queue = bench.queue.queue, []
        bench.book.tell(PeerConfig(None, (AGAIN,)))
    bench.receiver.pump()
    [(rid, reason)] = bench.answers
    assert (rid, "the link is down" in reason) == ("a", True)
    if way != "replaced before":
        bench.deferred.sweep(0.0)
        assert (bench.freed, bench.transfers.freed_slots) == ([], [])
    if way == "acknowledged":
        bench.acknowledged.add(1)
    elif way == "replaced after":
        bench.book.tell(PeerConfig(None, (AGAIN,)))
    bench.deferred.sweep(0.0)
    assert (bench.freed, bench.transfers.freed_slots) == (["a"], [0])
    manager = bench.queue.kv_manager
    assert not manager.transfer_statuses
    assert not manager.failure_records
    assert manager.addr_to_rooms_tracker[FakeReceiver.bootstrap_addr] == set()
    assert bench.transfers.metadata_buffers.bootstrap_room == {0: 0}
    assert not bench.acknowledged


def test_what_senders_said_is_kept_for_transfers_and_quarantined_pages_only(bench: ReceiveScene) -> None:
    for room, rid in enumerate(("failed", "moving", "connecting"), start=1):
        bench.add(rid).bootstrap_room = room
        if rid != "connecting":
            bench.transfers.queue, bench.queue.queue = [*bench.transfers.queue, *bench.queue.queue], []
    bench.transfers.failing = {"failed"}
    bench.receiver._take_failed(bench.transfers.take_failed())
    bench.acknowledged.update({1, 2, 3, 4})
    bench.receiver.forget_said()
    assert bench.acknowledged == {1, 2}
    bench.deferred.sweep(0.0)
    bench.receiver.forget_said()
    assert (bench.freed, bench.acknowledged) == (["failed"], {2})


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("told", [(), (Peer("b", "10.0.0.2", 9001),), (Peer("renamed", "10.0.0.2", 9001, "i1"),)])
def test_a_sender_that_may_still_be_there_keeps_the_pages(
    bench: ReceiveScene, when: str, told: tuple[Peer, ...]
) -> None:
    """It is told no more, or not as another process: it may still write."""
    bench.add("a")
    bench.transfers.failing = {"a"}
    if when == "before":
        bench.book.tell(PeerConfig(None, told))
    bench.receiver.pump()
    bench.book.tell(PeerConfig(None, told))
    bench.deferred.sweep(0.0)
    assert (bench.freed, len(bench.deferred)) == ([], 1)
    bench.acknowledged.add(1)
    bench.deferred.sweep(0.0)
    assert bench.freed == ["a"]


def test_aborts_by_prefix_in_every_state(bench: ReceiveScene) -> None:
    """Those with a connection end when all ranks have seen it; a ready one at once."""
    waiting, moving = bench.add("r-1"), None
    bench.receiver.pump()
    moving = bench.transfers.queue[0]
    bench.receiver.ready = [FakeRequest("r-2"), FakeRequest("other")]
    bench.add("r-3")
    bench.receiver.abort(lambda rid: rid.startswith("r-"))
    assert moving.kv_receiver.aborted == 1
    assert bench.queue.queue[0].kv_receiver.aborted == 1
    assert bench.answers == [("r-2", "aborted")]
    assert bench.freed == ["r-2"]
    assert [req.rid for req in bench.receiver.ready] == ["other"]
    assert not waiting.finished()


def test_legs_that_have_waited_too_long_fail(bench: ReceiveScene) -> None:
    """For memory or for their KV. One that no pass has seen has not waited yet."""
    for rid in ("moving", "late", "soon", "new"):
        bench.add(rid)
    moving, late, soon, new = bench.queue.queue
    bench.transfers.queue, bench.queue.queue = [moving], [late, soon, new]
    moving.pla_since_s, late.pla_since_s, soon.pla_since_s = 1.0, 1.5, 2.0
    bench.receiver.expire(legs_s=2.0, pulls_s=2.0)
    assert [leg.kv_receiver.aborted for leg in (moving, late, soon, new)] == [1, 1, 0, 0]
    setattr(soon.req, GOES_ON_ATTRIBUTE, True)
    bench.receiver.expire(legs_s=0.0, pulls_s=3.0)
    assert [leg.kv_receiver.aborted for leg in (moving, late, soon, new)] == [1, 1, 1, 0], "a pull waits less"
    assert set(bench.queue.kv_manager.failure_records.values()) == {"Request waiting timeout reached."}


def test_load_reports_count_what_waits_to_decode_and_no_prefill_leg_as_decoding(bench: ReceiveScene) -> None:
    for rid in ("a", "b"):
        bench.add(rid)
    bench.receiver.pump()
    bench.add("c")
    bench.receiver.ready = [FakeRequest("d", 50)]
    leg, whole = FakeRequest("leg"), FakeRequest("whole")
    setattr(leg, KIND_ATTRIBUTE, LegKind.PREFILL)
    setattr(whole, KIND_ATTRIBUTE, LegKind.WHOLE)
    engine = engine_of_fakes()
    engine.receiver = bench.receiver
    scheduler = SimpleNamespace(
        disagg_decode_prealloc_queue=bench.queue,
        disagg_decode_transfer_queue=bench.transfers,
        pla_fleet=engine,
        running_batch=FakeBatch(whole),
    )
    assert backlog.count_decode_waiting(scheduler) == (4, 350)
    assert backlog.list_decoding(scheduler, [leg]) == [whole]


# -- the engine around both ends -------------------------------------------------------------------------------------


class FakeEnd:
    def __init__(self) -> None:
        self.aborts = 0
        self.legs: dict[int, Any] = {}
        self.ready: list[Any] = []
        self.awaited: set[int] = set()

    def waits_for(self, room: int) -> bool:
        return room in self.awaited

    def abort(self, matches: Any, fault: str | None = None) -> int:
        self.aborts += 1
        self.fault = fault
        if self.aborts > 1:
            raise RuntimeError("broken again")
        return 0

    def fail(self, *args: Any) -> None:
        raise RuntimeError("broken")


def engine_of_fakes() -> StatelessEngine:
    engine = object.__new__(StatelessEngine)
    engine.faults = Faults()
    engine._agree = lambda flags: flags
    engine.sender = engine.receiver = FakeEnd()  # type: ignore[assignment]
    engine.holder, engine.redone, engine.refused = NO_HOLDS, 0, 0
    engine._scheduler, engine.book = ACCEPTING, PeerBook("127.0.0.1", 9000)
    engine.book.tell(PeerConfig(None, (PEER,)))
    engine.used_rooms = UsedRooms()
    return engine


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Statuses that clients get."""
    got: list[int] = []
    monkeypatch.setattr(calls, "end_with_error", lambda scheduler, req, reason, status: got.append(int(status)))
    return got


def test_a_fault_is_logged_and_ends_the_legs_and_never_the_scheduler(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of_fakes()
    engine.sender.before_pass = engine.sender.fail  # type: ignore[attr-defined,method-assign]
    ends = engine.sender, engine.receiver
    engine._attempt(lambda: engine.sender.before_pass(None, None), "leaving the last batch", *ends)
    assert engine.faults.count == 2, "one abort raised"
    assert engine.receiver.aborts == 2, "both ends, though the first abort raised"  # type: ignore[attr-defined]
    assert engine.receiver.fault == "an exception in its instance: leaving the last batch"  # type: ignore[attr-defined]
    assert "leaving the last batch" in caplog.text
    assert "broken again" in caplog.text


def test_a_list_that_is_short_of_a_peer_ends_nothing_of_it() -> None:
    """It is forgotten when its last leg is gone. Told as another process it goes at once."""
    engine, dropped, sources = engine_of_fakes(), list[Peer](), {PEER.address}
    engine._scheduler = SimpleNamespace()
    engine.connector = SimpleNamespace(drop=dropped.append, connect=lambda peer: None)  # type: ignore[assignment]
    engine.receiver.list_sources = lambda: sources  # type: ignore[method-assign]
    for told in ((PEER,), ()):
        engine.on_peers(PlaPeers(told=PeerConfig(None, told)))
        engine._forget_peers()
    assert dropped == []
    engine.on_peers(PlaPeers(told=PeerConfig(None, (AGAIN,))))
    assert dropped == [PEER]
    engine.on_peers(PlaPeers(told=PeerConfig(None, ())))
    sources.clear()
    engine._forget_peers()
    assert dropped == [PEER, AGAIN]
    assert engine.book.at(*PEER.address) is None


def test_sources_are_those_of_legs_that_wait_for_kv(bench: ReceiveScene) -> None:
    assert bench.receiver.list_sources() == set()
    bench.add("a")
    assert bench.receiver.list_sources() == {PEER.address}
    bench.receiver.pump()
    assert bench.receiver.list_sources() == {PEER.address}
    bench.transfers.arrived = {"a"}
    bench.receiver.pump()
    assert bench.receiver.list_sources() == set()


def test_a_request_that_cannot_be_taken_over_is_answered(answers: list[int]) -> None:
    engine, forgotten = engine_of_fakes(), list[str]()
    engine.sender.forget = lambda req: forgotten.append(req.rid)  # type: ignore[method-assign]
    engine.sender.add = engine.sender.fail  # type: ignore[method-assign]
    req = FakeRequest("a")
    req.bootstrap_host, req.bootstrap_port = "127.0.0.1", 9000
    assert engine.takes(req)
    assert (forgotten, answers, engine.faults.count) == (["a", "a"], [500], 1)


@pytest.mark.parametrize(
    ("others", "status", "faults"), [((False, True), 500, 1), ((True, False), 410, 0), ((False, False), 500, 1)]
)
def test_what_befell_another_rank_befalls_all(
    answers: list[int], others: tuple[bool, bool], status: int, faults: int
) -> None:
    """Another rank could not take a leg over, or has heard that it was given up. Whole requests need no such vote."""
    engine, added = engine_of_fakes(), list[str]()
    engine._agree = lambda flags: [own and other for own, other in zip(flags, others, strict=True)]
    forgotten: list[str] = []
    engine.sender.add = lambda req, now_s: added.append(req.rid)  # type: ignore[method-assign]
    engine.sender.forget = lambda req: forgotten.append(req.rid)  # type: ignore[method-assign]
    leg = FakeRequest("leg")
    leg.bootstrap_host, leg.bootstrap_port = "127.0.0.1", 9000
    assert engine.takes(leg)
    assert (added, answers, engine.faults.count) == (["leg"], [status], faults)
    assert forgotten == ["leg", "leg"], "by both ends"
    assert not engine.takes(FakeRequest("whole"))
    assert len(answers) == 1


def test_what_comes_back_to_the_queue_is_the_hosts() -> None:
    """A retracted request, also one that came as a decode part, is prefilled here."""
    engine, taken = engine_of_fakes(), list[str]()
    engine.receiver.add = lambda req: taken.append(req.rid)  # type: ignore[method-assign]
    leg, whole = FakeRequest("leg"), FakeRequest("whole")
    leg.bootstrap_host, leg.bootstrap_port = PEER.address
    assert (engine.takes(leg), engine.takes(whole)) == (True, False)
    assert taken == ["leg"]
    assert engine.keeps_from_prefill(leg)
    assert not engine.keeps_from_prefill(whole)
    leg.retracted_stain = True
    assert not engine.takes(leg)
    assert not engine.keeps_from_prefill(leg)


@pytest.mark.parametrize(("address", "room", "status"), [(("10.0.0.9", 1), 1, 409), (PEER.address, None, 400)])
def test_a_leg_that_is_refused(answers: list[int], address: tuple[str, int], room: int | None, status: int) -> None:
    engine = engine_of_fakes()
    req = FakeRequest("a")
    req.bootstrap_host, req.bootstrap_port, req.bootstrap_room = (*address, room)
    assert engine.takes(req)
    assert (answers, engine.refused) == ([status], 1)


def test_a_pause_for_new_weights_ends_all_legs() -> None:
    calls: list[str] = []
    scheduler = SimpleNamespace(pla_fleet=SimpleNamespace(end_all_legs=lambda: calls.append("all")))
    hooks.before_pause_generation(scheduler, SimpleNamespace(mode="in_place"))
    assert calls == []
    hooks.before_pause_generation(scheduler, SimpleNamespace(mode="retract"))
    assert calls == ["all"]


@pytest.mark.parametrize(("idle", "busy", "wanted"), [(True, True, False), (True, False, True), (False, False, False)])
def test_idle_means_without_legs(idle: bool, busy: bool, wanted: bool) -> None:
    scheduler = SimpleNamespace(pla_fleet=SimpleNamespace(busy=busy))
    assert hooks.after_is_fully_idle(idle, scheduler) is wanted
    assert hooks.after_is_fully_idle(idle, scheduler, True) is None, "a health check asks for passes"


def test_growth_of_received_requests_is_kept_out_of_prefills() -> None:
    engine = engine_of_fakes()
    long, short = FakeRequest("a"), FakeRequest("b")
    long.sampling_params.max_new_tokens = 100_000
    engine.receiver.requests_with_memory = lambda: [long, short]  # type: ignore[method-assign]
    adder: Any = FakeAdder()
    adder.new_token_ratio = 0.5
    engine.reserve_growth(adder)
    assert adder.withheld_tokens == (0.5 * (CLIP_MAX_NEW_TOKENS + 100), 0)


# -- what happens to one leg happens to no other -----------------------------------------------------------------------


def test_a_leg_whose_kv_could_not_be_taken_over_on_any_rank_ends_with_500(bench: ReceiveScene) -> None:
    for rid in ("here", "there", "good"):
        bench.add(rid)
    setattr(bench.queue.queue[0].req, FAULT_ATTRIBUTE, True)
    bench.receiver._agree = lambda flags: [flag and place != 1 for place, flag in enumerate(flags)]
    bench.transfers.arrived = {"here", "there", "good"}
    bench.receiver.pump()
    assert [req.rid for req in bench.receiver.ready] == ["good"]
    assert [rid for rid, _ in bench.answers] == ["here", "there"]
    assert all("an exception in its instance" in reason for _, reason in bench.answers)
    assert (bench.freed, bench.receiver.failed) == (["here", "there"], 2)


def test_a_leg_that_raised_in_the_hosts_queue_ends_and_keeps_its_pages_as_ever(bench: ReceiveScene) -> None:
    bench.add("bad")
    [broken], bench.queue.queue = bench.queue.queue, []
    bench.add("good")
    bench.queue.take_broken = lambda: (broken,)  # type: ignore[method-assign]
    bench.receiver.pump()
    assert [rid for rid, _ in bench.answers] == ["bad"]
    assert (broken.kv_receiver.aborted, len(bench.deferred), len(bench.transfers.queue)) == (1, 1, 1)
    bench.acknowledged.add(1)
    bench.deferred.sweep(0.0)
    assert bench.freed == ["bad"]


def test_a_fault_that_ends_legs_is_no_ordered_abort(bench: ReceiveScene) -> None:
    """A router tells a loss from an abort by the reason and the status."""
    bench.add("moving")
    bench.receiver.ready = [FakeRequest("ready")]
    bench.receiver.abort(lambda rid: True, "an exception in its instance: receiving")
    assert bench.queue.kv_manager.failure_records == {1: "an exception in its instance: receiving"}
    [(rid, reason)] = bench.answers
    assert (rid, reason) == ("ready", "Decode transfer failed for request ready: an exception in its instance")


def test_a_source_without_kv_for_a_leg_is_a_failed_transfer_and_for_a_pull_gone(
    bench: ReceiveScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(calls, "end_with_error", lambda scheduler, req, reason, status: statuses.append(int(status)))
    bench.add("leg")
    setattr(bench.add("pull"), GOES_ON_ATTRIBUTE, True)
    monkeypatch.setattr("pla_sglang.fleet.stateless.transfer.receiving.announce_pull", lambda receiver: None)
    bench.refused.add(1)
    bench.receiver.pump()
    assert [entry.kv_receiver.aborted for entry in bench.transfers.queue] == [1, 1]
    bench.transfers.failing = {"leg", "pull"}
    bench.receiver.pump()
    assert statuses == [500, 410]


@pytest.mark.parametrize("taken_by", ["a hold", "a leg", "a leg that is over", "a decode part", None])
def test_a_leg_whose_room_is_taken_is_refused(answers: list[int], taken_by: str | None) -> None:
    engine, added = engine_of_fakes(), list[str]()
    engine.holder = SimpleNamespace(holds={})  # type: ignore[assignment]
    engine.sender.add = lambda req, *rest: added.append(req.rid)  # type: ignore[method-assign]
    req = FakeRequest("r", room=7)
    req.bootstrap_host, req.bootstrap_port = ("127.0.0.1", 9000) if taken_by != "a decode part" else PEER.address
    if taken_by == "a hold":
        engine.holder.holds[7] = None  # type: ignore[assignment]
    elif taken_by == "a leg":
        engine.used_rooms.begin(7)
    elif taken_by == "a leg that is over":
        engine.used_rooms.end(7)
    elif taken_by == "a decode part":
        engine.receiver.awaited.add(7)  # type: ignore[attr-defined]
    assert engine.takes(req)
    assert (answers, added) == (([], ["r"]) if taken_by is None else ([409], []))
