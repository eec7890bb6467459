"""What a pass costs beside its tokens: marks on the device's clock, or what an emulated device says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pla_sglang.plugin.engine.pass_timer import PassTime, PassTimer, make_marks
from pla_sglang.plugin.engine.step_measurement import StepMeasurement
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.common.step_model import GPU_START
from pla_sglang.profiles import load_profile
from pla_sglang.sim.emulate.batch import StepShape
from pla_sglang.sim.emulate.device import EmulatedDevice, ResultReady


@dataclasses.dataclass
class FakeEvent:
    """As ``torch.cuda.Event``: passed at a moment of the device's clock; infinite: not yet, and not to be read."""

    at_s: float

    def query(self) -> bool:
        return math.isfinite(self.at_s)

    def elapsed_time(self, end_event: FakeEvent) -> float:
        if not (self.query() and end_event.query()):
            raise RuntimeError("device not ready")
        return 1e3 * (end_event.at_s - self.at_s)


def make_timer(*device_s: float) -> PassTimer:
    """``device_s``: when the device comes to each mark."""
    marks: Iterator[float] = iter(device_s)
    return PassTimer(synchronous=False, clock=lambda: 0.0, marks=lambda: FakeEvent(next(marks)))


def test_a_pass_that_was_launched_in_time_waits_for_its_launch() -> None:
    timer = make_timer(*(0.0, 0.010), *(0.014, 0.030))  # the second could begin 4 ms after the first was done
    timer.begin_launch()
    timer.end_launch()
    timer.begin_launch()
    timer.end_launch()
    first, second = timer.end_pass(0.011), timer.end_pass(0.031)
    assert first is not None
    assert second is not None
    assert (first.gap_s, second.gap_s) == pytest.approx((0.0, 0.004))
    assert (timer.passes, timer.gap_s) == (2, pytest.approx(0.004))


def test_a_pass_that_came_when_nothing_was_left_did_not_wait() -> None:
    """Tells whether there was work in between nobody can tell."""
    timer = make_timer(*(0.0, 0.010), *(5.0, 5.010), *(5.012, 5.020))
    for now_s in (0.011, 5.011):
        timer.begin_launch()
        timer.end_launch()
        if now_s > 5:
            timer.begin_launch()
            timer.end_launch()
        measured = timer.end_pass(now_s)
        assert measured is not None
        assert measured.gap_s == 0.0
    last = timer.end_pass(5.021)
    assert last is not None
    assert last.gap_s == pytest.approx(0.002)


def test_a_gap_is_no_less_than_nothing() -> None:
    timer = make_timer(*(0.0, 0.010), *(0.009, 0.020))
    for _ in range(2):
        timer.begin_launch()
        timer.end_launch()
    gaps_s = [measured.gap_s for now_s in (0.010, 0.020) if (measured := timer.end_pass(now_s)) is not None]
    assert gaps_s == [0.0, 0.0]


def test_a_pass_takes_what_the_device_says_and_not_when_the_host_looks() -> None:
    """From the end of the pass before, the gap included; the first one from its launch."""
    timer = make_timer(*(0.001, 0.010), *(0.012, 0.030), *(0.030, 0.045))
    for _ in range(3):
        timer.begin_launch()
        timer.end_launch()
    late = [measured for now_s in (0.019, 0.031, 0.060) if (measured := timer.end_pass(now_s)) is not None]
    assert [measured.device_s for measured in late] == pytest.approx([0.009, 0.020, 0.015])
    assert [measured.gap_s for measured in late] == pytest.approx([0.0, 0.002, 0.0])


def test_a_result_that_came_without_the_device_has_no_gap_and_ends_nothing() -> None:
    """SGLang makes a pass of requests whose KV has come, and waits for no event of it."""
    timer = make_timer(*(0.0, 0.010), *(math.inf, math.inf), *(0.015, 0.020))
    for _ in range(3):
        timer.begin_launch()
        timer.end_launch()
    gaps_s = [measured.gap_s for now_s in (0.011, 0.012, 0.021) if (measured := timer.end_pass(now_s)) is not None]
    assert gaps_s == [0.0, 0.0, 0.0]


def test_an_emulated_device_says_it() -> None:
    profile = dataclasses.replace(load_profile("h100-qwen2.5-7b-tp1"), pass_s=6e-3)
    device, timer = EmulatedDevice(profile, time_scale=4.0, prefill_graph=True), PassTimer(synchronous=False)
    timer.begin_launch()
    span = device.launch(StepShape(new_tokens=100, attention=1e4, requests=1), 0.0)
    timer.end_launch(SimpleNamespace(pla_ready=ResultReady(span, device.log)))
    measured = timer.end_pass(1e9)
    assert measured is not None
    assert measured.gap_s == pytest.approx(4 * 6e-3)


def test_the_step_model_learns_it() -> None:
    """A device that is four times as slow, whose passes take 1 ms for 20 tokens and 6 ms besides."""
    taken_s: list[float] = []

    def end_pass(now_s: float) -> PassTime:
        return PassTime(0.0, 0.0, now_s, 4 * (6e-3 + taken_s[-1]), 0.0, gap_s=4 * 6e-3)

    timer: Any = SimpleNamespace(synchronous=False, end_pass=end_pass, passes=28, gap_s=28 * 4 * 6e-3)
    steps = StepMeasurement(SimpleNamespace(enable_overlap=True), GPU_START, timer, DeviceClock(4))
    mode = SimpleNamespace(is_extend=lambda: True, is_mixed=lambda: False)
    for tokens in (100, 400, 700, 1000, 1500, 2000, 3000) * 4:
        taken_s.append(tokens * 5e-5)
        batch = SimpleNamespace(forward_mode=mode, extend_lens=[tokens], prefix_lens=[0])
        assert steps.on_result(batch) == 4 * 6e-3
    assert steps.fits.prefills.model.pass_s == pytest.approx(6e-3)
    assert steps.fits.prefills.model.step_s(1000, 0) == pytest.approx(56e-3, rel=0.1)
    assert steps.to_dict()["pass_gap_s"] == pytest.approx(28 * 6e-3)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", "xpu"])
def test_only_a_cuda_device_has_marks(device: str) -> None:
    assert make_marks(SimpleNamespace(device=device)) is None
    assert make_marks(SimpleNamespace(device="cuda:0")) is not None
