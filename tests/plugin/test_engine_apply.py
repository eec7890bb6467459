"""A decision is carried out and taken back without a trace, whatever happens in between. On a fake scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_scheduler import (
    CHUNK_TOKENS,
    TEMPORAL,
    FakeAdder,
    FakeBatch,
    FakeReq,
    FakeScheduler,
    long,
    short_prompts,
    started,
)

from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.engine import apply
from pla_sglang.plugin.engine.clock import PlaTick
from pla_sglang.plugin.engine.hooks import scheduler as handlers
from pla_sglang.plugin.engine.host.requests import extend_end
from pla_sglang.plugin.engine.pass_timer import PassTimer, computes_in_launch
from pla_sglang.plugin.engine.step_measurement import StepMeasurement
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.common.step_model import GPU_START
from pla_sglang.policy.interface.prefill import Action, PassDecision, PassReason, PassView

EMPTY_VIEW = PassView([], None, CHUNK_TOKENS, 1, 1000, 1000, 1000, 0)


# -- the queue ---------------------------------------------------------------------------------------------------------


def test_the_host_sees_one_class_only_and_gets_its_queue_back() -> None:
    first, second, third = long("a"), *short_prompts(2)
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
    queue = [long("a"), *short_prompts(1)]
    preempted = FakeReq("preempted", 20)
    scheduler = FakeScheduler(queue)
    scheduler.run_pass(lambda it: it.waiting_queue.append(preempted), fits=1)
    assert scheduler.waiting_queue == [queue[0], preempted]


def test_nothing_admitted_leaves_the_queue_as_it_was() -> None:
    queue = [long("a"), *short_prompts(2)]
    scheduler = FakeScheduler(queue)
    assert scheduler.run_pass(fits=0) is None
    assert scheduler.waiting_queue == queue


@pytest.mark.parametrize("moment", ["before the decision", "after the decision"])
def test_an_exception_in_the_middle_restores_everything(moment: str) -> None:
    chunk, queue = started(), [*short_prompts(2), long("a")]
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
    queue = [long("a"), *short_prompts(1)]
    scheduler = FakeScheduler(queue)
    scheduler.pla.on_ordered(scheduler.waiting_queue)
    assert scheduler.waiting_queue == queue


# -- the chunk ---------------------------------------------------------------------------------------------------------


def test_a_parked_chunk_is_hidden_for_one_pass() -> None:
    chunk, queue = started(), short_prompts(2)
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
    assert extend_end(chunk) == 2 * CHUNK_TOKENS
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
    scheduler = FakeScheduler(short_prompts(1), started())
    decision = PassDecision(Action.SHORT, PassReason.NO_GAIN, park=True)
    context = apply.PassContext(scheduler.running, False, view=EMPTY_VIEW, decision=decision)
    apply.enter_pass(context, scheduler, scheduler.waiting_queue)
    scheduler.chunked_req = long("second")
    with pytest.raises(AssertionError, match="cut a request"):
        apply.leave_pass(context, scheduler, CHUNK_TOKENS, None)


def test_an_aborted_chunk_is_gone_in_the_next_pass() -> None:
    scheduler = FakeScheduler(short_prompts(1), started())
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
    scheduler.waiting_queue += short_prompts(1)
    assert scheduler.run_pass() is not None


def test_shorts_that_found_no_memory_leave_the_hosts_mark() -> None:
    scheduler = FakeScheduler(short_prompts(1), running=FakeBatch([FakeReq("decoding", 5)]))
    assert scheduler.run_pass(fits=0) is None
    assert scheduler.running.batch_is_full


# -- memory and adapters of the parked chunk ---------------------------------------------------------------------------


def test_the_parked_chunks_memory_is_reserved() -> None:
    chunk = started(3000, CHUNK_TOKENS, new_tokens=100)
    scheduler = FakeScheduler(short_prompts(1), chunk)
    made = FakeAdder(page_size=16)
    scheduler.run_pass(lambda it: apply.reserve_for_parked(it.pla.context, made))
    # 2744 tokens to prefill, half of 100 tokens of output by the host's ratio, a page for rounding
    assert made.withheld_tokens == (2744 + 50 + 16, 2744 + 16)


def test_nothing_is_reserved_for_a_chunk_that_runs() -> None:
    made = FakeAdder()
    FakeScheduler([], started()).run_pass(lambda it: apply.reserve_for_parked(it.pla.context, made))
    assert made.withheld_tokens == (0, 0)


def test_a_parked_chunks_adapter_counts_as_running() -> None:
    asked: list[set[str | None]] = []

    def original(scheduler: Any, req: Any, running_loras: set[str | None]) -> bool:
        asked.append(set(running_loras))
        return True

    chunk = started(lora_id="lora-of-the-chunk")
    scheduler = FakeScheduler(short_prompts(1), chunk)
    scheduler.run_pass(lambda it: handlers.around_can_schedule_lora(original, it, it.waiting_queue[0], {"other"}))
    scheduler.waiting_queue = []
    scheduler.run_pass(lambda it: handlers.around_can_schedule_lora(original, it, chunk, {"other"}))
    handlers.around_can_schedule_lora(original, scheduler, chunk, {"other"})
    assert asked == [{"other", "lora-of-the-chunk"}, {"other"}, {"other"}]


# -- mixed passes (ablation) -------------------------------------------------------------------------------------------


def test_a_mixed_pass_splits_the_chunk_size() -> None:
    chunk = started()
    scheduler = FakeScheduler(short_prompts(3), chunk)
    scheduler.pla.set_config(TEMPORAL.replace(mixing="allow"))
    given: list[int] = []

    def original(made: Any, req: Any) -> None:
        given.append(made.rem_chunk_tokens)
        made.rem_chunk_tokens -= made.rem_chunk_tokens  # the host takes all there is

    def during(it: FakeScheduler) -> None:
        made = FakeAdder()
        made.rem_chunk_tokens = it.chunked_prefill_size
        apply.add_chunk(original, it.pla.context, made, chunk)
        given.append(made.rem_chunk_tokens)

    scheduler.run_pass(during)
    assert scheduler.seen[0]["chunk"] is chunk
    # Each short takes its 20 tokens and a page of rounding; the chunk gets what they leave of 256.
    assert given == [CHUNK_TOKENS - 63, 63]
    assert scheduler.chunked_prefill_size == CHUNK_TOKENS
    assert scheduler.pla.telemetry.mixed_batches == 1


@pytest.mark.parametrize(
    ("reqs", "mixed"), [([long("a", 120), *short_prompts(2)], 1), (short_prompts(3), 0), ([long("a", 120)], 0)]
)
def test_a_pass_of_both_classes_is_a_mixed_one(
    reqs: list[FakeReq], mixed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take_all(view: PassView, now_s: float) -> PassDecision:
        return PassDecision(Action.LONG, PassReason.NO_SHORT, tuple(view.waiting))

    scheduler = FakeScheduler(reqs)
    monkeypatch.setattr(scheduler.pla.policy, "decide", take_all)
    assert scheduler.run_pass() is not None
    assert scheduler.pla.telemetry.mixed_batches == mixed


def test_other_passes_leave_the_chunk_size_alone() -> None:
    made = FakeAdder()
    made.rem_chunk_tokens = 256
    for context in (None, apply.PassContext(FakeBatch(), False)):
        assert apply.add_chunk(lambda it, req: it.rem_chunk_tokens, context, made, None) == 256


# -- accounts ----------------------------------------------------------------------------------------------------------


def test_the_hosts_pending_figure_counts_what_was_left_out() -> None:
    scheduler = FakeScheduler([long("a"), *short_prompts(2)])
    batch = scheduler.run_pass()
    assert batch is not None
    assert batch.prefill_stats.num_pending_tokens == 3000


def test_only_what_was_admitted_counts() -> None:
    scheduler = FakeScheduler(short_prompts(5))
    scheduler.run_pass(fits=2)
    assert scheduler.pla.telemetry.requests == {"short": 2}
    assert scheduler.pla.policy.prefills.awd.depth == 2


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

    scheduler = FakeScheduler([long("a"), *short_prompts(2)], started())
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

    chunk.set_cached(CHUNK_TOKENS)  # what was computed is cached
    handlers.around_process_prefill_chunk(original, scheduler, last_batch=None, running_batch=None)
    chunk.set_cached(0)
    handlers.around_process_prefill_chunk(original, scheduler, last_batch=None, running_batch=None)
    assert seen == [None, chunk]
    assert scheduler.chunked_req is chunk


def test_a_held_chunk_is_parked_too() -> None:
    chunk = started()
    scheduler = FakeScheduler([], chunk)
    decision = PassDecision(Action.HOLD, PassReason.DECODE_TURN)
    context = apply.PassContext(scheduler.running, False, view=EMPTY_VIEW, decision=decision)
    apply.enter_pass(context, scheduler, scheduler.waiting_queue)
    assert scheduler.chunked_req is None
    apply.leave_pass(context, scheduler, CHUNK_TOKENS, None)
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
    times_s = iter((5.0, 5.020))
    timer = PassTimer(synchronous=computes_in_launch(device, PlaConfig()), clock=lambda: next(times_s))
    steps = StepMeasurement(SimpleNamespace(enable_overlap=overlap), GPU_START, timer, DeviceClock())
    timer.begin_launch(4.999)
    timer.end_launch()
    measured = timer.end_pass(5.024)
    assert measured is not None
    assert (measured.device_s, steps.host_s(measured)) == pytest.approx((device_s, host_s))
    assert timer.end_pass(6.0) is None
