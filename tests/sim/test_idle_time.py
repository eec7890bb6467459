"""The work of a simulation follows its events: idle time costs little, and changes nothing."""

from __future__ import annotations

import dataclasses
import math
import random
import time

import numpy as np
import pytest

from pla_sglang.policy.registry import policy_names
from pla_sglang.sim.core import idle
from pla_sglang.sim.core.experiment import Experiment, run_experiment
from pla_sglang.sim.core.simulation import RunResult
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.workload import Arrivals, Trace, generated_trace, length_model

SLO = Slo(1.0, 0.05)
DAY_S = 86_400.0


def trace_with_gap(gap_s: float) -> Trace:
    """Two bursts of 40 requests at 12 a second."""
    inputs, outputs = length_model("lmsys_first_turn_prompt"), length_model("sharegpt4_output")
    trace = generated_trace(80, Arrivals(12.0, random.Random(3)), inputs, outputs)
    return dataclasses.replace(trace, arrival_s=trace.arrival_s + gap_s * (np.arange(len(trace)) // 40))


def run(policy: str, trace: Trace) -> RunResult:
    return run_experiment(Experiment(policy, SLO, instances=4), trace).result


@pytest.mark.parametrize("policy", policy_names())
def test_what_is_left_out_changes_nothing(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "SETTLE_S", 200.0)
    trace = trace_with_gap(900.0)
    short = run(policy, trace)
    monkeypatch.setattr(idle, "SETTLE_S", math.inf)
    whole = run(policy, trace)
    assert short.events < 0.8 * whole.events
    assert (short.stage, short.reasons, short.counts) == (whole.stage, whole.reasons, whole.counts)
    for name in ("prefill_instance", "decode_instance", "migrations", "retractions"):
        assert np.array_equal(getattr(short, name), getattr(whole, name))
    for name in ("arrival_s", "first_token_s", "finish_s"):
        np.testing.assert_allclose(getattr(short.served, name), getattr(whole.served, name), rtol=0, atol=1e-6)
    assert short.end_s == pytest.approx(whole.end_s)
    assert short.gpu_hours == pytest.approx(whole.gpu_hours)


@pytest.mark.parametrize("policy", ["round-robin", "combined"])
def test_a_gap_of_days_costs_no_more_than_one_of_hours(policy: str) -> None:
    hours, days = (run(policy, trace_with_gap(gap_s)) for gap_s in (7200.0, 1000 * DAY_S))
    assert days.events < hours.events + 1000
    assert days.end_s == pytest.approx(hours.end_s + 1000 * DAY_S - 7200.0)


def test_a_late_first_arrival_is_no_work() -> None:
    early = trace_with_gap(0.0)
    late = dataclasses.replace(early, arrival_s=early.arrival_s + 1000 * DAY_S)
    begun_s = time.process_time()
    assert run("round-robin", late).counts["finished"] == 80
    assert time.process_time() - begun_s < 20
