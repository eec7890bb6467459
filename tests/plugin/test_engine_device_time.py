"""The scheduling of a slowed engine runs on the time of its device; what it shows is wall time."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fake_scheduler import FakeReq, FakeScheduler

from pla_sglang.load.report import FittedPasses
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.engine import backlog
from pla_sglang.plugin.engine.pass_timer import PassTimer
from pla_sglang.plugin.engine.probe import describe_steps
from pla_sglang.plugin.engine.scheduler_adapter import PrefillAdapter
from pla_sglang.plugin.engine.step_measurement import StepMeasurement
from pla_sglang.plugin.engine.telemetry import Telemetry
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.common.step_model import GPU_START
from pla_sglang.policy.interface.prefill import Action, PassDecision, PassReason, WaitingView
from pla_sglang.policy.slo.mixed_batches import MixedBatchModel

SCALE = 4.0
SLOW = PlaConfig(prefill_disagg="temporal", boundary_tokens=100, emulate="linear", time_scale=SCALE, slo_ttft_ms=1000.0)


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The wall clock, which stands still until it is moved."""
    clock = SimpleNamespace(now_s=400.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now_s)
    return clock


def test_arrivals_and_targets_are_the_device_s(wall: SimpleNamespace) -> None:
    scheduler = FakeScheduler()
    adapter = scheduler.pla = PrefillAdapter(scheduler, SLOW)
    adapter.on_tick(adapter.make_tick())
    req = FakeReq("a", 50)
    adapter.on_queued(req)
    view = adapter.views.find_view(req)
    assert (adapter.now_s, view.arrival_s, view.deadline_s) == (100.0, 100.0, 100.0 + 1.0 / SCALE)
    wall.now_s += 8.0
    scheduler.waiting_queue.append(req)
    assert backlog.measure_oldest_s(scheduler, wall.now_s) == 8.0, "a load report is in wall time"
    adapter.on_tick(adapter.make_tick())
    adapter.on_queued(req)  # as if it had been retracted
    assert adapter.views.find_view(req).arrival_s == 100.0


def test_measured_steps_are_the_device_s(wall: SimpleNamespace) -> None:
    scheduler = SimpleNamespace(enable_overlap=True, is_mixed_chunk=False)
    steps = StepMeasurement(scheduler, GPU_START, PassTimer(synchronous=False, clock=time.perf_counter), DeviceClock(4))

    def launch(*args: Any) -> None:
        wall.now_s += 0.4

    decode = SimpleNamespace(is_extend=lambda: False, is_mixed=lambda: False, is_decode=lambda: True)
    for _ in range(60):
        steps.begin_scheduling()
        steps.launch(launch, (), {})
        steps.on_result(SimpleNamespace(forward_mode=decode, reqs=[None] * 8, seq_lens_cpu=np.full(8, 1000)))
    assert steps.decode_step_s == pytest.approx(0.1)
    told = describe_steps(steps.fits)
    assert told["fitted"] == FittedPasses(0, 56, 0), "a fit is of eight"
    assert MixedBatchModel(*told["decode_model"]).decode_s(8, 8000) == pytest.approx(0.1, rel=0.01)


class FakeSeries:
    """Stands in for ``LabelledSeries``: keeps what histograms observe."""

    def __init__(self) -> None:
        self.observed: list[tuple[str, float]] = []

    def gauge(self, name: str, *_: str) -> Any:
        child = SimpleNamespace(
            inc=lambda *_: None, set=lambda *_: None, observe=lambda s: self.observed.append((name, s))
        )
        return SimpleNamespace(at=lambda *labels: child)

    total = histogram = gauge


def test_what_is_shown_is_wall_time() -> None:
    telemetry, series = Telemetry(DeviceClock(SCALE)), FakeSeries()
    telemetry.attach(series)  # type: ignore[arg-type]
    view = WaitingView("a", 50, 0, arrival_s=100.0)
    telemetry.on_pass(PassDecision(Action.HOLD, PassReason.WINDOW), (), None, 100.0)
    extend = SimpleNamespace(is_mixed=lambda: False)
    batch = SimpleNamespace(reqs=[object()], extend_lens=[50], forward_mode=extend)
    telemetry.on_pass(PassDecision(Action.SHORT, PassReason.WINDOW, (view,)), (view,), batch, 100.5)
    assert telemetry.hold_s == 2.0
    assert ("pla_wait_seconds", 2.0) in series.observed
