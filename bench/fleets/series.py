"""Load by interval of traces that have days or hours: what a planner would have seen, without the single requests."""

from __future__ import annotations

import csv
import dataclasses
import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.fleets.workloads import RECORDED, workload
from pla_sglang.policy.dopd.load import LoadSample
from pla_sglang.policy.dopd.planner import Planner
from pla_sglang.workload import Trace

Floats = npt.NDArray[np.float64]

# Mean lengths quoted for BurstGPT; its hourly summary has counts only.
BURSTGPT_INPUT_TOKENS, BURSTGPT_OUTPUT_TOKENS = 621.0, 126.0


@dataclasses.dataclass(frozen=True)
class LoadSeries:
    """One value an interval.

    Attributes:
        requests: [n] float64 arrivals.
        input_tokens, output_tokens: [n] float64 mean lengths, NaN where nothing arrived.
        recorded: counts of a real service; False: generated.
    """

    name: str
    interval_s: float
    requests: Floats
    input_tokens: Floats
    output_tokens: Floats
    recorded: bool = True

    def __len__(self) -> int:
        return len(self.requests)

    def last(self, count: int | None) -> LoadSeries:
        """Its last intervals, for a service that grew; None: all."""
        if count is None or count >= len(self):
            return self
        columns = ("requests", "input_tokens", "output_tokens")
        return dataclasses.replace(self, **{name: getattr(self, name)[-count:] for name in columns})

    def samples(self, planner: Planner, busy_instances: float) -> list[LoadSample]:
        """What the load meter would report, the mean load scaled to ``busy_instances`` prefill and decode instances.

        Concurrency by Little's law: a request is in the system for its prefill and its answer at the step time of a
        full batch. Where nothing arrived, lengths are None, as the meter has it.
        """
        once = [self._sample(planner, index, 1.0) for index in range(len(self))]
        capacity = planner.knobs.concurrency_max
        mean = float(np.mean([self._work(planner, one) + one.concurrency / capacity for one in once]))
        return [one.times(busy_instances / mean) for one in once]

    def _sample(self, planner: Planner, index: int, scale: float) -> LoadSample:
        rate = scale * float(self.requests[index]) / self.interval_s
        prompt, answer = float(self.input_tokens[index]), float(self.output_tokens[index])
        if not rate:
            return LoadSample(None, None, 0.0, 0.0)
        step_s = planner.step_s(planner.knobs.concurrency_max, prompt + answer / 2)
        return LoadSample(prompt, answer, rate * (planner.prefill_s(prompt) + answer * step_s), rate)

    @staticmethod
    def _work(planner: Planner, one: LoadSample) -> float:
        return 0.0 if one.input_tokens is None else one.rate_per_s * planner.prefill_s(one.input_tokens)


def from_trace(name: str, trace: Trace, interval_s: float, *, recorded: bool) -> LoadSeries:
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
    return LoadSeries(name, interval_s, requests, means[0], means[1], recorded)


def burstgpt_hours(path: Path) -> LoadSeries:
    """61 days of BurstGPT by hour: requests of the sessions that began in it. Hours without a row had none."""
    with _open(path) as file:
        rows = [(int(row["hour_start_s"]), float(row["requests_of_sessions_started"])) for row in csv.DictReader(file)]
    hours = np.zeros(rows[-1][0] // 3600 + 1)
    for start_s, requests in rows:
        hours[start_s // 3600] = requests
    lengths = np.where(hours > 0, 1.0, np.nan)
    return LoadSeries("burstgpt_61d", 3600.0, hours, lengths * BURSTGPT_INPUT_TOKENS, lengths * BURSTGPT_OUTPUT_TOKENS)


def mooncake_minutes(path: Path) -> LoadSeries:
    """The whole hour of Mooncake's conversation trace by minute."""
    with _open(path) as file:
        rows = [
            [float(row[key]) for key in ("requests", "input_tokens", "output_tokens")] for row in csv.DictReader(file)
        ]
    requests, prompts, answers = np.array(rows).T
    return LoadSeries("mooncake_1h", 60.0, requests, prompts / requests, answers / requests)


def _open(path: Path):  # type: ignore[no-untyped-def]  # two kinds of text file
    return gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8")


def series(folder: Path | None) -> list[LoadSeries]:
    """All that the data folder has; without one a generated hour, so that the bench still runs."""
    found: list[LoadSeries] = []
    if folder is not None:
        files: list[tuple[str, Callable[[Path], LoadSeries]]] = [
            ("burstgpt_1.per_hour.csv", burstgpt_hours),
            ("mooncake_conv_1h.per_minute.csv", mooncake_minutes),
        ]
        found += [read(folder / name) for name, read in files if (folder / name).is_file()]
        for name in ("azure_code", "azure_conv", "burst", "reason"):
            if (folder / RECORDED[name].file).is_file():
                one = workload(name, folder)
                found.append(from_trace(f"{name}_1h", one.trace, 60.0, recorded=one.recorded))
    if not found:
        found.append(from_trace("chat", workload("chat", None).trace, 60.0, recorded=False))
    return found
