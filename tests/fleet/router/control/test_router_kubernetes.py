"""A router that scales Deployments and finds their pods by a Service, against the stand-in: the whole way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes.aio", reason="needs pla-sglang[kubernetes]")

from fake_sglang import FakeSglang
from support.kube_cluster import FLEET
from support.kube_scene import KubeScene, kube_scene, stand_in_only
from support.router_scene import Scene, scene

from pla_sglang.fleet.actuators import kubernetes_actuator
from pla_sglang.fleet.actuators.kubernetes_client import ApiError, Resource
from pla_sglang.fleet.router.control import scale_orders
from pla_sglang.fleet.router.control.scale_orders import ScalingKnobs
from pla_sglang.fleet.router.control.workers import worker_service
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.policy.interface.decisions import ScaleTo
from pla_sglang.policy.interface.fleet import Role
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.policy.runner import Refusal

pytestmark = stand_in_only  # a real server takes no loopback address for an endpoint
REASON = FleetReason.DOPD_TOTAL


class Node:
    """Runs pods: an instance at the address of each, and keeps the Service's EndpointSlice."""

    def __init__(self, kube: KubeScene) -> None:
        self.kube, self.cluster = kube, kube.cluster
        self.cluster.network = "127.0.1"
        self.instances: dict[str, FakeSglang] = {}
        self.port = 0
        self._slices = Resource(worker_service.GROUP, kube.namespace, "endpointslices")
        self._written: list[dict[str, Any]] = []

    async def start(self, replicas: int) -> None:
        async with FakeSglang("stateless") as probe:
            self.port = probe.port  # free at the other addresses of this machine too
        await self.cluster.create("stateless", replicas, port=self.port)
        meta = {"name": "slice", "labels": {"kubernetes.io/service-name": FLEET}}
        ports = [{"name": "http", "port": self.port}]
        await self.kube.client.ask("POST", self._slices.path(), {"metadata": meta, "endpoints": [], "ports": ports})

    async def run(self) -> None:
        while True:
            with contextlib.suppress(ApiError):  # a fault that was not meant for us
                await self._step()
            await asyncio.sleep(0.02)

    async def _step(self) -> None:
        await self.cluster.step()
        endpoints = []
        for pod in await self.cluster.list_pods():
            name, host = pod["metadata"]["name"], pod["status"].get("podIP")
            if pod["metadata"].get("deletionTimestamp"):
                if name in self.instances:
                    await self.instances.pop(name).stop()
                await self.cluster.end(name)
            elif host:
                if name not in self.instances:
                    self.instances[name] = FakeSglang("stateless", host=host, port=self.port)
                    await self.instances[name].start()
                endpoints.append({"addresses": [host], "conditions": {"ready": True}})
        if endpoints != self._written:
            await self.kube.client.ask("PATCH", self._slices.path("slice"), {"endpoints": endpoints})
            self._written = endpoints


@contextlib.asynccontextmanager
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **knobs: Any) -> AsyncIterator[tuple[Scene, Node]]:
    """Two pods, and a router that leads."""
    monkeypatch.setattr(kubernetes_actuator, "LOOK_S", 0.02)
    for name in ("RETRY_S", "PAUSE_S"):
        monkeypatch.setattr(worker_service, name, 0.02)
    monkeypatch.setattr(scale_orders, "FOLLOW_S", 0.02)
    async with kube_scene(tmp_path, monkeypatch) as kube:
        node = Node(kube)
        await node.start(2)
        running = asyncio.create_task(node.run())
        place = f"{kube.namespace}/{FLEET}"
        scaling = ScalingKnobs(
            planner="dopd", actuator=f"kubernetes:{place}", instances_max=3, interval_s=3600.0, **knobs
        )
        try:
            async with scene([], worker_service=place, scaling=scaling, policy="combined") as one:
                await one.ready(2)
                await one.until(lambda: one.plane.scaling._leads and len(one.plane.scaling._listed) == 2)
                yield one, node
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            for instance in node.instances.values():
                await instance.stop()


def grow(one: Scene) -> Refusal | None:
    return one.plane.scaling.scale(ScaleTo(Role.MIXED, 3, REASON, start=1))


async def test_a_fleet_grows_by_a_pod_and_shrinks_by_the_one_that_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch) as (one, node):
        told = one.admin("GET", "/pla/state")[1]["worker_service"]
        assert told == {"service": f"{node.kube.namespace}/{FLEET}", "endpoints": 2, "error": ""}
        assert grow(one) is None
        await one.ready(3)
        await one.until(lambda: one.describe_planner()["starts"] == {"ready": 1})
        went = one.assign("r1")
        one.reach("r1", m.Milestone.SENT)
        leaving = one.plane.table.by_number[went.decode]
        assert one.plane.scaling.scale(ScaleTo(Role.MIXED, 2, REASON, drain=(leaving.view,))) is None
        await asyncio.sleep(0.2)
        assert len(node.instances) == 3, "it is stopped only when it is empty"
        one.ended("r1", output_tokens=3)
        await one.until(lambda: len(node.instances) == 2)
        assert leaving.url not in [instance.url for instance in node.instances.values()]
        await one.until(lambda: len(list(one.plane.table)) == 2)
        await one.until(lambda: len(one.plane.scaling._listed) == 2)
        assert await node.cluster.count("stateless") == 2
        await one.until(lambda: not one.plane._state_file.state.removed)
        assert grow(one) is None
        await one.ready(3)


async def test_a_scale_that_is_refused_and_a_pod_that_never_gets_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch, start_timeout_s=1.0) as (one, node):
        node.kube.api.fail("PATCH", "/sglang-stateless", 403, "exceeded quota", times=1)
        assert grow(one) is None
        await one.until(lambda: one.describe_planner()["starts"] == {"failed": 1})
        node.cluster.starts = False
        assert grow(one) is None
        await one.until(lambda: one.describe_planner()["starts"] == {"failed": 1, "expired": 1})
        await one.until(lambda: len(one.plane.scaling._listed) == 2)
        assert one.assign("r1").decode in (0, 1), "the others serve on"
        async with asyncio.timeout(20.0):
            while len(await node.cluster.list_pods()) != 2:
                await asyncio.sleep(0.02)
        assert len(one.plane.table.fleet.ready) == 2
