"""Running batch: ends come at their steps, and what has left does not come back."""

from __future__ import annotations

from pla_sglang.sim.core.request import SimRequest, SimStage
from pla_sglang.sim.core.running import RunningBatch

CLIP_TOKENS = 10


def request(row: int, output_tokens: int, limit_tokens: int | None = None) -> SimRequest:
    made = SimRequest(row, 0.0, 100, output_tokens, limit_tokens=limit_tokens or output_tokens)
    made.move(SimStage.PREFILL)
    made.done_tokens = 1
    return made


def test_ends_come_in_order_and_bring_the_counts_up_to_date() -> None:
    batch = RunningBatch(CLIP_TOKENS)
    first, second = request(0, 6), request(1, 3)
    batch.join(first)
    batch.join(second)
    assert batch.steps_to_end() == 2
    batch.advance(2)
    assert batch.ended() == [second]
    assert (second.done_tokens, second.private_tokens) == (3, 2)
    assert batch.done_of(first) == 3
    assert batch.context_tokens == 100 + 2
    batch.check_integrity()


def test_a_request_that_moved_on_does_not_end_here_even_with_the_same_step_number() -> None:
    here, there = RunningBatch(CLIP_TOKENS), RunningBatch(CLIP_TOKENS)
    moved, stays = request(0, 6), request(1, 9)
    here.join(moved)
    here.join(stays)
    here.leave(moved)
    there.join(moved)
    assert moved.finish_step == 5, "in the other batch, as it was in this one"
    assert here.steps_to_end() == 8
    here.advance(5)
    assert here.ended() == []
    there.advance(5)
    assert there.ended() == [moved]
    here.check_integrity()
    there.check_integrity()


def test_of_a_limit_admission_counts_no_more_than_the_clip() -> None:
    batch = RunningBatch(CLIP_TOKENS)
    counted, clipped, leaves = request(0, 6), request(1, 30, limit_tokens=14), request(2, 30, limit_tokens=1_000)
    for member in (counted, clipped, leaves):
        batch.join(member)
    assert batch.growth_tokens() == 5 + CLIP_TOKENS + CLIP_TOKENS
    batch.leave(leaves)
    batch.advance(3)
    batch.check_integrity()
    assert batch.growth_tokens() == 2 + CLIP_TOKENS
    batch.advance(1)  # from here on it has less than the clip left
    assert batch.growth_tokens() == 1 + 9
    batch.check_integrity()
    batch.leave(clipped)
    assert batch.growth_tokens() == 1
    batch.check_integrity()
