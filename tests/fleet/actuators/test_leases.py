"""How long a lease in Ray lasts: for an owner that is away for a while, and for its successor.

Simulated: the clock goes on by half a second, as often as an owner looks at its actuator's list.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pla_sglang.fleet.actuators.ray_actuator import LEASE_S, RETRY_S, RayLease
from pla_sglang.fleet.router.control.scale_orders import FOLLOW_S

AGAIN_S = 1.5  # for a helper to import Ray and to find its head
SPAN_S, AWAY_AT_S = 90.0, 20.0


@pytest.mark.parametrize(("away_s", "taken_after_s"), [(RETRY_S + AGAIN_S, None), (SPAN_S, LEASE_S)])
def test_a_lease_outlives_a_helper_and_not_its_owner(
    away_s: float, taken_after_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``taken_after_s``: when the second of two owners has it; None: never."""
    ray_fleet = pytest.importorskip("pla_sglang.fleet.cluster.ray_fleet", reason="needs Ray")
    now_s = 0.0
    monkeypatch.setattr(ray_fleet, "time", SimpleNamespace(monotonic=lambda: now_s))
    fleet: Any = SimpleNamespace(_token="", _owner="", _until_s=0.0)
    leases = [RayLease(lambda: now_s), RayLease(lambda: now_s)]
    rows = []
    while now_s < SPAN_S:
        rows.append((now_s, *(lease.acquire() for lease in leases)))
        for number, lease in enumerate(leases):
            if number or not AWAY_AT_S <= now_s < AWAY_AT_S + away_s:
                leads = ray_fleet.Fleet._lease_to(fleet, lease.token, lease.holder)
                lease.note_answer(now_s, fleet._owner, leads=leads)
        now_s += FOLLOW_S
    assert not any(first and second for _, first, second in rows), "never two"
    taken_s = next((at_s for at_s, _, second in rows if second), None)
    if taken_after_s is None:
        assert taken_s is None
        assert all(first for at_s, first, _ in rows if at_s >= AWAY_AT_S)
    else:
        assert taken_s == pytest.approx(AWAY_AT_S + taken_after_s, abs=2 * FOLLOW_S)
