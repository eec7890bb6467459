"""The emulated device of one scheduler process: durations from a profile, time line, waiting of the host."""

from __future__ import annotations

import time
from typing import Any

from pla_sglang.plugin.config import PlaConfig
from pla_sglang.profiles import StepProfile, load_profile
from pla_sglang.sim.emulate.batch import StepShape
from pla_sglang.sim.emulate.metrics import DeviceSeries
from pla_sglang.sim.emulate.steplog import StepLog
from pla_sglang.sim.emulate.timeline import Span, Timeline

QUANTILES = (0.5, 0.9, 0.99)


class EmulatedDevice:
    """Results are ready at max(now, device free) + cost. All on the scheduler's thread.

    A launch returns at once where a graph is replayed. Without one the host is busy with it for the profile's launch
    floor, whatever the device does.
    """

    def __init__(self, profile: StepProfile, *, time_scale: float, prefill_graph: bool) -> None:
        self.profile = profile
        self.time_scale = time_scale
        self.timeline = Timeline()
        self.log = StepLog()
        self.series: DeviceSeries | None = None
        self.is_broken = False
        self._prefill_graph = prefill_graph

    def cost_s(self, shape: StepShape) -> float:
        """Seconds of this process's clock that a batch takes."""
        return self.time_scale * self.profile.step_s(**shape._asdict(), graph=self._has_graph(shape))

    def host_s(self, shape: StepShape) -> float:
        """Seconds of this process's clock for which the host is busy with the launch."""
        return self.time_scale * self.profile.launch_floor_s(graph=self._has_graph(shape))

    def _has_graph(self, shape: StepShape) -> bool:
        return self._prefill_graph or shape.requests == 0

    def break_down(self) -> None:
        """From now on it fails, as a GPU does after an illegal access: its host finds that at its next pass."""
        self.is_broken = True

    def require_whole(self) -> None:
        """Raises RuntimeError where it is broken."""
        if self.is_broken:
            raise RuntimeError("the emulated device has failed (SIGUSR1)")

    def launch(self, shape: StepShape, now_s: float) -> Span:
        """Raises RuntimeError where it is broken."""
        self.require_whole()
        before_s = self.time_scale * self.profile.pass_s if shape.new_tokens else 0.0
        span = self.timeline.launch(self.cost_s(shape) - before_s, now_s, before_s)
        if self.series is not None:
            self.series.on_step(span)
        return span

    def state(self) -> dict[str, Any]:
        """Plain values for /server_info."""
        p50, p90, p99 = self.log.quantiles(QUANTILES)
        return {
            "profile": self.profile.name,
            "time_scale": self.time_scale,
            "steps": self.log.steps,
            "busy_s": self.timeline.busy_s,
            "host_gap_s": self.timeline.gap_s,
            "pass_gap_s": self.timeline.between_s,
            "pass_ms": self.profile.pass_s * 1e3,
            "host_overhead_share": self.timeline.overhead_share,
            "step_error_p50": p50,
            "step_error_p90": p90,
            "step_error_p99": p99,
        }


class ResultReady:
    """Replaces the CUDA event of a result: ``synchronize`` returns once the device has finished it."""

    def __init__(self, span: Span, log: StepLog) -> None:
        self._span = span
        self._log = log
        self._seen = False

    @property
    def idle_s(self) -> float:
        """For how long the device waits before this pass although it has it to do."""
        return self._span.gap_s + self._span.before_s

    def synchronize(self) -> None:
        wait_s = self._span.ready_s - time.perf_counter()
        if wait_s > 0:
            time.sleep(wait_s)
        if not self._seen:
            self._seen = True
            self._log.observe(self._span, time.perf_counter())

    def query(self) -> bool:
        return time.perf_counter() >= self._span.ready_s

    def record(self, stream: Any = None) -> None:
        """The host records the event after the work; here the end time is part of the work."""


class KvLink:
    """The link into this instance: transfers run one after the other at a given bandwidth."""

    def __init__(self, bytes_per_token: int, gbps: float, time_scale: float) -> None:
        self._token_s = bytes_per_token * 8 / (gbps * 1e9) * time_scale
        self._timeline = Timeline()

    def done_s(self, tokens: int, now_s: float) -> float:
        """When a transfer of ``tokens`` that starts now is complete."""
        return self._timeline.launch(tokens * self._token_s, now_s).ready_s


def build(config: PlaConfig) -> EmulatedDevice:
    """The device that ``config`` asks for. Raises ProfileError."""
    assert config.emulate is not None
    return EmulatedDevice(
        load_profile(config.emulate), time_scale=config.time_scale, prefill_graph=config.emulate_launch == "graph"
    )
