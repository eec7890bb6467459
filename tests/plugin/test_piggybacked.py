"""Running decodes that join a prefill pass: what is read of them, what the host is told, and its off-by-one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_scheduler import CHUNK_TOKENS, FakeBatch, FakeReq, FakeScheduler
from support.request_fields import RequestFields
from support.views import pass_view

from pla_patches.host import recorded
from pla_sglang.plugin.engine.piggybacked import NextTokenClock, set_piggybacked_prefixes
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.interface.prefill import PassView, Piggyback

AT = 10.0, 10.0  # the pass begins, and when running requests had their last token


def running(prompt: int, output: int, **params: Any) -> FakeReq:
    """A request with ``output`` tokens, the last one under way."""
    req = FakeReq("running", prompt)
    req.kv_committed_len = prompt + output - 1
    req.sampling_params.custom_params = params or None
    return req


def look(
    reqs: list[FakeReq],
    at: tuple[float, float] = AT,
    *,
    clock: NextTokenClock | None = None,
    default_ms: float | None = 50.0,
    page_tokens: int = 1,
) -> PassView:
    view = pass_view()
    (clock or NextTokenClock(DeviceClock(1.0), page_tokens)).add_to(view, reqs, *at, default_ms)
    return view


def mixing(queue: list[FakeReq], reqs: list[FakeReq], **fields: Any) -> FakeScheduler:
    scheduler = FakeScheduler(queue, is_mixed_chunk=True, **fields)
    scheduler.running = FakeBatch(reqs)
    return scheduler


def test_targets_count_from_where_a_request_was_first_seen() -> None:
    clock, req = NextTokenClock(DeviceClock(1.0), 1), running(100, 5)
    first = look([req], clock=clock)
    assert (first.context_tokens, first.piggyback_kv_tokens) == (104, 1)
    assert first.token_slack_s == pytest.approx(0.05), "one target after the token it has"
    req.kv_committed_len += 2
    early = look([req], (10.02, 10.02), clock=clock)
    assert early.token_slack_s == pytest.approx(0.15 - 0.02), "two tokens came in 20 ms"
    late = look([req], (11.0, 10.9), clock=clock)
    assert late.token_slack_s == pytest.approx(-0.05), "what is behind is due a target after its last token"


def test_the_first_deadline_counts_and_a_request_may_have_its_own_target() -> None:
    clock = NextTokenClock(DeviceClock(1.0), 1)
    reqs = [running(10, 1), running(20, 1, slo_tpot_ms=20.0), running(30, 1, slo_tpot_ms=400.0)]
    piggybacked = look(reqs, clock=clock)
    assert (piggybacked.token_slack_s, piggybacked.tpot_target_s) == (pytest.approx(0.02), pytest.approx(0.02))
    assert look(reqs[:1], clock=clock, default_ms=None).token_slack_s == pytest.approx(0.05), "stamped once"
    without = look([running(10, 1)], default_ms=None)
    assert (without.token_slack_s, without.tpot_target_s) == (None, None)


@pytest.mark.parametrize(("committed", "tokens"), [(15, 0), (16, 16), (17, 0)])
def test_a_rider_takes_a_page_where_one_is_full(committed: int, tokens: int) -> None:
    req = running(committed, 1)
    assert look([req], page_tokens=16).piggyback_kv_tokens == tokens


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_pages_are_counted_over_all_riders(page_tokens: int) -> None:
    reqs = [running(committed, 1) for committed in (15, 16, 32, 64, 65)]
    full = sum(req.kv_committed_len % page_tokens == 0 for req in reqs)
    assert look(reqs, page_tokens=page_tokens).piggyback_kv_tokens == full * page_tokens


def test_a_retracted_request_that_runs_again_is_due_a_target_after_its_last_token() -> None:
    """Its answer so far is part of what is computed again: tokens are counted on, and what it waited is not made up."""
    clock, req = NextTokenClock(DeviceClock(1.0), 1), running(100, 5)
    look([req], clock=clock)
    req.kv_committed_len = 100 + 6 - 1  # retracted, prefilled again, and given its next token 3 s later
    again = look([req], (13.0, 13.0), clock=clock)
    assert (again.context_tokens, again.token_slack_s) == (105, pytest.approx(0.05))


def test_riders_join_and_the_chunk_keeps_its_size() -> None:
    """The host takes a token a rider off its budget, so it is given as many more."""
    scheduler = mixing([FakeReq("long", 3000)], [running(50, 3), running(60, 3)])
    scheduler.run_pass()
    assert scheduler.seen[0]["mixes"] is True
    assert scheduler.seen[0]["size"] == CHUNK_TOKENS + 2
    assert (scheduler.is_mixed_chunk, scheduler.chunked_prefill_size) == (True, CHUNK_TOKENS), "as they were"
    assert scheduler.pla.telemetry.to_dict()["rides"] == {Piggyback.TOGETHER.value: 1}


def test_nobody_joins_where_the_decision_says_so() -> None:
    scheduler = mixing([FakeReq("long", 3000)], [running(50, 3)])
    scheduler.pla.policy.set_mixed_model(scheduler.pla.policy.mixed_model.__class__(1e-6, 0.0, 0.0, extra_s=1.0))
    scheduler.run_pass()
    assert scheduler.seen[0]["mixes"] is False
    assert scheduler.seen[0]["size"] == CHUNK_TOKENS
    assert scheduler.is_mixed_chunk is True
    assert scheduler.pla.telemetry.to_dict()["rides"] == {Piggyback.ALONE.value: 1}


@pytest.mark.parametrize("who", ["running", "waiting"])
def test_a_request_with_logprobs_rides_with_nobody(who: str) -> None:
    """The host would not mix such a pass; a decision that counts on riders would be wrong."""
    waiting, decoding = FakeReq("long", 3000), running(50, 3)
    scheduler = mixing([waiting], [decoding])
    waiting.return_logprob = who == "waiting"
    scheduler.running.return_logprob = who == "running"
    scheduler.run_pass()
    assert scheduler.seen[0]["mixes"] is False
    assert scheduler.pla.telemetry.to_dict()["rides"] == {}


def test_an_exception_in_the_middle_restores_the_flag() -> None:
    scheduler = mixing([FakeReq("long", 3000)], [running(50, 3)])
    scheduler.pla.policy.set_mixed_model(scheduler.pla.policy.mixed_model.__class__(1e-6, 0.0, 0.0, extra_s=1.0))

    def fail(_: FakeScheduler) -> None:
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        scheduler.run_pass(fail)
    assert scheduler.is_mixed_chunk is True


class DecodingReq(RequestFields):
    """A running request as the host's ``mix_with_running`` sees it."""

    def __init__(self, prompt: int, known: int, under_way: int) -> None:
        self.origin_input_ids = [1] * prompt
        self.output_ids = [1] * known
        self.full_untruncated_fill_ids = [1] * (prompt + known)
        # After ``prepare_for_decode``: the slot of the token that this pass takes in counts as written.
        self.kv_committed_len = prompt + known + under_way

    def refresh_fill_ids(self) -> None:
        pass

    _refresh_fill_ids = refresh_fill_ids


