"""The picture of ``bench.spatial``: who missed the target, when, and where instances changed pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib.picture import panels
from bench.lib.plot import arm_colours
from bench.pooling.arms import SPATIAL
from bench.replaying.steps import Row

WINDOW_S = 2.0


def plot(
    arms: Mapping[str, Mapping[str, Any]], rows: Mapping[str, Sequence[Row]], slo_s: float, path: Path, title: str
) -> None:
    """Left: share of late requests by arm and class, a dot for each seed. Right: over the time of the run."""
    colours = arm_colours(list(arms))
    with panels(path, 2, size=(13, 4.6), title=title) as (left, right):
        places = np.arange(len(arms))
        for shift, (name, label) in enumerate((("all", "all"), ("short", "shorts"), ("long", "longs"))):
            of_class = [found if name == "all" else found[name] for found in arms.values()]
            bars = left.bar(
                places + (shift - 1) * 0.27, [100 * (one["violation_rate"] or 0) for one in of_class], 0.25, label=label
            )
            left.bar_label(bars, fmt="%.1f", fontsize=7)
        for place, found in zip(places, arms.values(), strict=True):
            by_seed = found["violation_rate_by_seed"]
            left.plot([place - 0.27] * len(by_seed), [100 * value for value in by_seed], ".", color="black", ms=4)
        left.set_xticks(places, [arm.removeprefix("router:") for arm in arms], rotation=15)
        left.set_ylabel("TTFT target missed, % of requests")
        for arm, own in rows.items():
            middles, shares = over_time(own, slo_s)
            right.plot(middles, 100 * shares, color=colours[arm], label=arm, lw=2 if arm == SPATIAL else 1)
        for move in (move for of_seed in arms.get(SPATIAL, {}).get("moves", []) for move in of_seed):
            right.axvline(move["at_s"], color=colours[SPATIAL], ls=":", lw=1)
        right.set(xlabel="arrival, s of device time; dotted: an instance changes pools", ylabel="target missed, %")
        right.grid(alpha=0.3)


def over_time(rows: Sequence[Row], slo_s: float) -> tuple[np.ndarray, np.ndarray]:
    """Middles of windows of the arrival time, and the share of late requests in each; nan where none arrived."""
    due = np.array([due_s for row in rows for _, due_s, _ in row["requests"]])
    late = np.array([ttft_s is None or ttft_s > slo_s for row in rows for _, _, ttft_s in row["requests"]], dtype=float)
    edges = np.arange(0.0, due.max() + WINDOW_S, WINDOW_S)
    counts = np.histogram(due, edges)[0]
    with np.errstate(invalid="ignore"):
        shares = np.histogram(due, edges, weights=late)[0] / counts
    return (edges[:-1] + edges[1:]) / 2, shares
