"""Pictures of the simulator against live engines. Each function draws on axes that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pla_sglang.metrics.latency import ecdf
from pla_sglang.sim.fidelity import Points, served_of


def against_live(axes: Sequence[Any], points: Points, title: str) -> None:
    """Distributions of TTFT and TPOT of a live run and of its simulation, on two axes."""
    for panel, what in zip(axes, ("ttft", "tpot"), strict=True):
        for kind, label, style in (("live", "live", "-"), ("sim", "simulated", "--")):
            values = getattr(served_of(points, kind), f"{what}_s")()
            panel.plot(*ecdf(values[np.isfinite(values)].tolist()), style, label=label)
        panel.set_title(title, fontsize=8)
        panel.set(xscale="log", xlabel=f"{what.upper()}, s", ylabel="share of requests")
        panel.grid(alpha=0.3)
