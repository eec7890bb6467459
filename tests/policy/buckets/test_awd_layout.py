"""AWD with captured graphs: where a batch ends, what it costs, and the wait for the one that fills its slots."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.views import FLAT, short

from pla_sglang.policy.awd import Awd, AwdKnobs, BatchChoice, batch_step_s, waiting_gain_s
from pla_sglang.policy.buckets.layouts import VariableLayout
from pla_sglang.policy.types import Reason

NOW_S = 10.0
LAYOUT = VariableLayout([32, 64, 128, 256], [1, 4, 16], longest=128)
KNOBS = AwdKnobs(depth_max=16, wait_max_s=0.010, layout=LAYOUT)


def decide(lengths: list[int], *, rate_per_s: float = 1000.0, knobs: AwdKnobs = KNOBS, **limits: Any) -> BatchChoice:
    awd = Awd(knobs)
    awd.window_s = 0.010
    awd.depth = limits.pop("depth", awd.depth)
    queue = [short(NOW_S - 0.001, new_tokens=tokens) for tokens in lengths]
    limits = {"budget_tokens": 1000, "slots": 100} | limits
    return awd.decide(queue, NOW_S, model=FLAT, rate_per_s=rate_per_s, **limits)


def test_a_full_batch_stops_at_the_bucket_s_edge() -> None:
    """60 + 60 fill the bucket of 128; with the 9 it would be the one of 256. The 9 wait for the next pass."""
    choice = decide([60, 60, 9, 90], budget_tokens=130)
    assert (choice.reason, len(choice.batch)) == (Reason.TOKENS, 2)
    assert len(decide([60, 60, 9, 90], budget_tokens=130, knobs=dataclasses.replace(KNOBS, layout=None)).batch) == 3


def test_a_batch_that_is_not_full_is_not_cut() -> None:
    """Whoever was cut off would need a pass of their own."""
    assert len(decide([60, 60, 9]).batch) == 3


def test_waits_for_the_one_that_fills_the_slots() -> None:
    """At depth D=3 a batch of three would go; the fourth is free, for it fits the same bucket."""
    choice = decide([8, 8, 8], depth=3)
    assert (choice.due, choice.reason) == (False, Reason.WAIT_FOR_SLOT)
    assert choice.release_s == pytest.approx(NOW_S + 1 / 1000)  # W_GR: one arrival
    assert choice.gain_s > 0


@pytest.mark.parametrize(
    ("why", "lengths", "options", "reason"),
    [
        ("nobody is expected", [8] * 3, {"rate_per_s": 0.0}, Reason.NO_GAIN),
        ("the next is too far off", [8] * 3, {"rate_per_s": 50.0}, Reason.NO_GAIN),
        ("the server has no slot for it", [8] * 3, {"slots": 3}, Reason.DEPTH),
        ("the slots are full already", [10] * 4, {"depth": 4}, Reason.DEPTH),
        ("it would need the next bucket", [20] * 3, {}, Reason.DEPTH),
    ],
)
def test_does_not_wait_where(why: str, lengths: list[int], options: dict[str, Any], reason: Reason) -> None:
    choice = decide(lengths, **{"depth": 3, **options})
    assert (choice.due, choice.reason) == (True, reason), why


def test_a_pass_costs_its_bucket() -> None:
    batch = [short(NOW_S, new_tokens=65), short(NOW_S, new_tokens=65)]
    assert batch_step_s(batch, FLAT) == pytest.approx(0.0130)
    assert batch_step_s(batch, FLAT, layout=LAYOUT) == pytest.approx(0.0256)


def test_one_more_in_the_same_bucket_is_free() -> None:
    batch = [short(NOW_S, new_tokens=65), short(NOW_S, new_tokens=65)]
    plain = waiting_gain_s(batch, FLAT, 1000.0)
    assert waiting_gain_s(batch, FLAT, 1000.0, layout=LAYOUT) > plain
