"""How many requests are in their prefill and in their decode."""

from __future__ import annotations

import numpy as np

from bench.lab.papers.phase_load import load_of_phases
from pla_sglang.sim.metrics.goodput import Served


def test_requests_in_each_phase_over_time() -> None:
    """Two requests: prefill 0 to 2 and 1 to 3, decode up to 4 and 10."""
    times_s = [np.array(column, dtype=np.float64) for column in ([0.0, 1.0], [2.0, 3.0], [4.0, 10.0])]
    load = load_of_phases(Served(*times_s, np.array([5, 5])), samples=21)
    assert load.at_s[:4].tolist() == [0.0, 0.5, 1.0, 1.5]
    assert load.prefills.tolist() == [0, 1, 1, 2, 2, 1, 1, *[0] * 14]
    assert load.decodes.tolist() == [0, 0, 0, 0, 0, 1, 1, 2, 2, *[1] * 12]
    assert load.moment_s(load.prefills, 0.5) == 1.5
    assert load.moment_s(load.decodes, 0.5) == 5.5
