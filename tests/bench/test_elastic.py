"""The bench of fleets that grow and shrink: the shape of its day, the fixed fleet beside an arm, and what it emits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.compare import elastic
from bench.compare.elastic import FIXED_MOST, Figures, SimulatedFleets, make_day, rate_share
from bench.harness.catalogue import BENCHES

SHORT = ["--rate", "3", "--day-s", "200", "--startup-s", "5", "--plan-interval-s", "5"]


def test_the_peak_is_three_times_the_mean() -> None:
    shares = [rate_share(at_s, 1200.0) for at_s in np.arange(0.5, 1200.0)]
    assert max(shares) == pytest.approx(1.0, abs=1e-4)
    assert np.mean(shares) == pytest.approx(1 / 3, abs=1e-4)
    assert min(shares) > 0
    trace = make_day(20.0, 1200.0, seed=1)
    assert len(trace) == pytest.approx(24_000, rel=0.02)
    busiest = np.histogram(trace.arrival_s, bins=24, range=(0.0, 1200.0))[0].max() / 50
    assert busiest == pytest.approx(60.0, rel=0.1)


@pytest.mark.parametrize(
    ("needed", "found"), [(1, 1), (5, 5), (8, 8), (FIXED_MOST, FIXED_MOST), (FIXED_MOST + 1, None)]
)
def test_the_smallest_fixed_fleet_is_found(needed: int, found: int | None) -> None:
    class Known(SimulatedFleets):
        def __init__(self) -> None:
            self.sizes: list[int] = []

        def run_fixed(self, instances: int) -> Figures:
            self.sizes.append(instances)
            return Figures(float(instances), 1.0 if instances >= needed else 0.5)

    fleets = Known()
    assert fleets.smallest_fixed(0.99) == found
    assert len(set(fleets.sizes)) <= 10


def test_an_arm_stands_beside_a_fixed_fleet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert BENCHES["elastic"].main([*SHORT, "--arms", "least-tokens+sla", "--out", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    ratio = result["gpu_hours_vs_fixed"]["least-tokens+sla"]
    arm = result["arms"]["least-tokens+sla"]
    assert ratio == arm["gpu_hours_vs_fixed"] > 0
    assert arm["fixed_attainment"] >= result["attainment"]["least-tokens+sla"] - elastic.MARGIN
    assert 0 < result["lower_bound_gpu_hours"]["least-tokens+sla"] <= arm["gpu_hours"]
    assert "`least-tokens+sla`" in elastic.page(result)
