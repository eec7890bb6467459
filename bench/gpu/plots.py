"""Pictures of a run, drawn from whatever it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench.lib.plot import COLOURS


def plot_steps(steps: dict[str, Any], path: Path, size: str) -> None:
    """Median step time by shape, one bar an arm. Draws nothing without a measured shape."""
    arms = {arm: of_arm["shapes"] for arm, of_arm in steps.items() if of_arm.get("shapes")}
    shapes = list(dict.fromkeys(shape for of_arm in arms.values() for shape in of_arm))
    if not shapes:
        return
    figure, axes = plt.subplots(figsize=(2 + 0.9 * len(shapes), 4.2), layout="constrained")
    width = 0.8 / len(arms)
    for index, (arm, of_arm) in enumerate(arms.items()):
        at = [place + index * width for place, shape in enumerate(shapes) if shape in of_arm]
        axes.bar(at, [of_arm[s]["median_ms"] for s in shapes if s in of_arm], width, label=arm, color=COLOURS[index])
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(shapes))], shapes, rotation=30, ha="right")
    axes.set_ylabel("one prefill pass, ms (median)")
    axes.set_title(f"{size}: requests x mean new tokens + history of each", fontsize=10)
    axes.legend(frameon=False)
    _save(figure, path)


def plot_fig6(fig6: dict[str, Any], path: Path) -> None:
    """RPS, mean and P90 by concurrency. Draws nothing without an arm."""
    arms = fig6.get("arms") or {}
    if not arms:
        return
    figure, panels = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    for panel, (key, label) in zip(
        panels, (("rps", "requests/s"), ("mean_ms", "mean latency, ms"), ("p90_ms", "P90 latency, ms")), strict=True
    ):
        for colour, (arm, of_arm) in zip(COLOURS, arms.items(), strict=False):
            at = of_arm["concurrency"]
            values = [one[key] for one in at.values()]
            panel.plot([int(clients) for clients in at], values, "o-", color=colour, label=arm)
        panel.set_xscale("log", base=2)
        panel.set_xlabel("concurrency")
        panel.set_ylabel(label)
    panels[0].legend(frameon=False)
    _save(figure, path)


def plot_kernels(kernels: dict[str, Any], path: Path) -> None:
    """Ours against torch. Draws nothing where kernels could not run."""
    cases = {name: one for name, one in kernels.items() if isinstance(one, dict) and "ours_us" in one}
    if not cases:
        return
    figure, axes = plt.subplots(figsize=(7, 0.5 + 0.5 * len(cases)), layout="constrained")
    places = range(len(cases))
    axes.barh([place - 0.2 for place in places], [one["torch_us"] for one in cases.values()], 0.4, label="torch")
    axes.barh([place + 0.2 for place in places], [one["ours_us"] for one in cases.values()], 0.4, label="ours")
    axes.set_yticks(list(places), list(cases))
    axes.set_xscale("log")
    axes.set_xlabel("microseconds")
    axes.legend(frameon=False)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=140)
    plt.close(figure)
