"""How many requests are in their prefill and in their decode over time (Arrow, Figure 4)."""

from __future__ import annotations

import dataclasses

import numpy as np

from pla_sglang.sim.metrics.goodput import Floats, Served


@dataclasses.dataclass(frozen=True)
class PhaseLoad:
    """Requests at equal distances of time: those without a first token, waiting ones included, and those after it.

    Attributes:
        at_s: [samples] seconds, from 0 to the last end.
        prefills, decodes: [samples] requests.
    """

    at_s: Floats
    prefills: Floats
    decodes: Floats

    def moment_s(self, counts: Floats, share: float) -> float:
        """When ``share`` of what ``counts`` add up to has passed."""
        return float(self.at_s[np.searchsorted(np.cumsum(counts), share * counts.sum())])


def load_of_phases(served: Served, *, samples: int) -> PhaseLoad:
    """Of a run in which every request has ended."""
    at_s = np.linspace(0.0, float(served.finish_s.max()), samples)
    arrived, first, ended = (
        np.searchsorted(np.sort(times_s), at_s).astype(np.float64)
        for times_s in (served.arrival_s, served.first_token_s, served.finish_s)
    )
    return PhaseLoad(at_s, arrived - first, first - ended)
