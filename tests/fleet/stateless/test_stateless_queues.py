"""Budgets of the receiving queue, on SGLang's own class without its constructor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.request_fields import RequestFields

from pla_sglang.fleet.stateless.transfer.legs import Caps, Uncounted
from pla_sglang.fleet.stateless.transfer.peers import Peer, PeerBook, PeerConfig, PeerState
from pla_sglang.fleet.stateless.transfer.reservations import Reservations
from pla_sglang.plugin.engine.faults import Faults
from pla_sglang.plugin.engine.host.requests import set_extend

pytestmark = pytest.mark.usefixtures("published")

PEER = Peer("b", "10.0.0.2", 9001, "i1")


class FakeConnector:
    def __init__(self) -> None:
        self.warm_addresses: set[tuple[str, int]] = set()
        self.asked: list[Peer] = []

    def is_connected(self, host: str, port: int) -> bool:
        return (host, port) in self.warm_addresses

    def connect(self, peer: Peer) -> None:
        self.asked.append(peer)


def queue_with(*, free_tokens: int = 1000, running: int = 0, held: int = 0, held_tokens: int = 0) -> Any:
    """A receiving queue whose host has ``free_tokens``, 10 reserved for each request that grows."""
    from pla_sglang.fleet.stateless.transfer.queues import ReceiveQueue

    queue: Any = object.__new__(ReceiveQueue)
    pool = SimpleNamespace(available_size=lambda: free_tokens, page_size=1, prealloc_fits_assumes_reclaim=lambda: False)
    queue.token_to_kv_pool_allocator = queue.token_to_kv_pool = pool
    params = SimpleNamespace(max_new_tokens=1)
    batch = SimpleNamespace(reqs=[SimpleNamespace(sampling_params=params, origin_input_ids=[])] * running)
    queue.scheduler = SimpleNamespace(
        running_batch=batch,
        waiting_queue=[object()] * 50,
        chunked_req=None,
        last_batch=None,
        enable_hisparse=False,
        enable_lora=False,
        server_args=SimpleNamespace(disaggregation_decode_enable_radix_cache=False),
    )
    queue.num_reserved_decode_tokens, queue.retracted_queue, queue._prefill_dp_rank_queries = 10, [], {}
    queue._held, queue.caps = Uncounted(held_tokens, held), Caps(400, 8)
    queue._fresh_tokens, queue._fresh_requests, queue._broken, queue.agree = 0, 0, (), lambda flags: flags
    queue.reservations = Reservations(queue.scheduler)
    queue.book, queue.connector = PeerBook("127.0.0.1", 9000), FakeConnector()
    queue.book.tell(PeerConfig(None, (PEER,)))
    queue.kv_manager = SimpleNamespace(failures={})
    queue.kv_manager.record_failure = queue.kv_manager.failures.__setitem__
    queue.faults = Faults()
    return queue


def test_prefills_that_wait_are_not_counted_as_growing() -> None:
    """The host's queue would reserve for all 50 of the waiting queue."""
    assert queue_with(running=3, held=2)._active_req_count(1) == 6
    assert queue_with(running=3)._allocatable_token_budgets() == 1000 - 30


def test_a_prefill_under_way_keeps_what_it_needs() -> None:
    queue = queue_with()
    queue.scheduler.chunked_req = chunk = RequestFields(origin_input_ids=[1] * 300)
    set_extend(chunk, 0, 100)
    assert queue._allocatable_token_budgets() == 1000 - 200 - 1


@pytest.mark.parametrize(
    ("held", "held_tokens", "budget"), [(0, 0, 1000), (1, 100, 300), (1, 500, -100), (7, 390, 10), (8, 80, -1)]
)
def test_the_cap_binds_once_anything_is_held(held: int, held_tokens: int, budget: int) -> None:
    """A single request may hold more than the share, or it could never be received."""
    assert queue_with(held=held, held_tokens=held_tokens)._allocatable_token_budgets() == budget


def entry() -> Any:
    req = RequestFields(bootstrap_host=PEER.host, bootstrap_port=PEER.bootstrap_port, bootstrap_room=5)
    receiver = SimpleNamespace(aborts=0)
    receiver.abort = lambda: setattr(receiver, "aborts", receiver.aborts + 1)
    return SimpleNamespace(req=req, kv_receiver=receiver)


