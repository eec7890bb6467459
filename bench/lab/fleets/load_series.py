"""Load by interval, for traces that have days or hours: what a planner would have seen, without the single requests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.lab.named_workloads import WORKLOADS, workload
from pla_sglang.policy.common.load_meter import LoadSample
from pla_sglang.policy.dopd.planner import Planner
from pla_sglang.sim.workload import Trace

# Mean lengths quoted for BurstGPT; its hourly summary has counts only.
BURSTGPT_INPUT_TOKENS, BURSTGPT_OUTPUT_TOKENS = 621.0, 126.0

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LoadSeries:
    """One value an interval.

    Attributes:
        requests: [n] float64 arrivals.
        input_tokens, output_tokens: [n] float64 mean lengths, NaN where nothing arrived.
    """

    name: str
    interval_s: float
    requests: Floats
    input_tokens: Floats
    output_tokens: Floats

    def last(self, count: int | None) -> LoadSeries:
        """Its last intervals, for a service that grew; None: all."""
        tail = slice(None if count is None else -count, None)
        columns = (self.requests, self.input_tokens, self.output_tokens)
        return LoadSeries(self.name, self.interval_s, *(column[tail] for column in columns))

    def samples(self, planner: Planner, busy_instances: float) -> list[LoadSample]:
        """What the load meter would report, the mean load scaled to ``busy_instances`` prefill and decode instances.

        Concurrency by Little's law: a request is in the system for its prefill and its answer at the step time of a
        full batch. Where nothing arrived, lengths are None, as the meter has it.
        """
        unscaled: list[LoadSample] = []
        busy: list[float] = []
        capacity = planner.knobs.concurrency_max
        for requests, prompt, answer in zip(self.requests, self.input_tokens, self.output_tokens, strict=True):
            if not requests:
                unscaled.append(LoadSample(None, None, 0.0, 0.0))
                busy.append(0.0)
                continue
            rate, prefill_s = float(requests) / self.interval_s, planner.prefill_s(float(prompt))
            answer_s = float(answer) * planner.step_s(capacity, float(prompt + answer / 2))
            unscaled.append(LoadSample(float(prompt), float(answer), rate * (prefill_s + answer_s), rate))
            busy.append(rate * prefill_s + unscaled[-1].concurrency / capacity)
        return [sample.times(busy_instances / float(np.mean(busy))) for sample in unscaled]


def from_trace(name: str, trace: Trace, interval_s: float) -> LoadSeries:
    """Whole intervals from the first request on; the last, partial one is left out."""
    count = int(trace.span_s // interval_s)
    index = ((trace.arrival_s - trace.arrival_s[0]) // interval_s).astype(np.int64)
    inside = index < count
    requests = np.bincount(index[inside], minlength=count).astype(np.float64)
    with np.errstate(invalid="ignore"):
        means = [
            np.bincount(index[inside], weights=column[inside], minlength=count) / requests
            for column in (trace.input_tokens, trace.output_tokens)
        ]
    return LoadSeries(name, interval_s, requests, *means)


def burstgpt_hours(path: Path) -> LoadSeries:
    """61 days of BurstGPT by hour: requests of the sessions that began in it. Hours without a row had none."""
    rows = np.genfromtxt(path, delimiter=",", names=True)
    hours = (rows["hour_start_s"] // 3600).astype(np.int64)
    requests = np.bincount(hours, weights=rows["requests_of_sessions_started"]).astype(np.float64)
    lengths = np.where(requests > 0, 1.0, np.nan)
    mean_lengths = lengths * BURSTGPT_INPUT_TOKENS, lengths * BURSTGPT_OUTPUT_TOKENS
    return LoadSeries("burstgpt_61d", 3600.0, requests, *mean_lengths)


def mooncake_minutes(path: Path) -> LoadSeries:
    rows = np.genfromtxt(path, delimiter=",", names=True)
    requests = rows["requests"]
    return LoadSeries("mooncake_1h", 60.0, requests, rows["input_tokens"] / requests, rows["output_tokens"] / requests)


COUNTED = {"burstgpt_1.per_hour.csv": burstgpt_hours, "mooncake_conv_1h.per_minute.csv": mooncake_minutes}


def read_series(folder: Path | None) -> list[LoadSeries]:
    """All that the data folder has; without one a generated hour, so that the bench still runs."""
    loads: list[LoadSeries] = []
    if folder is not None:
        loads += [read(folder / file) for file, read in COUNTED.items() if (folder / file).is_file()]
        for name in ("azure_code", "azure_conv", "burst", "reason"):
            if WORKLOADS[name].is_in(folder):
                loads.append(from_trace(f"{name}_1h", workload(name, folder).trace, 60.0))
    return loads or [from_trace("chat", workload("chat", None).trace, 60.0)]
