"""The highest rates that any scheduler keeps, against work by hand."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from bench.lab.rate_bounds import offered_over_capacity, upper_bound_over_span
from pla_sglang.profiles import load_profile
from pla_sglang.sim.core.upper_bound import attainment_bound, least_work
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.workload import Arrivals, LengthModel, Trace, generated_trace

PROFILE = load_profile("h100-llama3.1-8b-tp1")


def test_over_a_long_time_all_work_must_be_done() -> None:
    """M/G/c: with all requests kept, the bound nears servers over the mean work from above."""
    lengths = LengthModel((1.0,), (7.0,), (0.8,), least=16, most=16384, source="test")
    answers = LengthModel((1.0,), (3.0,), (0.5,), least=1, most=64, source="test")
    trace = generated_trace(20_000, Arrivals(10.0, random.Random(1)), lengths, answers)
    slo = Slo(2.0, 0.05)
    work = least_work(trace, slo, PROFILE)
    saturation = 4 / float((work.prefill_s + work.decode_s).mean())
    all_kept, most_kept = (
        upper_bound_over_span(lambda rate: trace, slo, PROFILE, instances=4, target=target, most_per_s=1e6)
        for target in (1.0, 0.9)
    )
    assert all_kept <= 1.1 * saturation
    assert most_kept > 1.05 * all_kept


def test_what_is_offered_over_what_a_fleet_has() -> None:
    """Ten prompts a second on two instances."""
    trace = Trace("t", np.arange(20) / 10, np.full(20, 2048), np.ones(20, np.int64))
    whole = PROFILE.prefill_s(2048, 2048.0**2)
    offered = offered_over_capacity(trace, PROFILE, instances=2)
    assert offered == pytest.approx(10 * whole / 2, rel=0.25)
    assert offered < 10 * whole / 2, "base times are left out, as passes share them"
    assert offered_over_capacity(trace.at_rate(40.0), PROFILE, instances=4) == pytest.approx(2 * offered)


def test_over_a_span_the_requests_are_those_that_come_in_it() -> None:
    """The first requests are small and all others large: what comes in a short span at a low rate is little work."""
    count, slo = 4000, Slo(2.0, 0.05)
    tokens = np.full(count, 8192)
    tokens[:20] = 16
    trace = Trace("late work", np.arange(count) / 10.0, tokens, np.full(count, 2))
    share = {"instances": 1, "target": 0.95}

    def trace_at(rate_per_s: float) -> Trace:
        return trace.head(max(2, round(10.0 * rate_per_s))).at_rate(rate_per_s)

    bound = upper_bound_over_span(trace_at, slo, PROFILE, most_per_s=400.0, **share)
    assert bound > 1.2 * upper_bound_over_span(lambda rate: trace, slo, PROFILE, most_per_s=1e6, **share), (
        "whose requests are nearly all large"
    )
    for rate_per_s, kept in ((0.97 * bound, True), (1.03 * bound, False)):
        came = trace_at(rate_per_s)
        assert (attainment_bound(came.arrival_s, least_work(came, slo, PROFILE), 1) >= 0.95) is kept
    few = upper_bound_over_span(trace_at, slo, PROFILE, most_per_s=1.0, **share)
    assert math.isinf(few), "up to that rate only small ones come"
