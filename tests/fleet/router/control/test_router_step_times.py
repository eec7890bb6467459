"""The router plans for each instance by the step times that it reports, says so, and a recording holds them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from support.router_scene import FakeRelay, enter_worker, hear_report

from pla_sglang.fleet.router.control.control_plane import ControlPlane
from pla_sglang.fleet.router.control.gauges import row_of
from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.fleet.router.control.workers.table import Worker
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.load.report import FittedPasses, Report
from pla_sglang.parity import replay_file
from pla_sglang.policy.interface.fleet import InstanceKind
from pla_sglang.policy.registry import build
from pla_sglang.profiles.load import load_profile
from pla_sglang.profiles.step import StepProfile
from pla_sglang.recording.file import read
from pla_sglang.recording.rows import Header, Line, Views
from pla_sglang.recording.setup import setup_of
from pla_sglang.sim.core.experiment import mixed_batch_model, step_model
from pla_sglang.sim.core.parity import Replay

H100, A100 = "h100-llama3.1-8b-tp1", "a100-llama3.1-8b-tp1"


class Fleet:
    """Instances of a real control plane, on a clock that stands still."""

    def __init__(self, *profiles: str, **knobs: Any) -> None:
        self.now_s, self.sequence = 0.0, 0
        self.plane = ControlPlane(
            ControlKnobs(policy="arrow", slo_ttft_s=1.0, slo_tpot_s=0.05, **knobs), clock=lambda: self.now_s
        )
        self.relay = FakeRelay()
        self.plane.attach_relay(0, self.relay)
        if "record" in knobs:
            self.plane.policy.open_recording(keep=False, clock_start_s=0.0)
        self.workers = [self.start(number, profile) for number, profile in enumerate(profiles)]

    def start(self, number: int, profile: str) -> Worker:
        kind = InstanceKind.DECODE if number else InstanceKind.PREFILL
        return enter_worker(self.plane, number, kind, self.now_s, instances=2, profile=profile)

    def report(self, worker: Worker, profile: str | None = None, *, passes: int = 100) -> None:
        """``profile``: the times that it has measured; None: it sends none, as an earlier version."""
        self.sequence += 1
        measured: dict[str, Any] = {}
        if profile is not None:
            steps = load_profile(profile)
            measured = {
                "step_model": step_model(steps).to_floats(),
                "decode_model": dataclasses.astuple(mixed_batch_model(steps)),
                "fitted": FittedPasses(passes, passes, passes),
            }
        report = Report(instance=worker.view.name, sequence=self.sequence, **measured)
        hear_report(self.plane, report)

    def ask(self, rid: str, tokens: int) -> None:
        where = (rid, 0, m.Endpoint.GENERATE, True, self.now_s, 4 * tokens, tokens)
        self.plane.on_message(m.Ask(*where, exact_tokens=True))

    def told(self, worker: Worker) -> str | None:
        return row_of(worker, self.plane.dispatcher, self.now_s).step_times


def test_what_an_instance_has_measured_counts_for_it_alone() -> None:
    fleet = Fleet("", "")
    first, second = fleet.workers
    assert fleet.told(first) is None, "it has not told its load yet"
    fleet.report(first)
    fleet.report(second, A100)
    assert (first.view.steps, fleet.told(first)) == (None, f"profile {H100}, not measured")
    assert fleet.told(second) == "measured (100 prefill passes, 100 decode steps)"
    assert second.view.steps is not None
    assert second.view.steps.decode_s(16, 16_000) == pytest.approx(load_profile(A100).decode_s(16, 16_000), rel=0.05)
    predictor = fleet.plane.policy.predictor
    assert predictor is not None
    assert predictor.curve(second.view).time_s(2048) > 1.5 * predictor.curve(first.view).time_s(2048)


def test_start_values_are_not_measured() -> None:
    fleet = Fleet("", "")
    fleet.report(fleet.workers[0], A100, passes=0)
    assert fleet.workers[0].view.steps is None


def test_an_instance_of_another_kind_has_its_own_profile_until_it_has_measured() -> None:
    fleet = Fleet(H100, A100)
    for worker in fleet.workers:
        fleet.report(worker)
    first, second = fleet.workers
    assert first.view.steps is None
    assert isinstance(second.view.steps, StepProfile)
    assert fleet.told(second) == f"profile {A100}, not measured"


def test_a_named_profile_is_that_of_all() -> None:
    fleet = Fleet(H100, A100, profile=A100)
    for worker in fleet.workers:
        fleet.report(worker)
    assert [worker.view.steps for worker in fleet.workers] == [None, None]


def test_a_recording_replays_by_the_same_step_times(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    fleet = Fleet("", A100, record=path)
    for step, measured in enumerate((None, A100, H100, A100)):
        for worker in fleet.workers:
            fleet.report(worker, measured)
        for number in range(5):
            fleet.now_s += 0.01
            fleet.ask(f"r{step}-{number}", 700 * (number + 1))
    fleet.plane.policy.close_recording()
    header, result = replay_file(path)
    assert result.decisions["dispatched"] == 20
    assert result.identical_share == 1.0, result.differences
    blind = (line for line in read(path) if not isinstance(line, Header))
    without = [_forget_steps(line) for line in blind]
    setup = setup_of(header)
    identical = Replay(build("arrow", setup), without, steps=setup.steps).run().identical
    assert identical["dispatched"] == 10, "those by the profile: not measured yet, and where it is right"


def _forget_steps(line: Line) -> Line:
    if isinstance(line, Views):
        for fields in line.changed.values():
            fields.pop("steps", None)
    return line
