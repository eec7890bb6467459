"""An exception of our own never loses a request: it is answered, and its KV freed, and so are those behind it."""

from __future__ import annotations

from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import FakeRequest, fail_for
from receive_scene import ReceiveScene

from pla_sglang.fleet.stateless import scheduler_hooks as hooks
from pla_sglang.fleet.stateless.engine import StatelessEngine
from pla_sglang.fleet.stateless.host import calls
from pla_sglang.fleet.stateless.host.side_channel import GUARD, PULL
from pla_sglang.fleet.stateless.requests import admission
from pla_sglang.fleet.stateless.transfer.deferred_free import DeferredFree
from pla_sglang.plugin.engine.faults import Faults
from pla_sglang.plugin.engine.hooks import running
from pla_sglang.plugin.engine.hooks import scheduler as scheduler_hooks


class JoiningRequest(FakeRequest):
    """Its KV is here. ``ends``: its first token is its last."""

    def __init__(self, rid: str, *, ends: bool = False) -> None:
        super().__init__(rid)
        self.req_pool_idx, self.output_ids = 1, [7]
        self.kv_committed_len = len(self.origin_input_ids)
        self.grammar, self.return_logprob, self.shown = None, False, 0
        self.time_stats.set_completion_time = lambda: None
        self._ends = ends

    def update_finish_state(self) -> None:
        self.finished_reason = "length" if self._ends else None


class JoiningBatch:
    return_logprob = False

    def __init__(self, reqs: list[Any]) -> None:
        self.reqs = reqs

    def filter_batch(self) -> None:
        self.reqs = [req for req in self.reqs if not req.finished()]

    def is_empty(self) -> bool:
        return not self.reqs

    def merge_batch(self, other: JoiningBatch) -> None:
        self.reqs = [*self.reqs, *other.reqs]


class Admission:
    """``admit_received`` against a fake host in which ``broken`` raises, once."""

    def __init__(self, patch: pytest.MonkeyPatch, broken: str) -> None:
        self._broken = broken
        self.faults = Faults()
        self.freed: list[str] = []
        self.running = JoiningBatch([JoiningRequest("running")])
        self.scheduler = SimpleNamespace(output_streamer=SimpleNamespace(stream_output=self._show))
        patch.setattr(admission, "note_joining", lambda reqs: None)
        patch.setattr(admission, "count_again", lambda batch, steps_under_way: self._pass("count"))
        patch.setattr(admission, "build_received_batch", self._build)
        patch.setattr(admission, "release_kv", self._free)
        patch.setattr(calls, "end_with_error", self._end)
        patch.setattr(JoiningBatch, "merge_batch", self._merge)

    def _pass(self, point: str) -> None:
        if point == self._broken:
            self._broken = ""
            raise RuntimeError(f"broken {point}")

    def _build(self, scheduler: Any, reqs: Any) -> JoiningBatch:
        self._pass("build")
        return JoiningBatch(list(reqs))

    def _free(self, scheduler: Any, req: JoiningRequest, *, keep_prefix: bool = True) -> None:
        self._pass("free")
        assert req.req_pool_idx is not None, "freed twice"
        req.req_pool_idx = None
        self.freed.append(req.rid)

    def _show(self, reqs: list[JoiningRequest], logprob: bool) -> None:
        self._pass("show")
        for req in reqs:
            req.shown += 1

    def _end(self, scheduler: Any, req: JoiningRequest, reason: str, status: int) -> None:
        assert not req.finished(), "answered twice"
        req.finished_reason = int(status)
        req.shown += 1

    def _merge(self, other: JoiningBatch) -> None:
        self._pass("merge")
        raise AssertionError("not reached")


@pytest.mark.parametrize(
    ("broken", "ended"),
    [("build", 500), ("count", 500), ("free", "length"), ("show", "length"), ("merge", "length")],
)
def test_requests_that_could_not_join_are_answered_and_freed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str, ended: Any
) -> None:
    """``ended``: what the first of them ends with; it has one token to give."""
    scene = Admission(monkeypatch, broken)
    first, second = JoiningRequest("first", ends=True), JoiningRequest("second")
    running = admission.admit_received(scene.scheduler, [first, second], scene.running, scene.faults)
    assert running is scene.running
    assert [req.rid for req in running.reqs] == ["running"]
    assert (first.finished_reason, second.finished_reason) == (ended, 500)
    assert sorted(scene.freed) == ["first", "second"]
    assert all(req.shown for req in (first, second))
    assert scene.faults.count == 1
    assert f"broken {broken}" in caplog.text