def test_a_leg_waits_while_its_peer_is_warmed_and_the_network_is_never_asked() -> None:
    queue, leg = queue_with(), entry()
    assert queue._resolve_prefill_dp_rank(leg.req) is None
    assert queue._ensure_prefill_info({"a": [leg]}) == ({}, [leg])
    assert queue.connector.asked == [PEER]
    queue.connector.warm_addresses.add(PEER.address)
    assert queue._resolve_prefill_dp_rank(leg.req) == 0
    assert queue._ensure_prefill_info({"a": [leg]}) == ({"a": [leg]}, [])


@pytest.mark.parametrize(("state", "status"), [(PeerState.SILENT, 503), (PeerState.MISFIT, 409), (None, 409)])
def test_a_leg_of_a_failed_or_forgotten_peer_ends(state: PeerState | None, status: int) -> None:
    queue, leg, why = queue_with(), entry(), None
    if state is None:
        queue.book.tell(PeerConfig(None, ()))
        queue.book.forget_unlisted()
    else:
        why = "page size 16 here, 1 there"
        queue.book.set_state(PEER, state, why)
    assert queue._ensure_prefill_info({"a": [leg]}) == ({}, [])
    assert leg.kv_receiver.aborts == 1
    assert leg.pla_status == status
    assert (why or "no longer configured") in queue.kv_manager.failures[5]


def test_a_leg_of_a_peer_that_is_told_no_more_waits_on_for_its_connection() -> None:
    queue, leg = queue_with(), entry()
    queue.book.tell(PeerConfig(None, ()))
    assert queue._ensure_prefill_info({"a": [leg]}) == ({}, [leg])
    assert queue.connector.asked == [PEER]


class OtherRank:
    """What another rank says of each leg: it is the one that has lost ``lost``."""

    def __init__(self, lost: int | None) -> None:
        self.lost = lost
        self.votes = 0

    def agree(self, flags: Any) -> list[bool]:
        self.votes += 1
        return [flag and place != self.lost for place, flag in enumerate(flags)]


@pytest.mark.parametrize(("own", "other", "asked"), [(None, None, []), (0, None, [0]), (None, 1, [1]), (0, 1, [0, 1])])
def test_all_ranks_ask_again_for_what_one_has_lost(own: int | None, other: int | None, asked: list[int]) -> None:
    from sglang.srt.disaggregation.base import KVPoll

    queue, rank = queue_with(), OtherRank(other)
    queue.agree, queue.queue = rank.agree, [entry(), entry()]
    for place, leg in enumerate(queue.queue):
        leg.waiting_for_input = True
        leg.kv_receiver.conclude_state = KVPoll.Failed if place == own else None
    queue._doubt_failed()
    assert [place for place, leg in enumerate(queue.queue) if not leg.waiting_for_input] == asked


def test_ranks_do_not_vote_where_all_will_ask() -> None:
    queue, rank = queue_with(), OtherRank(None)
    queue.agree, queue.queue = rank.agree, []
    queue._doubt_failed()
    queue.queue = [entry(), entry()]
    for leg, waits in zip(queue.queue, (True, False), strict=True):
        leg.waiting_for_input, leg.kv_receiver.conclude_state = waits, None
    queue._doubt_failed()
    assert rank.votes == 0


class RankReceiver:
    """Of one rank: it is connected once it was given the sender's rank, and waits for its input then."""

    def __init__(self) -> None:
        from sglang.srt.disaggregation.base import KVPoll

        self.conclude_state: Any = None
        self.state: Any = KVPoll.Bootstrapping
        self.started_transfer = False

    def poll(self) -> Any:
        return self.state

    def init(self, prefill_dp_rank: int) -> None:
        from sglang.srt.disaggregation.base import KVPoll

        self.state = KVPoll.WaitingForInput

    def abort(self) -> None:
        from sglang.srt.disaggregation.base import KVPoll

        self.state = self.conclude_state = KVPoll.Failed

    def failure_exception(self) -> None:
        raise RuntimeError("no connection")