def test_the_prefix_of_a_rider_that_sat_out_a_pass_is_what_the_cache_has() -> None:
    """The host itself, with overlap: it counts one too many where it has our seam ``sched.piggyback``, and only
    there."""
    import torch
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    rode, sat_out = DecodingReq(10, 4, under_way=1), DecodingReq(10, 4, under_way=0)
    reqs = [rode, sat_out]
    empty = torch.empty(0, dtype=torch.int64)
    piggybacked = SimpleNamespace(
        reqs=reqs,
        batch_size=lambda: 2,
        req_pool_indices=empty,
        req_pool_indices_cpu=empty,
        out_cache_loc=empty,
        seq_lens_cpu=torch.tensor([req.kv_committed_len for req in reqs]),
    )
    batch: Any = SimpleNamespace(
        enable_overlap=True,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        mamba_track_indices=None,
        out_cache_loc=empty,
        prefix_lens=[7],
        extend_lens=[5],
        extend_num_tokens=5,
        extend_logprob_start_lens=[0],
        merge_batch=lambda other: None,
    )
    ScheduleBatch.mix_with_running(batch, piggybacked)
    if "sched.ride" not in recorded().absent:
        assert batch.prefix_lens == [7, 14, 14]
        set_piggybacked_prefixes(batch, piggybacked)
    assert batch.prefix_lens == [7, 14, 13], "tokens in the cache before the pass"