def test_one_that_cannot_be_answered_keeps_no_other_from_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Admission(monkeypatch, "build")
    reqs = [JoiningRequest(rid) for rid in "abc"]

    def end(scheduler: Any, req: JoiningRequest, reason: str, status: int) -> None:
        if req.rid == "b":
            raise RuntimeError("nobody there")
        req.finished_reason = int(status)

    monkeypatch.setattr(calls, "end_with_error", end)
    admission.admit_received(scene.scheduler, reqs, scene.running, scene.faults)
    assert [req.finished_reason for req in reqs] == [500, None, 500]
    assert (scene.freed, scene.faults.count) == (["a", "b", "c"], 2)


def test_one_that_raises_before_it_joins_ends_and_the_others_join(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Admission(monkeypatch, "")
    bad, good = JoiningRequest("bad"), JoiningRequest("good")
    monkeypatch.setattr(admission, "refresh_fill_ids", lambda req: 1 / (req is not bad))
    running = admission.admit_received(scene.scheduler, [bad, good], JoiningBatch([]), scene.faults)
    assert [req.rid for req in running.reqs] == ["good"]
    assert (bad.finished_reason, scene.freed, scene.faults.count) == (500, ["bad"], 1)


@pytest.mark.parametrize("here", [True, False])
def test_one_whose_end_cannot_be_told_on_any_rank_ends_with_its_first_step(
    monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    scene, votes = Admission(monkeypatch, ""), list[list[bool]]()
    bad, good = JoiningRequest("bad"), JoiningRequest("good")
    if here:
        monkeypatch.setattr(bad, "update_finish_state", lambda: 1 / 0)

    def agree(flags: Any) -> list[bool]:
        votes.append(list(flags))
        return [False, True] if len(votes) == 3 else list(flags)

    running = admission.admit_received(scene.scheduler, [bad, good], JoiningBatch([]), scene.faults, agree)
    assert [req.rid for req in running.reqs] == ["bad", "good"]
    assert votes == [[True, True], [True], [not here, True]]
    assert (bad.to_finish.status_code, good.to_finish) == (500, None)


@pytest.mark.parametrize("here", [True, False])
def test_a_batch_that_one_rank_could_not_build_joins_on_none(monkeypatch: pytest.MonkeyPatch, here: bool) -> None:
    """Every rank says as much as the others: one that is silent would leave them waiting."""
    scene, votes = Admission(monkeypatch, "build" if here else ""), list[list[bool]]()

    def agree(flags: Any) -> list[bool]:
        votes.append(list(flags))
        return [False] if len(votes) == 2 else list(flags)

    reqs = [JoiningRequest(rid) for rid in "ab"]
    running = admission.admit_received(scene.scheduler, reqs, scene.running, scene.faults, agree)
    assert [req.rid for req in running.reqs] == ["running"]
    assert votes == [[True, True], [not here]]
    assert [req.finished_reason for req in reqs] == [500, 500]
    assert scene.freed == ["a", "b"]


# -- loops over what no queue has any more -----------------------------------------------------------------------------


def test_each_failed_transfer_is_answered_and_its_pages_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ReceiveScene(monkeypatch)
    for rid in ("a", "b"):
        bench.add(rid)
    bench.transfers.failing = {"a", "b"}
    fail_for(monkeypatch, calls, "end_with_error", "a")
    bench.receiver.pump()
    assert ([rid for rid, _ in bench.answers], bench.faults.count) == (["b"], 1)
    assert len(bench.deferred) == 2
    bench.acknowledged.add(1)
    bench.deferred.sweep(0.0)
    assert bench.freed == ["a", "b"]


def test_each_answer_with_foreign_kv_ends_and_the_others_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ReceiveScene(monkeypatch)
    for rid in ("a", "b", "good"):
        bench.add(rid)
    bench.transfers.arrived = {"a", "b", "good"}
    monkeypatch.setattr("pla_sglang.fleet.stateless.transfer.receiving.came_with_its_kv", lambda req: req.rid == "good")
    fail_for(monkeypatch, calls, "end_with_error", "a")
    bench.receiver.pump()
    assert [req.rid for req in bench.receiver.ready] == ["good"]
    assert ([rid for rid, _ in bench.answers], bench.freed) == (["b"], ["a", "b"])
    assert (bench.receiver.failed, bench.receiver.received, bench.faults.count) == (2, 1, 1)


def test_each_aborted_request_whose_kv_is_here_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ReceiveScene(monkeypatch)
    bench.receiver.ready = [FakeRequest("a"), FakeRequest("b")]
    fail_for(monkeypatch, calls, "end_aborted", "a")
    bench.receiver.abort(lambda rid: True)
    assert ([rid for rid, _ in bench.answers], bench.freed, bench.faults.count) == (["b"], ["a", "b"], 1)


def test_pages_behind_those_that_cannot_be_freed_are_freed() -> None:
    faults, freed = Faults(), list[str]()
    deferred = DeferredFree(lambda flags: flags, faults)

    def fail() -> None:
        raise RuntimeError("no such page")

    for release in (fail, lambda: freed.append("b")):
        deferred.hold(10, is_through=lambda: True, release=release, now_s=0.0)
    deferred.sweep(0.0)
    assert (freed, len(deferred), faults.count) == (["b"], 0, 1)


# -- hooks -------------------------------------------------------------------------------------------------------------


class Broken:
    """Whatever is asked of it raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"broken {name}")


BROKEN: Any = SimpleNamespace(pla_fleet=Broken())
OUTPUT = SimpleNamespace(internal_state={})
ABORT = [b"ABORT", b"7", b"10.0.0.2", b"40"]
PULLED = [PULL, b"7", b"10.0.0.2", b"40"]
ASKED = [GUARD, b"7", b"10.0.0.2", b"40", b"agent"]
HOOKS = [
    (hooks.after_adder_init, (None, None), None),
    (hooks.before_can_schedule_lora, (BROKEN, None, set()), None),
    (hooks.after_can_schedule_lora, (True, BROKEN, None, set()), None),
    (running.after_prepare_for_extend, (None, Broken()), None),
    (hooks.after_get_internal_state, (OUTPUT, BROKEN), None),
    (hooks.around_handle_abort, (lambda manager, message: True, Broken(), ABORT), True),
    (hooks.around_handle_abort, (lambda manager, message: True, Broken(), [*ABORT, b"1"]), True),
    (hooks.around_handle_abort, (lambda manager, message: False, Broken(), PULLED), True),
    (hooks.around_handle_abort, (lambda manager, message: False, Broken(), ASKED), False),
]


@pytest.mark.parametrize(("hook", "args", "answer"), HOOKS)
def test_a_hook_that_raises_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hook: Any, args: tuple[Any, ...], answer: Any
) -> None:
    """Not even the host's thread that reads what receivers say, which takes a message for its own only with True."""
    monkeypatch.setattr(hooks, "_engine", Broken())
    before = hooks._faults.count
    assert hook(*args) is answer
    assert hooks._faults.count > before
    assert "pla_sglang: " in caplog.text


def test_penalties_are_the_hosts_where_ours_cannot_be_counted() -> None:
    batch, calls, before = Broken(), list[Any](), hooks._faults.count
    running.around_cumulate_penalties(calls.append, batch)
    assert (calls, hooks._faults.count) == ([batch], before + 1)


@pytest.mark.parametrize("place_riders", [hooks.after_mix_with_running, scheduler_hooks.after_mix_with_running])
def test_running_requests_that_cannot_be_placed_in_a_pass_end_with_it(place_riders: Any) -> None:
    """The host's own place may be one too far: KV that is not written would be read."""
    piggybacked = [JoiningRequest("a"), JoiningRequest("b")]
    piggybacked[1].to_finish = "aborted before"
    place_riders(None, Broken(), SimpleNamespace(reqs=piggybacked))
    assert (piggybacked[0].to_finish.status_code, piggybacked[1].to_finish) == (500, "aborted before")
    assert all(req.skip_radix_cache_insert for req in piggybacked)  # type: ignore[attr-defined]


def test_a_leg_that_cannot_be_let_go_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, answers = object.__new__(StatelessEngine), list[int]()
    engine.faults, engine.refused, engine._scheduler = Faults(), 0, None
    engine.sender, engine.receiver = Broken(), Broken()  # type: ignore[assignment]
    monkeypatch.setattr(calls, "end_with_error", lambda scheduler, req, reason, status: answers.append(int(status)))
    engine._let_go(FakeRequest("a"), "it could not be taken over", HTTPStatus.INTERNAL_SERVER_ERROR)
    assert (answers, engine.faults.count) == ([500], 2)
