"""A decision is carried out and taken back without a trace, whatever happens in between. On a fake scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_scheduler import CHUNK_TOKENS, TEMPORAL, FakeBatch, FakeReq, FakeScheduler

from pla_sglang.engine import adapter, apply, handlers
from pla_sglang.engine.clock import PlaTick, pack_model, unpack_model
from pla_sglang.policy.boundary import CPU_START, GPU_START
from pla_sglang.policy.types import Action, PassDecision, PassView, Reason

EMPTY_VIEW = PassView([], None, CHUNK_TOKENS, 1, 1000, 0)


def shorts(count: int, tokens: int = 20) -> list[FakeReq]:
    return [FakeReq(f"short-{index}", tokens) for index in range(count)]


def long(name: str = "long", tokens: int = 3000, **fields: Any) -> FakeReq:
    return FakeReq(name, tokens, **fields)


def started(tokens: int = 3000, done: int = CHUNK_TOKENS, **fields: Any) -> FakeReq:
    """A long whose prefill is under way."""
    req = long("chunk", tokens, **fields)
    req.extend_range = SimpleNamespace(start=0, end=done)
    return req


# -- the queue ---------------------------------------------------------------------------------------------------------


def test_the_host_sees_one_class_only_and_gets_its_queue_back() -> None:
    first, second, third = long("a"), *shorts(2)
    scheduler = FakeScheduler([first, second, third])
    batch = scheduler.run_pass()
    assert scheduler.seen[0]["queue"] == [second, third]
    assert batch is not None
    assert batch.reqs == [second, third]
    assert scheduler.waiting_queue == [first]


def test_the_hosts_order_is_kept() -> None:
    queue = [long("a"), FakeReq("x", 20), long("b"), FakeReq("y", 20)]
    scheduler = FakeScheduler(queue)
    scheduler.run_pass(fits=1)
    assert scheduler.waiting_queue == [queue[0], queue[2], queue[3]]


def test_what_comes_in_during_a_pass_stays_at_the_end() -> None:
    queue = [long("a"), *shorts(1)]
    preempted = FakeReq("preempted", 20)
    scheduler = FakeScheduler(queue)
    scheduler.run_pass(lambda it: it.waiting_queue.append(preempted), fits=1)
    assert scheduler.waiting_queue == [queue[0], preempted]


def test_nothing_admitted_leaves_the_queue_as_it_was() -> None:
    queue = [long("a"), *shorts(2)]
    scheduler = FakeScheduler(queue)
    assert scheduler.run_pass(fits=0) is None
    assert scheduler.waiting_queue == queue


@pytest.mark.parametrize("moment", ["before the decision", "after the decision"])
def test_an_exception_in_the_middle_restores_everything(moment: str) -> None:
    chunk, queue = started(), [*shorts(2), long("a")]
    scheduler = FakeScheduler(queue, chunk)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("in the middle")

    if moment == "before the decision":
        scheduler.pla.policy.decide = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="in the middle"):
        scheduler.run_pass(fail)
    assert scheduler.waiting_queue == queue
    assert scheduler.chunked_req is chunk
    assert scheduler.chunked_prefill_size == CHUNK_TOKENS
    assert scheduler.pla.context is None


def test_outside_a_pass_ordering_changes_nothing() -> None:
    """Decode instances and diffusion models order queues too."""
    queue = [long("a"), *shorts(1)]
    scheduler = FakeScheduler(queue)
    scheduler.pla.on_ordered(scheduler.waiting_queue)
    assert scheduler.waiting_queue == queue


# -- the chunk ---------------------------------------------------------------------------------------------------------


def test_a_parked_chunk_is_hidden_for_one_pass() -> None:
    chunk, queue = started(), shorts(2)
    scheduler = FakeScheduler(queue, chunk)
    batch = scheduler.run_pass()
    assert batch is not None
    assert batch.reqs == queue
    assert (scheduler.seen[0]["chunk"], scheduler.seen[0]["size"]) == (None, None)
    assert scheduler.chunked_req is chunk
    assert scheduler.chunked_prefill_size == CHUNK_TOKENS
    assert scheduler.pla.telemetry.parks == 1


def test_the_chunk_goes_on_when_nobody_else_waits() -> None:
    chunk = started()
    scheduler = FakeScheduler([], chunk)
    batch = scheduler.run_pass()
    assert batch is not None
    assert batch.reqs == [chunk]
    assert chunk.extend_range.end == 2 * CHUNK_TOKENS
    assert scheduler.chunked_req is chunk


def test_a_long_starts_as_the_only_one_with_its_chunk_size() -> None:
    queue = [long("a"), long("b", 2000)]
    scheduler = FakeScheduler(queue)
    scheduler.run_pass()
    assert scheduler.seen[0]["queue"] == [queue[1]]  # least remaining first
    assert scheduler.seen[0]["size"] == CHUNK_TOKENS
    assert scheduler.chunked_req is queue[1]
    assert scheduler.waiting_queue == [queue[0]]


def test_one_that_fits_a_pass_overtakes_uncut() -> None:
    chunk, other = started(), long("a", 200)
    scheduler = FakeScheduler([other], chunk)
    batch = scheduler.run_pass()
    assert batch is not None
    assert batch.reqs == [other]
    assert scheduler.seen[0]["size"] is None, "cut, it would become a second chunk and overwrite the first"
    assert scheduler.chunked_req is chunk
    assert scheduler.pla.telemetry.overtakes == 1


def test_a_second_chunk_beside_a_parked_one_is_an_error() -> None:
    scheduler = FakeScheduler(shorts(1), started())
    decision = PassDecision(Action.SHORT, Reason.NO_GAIN, park=True)
    context = apply.PassContext(scheduler.running, False, view=EMPTY_VIEW, decision=decision)
    apply.enter(context, scheduler, scheduler.waiting_queue)
    scheduler.chunked_req = long("second")
    with pytest.raises(AssertionError, match="cut a request"):
        apply.leave(context, scheduler, CHUNK_TOKENS, None)


def test_an_aborted_chunk_is_gone_in_the_next_pass() -> None:
    scheduler = FakeScheduler(shorts(1), started())
    scheduler.run_pass()
    scheduler.chunked_req = None  # what the host does on an abort between two passes
    assert scheduler.run_pass() is None
    assert scheduler.chunked_req is None


@pytest.mark.parametrize(
    ("tokens", "page", "align", "expected"),
    [
        (256, 1, None, 256),
        (200, 16, None, 192),
        (10, 16, None, 16),
        (200, 16, 64, 192),
        (50, 16, 64, 64),
        (1, 1, None, 1),
    ],
)
def test_chunks_are_whole_pages(tokens: int, page: int, align: int | None, expected: int) -> None:
    scheduler = (
        SimpleNamespace(page_size=page)
        if align is None
        else SimpleNamespace(page_size=page, truncation_align_size=align)
    )
    assert apply.align_chunk(tokens, apply.chunk_grid_tokens(scheduler)) == expected


# -- batch_is_full -----------------------------------------------------------------------------------------------------


def test_a_long_that_found_no_memory_does_not_lock_out_shorts() -> None:
    scheduler = FakeScheduler([long("a")], running=FakeBatch([FakeReq("decoding", 5)]))
    assert scheduler.run_pass(fits=0) is None
    assert not scheduler.running.batch_is_full
    scheduler.waiting_queue += shorts(1)
    assert scheduler.run_pass() is not None


def test_shorts_that_found_no_memory_leave_the_hosts_mark() -> None:
    scheduler = FakeScheduler(shorts(1), running=FakeBatch([FakeReq("decoding", 5)]))
    assert scheduler.run_pass(fits=0) is None
    assert scheduler.running.batch_is_full


# -- memory and adapters of the parked chunk ---------------------------------------------------------------------------


def adder(page_size: int = 1) -> Any:
    return SimpleNamespace(page_size=page_size, rem_total_token_offset=0, cur_rem_token_offset=0, rem_chunk_tokens=None)


def test_the_parked_chunks_memory_is_reserved() -> None:
    chunk = started(3000, CHUNK_TOKENS, new_tokens=100)
    scheduler = FakeScheduler(shorts(1), chunk)
    made = adder(page_size=16)
    scheduler.run_pass(lambda it: apply.reserve_for_parked(it.pla.context, made))
    # 2744 tokens to prefill, half of 100 tokens of output by the host's ratio, a page for rounding
    assert made.rem_total_token_offset == 2744 + 50 + 16
    assert made.cur_rem_token_offset == 2744 + 16


def test_nothing_is_reserved_for_a_chunk_that_runs() -> None:
    made = adder()
    FakeScheduler([], started()).run_pass(lambda it: apply.reserve_for_parked(it.pla.context, made))
    assert (made.rem_total_token_offset, made.cur_rem_token_offset) == (0, 0)


def test_a_parked_chunks_adapter_counts_as_running() -> None:
    asked: list[set[str | None]] = []

    def original(scheduler: Any, req: Any, running_loras: set[str | None]) -> bool:
        asked.append(set(running_loras))
        return True

    chunk = started(lora_id="lora-of-the-chunk")
    scheduler = FakeScheduler(shorts(1), chunk)
    scheduler.run_pass(lambda it: handlers.around_can_schedule_lora(original, it, it.waiting_queue[0], {"other"}))
    scheduler.waiting_queue = []
    scheduler.run_pass(lambda it: handlers.around_can_schedule_lora(original, it, chunk, {"other"}))
    handlers.around_can_schedule_lora(original, scheduler, chunk, {"other"})
    assert asked == [{"other", "lora-of-the-chunk"}, {"other"}, {"other"}]


# -- mixed passes (ablation) -------------------------------------------------------------------------------------------


def test_a_mixed_pass_splits_the_chunk_size() -> None:
    chunk = started()
    scheduler = FakeScheduler(shorts(3), chunk)
    scheduler.pla.set_config(TEMPORAL.replace(mixing="allow"))
    given: list[int] = []

    def original(made: Any, req: Any) -> None:
        given.append(made.rem_chunk_tokens)
        made.rem_chunk_tokens -= made.rem_chunk_tokens  # the host takes all there is

    def during(it: FakeScheduler) -> None:
        made = adder()
        made.rem_chunk_tokens = it.chunked_prefill_size
        apply.add_chunk(original, it.pla.context, made, chunk)
        given.append(made.rem_chunk_tokens)

    scheduler.run_pass(during)
    assert scheduler.seen[0]["chunk"] is chunk
    # Each short takes its 20 tokens and a page of rounding; the chunk gets what they leave of 256.
    assert given == [CHUNK_TOKENS - 63, 63]
    assert scheduler.chunked_prefill_size == CHUNK_TOKENS


def test_other_passes_leave_the_chunk_size_alone() -> None:
    made = adder()
    made.rem_chunk_tokens = 256
    for context in (None, apply.PassContext(FakeBatch(), False)):
        assert apply.add_chunk(lambda it, req: it.rem_chunk_tokens, context, made, None) == 256


# -- holding -----------------------------------------------------------------------------------------------------------


def holding(**fields: Any) -> FakeScheduler:
    """A scheduler that holds two shorts back for a while."""
    scheduler = FakeScheduler(shorts(2), **fields)
    scheduler.pla.set_config(TEMPORAL.replace(wait_min_ms=5.0))
    scheduler.pla.on_tick(PlaTick(now_s=100.0))
    assert scheduler.run_pass() is None
    assert len(scheduler.seen) == 1
    return scheduler


def test_an_unchanged_hold_does_not_ask_the_host_again(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(adapter.time, "sleep", naps.append)
    scheduler = holding()
    for _ in range(3):
        assert scheduler.run_pass() is None
    assert len(scheduler.seen) == 1
    assert scheduler.pla.telemetry.passes_skipped == 3
    assert naps == [adapter.HOLD_NAP_S] * 3


def test_a_hold_naps_only_on_an_idle_device(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(adapter.time, "sleep", naps.append)
    scheduler = holding(running=FakeBatch([FakeReq("decoding", 5)]))
    assert scheduler.run_pass() is None
    assert naps == []


@pytest.mark.parametrize(
    "change",
    [
        lambda it: it.pla.on_tick(PlaTick(now_s=100.006)),
        lambda it: it.waiting_queue.append(FakeReq("new", 20)),
        lambda it: it.waiting_queue.pop(),
        lambda it: it.waiting_queue.__setitem__(-1, FakeReq("another", 20)),
        lambda it: it.running.reqs.append(FakeReq("decoding", 5)),
        lambda it: it.pla.set_config(it.pla.config.replace(wait_max_ms=9.0)),
        lambda it: setattr(it, "chunked_req", started()),
        lambda it: setattr(it.grammar_manager, "has_waiting_grammars", lambda: True),
    ],
    ids=["its end", "arrival", "abort", "abort and arrival", "decode", "knobs", "chunk", "grammar"],
)
def test_a_hold_ends_when_something_changes(change: Any) -> None:
    scheduler = holding()
    change(scheduler)
    scheduler.run_pass()
    assert len(scheduler.seen) == 2


def test_a_hold_reports_the_load_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter.time, "sleep", lambda seconds: None)
    scheduler = holding()
    for _ in range(5):
        scheduler.run_pass()
    assert scheduler.published == 1


# -- clock and model ---------------------------------------------------------------------------------------------------


def receiver(pp_rank: int = 0) -> Any:
    return SimpleNamespace(ps=SimpleNamespace(pp_rank=pp_rank))


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    made = FakeScheduler()
    monkeypatch.setattr(handlers, "_adapter", made.pla)
    return made


def test_the_clock_rides_in_front_of_what_rank_0_received(scheduler: FakeScheduler) -> None:
    pulled = ["a request"]
    handlers.after_pull_raw_reqs(pulled, receiver())
    assert isinstance(pulled[0], PlaTick)
    assert pulled[1:] == ["a request"]


def test_other_ranks_have_no_clock(scheduler: FakeScheduler) -> None:
    scheduler.waiting_queue = shorts(1)
    assert handlers.after_pull_raw_reqs(None, receiver()) is None  # a rank that receives by broadcast
    pulled: list[Any] = []
    handlers.after_pull_raw_reqs(pulled, receiver(pp_rank=1))
    assert pulled == []


def test_no_clock_before_the_policy_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_adapter", None)
    pulled = ["a request"]
    handlers.after_pull_raw_reqs(pulled, receiver())
    assert pulled == ["a request"]


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda it: None, False),
        (lambda it: it.waiting_queue.append(FakeReq("a", 5)), True),
        (lambda it: setattr(it, "chunked_req", started()), True),
        (lambda it: it.grammar_manager.grammar_queue.append("a"), True),
        (lambda it: setattr(it, "disagg_prefill_bootstrap_queue", SimpleNamespace(queue=["a"])), True),
        (lambda it: setattr(it, "disagg_prefill_bootstrap_queue", SimpleNamespace(queue=[])), False),
    ],
    ids=["idle", "queue", "chunk", "grammar", "handshake", "no handshake"],
)
def test_an_idle_server_broadcasts_nothing(scheduler: FakeScheduler, change: Any, wanted: bool) -> None:
    change(scheduler)
    pulled: list[Any] = []
    handlers.after_pull_raw_reqs(pulled, receiver())
    assert bool(pulled) is wanted


def test_the_clock_runs_forward(scheduler: FakeScheduler) -> None:
    first, second = scheduler.pla.make_tick(), scheduler.pla.make_tick()
    assert second.now_s > first.now_s
    scheduler.pla.on_tick(second)
    assert scheduler.pla.now_s == second.now_s


def test_a_model_travels_once(scheduler: FakeScheduler) -> None:
    scheduler.pla._model_to_send = pack_model(GPU_START)
    tick = scheduler.pla.make_tick()
    assert unpack_model(tick.model) == GPU_START
    assert scheduler.pla.make_tick().model == ()
    assert scheduler.pla.policy.model == CPU_START, "rank 0 changes its own model with everybody else"
    scheduler.pla.on_tick(tick)
    assert scheduler.pla.policy.model == GPU_START
    scheduler.pla.on_tick(PlaTick(now_s=1.0))
    assert scheduler.pla.policy.model == GPU_START


def test_arrivals_are_stamped_with_the_shared_clock(scheduler: FakeScheduler) -> None:
    scheduler.pla.on_tick(PlaTick(now_s=50.0))
    req = FakeReq("a", 20)
    handlers.after_add_request_to_queue(None, scheduler, req)
    scheduler.pla.on_tick(PlaTick(now_s=60.0))
    assert scheduler.pla.views.get(req).arrival_s == 50.0


# -- accounts ----------------------------------------------------------------------------------------------------------


def test_the_hosts_pending_figure_counts_what_was_left_out() -> None:
    scheduler = FakeScheduler([long("a"), *shorts(2)])
    batch = scheduler.run_pass()
    assert batch is not None
    assert batch.prefill_stats.num_pending_tokens == 3000


def test_a_mixed_batch_would_be_counted() -> None:
    scheduler = FakeScheduler(shorts(1))
    intruder = long("intruder")
    scheduler.run_pass(lambda it: it.waiting_queue.append(intruder))
    assert scheduler.pla.telemetry.mixed_batches == 1


def test_only_what_was_admitted_counts() -> None:
    scheduler = FakeScheduler(shorts(5))
    scheduler.run_pass(fits=2)
    assert scheduler.pla.telemetry.requests == {"short": 2}
    assert scheduler.pla.policy.awd.depth == 2


def test_a_decode_turn_lets_the_host_decode() -> None:
    scheduler = FakeScheduler([], started(), running=FakeBatch([FakeReq("decoding", 5)]))
    scheduler.pla.set_config(TEMPORAL.replace(decode_gap_ms=100.0))
    scheduler.pla.on_tick(PlaTick(now_s=1.0))
    assert scheduler.run_pass() is not None
    scheduler.pla.on_tick(PlaTick(now_s=1.2))
    assert scheduler.run_pass() is None
    assert scheduler.pla.telemetry.decisions["hold:decode_turn"] == 1
    assert scheduler.chunked_req is not None
    assert scheduler.run_pass() is not None


def test_state_is_plain() -> None:
    """It travels as msgpack."""
    import msgspec

    scheduler = FakeScheduler([long("a"), *shorts(2)], started())
    scheduler.run_pass()
    state = scheduler.pla.state()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state)) == state
    assert state["queue"] == {"short": {"reqs": 0, "tokens": 0}, "long": {"reqs": 1, "tokens": 3000}}
    assert state["chunk_remaining_tokens"] == 3000 - CHUNK_TOKENS


def test_a_parked_pd_chunk_is_not_cached_and_sent_again() -> None:
    """Its whole prefix would go into the radix tree in every pass."""
    chunk = started()
    scheduler = FakeScheduler([], chunk)
    seen: list[Any] = []

    def original(it: Any, **_: Any) -> None:
        seen.append(it.chunked_req)

    chunk.prefix_indices = range(CHUNK_TOKENS)  # what was computed is cached
    handlers.around_process_prefill_chunk(original, scheduler, last_batch=None, running_batch=None)
    chunk.prefix_indices = range(0)
    handlers.around_process_prefill_chunk(original, scheduler, last_batch=None, running_batch=None)
    assert seen == [None, chunk]
    assert scheduler.chunked_req is chunk


def test_nothing_is_applied_without_a_decision() -> None:
    with pytest.raises(AssertionError, match="precedes"):
        apply.enter(apply.PassContext(FakeBatch(), False), FakeScheduler(), [])


def test_a_held_chunk_is_parked_too() -> None:
    chunk = started()
    scheduler = FakeScheduler([], chunk)
    decision = PassDecision(Action.HOLD, Reason.DECODE_TURN)
    context = apply.PassContext(scheduler.running, False, view=EMPTY_VIEW, decision=decision)
    apply.enter(context, scheduler, scheduler.waiting_queue)
    assert scheduler.chunked_req is None
    apply.leave(context, scheduler, CHUNK_TOKENS, None)
    assert scheduler.chunked_req is chunk


@pytest.mark.parametrize(
    ("device", "overlap", "device_s", "host_s"),
    [
        ("cpu", False, 0.020, 0.001 + 0.004),  # scheduling, computing, processing the result: one after the other
        ("cpu", True, 0.020, 0.001),  # the next pass computes before this one's result is processed
        ("cuda", True, 0.024, 0.0),  # the host works while the device computes
        ("cuda", False, 0.024, 0.001),
    ],
)
def test_a_step_costs_what_the_device_waits_for(device: str, overlap: bool, device_s: float, host_s: float) -> None:
    scheduler = FakeScheduler([])
    scheduler.enable_overlap = overlap
    scheduler.pla._synchronous = device == "cpu"
    launch = adapter._Launch(at_s=5.0, synchronous_s=0.020, scheduling_s=0.001)
    assert scheduler.pla._cost_s(launch, done_s=5.024) == pytest.approx((device_s, host_s))