def ranks_with_a_leg(monkeypatch: pytest.MonkeyPatch, count: int = 2) -> list[Any]:
    """The queues of ranks with one leg whose peer none is connected to. A poll is the least of all ranks."""
    from sglang.srt.disaggregation import decode

    ranks = [queue_with() for _ in range(count)]
    for queue in ranks:
        leg = entry()
        leg.kv_receiver, leg.waiting_for_input = RankReceiver(), False
        leg.req.finished_reason, leg.req.return_logprob, leg.req.rid = None, False, "r"
        leg.req.finished = lambda req=leg.req: req.finished_reason is not None
        leg.req.time_stats = SimpleNamespace(set_bootstrap_done_time=lambda: None)
        queue.queue, queue.pending_reqs, queue.pp_size, queue.tp_rank, queue.gloo_group = [leg], [leg], 1, 0, None
        queue.scheduler.metrics_reporter = SimpleNamespace(enable_metrics=False)

    def poll(receivers: Any, group: Any) -> list[int]:
        return [min(int(queue.queue[place].kv_receiver.state) for queue in ranks) for place in range(len(receivers))]

    monkeypatch.setattr(decode, "poll_and_all_reduce", poll)
    return ranks


def pass_once(ranks: list[Any]) -> list[tuple[bool, bool]]:
    """On each rank: whether the leg may have memory, and whether it has ended."""
    for queue in ranks:
        queue._resolve_pending_reqs()
    for queue in ranks:
        queue._update_handshake_waiters()
    return [(queue.queue[0].waiting_for_input, queue.queue[0].req.finished()) for queue in ranks]


def test_a_peer_to_which_one_rank_alone_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank looks at its own connections; what follows from that is the host's vote, so all go on at once."""
    ranks = ranks_with_a_leg(monkeypatch)
    assert pass_once(ranks) == [(False, False)] * 2
    ranks[0].connector.warm_addresses.add(PEER.address)
    assert pass_once(ranks) == [(False, False)] * 2
    assert [len(queue.pending_reqs) for queue in ranks] == [0, 1]
    ranks[1].connector.warm_addresses.add(PEER.address)
    assert pass_once(ranks) == [(True, False)] * 2


@pytest.mark.parametrize(("state", "status"), [(PeerState.MISFIT, 409), (PeerState.SILENT, 503)])
def test_a_leg_whose_peer_has_failed_is_answered_with_its_status(
    monkeypatch: pytest.MonkeyPatch, state: PeerState, status: int
) -> None:
    """The host answers every failed handshake with 500."""
    [queue] = ranks_with_a_leg(monkeypatch, 1)
    queue.book.set_state(PEER, state, "why it failed")
    assert pass_once([queue]) == [(False, True)]
    assert queue.queue[0].req.finished_reason.status_code == status


def test_a_handshake_that_fails_otherwise_is_answered_as_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    [queue] = ranks_with_a_leg(monkeypatch, 1)
    queue.queue[0].kv_receiver.abort()
    assert pass_once([queue]) == [(False, True)]
    assert queue.queue[0].req.finished_reason.status_code == 500


def test_how_long_a_leg_has_waited_counts_from_its_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue

    now_s = [5.0]
    monkeypatch.setattr("pla_sglang.fleet.stateless.transfer.queues.time.monotonic", lambda: now_s[0])
    monkeypatch.setattr(DecodePreallocQueue, "pop_preallocated", lambda self: ([], []))
    queue = queue_with()
    for came_s in (5.0, 9.0):
        now_s[0] = came_s
        queue.queue = [*getattr(queue, "queue", ()), entry()]
        assert queue.pop_preallocated() == ([], [])
    assert [leg.pla_since_s for leg in queue.queue] == [5.0, 9.0]


@pytest.mark.parametrize("knows", [0, 1])
def test_ranks_answer_alike_for_a_peer_that_is_silent_to_one(monkeypatch: pytest.MonkeyPatch, knows: int) -> None:
    """The first rank answers, and it need not be the one that knows."""
    ranks = ranks_with_a_leg(monkeypatch)
    ranks[1 - knows].connector.warm_addresses.add(PEER.address)
    ranks[knows].book.set_state(PEER, PeerState.SILENT, "no answer")
    for queue in ranks:
        queue._resolve_pending_reqs()
    for place, queue in enumerate(ranks):
        # Of the statuses 503 and 409: what the other rank has not heard of.
        others = [place == knows, True]
        queue.agree = lambda flags, others=others: (
            [own and other for own, other in zip(flags, others, strict=True)] if len(flags) == 2 else flags
        )
        queue._update_handshake_waiters()
    assert [queue.queue[0].req.finished_reason.status_code for queue in ranks] == [503, 503]


def test_a_leg_whose_room_is_further_than_it_ends_and_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.disaggregation.base import KVPoll

    [queue] = ranks_with_a_leg(monkeypatch, 1)
    queue.pending_reqs = []
    queue.queue[0].kv_receiver.state = KVPoll.Success
    queue._update_handshake_waiters()
    assert queue.queue[0].req.finished_reason.status_code == 500


