"""The sending end against a fake host: who enters, what goes out when, and how every state can be left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fakes import FakeBatch, FakeRequest, FakeScheduler, FakeSendQueue

from pla_sglang.fleet.stateless.host import calls
from pla_sglang.fleet.stateless.host.calls import SendPoll
from pla_sglang.fleet.stateless.transfer.deferred_free import DeferredFree
from pla_sglang.fleet.stateless.transfer.legs import Caps, SendLeg, SendState
from pla_sglang.fleet.stateless.transfer.sending import GivenUpError, Sender
from pla_sglang.plugin.engine.faults import Faults
from pla_sglang.plugin.engine.host.requests import set_extend


class Bench:
    """One sender, its fakes, and what the host was asked to do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, overlap: bool, cap_tokens: int = 1000) -> None:
        self.scheduler, self.queue = FakeScheduler(overlap=overlap), FakeSendQueue()
        self.deferred = DeferredFree(lambda flags: flags, Faults())
        self.faults = Faults()
        self.sender = Sender(self.scheduler, self.queue, self.deferred, faults=self.faults, caps=Caps(cap_tokens, 4))
        self.scheduler.handle_bootstrap_failure = lambda req: self._answer(req, self._reason(req))
        self.freed: list[str] = []
        self.answers: list[tuple[str, str]] = []
        monkeypatch.setattr(calls, "poll_senders", lambda scheduler, senders: [one.outcome for one in senders])
        monkeypatch.setattr(calls, "free_metadata", lambda scheduler, req: None)
        monkeypatch.setattr(calls, "has_failed", lambda manager, room: manager.request_status.get(room) == "failed")
        monkeypatch.setattr("pla_sglang.fleet.stateless.transfer.fence.mark_failed", lambda manager, room: None)
        monkeypatch.setattr(calls, "release_kv", self._release)
        monkeypatch.setattr(calls, "end_sent", lambda scheduler, req: self._answer(req, "sent"))
        monkeypatch.setattr(calls, "end_aborted", lambda scheduler, req, reason: self._answer(req, "aborted"))
        monkeypatch.setattr(calls, "end_with_error", lambda scheduler, req, reason, status: self._answer(req, reason))

    def _release(self, scheduler: Any, req: FakeRequest, *, keep_prefix: bool = True) -> None:
        assert req.req_pool_idx is not None
        req.req_pool_idx = None
        self.freed.append(req.rid)

    def _answer(self, req: FakeRequest, what: str) -> None:
        assert not req.finished(), "answered twice"
        req.finished_reason = what
        self.answers.append((req.rid, what))

    def _reason(self, req: FakeRequest) -> str:
        return str(self.queue.kv_manager.failure_records.get(req.bootstrap_room))

    def state(self, req: FakeRequest) -> SendState | None:
        leg = self.sender.legs.get(id(req))
        return None if leg is None else leg.state

    def add(self, rid: str, tokens: int = 100, *, connected: bool = True) -> FakeRequest:
        req = FakeRequest(rid, tokens)
        asked = self.queue.kv_manager.transfer_infos
        req.disagg_kv_sender.forget = lambda: asked.pop(req.bootstrap_room, None)
        self.sender.add(req, 0.0)
        if connected:
            req.disagg_kv_sender.outcome = SendPoll.ASKED
        return req

    def turn(
        self, admitted: FakeBatch | None, last: FakeBatch | None, chunk: tuple[FakeRequest, int] | None = None
    ) -> None:
        """One choice of the host's next batch: it admits ``admitted``; ``chunk`` is the request cut, and where."""
        self.sender.before_pass(FakeBatch(), last)
        self.sender.poll()
        if admitted is not None:
            for req in admitted.reqs:
                req.req_pool_idx = 1
                set_extend(req, 0, len(req.origin_input_ids))
                self.scheduler.waiting_queue = [one for one in self.scheduler.waiting_queue if one is not req]
        self.scheduler.chunked_req = None if chunk is None else chunk[0]
        if chunk is not None:
            set_extend(chunk[0], 0, chunk[1])
        self.sender.after_pass()
        self.deferred.sweep(0.0)

    def result(self, batch: FakeBatch, *, done: bool = True) -> None:
        """The host has processed the pass of ``batch``; ``done``: with it the prompts were complete."""
        for req in batch.reqs:
            if done:
                req.output_ids.append(7)
        self.sender.on_result(batch)


