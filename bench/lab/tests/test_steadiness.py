"""Controllers settle: at most one flip in the second hour of a constant load, below and above what can be served."""

from __future__ import annotations

import pytest

from bench.lab.fleets.steadiness import steady_run


@pytest.mark.parametrize("policy", ["arrow", "combined"])
@pytest.mark.parametrize("rate_per_s", [3.0, 16.0])
def test_at_most_one_flip_an_hour_after_settling(policy: str, rate_per_s: float) -> None:
    found = steady_run(policy, rate_per_s)
    assert found["late_flips"] <= 1
