"""Named workloads: as many requests as a span needs, and what cannot be had."""

from __future__ import annotations

import pytest

from pla_sglang.sim.named_workloads import WORKLOADS, workload


@pytest.mark.parametrize(("rate_per_s", "count"), [(2.0, 40), (9.0, 180)])
def test_a_trace_is_cut_or_repeated_to_its_span(rate_per_s: float, count: int) -> None:
    load = workload("star", None, requests=100)
    trace = load.trace_at(rate_per_s, 20.0)
    assert len(trace) == count
    assert trace.rate_per_s == pytest.approx(rate_per_s)
    assert trace.span_s == pytest.approx(20.0, rel=0.05)
    assert trace.input_tokens[:40].tolist() == load.trace.input_tokens[:40].tolist()


def test_every_generated_workload_is_drawn_from_its_seed() -> None:
    for name in ("chat", "hol", "star"):
        first, again, other = (workload(name, None, 60, seed).trace for seed in (1, 1, 2))
        assert first.input_tokens.tolist() == again.input_tokens.tolist() != other.input_tokens.tolist()
        assert not WORKLOADS[name].recorded