@pytest.fixture(params=[True, False], ids=["overlap", "no overlap"])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch, overlap=request.param)


def computed(bench: Bench, rid: str = "a") -> FakeRequest:
    """A leg whose prompt was computed in one pass and whose KV is on its way."""
    req = bench.add(rid)
    bench.turn(None, None)
    assert bench.scheduler.waiting_queue == [req]
    batch = FakeBatch(req)
    bench.turn(batch, None)
    if bench.scheduler.enable_overlap:
        bench.turn(None, batch)  # the next pass is chosen before the result is in
    bench.result(FakeBatch(req))
    bench.turn(None, batch)
    assert batch.reqs == [], "the host must not let it decode"
    assert bench.state(req) is SendState.SENDING
    return req


def test_a_leg_ends_when_its_kv_is_gone(bench: Bench) -> None:
    req = computed(bench)
    assert bench.scheduler.sent == [("a", None)]
    assert bench.answers == []
    req.disagg_kv_sender.outcome = SendPoll.DONE
    bench.turn(None, None)
    assert (bench.answers, bench.freed, bench.sender.legs) == ([("a", "sent")], ["a"], {})


def test_the_host_never_sees_it_end(bench: Bench) -> None:
    req: Any = bench.add("a")
    assert req.update_finish_state() is None
    assert not req.finished()
    assert not req.stream


def test_chunks_go_out_once_their_result_is_in(bench: Bench) -> None:
    """With overlap a result comes one pass later; never more than computed KV is sent."""
    req = bench.add("a", 300)
    bench.turn(None, None)
    batches = [FakeBatch(req) for _ in range(3)]
    overlap = bench.scheduler.enable_overlap
    for number, end in enumerate((100, 200, 300)):
        chunk = (req, end) if end < 300 else None
        bench.turn(batches[number], batches[number - 1] if number else None, chunk)
        set_extend(req, 0, end)
        behind = number - overlap
        if behind >= 0:
            bench.result(FakeBatch(req), done=behind == 2)
        computed_tokens = 100 * (behind + 1)
        assert all(sent is None or sent <= computed_tokens for _, sent in bench.scheduler.sent)
    if overlap:
        bench.turn(None, batches[2])
        bench.result(FakeBatch(req))
    assert bench.scheduler.sent == [("a", 100), ("a", 200), ("a", None)]


def test_whole_requests_beside_it_stay_in_the_batch(bench: Bench) -> None:
    req, other = bench.add("a"), FakeRequest("whole")
    bench.turn(None, None)
    batch = FakeBatch(other, req)
    bench.turn(batch, None)
    bench.turn(None, batch)
    assert batch.reqs == [other]


def test_no_more_kv_than_the_cap_but_one_leg_always(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, overlap=True, cap_tokens=250)
    big, small, late = bench.add("big", 900), bench.add("small"), bench.add("late")
    bench.turn(None, None)
    assert [bench.state(req) for req in (big, small, late)] == [
        SendState.QUEUED,
        SendState.HANDSHAKE,
        SendState.HANDSHAKE,
    ]


def test_no_more_legs_than_the_cap_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, overlap=True)
    reqs = [bench.add(rid, 10) for rid in "abcdef"]
    bench.turn(None, None)
    assert [bench.state(req) for req in reqs] == [SendState.QUEUED] * 4 + [SendState.HANDSHAKE] * 2


@pytest.mark.parametrize("prefix", ["alone", "al"])
def test_abort_before_the_handshake(bench: Bench, prefix: str) -> None:
    req = bench.add("alone", connected=False)
    bench.sender.abort(lambda rid: rid.startswith(prefix))
    assert (bench.answers, bench.sender.legs, bench.queue.queue) == ([("alone", "aborted")], {}, [])
    assert req.disagg_kv_sender.aborted
    assert req.disagg_kv_sender.cleared


