"""The picture of a replay: distributions against the targets, and latency over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bench.lib.picture import panels
from bench.lib.plot import COLOURS, log_seconds
from pla_sglang.metrics.goodput import Served, Slo


def plot_replay(columns: Served, slo: Slo, path: Path, *, title: str) -> None:
    """TTFT and TPOT as distributions with their targets, TTFT by arrival time."""
    with panels(path, 3, size=(13.8, 4.2), title=title) as (left, middle, right):
        _distribution(left, columns.ttft_s(), slo.ttft_s, "time to first token")
        _distribution(middle, columns.tpot_s(), slo.tpot_s, "time per further token")
        missed = ~columns.met(slo)
        for mask, colour, label in ((~missed, COLOURS[0], "met both targets"), (missed, COLOURS[1], "missed one")):
            right.plot(columns.arrival_s[mask], columns.ttft_s()[mask], ".", ms=3, color=colour, label=label)
        right.set(xlabel="arrival, s of device time", ylabel="time to first token, s", yscale="log")


def _distribution(panel: Any, values: np.ndarray, target_s: float, label: str) -> None:
    known = np.sort(values[np.isfinite(values)])
    if not len(known):
        panel.set_title(f"no {label}")
        return
    panel.plot(known, np.arange(1, len(known) + 1) / len(values), color=COLOURS[0])
    panel.axvline(target_s, color=COLOURS[1], ls="--", lw=1, label=f"target {target_s:g} s")
    panel.set(xlabel=label, ylabel="share of all requests", xscale="log", ylim=(0, 1))
    low, high = max(1e-4, min(float(known[0]), target_s) / 1.5), max(float(known[-1]), target_s) * 1.5
    panel.set_xlim(low, high)
    log_seconds(panel.xaxis, low, high)
