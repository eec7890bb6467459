"""Named workloads: as many requests as a span needs, and what cannot be had."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from bench.lab.named_workloads import FLEET_WORKLOADS, MOONCAKE, MOONCAKE_WHOLE, WORKLOADS, available, workload
from pla_sglang.profiles import load_profile
from pla_sglang.sim.workload import Trace


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


def test_of_sessions_as_many_requests_come_as_the_rate_asks_for() -> None:
    """Think times stay: more sessions are under way at a higher rate, and none goes on faster."""
    session, turn = np.divmod(np.arange(300), 3)
    order = np.argsort(session + 20.0 * turn, kind="stable")
    session, turn = session[order], turn[order]
    ones = np.ones(300, np.int64)
    trace = Trace("sessions", session + 20.0 * turn, ones, ones, session=session, turn=turn, think_s=10.0 * turn)
    for rate_per_s in (0.5, 4.0, 40.0):
        cut = dataclasses.replace(WORKLOADS["star"], trace=trace).trace_at(rate_per_s, 30.0)
        assert len(cut) == pytest.approx(30 * rate_per_s, abs=1)
        assert cut.span_s < 30.0
        assert cut.turn is not None
        assert (cut.arrival_s - cut.start_s()).tolist() == pytest.approx((20.0 * cut.turn).tolist())


def test_every_generated_workload_is_drawn_from_its_seed() -> None:
    for name in ("chat", "hol", "star"):
        first, again, other = (workload(name, None, 60, seed).trace for seed in (1, 1, 2))
        assert first.input_tokens.tolist() == again.input_tokens.tolist() != other.input_tokens.tolist()
        assert not WORKLOADS[name].recorded


def test_every_profile_is_there_and_the_eager_one_differs_in_its_mixed_passes() -> None:
    for load in WORKLOADS.values():
        assert load.profile is None or load_profile(load.profile).gpus > 1
    assert all(WORKLOADS[name].profile is None for name in FLEET_WORKLOADS)
    base, eager = load_profile("h100-llama3.1-70b-fp8-tp2"), load_profile(WORKLOADS["azure_conv_eager"].profile or "")
    same = dataclasses.replace(eager, name=base.name, source=base.source, mixed_floor_s=0.0)
    assert same == base
    assert eager.mixed_floor_s == base.launch_floor.eager_s > WORKLOADS["azure_conv_eager"].slo.tpot_s


def test_the_whole_recording_is_read_where_the_folder_has_it(tmp_path: Path) -> None:
    header = "arrival_s,input_tokens,output_tokens\n"
    assert available(tmp_path) == ["chat", "hol", "star"]
    (tmp_path / MOONCAKE).write_text(header + "0,1,1\n")
    assert available(tmp_path) == ["mooncake", "chat", "hol", "star", "mooncake_70b"]
    (tmp_path / MOONCAKE_WHOLE).write_text(header + "0,1,1\n1,1,1\n")
    for name in ("mooncake", "mooncake_70b"):
        assert len(workload(name, tmp_path).trace) == 2