def test_abort_in_the_hosts_queue_is_the_hosts(bench: Bench) -> None:
    """It takes the request out and answers; the leg must notice, and answer nothing itself."""
    req = bench.add("a")
    bench.turn(None, None)
    bench.scheduler.waiting_queue.clear()
    bench.sender.abort(lambda rid: True)
    assert bench.answers == []
    bench.turn(None, None)
    assert bench.sender.legs == {}
    assert req.disagg_kv_sender.cleared


def test_abort_while_sending_keeps_the_pages_until_no_worker_reads_them(bench: Bench) -> None:
    req = computed(bench)
    bench.sender.abort(lambda rid: True)
    bench.turn(None, None)
    assert bench.answers == [("a", "aborted")]
    assert (bench.freed, bench.state(req)) == ([], SendState.LEAVING)
    bench.queue.pass_marks()
    bench.turn(None, None)
    assert (bench.freed, bench.sender.legs) == (["a"], {})


def test_abort_between_chunks_ends_the_chunk_and_not_the_host(bench: Bench) -> None:
    req = bench.add("a", 300)
    bench.turn(None, None)
    batch = FakeBatch(req)
    bench.turn(batch, None, (req, 100))
    bench.scheduler._pending_chunked_abort_req = req  # as the host's own abort leaves it
    bench.sender.abort(lambda rid: True)
    assert bench.scheduler._pending_chunked_abort_req is None, "the host would free the pages at once"
    bench.turn(None, batch)
    assert bench.scheduler.chunked_req is None
    assert bench.answers == [("a", "aborted")]
    bench.result(FakeBatch(req), done=False)  # of the chunk that was under way: nothing is sent any more
    bench.queue.pass_marks()
    bench.turn(None, None)
    assert (bench.scheduler.sent, bench.freed, bench.sender.legs) == ([], ["a"], {})


def test_before_a_pause_nothing_of_a_leg_is_left_in_the_hosts_batches(bench: Bench) -> None:
    """The host would retract it: free its pages, and queue it again."""
    req, chunked = bench.add("a"), bench.add("b", 300)
    bench.turn(None, None)
    batch = FakeBatch(req, chunked)
    bench.turn(batch, None, (chunked, 100))
    bench.sender.abort(lambda rid: True)
    bench.sender.before_pass(FakeBatch(), batch)
    assert (batch.reqs, bench.scheduler.chunked_req) == ([], None)
    bench.result(FakeBatch(req))
    assert sorted(bench.answers) == [("a", "aborted"), ("b", "aborted")]


def test_abort_during_the_last_pass(bench: Bench) -> None:
    req = bench.add("a")
    bench.turn(None, None)
    batch = FakeBatch(req)
    bench.turn(batch, None)
    bench.sender.abort(lambda rid: True)
    assert bench.answers == [], "its pass is under way"
    bench.result(batch)
    assert bench.answers == [("a", "aborted")]
    assert bench.scheduler.sent == []
    bench.queue.pass_marks()
    bench.turn(None, batch)
    assert bench.freed == ["a"]


def test_a_failed_transfer_is_an_error_with_its_reason(bench: Bench) -> None:
    req = computed(bench)
    req.disagg_kv_sender.outcome = SendPoll.FAILED
    bench.turn(None, None)
    [(rid, reason)] = bench.answers
    assert rid == "a"
    assert "the link is down" in reason


def test_a_target_that_gave_up_takes_its_leg_out_of_the_queue(bench: Bench) -> None:
    req = bench.add("a")
    bench.turn(None, None)
    req.disagg_kv_sender.outcome = SendPoll.FAILED
    bench.turn(None, None)
    assert bench.scheduler.waiting_queue == []
    assert len(bench.answers) == 1
    assert bench.sender.legs == {}


