"""AWD with captured graphs: what a batch costs, and which requests share one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.views import FLAT, short

from pla_sglang.policy.interface.prefill import PassReason, WaitingView
from pla_sglang.policy.pla.awd import Awd, AwdKnobs, BatchChoice, batch_step_s, waiting_gain_s
from pla_sglang.policy.pla.graphs.layouts import GridLayout, VariableLayout

NOW_S = 10.0
LAYOUT = VariableLayout([32, 64, 128, 256], [1, 4, 16], longest=128)
KNOBS = AwdKnobs(depth_max=16, wait_max_s=0.010, layout=LAYOUT)


def test_a_pass_costs_its_bucket() -> None:
    batch = [short(NOW_S, new_tokens=65), short(NOW_S, new_tokens=65)]
    assert batch_step_s(batch, FLAT) == pytest.approx(0.0130)
    assert batch_step_s(batch, FLAT, layout=LAYOUT) == pytest.approx(0.0256)


def test_one_more_in_the_same_bucket_is_free() -> None:
    batch = [short(NOW_S, new_tokens=65), short(NOW_S, new_tokens=65)]
    plain = waiting_gain_s(batch, FLAT, 1000.0)
    assert waiting_gain_s(batch, FLAT, 1000.0, layout=LAYOUT) > plain


# -- batches of one bucket first (Algorithm 1 line 6) ------------------------------------------------------------------

GRID = dataclasses.replace(KNOBS, layout=GridLayout())


def choose(queue: list[WaitingView], *, knobs: AwdKnobs = GRID, **limits: Any) -> BatchChoice:
    awd = Awd(knobs)
    awd.window_s = 0.010
    limits = {"budget_tokens": 1000, "slots": 100} | limits
    return awd.decide(queue, NOW_S, model=FLAT, rate_per_s=1000.0, **limits)


def queue_of(*lengths: int) -> list[WaitingView]:
    return [short(NOW_S - 0.001, new_tokens=tokens) for tokens in lengths]


@pytest.mark.parametrize(
    ("why", "lengths", "options", "taken", "reason"),
    [
        ("the head's bucket, in order", [60, 5, 64, 7, 33], {}, [0, 2, 4], PassReason.BUCKET),
        ("the head is alone in its bucket", [9, 60, 60], {}, [0], PassReason.BUCKET),
        ("longer than every bucket", [300, 60, 301], {}, [0, 2], PassReason.BUCKET),
        ("all of one bucket: as ever", [60, 64, 33], {}, [0, 1, 2], PassReason.WAIT_FOR_DEPTH),
        ("its own bucket fills the pass", [60, 5, 60, 60], {"budget_tokens": 130}, [0, 2], PassReason.TOKENS),
    ],
)
def test_a_batch_is_of_one_bucket(
    why: str, lengths: list[int], options: dict[str, Any], taken: list[int], reason: PassReason
) -> None:
    queue = queue_of(*lengths)
    choice = choose(queue, **options)
    assert [queue.index(view) for view in choice.batch] == taken, why
    assert choice.reason is reason
    assert choice.due is (reason is not PassReason.WAIT_FOR_DEPTH)


def test_whoever_cannot_wait_brings_its_bucket_forward() -> None:
    queue = queue_of(60, 5, 7, 60)
    queue[2].resumed = True
    choice = choose(queue)
    assert (list(choice.batch), choice.reason) == ([queue[1], queue[2]], PassReason.RESUMED)
    queue = queue_of(60, 5, 7, 60)
    queue[1].deadline_s = NOW_S + 100.0
    assert choose(queue).batch[0] is queue[0], "its deadline is far"
    queue[1].deadline_s = NOW_S
    choice = choose(queue)
    assert (list(choice.batch), choice.reason) == ([queue[1], queue[2]], PassReason.SLACK)


def test_variable_lengths_are_not_grouped() -> None:
    queue = queue_of(60, 5, 64)
    assert choose(queue, knobs=KNOBS).batch == tuple(queue)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=80), st.integers(1, 2000))
def test_every_batch_has_one_padded_length_and_the_head(lengths: list[int], budget_tokens: int) -> None:
    """So nobody waits for more batches than stand before it in the queue."""
    queue, layout = queue_of(*lengths), GridLayout()
    batch = choose(queue, budget_tokens=budget_tokens).batch
    assert batch[0] is queue[0]
    assert len({layout.batch_group(view.new_tokens) for view in batch}) == 1