class Popping:
    """The host's ``pop_preallocated`` over legs of which ``bad`` raises: memory is reserved for each in turn."""

    def __init__(self, bad: str, *, with_memory: bool) -> None:
        self._bad, self._with_memory = bad, with_memory

    def __get__(self, queue: Any, owner: Any) -> Any:
        def pop() -> tuple[list[Any], list[Any]]:
            started = []
            for leg in queue.queue:
                if leg.req.rid == self._bad:
                    leg.req.req_pool_idx = 1 if self._with_memory else None
                    raise RuntimeError("broken")
                assert leg.req.req_pool_idx is None, "reserved twice"
                leg.req.req_pool_idx, leg.kv_receiver.started_transfer = 1, True
                started.append(leg)
            queue.queue = [leg for leg in queue.queue if leg not in started]
            return started, []

        return pop


@pytest.mark.parametrize("with_memory", [True, False])
@pytest.mark.parametrize("bad", ["a", "b", "c"])
def test_one_leg_that_raises_ends_and_the_others_have_started(
    monkeypatch: pytest.MonkeyPatch, bad: str, with_memory: bool
) -> None:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue

    queue = queue_with()
    queue.queue = [entry() for _ in range(3)]
    for leg, rid in zip(queue.queue, "abc", strict=True):
        leg.req.rid, leg.req.req_pool_idx, leg.kv_receiver.started_transfer = rid, None, False
    queue.pending_reqs = [leg for leg in queue.queue if leg.req.rid == bad]
    monkeypatch.setattr(DecodePreallocQueue, "pop_preallocated", Popping(bad, with_memory=with_memory))
    started, failed = queue.pop_preallocated()
    assert sorted(leg.req.rid for leg in started) == sorted({"a", "b", "c"} - {bad})
    assert [leg.req.rid for leg in queue.take_broken()] == [bad]
    assert (failed, queue.queue, queue.pending_reqs, queue.take_broken()) == ([], [], [], ())
    assert queue.faults.count in (1, 2)


def test_a_leg_gets_memory_whatever_adapters_others_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions would count the adapters of waiting prefills here. Its own has to fit when it joins."""
    queue, leg, asked = queue_with(), entry(), list[str]()
    scheduler = queue.scheduler
    scheduler.enable_lora, scheduler.enable_priority_scheduling = True, False
    for name in ("can_schedule_lora_req", "_can_schedule_lora_req"):
        setattr(scheduler, name, lambda req, in_use: pytest.fail("prefills are asked for"))
    leg.req.lora_id, leg.req.finished_reason, leg.waiting_for_input = "red", None, True
    queue.queue, queue.pending_reqs, queue.transfer_queue, queue.pp_size = [leg], [], SimpleNamespace(queue=[]), 1
    for name in ("_resolve_pending_reqs", "_hicache_pending_restore_tokens"):
        monkeypatch.setattr(queue, name, lambda: 0)
    monkeypatch.setattr(queue, "_update_handshake_waiters", lambda *args: None)
    queue.req_to_metadata_buffer_idx_allocator = SimpleNamespace(available_size=lambda: 1)
    queue.req_to_token_pool = SimpleNamespace(available_size=lambda: asked.append("a row") or 0)
    assert queue.pop_preallocated() == ([], [])
    assert (asked, queue.faults.count, scheduler.enable_lora) == (["a row"], 0, True)


def test_kv_that_cannot_be_taken_over_leaves_no_leg_without_a_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's loop goes on: it hands the leg out as the others, and its end answers and frees it."""
    from sglang.srt.disaggregation.decode import DecodeTransferQueue

    from pla_sglang.fleet.stateless.transfer.legs import FAULT_ATTRIBUTE
    from pla_sglang.fleet.stateless.transfer.queues import TransferQueue

    def commit(self: Any, decode_req: Any) -> None:
        if decode_req.req.rid == "bad":
            raise RuntimeError("broken")

    monkeypatch.setattr(DecodeTransferQueue, "_commit_transfer_to_req", commit)
    queue: Any = object.__new__(TransferQueue)
    queue.faults = Faults()
    for rid in ("bad", "good"):
        leg = SimpleNamespace(req=SimpleNamespace(rid=rid), kv_receiver=object())
        queue._commit_transfer_to_req(leg)
        assert getattr(leg.req, FAULT_ATTRIBUTE, False) is (rid == "bad")
    assert queue.faults.count == 1