def test_an_exception_while_sending_ends_that_leg_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(bench.scheduler, "send_kv_chunk", fail)
    req, other = bench.add("a"), bench.add("b")
    bench.turn(None, None)
    batch = FakeBatch(req)
    bench.turn(batch, None)
    bench.result(FakeBatch(req))
    assert bench.answers == [], "other ranks have sent it: it ends when all know"
    assert bench.queue.kv_manager.failure_records == {1: "its KV could not be sent"}
    bench.turn(None, batch)
    assert [rid for rid, _ in bench.answers] == ["a"]
    assert bench.state(other) is SendState.QUEUED


def test_a_leg_that_comes_after_its_decode_leg_gave_up(bench: Bench) -> None:
    """An abort may overtake the request. Its room is answered once and then forgotten."""
    manager = bench.queue.kv_manager
    manager.request_status[1], manager.transfer_infos[1] = "failed", {}
    req = FakeRequest("a")
    with pytest.raises(GivenUpError):
        bench.sender.add(req, 0.0)
    assert req.stream, "untouched"
    bench.sender.forget(req)
    assert (bench.sender.legs, manager.request_status, manager.transfer_infos) == ({}, {}, {})


def test_a_leg_that_another_rank_has_heard_to_be_given_up(bench: Bench) -> None:
    """This rank has made a sender for it already, which must not wait for ever."""
    req, manager = bench.add("a"), bench.queue.kv_manager
    manager.request_status[1] = "waits"
    bench.sender.forget(req)
    assert (req.disagg_kv_sender.aborted, req.disagg_kv_sender.cleared) == (True, True)
    assert (bench.sender.legs, bench.queue.queue, manager.request_status) == ({}, [], {})


def test_a_handshake_that_takes_too_long(bench: Bench) -> None:
    """It fails, and ends when all ranks have seen that."""
    req, records = bench.add("a", connected=False), bench.queue.kv_manager.failure_records
    bench.sender.expire(waiting_s=-1.0, sending_s=1.0)
    assert not req.disagg_kv_sender.aborted
    bench.sender.expire(waiting_s=1.0, sending_s=-1.0)
    assert req.disagg_kv_sender.aborted
    assert records == {1: "Request waiting timeout reached."}
    bench.turn(None, None)
    assert (bench.answers, bench.sender.legs) == ([("a", "Request waiting timeout reached.")], {})


def test_a_transfer_that_takes_too_long(bench: Bench) -> None:
    req, records = computed(bench), bench.queue.kv_manager.failure_records
    bench.sender.expire(waiting_s=1.0, sending_s=-1.0)
    assert not req.disagg_kv_sender.aborted
    bench.sender.expire(waiting_s=-1.0, sending_s=1.0)
    assert req.disagg_kv_sender.aborted
    assert records == {1: "Request running timeout reached."}


# -- what happens to one leg happens to no other -----------------------------------------------------------------------


def test_a_leg_whose_room_is_under_way_for_another_ends_alone(bench: Bench) -> None:
    """The host's own loop raises at it, and loses those that it has taken out before."""
    first, bad, last = (bench.add(rid) for rid in ("first", "bad", "last"))
    bad.bootstrap_room, bad.disagg_kv_sender.outcome = 9, SendPoll.DONE
    bench.turn(None, None)
    assert [bench.state(req) for req in (first, last)] == [SendState.QUEUED] * 2
    bench.turn(None, None)
    assert bench.answers == [("bad", "room 9 is in use")]
    assert bench.scheduler.waiting_queue == [first, last]
    assert (bench.queue.queue, len(bench.sender.legs), bench.sender.failed) == ([], 2, 1)


