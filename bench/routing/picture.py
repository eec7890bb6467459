"""The picture of ``bench.router_cost``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.lib.plot import COLOURS, plt

PANELS = (
    ("added TTFT at 200/s, ms", (("added_ttft_p50_ms", "p50"), ("added_ttft_p99_ms", "p99"))),
    ("CPU time, ms", (("cpu_ms_per_request", "a request"), ("cpu_ms_per_stream", "a 16-token stream"))),
    ("a second", (("requests_per_s", "requests"), ("events_per_s", "events"), ("long_body_rps", "60K-token bodies"))),
)


def plot_costs(by_arm: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Bars by arm, logarithmic: the arms differ by orders of magnitude."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(5.2 * len(PANELS), 4.2), layout="constrained")
    names = list(by_arm)
    for panel, (title, series) in zip(axes, PANELS, strict=True):
        width = 0.8 / len(series)
        for place, (key, label) in enumerate(series):
            heights = [by_arm[name].get(key) or float("nan") for name in names]
            panel.bar(
                [index + place * width for index in range(len(names))],
                heights,
                width,
                label=label,
                color=COLOURS[place],
            )
        panel.set_yscale("log")
        panel.set_title(title, fontsize=10)
        panel.set_xticks(
            [index + 0.4 - width / 2 for index in range(len(names))], names, rotation=30, ha="right", fontsize=8
        )
        panel.legend(frameon=False, fontsize=8)
        panel.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=140)
    plt.close(figure)
