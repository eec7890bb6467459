"""Tells whether our graphs pay (``--pla-graph-layout auto``): host seconds of a pass, ours against the host's own
runner.

A pass of a short prefill is as long on the device in either runner; what differs is how long the host launches it, one
graph against a segment and an attention call for each layer. That depends on the model and the machine, not on the
shape, so one shape is measured. Written against 0.5.17 and 0.5.23.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from pla_graphs.recorder import RecordedPass
from pla_sglang.plugin.engine.graphs.host import CapturedForward
from pla_sglang.policy.pla.graphs.layouts import Bucket

WARM_PASSES, TIMED_PASSES = 3, 9
LEAST_GAIN = 0.05  # of the host's own seconds; less is within the noise of nine passes


class HostTimes(NamedTuple):
    """Seconds of the host to launch a pass, medians."""

    ours_s: float
    stock_s: float

    @property
    def pays(self) -> bool:
        return self.ours_s < (1 - LEAST_GAIN) * self.stock_s

    def to_ms(self) -> dict[str, float]:
        return {"ours": round(1e3 * self.ours_s, 3), "sglang": round(1e3 * self.stock_s, 3)}


def measure_host_times(
    forward: CapturedForward, recording: RecordedPass, bucket: Bucket, *, stock: Any, eager: Any
) -> HostTimes:
    """On a full batch of this shape, without history; nothing else runs. ``eager`` serves what ``stock`` does not take.

    Of this rank; all ranks measure together, as passes hold their collectives. Raises what a runner raises.
    """
    batch = forward.pretended_batch(bucket)
    forward.runner.prefill_cuda_graph_runner = stock  # as the host sets it after this; its eager runner asks
    stock_runner = stock if stock.can_run_graph(batch) else eager

    def run_ours() -> None:
        forward.load(bucket, batch)
        forward.replay(recording, batch)

    def run_stock() -> None:
        stock_runner.execute(batch)

    with forward.as_live_pass(bucket):
        times_s = [(time_launch(run_ours), time_launch(run_stock)) for _ in range(WARM_PASSES + TIMED_PASSES)]
    return HostTimes(*(statistics.median(of_runner) for of_runner in zip(*times_s[WARM_PASSES:], strict=True)))


def time_launch(launch: Callable[[], None]) -> float:
    """Host seconds; the device is idle when it begins, and has done the work when this returns."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    started_s = time.perf_counter()
    launch()
    took_s = time.perf_counter() - started_s
    synchronize()
    return took_s
