"""How long leases last: what half and twice as long do to an owner that is away for a while, and to its successor.

Simulated: the clock goes on by half a second, as often as an owner looks at its actuator's list.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pla_sglang.fleet.actuators import kubernetes_lease, ray_actuator
from pla_sglang.fleet.actuators.interface import ActuatorError
from pla_sglang.fleet.actuators.kubernetes_client import ApiError
from pla_sglang.fleet.actuators.kubernetes_lease import DURATION_S, KubernetesLease
from pla_sglang.fleet.actuators.ray_actuator import LEASE_S, RETRY_S, RayLease
from pla_sglang.fleet.router.control.scale_orders import FOLLOW_S

AGAIN_S = 1.5  # for a helper to import Ray and to find its head
SPAN_S, AWAY_AT_S = 90.0, 20.0


class Leases:
    """One object of an API server, which does not answer while it is away."""

    def __init__(self) -> None:
        self.away = False
        self._lease: dict[str, Any] | None = None
        self._version = 0

    async def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        if self.away:
            raise ApiError(f"{method} {path}: 503", 503)
        if method == "GET" and self._lease is None:
            raise ApiError(f"{method} {path}: 404", 404)
        if method == "PATCH" and body["metadata"]["resourceVersion"] != str(self._version):
            raise ApiError(f"{method} {path}: 409", 409)
        if method != "GET":
            self._version += 1
            spec = {**(self._lease or {"spec": {}})["spec"], **body["spec"]}
            self._lease = {"metadata": {"resourceVersion": str(self._version)}, "spec": spec}
        assert self._lease is not None
        return self._lease


async def follow(lease: KubernetesLease) -> bool:
    try:
        held = lease.acquire()
    except ActuatorError:
        held = False
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return held


async def simulate_kubernetes(
    duration_s: int, *, away_s: float, owner_ends: bool, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[float, bool, bool]]:
    """When, and who of two then holds it. The server is away for so long, or the first owner for ever."""
    now_s, server = 0.0, Leases()
    monkeypatch.setattr(kubernetes_lease, "DURATION_S", duration_s)
    client: Any = server
    first, second = (KubernetesLease(client, "n", "fleet", name, clock=lambda: now_s) for name in ("first", "second"))
    rows = []
    while now_s < SPAN_S:
        gone = owner_ends and now_s >= AWAY_AT_S
        server.away = not owner_ends and AWAY_AT_S <= now_s < AWAY_AT_S + away_s
        held = first.held if gone else await follow(first)
        rows.append((now_s, held, await follow(second) if now_s > 2.0 else False))
        now_s += FOLLOW_S
    return rows


def simulate_ray(lease_s: float, *, away_s: float, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, bool, bool]]:
    ray_fleet = pytest.importorskip("pla_sglang.fleet.cluster.ray_fleet", reason="needs Ray")
    now_s = 0.0
    for module in (ray_actuator, ray_fleet):
        monkeypatch.setattr(module, "LEASE_S", lease_s)
    monkeypatch.setattr(ray_fleet, "time", SimpleNamespace(monotonic=lambda: now_s))
    fleet: Any = SimpleNamespace(_token="", _owner="", _until_s=0.0)
    leases = [RayLease(lambda: now_s), RayLease(lambda: now_s)]
    rows = []
    while now_s < SPAN_S:
        held = [lease.acquire() for lease in leases]
        rows.append((now_s, held[0], held[1]))
        for number, lease in enumerate(leases):
            if number or not AWAY_AT_S <= now_s < AWAY_AT_S + away_s:
                leads = ray_fleet.Fleet._lease_to(fleet, lease.token, lease.holder)
                lease.note_answer(now_s, fleet._owner, leads=leads)
        now_s += FOLLOW_S
    return rows


def describe(rows: list[tuple[float, bool, bool]]) -> tuple[bool, float | None]:
    """Whether the first one held it all the time, once it had it; and for how long nobody did, None: for ever."""
    assert not any(first and second for _, first, second in rows), "never two"
    begun_s = next(at_s for at_s, first, _ in rows if first)
    kept = all(first for at_s, first, _ in rows if at_s >= begun_s)
    taken_s = next((at_s for at_s, _, second in rows if second), None)
    return kept, None if taken_s is None else taken_s - AWAY_AT_S


@pytest.mark.parametrize(("times", "kept"), [(0.5, False), (1.0, True), (2.0, True)])
async def test_a_lease_of_kubernetes_outlives_an_answer_that_fails(
    times: float, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = await simulate_kubernetes(
        int(times * DURATION_S), away_s=0.3 * DURATION_S, owner_ends=False, monkeypatch=monkeypatch
    )
    assert describe(rows)[0] is kept


@pytest.mark.parametrize("times", [0.5, 1.0, 2.0])
async def test_a_lease_of_kubernetes_whose_owner_is_gone(times: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is over as long after its last change as it lasts, and is asked for each third of that."""
    duration_s = int(times * DURATION_S)
    without_s = describe(await simulate_kubernetes(duration_s, away_s=0.0, owner_ends=True, monkeypatch=monkeypatch))[1]
    assert without_s is not None
    assert 2 / 3 * duration_s <= without_s <= 4 / 3 * duration_s + 2 * FOLLOW_S


@pytest.mark.parametrize(("times", "kept"), [(0.5, False), (1.0, True), (2.0, True)])
def test_a_lease_of_ray_outlives_a_helper(times: float, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = simulate_ray(times * LEASE_S, away_s=RETRY_S + AGAIN_S, monkeypatch=monkeypatch)
    assert describe(rows)[0] is kept


@pytest.mark.parametrize("times", [0.5, 1.0, 2.0])
def test_a_lease_of_ray_whose_owner_is_gone(times: float, monkeypatch: pytest.MonkeyPatch) -> None:
    without_s = describe(simulate_ray(times * LEASE_S, away_s=SPAN_S, monkeypatch=monkeypatch))[1]
    assert without_s == pytest.approx(times * LEASE_S, abs=2 * FOLLOW_S)
