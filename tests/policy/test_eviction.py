"""What new tokens are expected to cost by the prefixes that they throw out. A token takes 1 ms, ``reuse_s`` is 120."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fleets import instance, predictor

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.common.eviction import EvictionCost, EvictionKnobs
from pla_sglang.policy.interface.decisions import MeasuredPass, PrefillSample

NOW_S = 1000.0


def eviction() -> EvictionCost:
    return EvictionCost(EvictionKnobs(), predictor())


def holding(used: int, cached: int, idle_s: float | None = None, **fields: Any) -> Any:
    since_s = None if idle_s is None else NOW_S - idle_s
    return instance(
        0, kv_capacity_tokens=1000, kv_used_tokens=used, kv_cached_tokens=cached, evicted_next_s=since_s, **fields
    )


@pytest.mark.parametrize(
    ("name", "view", "again"),
    [
        ("nothing is held", holding(0, 0), 0.0),
        ("all of it is in use: nothing can be thrown out", holding(1000, 0), 0.0),
        ("used right now", holding(400, 600, 0.0), 1.0),
        ("half of it comes back", holding(400, 600, 120 * math.log(2)), 0.5),
        ("old", holding(400, 600, 240.0), math.exp(-2)),
        ("queued prompts fill what is left", holding(400, 500, 60.0, queued_tokens=100), math.exp(-0.5)),
        ("room, and nobody fills it", holding(400, 500, 60.0), 0.0),
        ("a clock that runs behind", holding(400, 600, -5.0), 1.0),
    ],
)
def test_a_token_costs_what_is_computed_again(name: str, view: Any, again: float) -> None:
    assert eviction().token_s(view, NOW_S) == pytest.approx(0.001 * again)


def test_room_postpones_it_by_the_time_until_it_is_filled() -> None:
    """600 tokens to two instances: 300 for each in 120 s, 2.5 a second. 100 tokens of room last for 40 s."""
    cost = eviction()
    cost.note(600, 2, NOW_S)
    assert cost.token_s(holding(400, 500, 20.0), NOW_S) == pytest.approx(0.001 * math.exp(-60 / 120))
    cost.note(0, 2, NOW_S + 120)  # e times slower by then, and what is held is unused for 140 s
    later = math.exp(-(140 + 40 * math.e) / 120)
    assert cost.token_s(holding(400, 500, 20.0), NOW_S + 120) == pytest.approx(0.001 * later)


def test_a_slow_instance_computes_it_slowly() -> None:
    made = predictor()
    cost, view = EvictionCost(EvictionKnobs(), made), holding(400, 600, 0.0)
    one = MeasuredPass(990, 990 * 990, 0, 2.0)
    for _ in range(200):
        made.on_prefill(PrefillSample(view, 990, 990 * 990, 0, 1, 2.0, (one,)))
    assert cost.token_s(view, NOW_S) == pytest.approx(0.002, rel=0.01)


@given(
    st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 500), st.floats(0, 1000), st.floats(0, 1000)
)
def test_the_emptier_and_the_older_is_never_dearer(
    used: int, cached: int, less: int, idle_s: float, older_s: float
) -> None:
    cost = eviction()
    cost.note(5000, 4, NOW_S - 30)
    used = min(used, 1000 - cached)
    base_s = cost.token_s(holding(used, cached, idle_s), NOW_S)
    assert cost.token_s(holding(used, cached, idle_s + older_s), NOW_S) <= base_s
    if cached > less:
        assert cost.token_s(holding(used, cached - less, idle_s), NOW_S) <= base_s


def test_bad_knobs() -> None:
    with pytest.raises(ConfigError, match="eviction reuse_s"):
        EvictionKnobs(reuse_s=0.0)
