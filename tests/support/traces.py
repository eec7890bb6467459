"""Traces, and traces as files."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from pla_sglang.sim.workload import Trace
from pla_sglang.sim.workload.csv_formats import PLAIN_HEADER


def steady_trace(count: int = 200, *, prompt: int = 2000, answer: int = 40) -> Trace:
    """A request every 50 ms, all alike."""
    sizes = np.full(count, prompt, np.int64), np.full(count, answer, np.int64)
    return Trace("steady", np.arange(count) / 20, *sizes)


def write_plain(trace: Trace, path: Path) -> None:
    """The times and lengths of ``trace`` in the plain form."""
    with path.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(PLAIN_HEADER)
        columns = (trace.arrival_s.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist())
        writer.writerows(zip(*columns, strict=True))
