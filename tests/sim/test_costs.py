"""Closed-form segments against steps that are added one by one."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sim import profile

from pla_sglang.common.errors import ConfigError
from pla_sglang.profiles import LaunchFloor, StepProfile, load_profile, profile_names
from pla_sglang.profiles.step import Grid
from pla_sglang.sim.core.costs import Segment, StepCosts

LINEAR = profile(decode_base_s=5e-3, decode_request_s=1e-5, decode_read_s=4e-8)
CORRECTED = dataclasses.replace(
    LINEAR,
    decode_correction=Grid((1.0, 64.0), (100.0, 700.0, 1700.0), ((1.0, 1.2, 0.9), (1.1, 1.4, 1.3))),
)
FLOORED = dataclasses.replace(LINEAR, launch_floor=LaunchFloor(eager_s=7e-3, graph_s=6e-3))
PROFILES: dict[str, StepProfile] = {
    "linear": LINEAR,
    "corrected": CORRECTED,
    "floored": FLOORED,
    **{name: load_profile(name) for name in profile_names()},
}


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize(("batch", "context"), [(1, 30), (7, 4_000), (64, 90_000), (200, 150_000)])
def test_a_segment_ends_when_its_steps_added_up_do(name: str, batch: int, context: int) -> None:
    costs = StepCosts(PROFILES[name])
    walked_s, done, tokens = 0.0, 0, context
    while done < 2_000:
        segment = costs.segment(batch, tokens, 2_000 - done)
        assert 1 <= segment.steps <= 2_000 - done
        for steps in range(1, segment.steps + 1):
            walked_s_here = sum_of_steps(costs, batch, tokens, steps) if steps in (1, segment.steps) else None
            if walked_s_here is not None:
                assert segment.end_s(steps) == pytest.approx(walked_s_here, rel=1e-9)
        walked_s += segment.end_s(segment.steps)
        done += segment.steps
        tokens += batch * segment.steps
    assert walked_s == pytest.approx(sum_of_steps(costs, batch, context, 2_000), rel=1e-9)


def sum_of_steps(costs: StepCosts, batch: int, context: int, steps: int) -> float:
    return math.fsum(costs.decode_s(batch, context + batch * step) for step in range(steps))


@given(
    a=st.floats(1e-4, 1.0),
    b=st.floats(0, 1e-3),
    c=st.sampled_from([0.0, 1e-7, 1e-5]),
    steps=st.integers(1, 5_000),
    share=st.floats(0, 1.1),
)
def test_ended_by_is_the_inverse_of_end(a: float, b: float, c: float, steps: int, share: float) -> None:
    segment = Segment(a, b, c, steps)
    elapsed_s = share * segment.end_s(steps)
    ended = segment.ended_by(elapsed_s)
    assert 0 <= ended <= steps
    assert ended == 0 or segment.end_s(ended) <= elapsed_s
    assert ended == steps or segment.end_s(ended + 1) > elapsed_s
    assert segment.ended_by(segment.end_s(steps)) == steps


def test_a_prefill_pass_runs_in_the_next_larger_graph_and_eagerly_above() -> None:
    with_floor = dataclasses.replace(LINEAR, launch_floor=LaunchFloor(eager_s=0.05, graph_s=0.0))
    costs = StepCosts(with_floor, prefill_graph_tokens=(64, 128))
    assert costs.prefill_s(129, 129 * 129, 0, 1) == pytest.approx(0.129)
    assert costs.prefill_s(5, 25, 0, 1) == pytest.approx(0.064), "eagerly it would take 0.05 s"
    assert costs.prefill_s(65, 65 * 65, 0, 1) == pytest.approx(0.128)
    assert costs.prefill_s(10, 100, 0, 1) == pytest.approx(0.064)
    assert StepCosts(with_floor, prefill_graph_tokens=()).prefill_s(10, 100, 0, 1) == pytest.approx(0.05)


def test_overhead_counts_in_every_pass() -> None:
    costs = StepCosts(LINEAR, overhead_s=1e-3)
    plain = StepCosts(LINEAR)
    assert costs.decode_s(3, 30) == pytest.approx(plain.decode_s(3, 30) + 1e-3)
    assert costs.prefill_s(5, 25, 0, 1) == pytest.approx(plain.prefill_s(5, 25, 0, 1) + 1e-3)
    mixed = StepCosts(LINEAR).mixed_s(5, 25, 0, 1, 3, 30)
    assert costs.mixed_s(5, 25, 0, 1, 3, 30) == pytest.approx(mixed + 1e-3)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"prefill_graph_tokens": (8, 4)}, "prefill_graph_tokens is"),
        ({"prefill_graph_tokens": (0, 4)}, "prefill_graph_tokens is"),
        ({"overhead_s": -1.0}, "overhead_s -1.0 is out of range"),
    ],
)
def test_bad_knobs(knobs: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StepCosts(LINEAR, **knobs)  # type: ignore[arg-type]
