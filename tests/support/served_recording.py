"""A recording of a load that a simulated fleet served, as a router in front of it would have written it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from pla_sglang.fleet.router.control.observability.recorder import DecisionRecorder
from pla_sglang.policy.interface.decisions import Dispatch
from pla_sglang.policy.interface.fleet import FleetView, InstanceKind, InstanceView, RequestView
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.policy.registry import Setup
from pla_sglang.profiles.load import load_profile
from pla_sglang.recording.file import RecordWriter
from pla_sglang.recording.rows import RecordedEngine
from pla_sglang.recording.setup import header_of
from pla_sglang.sim.core.experiment import Experiment, run_experiment
from pla_sglang.sim.core.host import HostKnobs
from pla_sglang.sim.metrics.goodput import Served, Slo
from pla_sglang.sim.workload import Trace

PROFILE = "h100-llama3.1-8b-tp1"
ENGINE = RecordedEngine(chunk_tokens=8192, slots=256)
REQUESTS = 200
HOST = HostKnobs(overlap=True, front_s=0.004, step_s=0.001)


def load_of(requests: int = REQUESTS, gap_s: float = 0.07, rush: float = 3.0) -> Trace:
    """Arrivals, in the middle ``rush`` times as many; long and short prompts."""
    rows = np.arange(requests)
    gaps_s = np.where((rows > requests // 2) & (rows < 0.7 * requests), gap_s / rush, gap_s)
    arrival_s = np.concatenate([[0.0], np.cumsum(gaps_s)[:-1]])
    return Trace("load", arrival_s, 200 + 700 * (rows % 7), 5 + 11 * (rows % 9))


def record(path: Path, trace: Trace, times: Served, engine: RecordedEngine | None = ENGINE, **setup: Any) -> Path:
    """As a router in front of two unified instances writes it."""
    steps = load_profile(PROFILE)
    made = Setup(steps, kv_capacity_tokens=steps.kv_capacity_tokens, ttft_slo_s=0.3, tpot_slo_s=0.02, **setup)
    views = [InstanceView(index, f"w{index}", InstanceKind.UNIFIED) for index in range(2)]
    recorder = DecisionRecorder(
        RecordWriter(path), header_of("round-robin", PROFILE, 1.0, made, engine), FleetView(views)
    )
    events: list[tuple[float, int, str]] = []
    for row in range(len(trace)):
        events += [
            (float(trace.arrival_s[row]), row, "arrival"),
            (float(times.first_token_s[row]), row, "first"),
            (float(times.finish_s[row]), row, "finish"),
        ]
    requests = [
        RequestView(f"r{row}", int(trace.input_tokens[row]), float(trace.arrival_s[row]) + 50)
        for row in range(len(trace))
    ]
    for at_s, row, what in sorted(events):
        request, view, now_s = requests[row], views[row % 2], at_s + 50
        if what == "arrival":
            recorder.write_arrival(request, now_s)
            recorder.write_dispatch(request, Dispatch(view, view, FleetReason.NO_DATA), now_s, hidden=set())
        elif what == "first":
            recorder.write_first_token(request, view, now_s)
        else:
            recorder.write_finish(request, int(trace.output_tokens[row]), now_s)
    recorder.close_recorder()
    return path


def serve(trace: Trace, **changes: Any) -> Served:
    """What the simulator with a host makes of it, in the place of a live fleet."""
    base = Experiment(
        policy="round-robin", slo=Slo(0.3, 0.02), profile=PROFILE, instances=2, slots=256, stateless=False
    )
    return run_experiment(dataclasses.replace(base, host=HOST, **changes), trace).result.served
