"""Named workloads: as many requests as a span needs, and what cannot be had."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.lab.named_workloads import WORKLOADS, workload


@pytest.mark.parametrize(("rate_per_s", "count"), [(2.0, 40), (9.0, 180)])
def test_a_trace_is_cut_or_repeated_to_its_span(rate_per_s: float, count: int) -> None:
    load = workload("star", None, requests=100)
    trace = load.trace_at(rate_per_s, 20.0)
    assert len(trace) == count
    assert trace.rate_per_s == pytest.approx(rate_per_s)
    assert trace.span_s == pytest.approx(20.0, rel=0.05)
    assert trace.input_tokens[:40].tolist() == load.trace.input_tokens[:40].tolist()


def test_requests_that_come_at_once_are_followed_by_one_that_comes_later() -> None:
    """Three at 0 s, as a recorded trace may begin: two of them would have no rate."""
    trace = dataclasses.replace(workload("star", None, requests=5).trace, arrival_s=np.array([0.0, 0.0, 0.0, 1.0, 2.0]))
    few = dataclasses.replace(WORKLOADS["star"], trace=trace).trace_at(0.01, 20.0)
    assert (len(few), few.rate_per_s) == (4, pytest.approx(0.01))


def test_every_generated_workload_is_drawn_from_its_seed() -> None:
    for name in ("chat", "hol", "star"):
        first, again, other = (workload(name, None, 60, seed).trace for seed in (1, 1, 2))
        assert first.input_tokens.tolist() == again.input_tokens.tolist() != other.input_tokens.tolist()
        assert not WORKLOADS[name].recorded