class OnceBroken:
    """Raises when it is called for ``rid``, the first time."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str, rid: str) -> None:
        self._original, self._rid, self.raised = getattr(owner, name), rid, False
        patch.setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.raised and any(getattr(arg, "rid", None) == self._rid for arg in args):
            self.raised = True
            raise RuntimeError(f"broken for {self._rid}")
        return self._original(*args, **kwargs)


def test_a_leg_that_cannot_be_started_ends_when_all_ranks_know(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks have started it: it enters the queue here too."""
    broken = OnceBroken(monkeypatch, bench.queue, "finalize_bootstrap", "bad")
    bad, good = bench.add("bad"), bench.add("good")
    bench.turn(None, None)
    assert broken.raised
    assert bench.scheduler.waiting_queue == [bad, good]
    bench.turn(None, None)
    assert bench.scheduler.waiting_queue == [good]
    assert [rid for rid, _ in bench.answers] == ["bad"]
    assert bench.faults.count == 1


@pytest.mark.parametrize("name", ["release_kv", "end_sent", "free_metadata"])
def test_what_a_leg_cannot_give_back_keeps_no_other_from_its_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    reqs = [computed(bench, rid) for rid in ("bad", "good")]
    OnceBroken(monkeypatch, calls, name, "bad")
    for req in reqs:
        req.disagg_kv_sender.outcome = SendPoll.DONE
    bench.turn(None, None)
    assert (bench.sender.legs, bench.sender.sent, bench.faults.count) == ({}, 2, 1)
    assert ("good", "sent") in bench.answers
    assert "good" in bench.freed


def test_a_leg_whose_end_raises_is_ended_by_the_next_poll(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """When its pass is over, no pass comes that would end it."""
    bad, good = bench.add("bad"), bench.add("good")
    bench.turn(None, None)
    batch = FakeBatch(bad, good)
    bench.turn(batch, None)
    bad.time_stats.set_prefill_transfer_queue_entry_time = lambda: 1 / 0
    monkeypatch.setattr(SendLeg, "move", OnceMoved(SendLeg.move, "bad"))
    bench.result(FakeBatch(bad, good))
    assert bench.state(good) is SendState.SENDING
    bench.turn(None, batch)
    assert (bench.state(bad), bench.state(good)) == (SendState.LEAVING, SendState.SENDING)
    assert [rid for rid, _ in bench.answers] == ["bad"]
    bench.queue.pass_marks()
    bench.turn(None, None)
    assert bench.freed == ["bad"]


class OnceMoved:
    """A leg of ``rid`` that does not get to SENDING."""

    def __init__(self, original: Any, rid: str) -> None:
        self._original, self._rid = original, rid

    def __get__(self, leg: Any, owner: Any) -> Any:
        def move(state: SendState) -> None:
            if leg.req.rid == self._rid and state is SendState.SENDING:
                raise RuntimeError("broken")
            self._original(leg, state)

        return move


def test_a_leg_that_fails_tells_its_receiver_and_an_abort_does_not(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who orders an abort orders it at both instances."""
    told: list[int] = []
    monkeypatch.setattr(
        "pla_sglang.fleet.stateless.transfer.sending.send_refusal", lambda manager, who, room: told.append(room)
    )
    for room, rid in enumerate(("failed", "aborted")):
        req = bench.add(rid)
        req.bootstrap_room = room
        bench.queue.kv_manager.transfer_infos[room] = {"agent": SimpleNamespace(endpoint="h", dst_port=1)}
        bench.turn(None, None)
    failed = next(leg.req for leg in bench.sender.legs.values() if leg.req.rid == "failed")
    failed.disagg_kv_sender.outcome = SendPoll.FAILED
    bench.scheduler.waiting_queue = [req for req in bench.scheduler.waiting_queue if req is failed]
    bench.turn(None, None)
    assert told == [0]
    assert all(room in bench.queue.rooms for room in (0, 1)), "not to be used again"


def test_an_end_for_a_fault_says_so(bench: Bench) -> None:
    """Not as an abort, which looks like a client's."""
    bench.add("waiting", connected=False)
    bench.add("queued")
    bench.turn(None, None)
    bench.sender.abort(lambda rid: True, "an exception")
    assert sorted(bench.answers) == [("queued", "an exception"), ("waiting", "an exception")]
    assert (bench.sender.legs, bench.scheduler.waiting_queue) == ({}, [])
