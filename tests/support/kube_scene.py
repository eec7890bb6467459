"""A Kubernetes API for tests: the stand-in, or the real server of the kubeconfig ``PLA_TEST_KUBECONFIG``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pla_sglang.fleet.actuators.interface import ActuatorError
from pla_sglang.fleet.actuators.kubernetes_actuator import KubernetesActuator
from pla_sglang.fleet.actuators.kubernetes_client import KubernetesClient
from support.kube_api import KubeApi
from support.kube_cluster import FLEET, KubeCluster

REAL = os.environ.get("PLA_TEST_KUBECONFIG", "")
stand_in_only = pytest.mark.skipif(bool(REAL), reason="injects faults, which a real server does not take")


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def write_kubeconfig(path: Path, url: str, token: str = "t") -> Path:
    users = [{"name": "u", "user": {"token": token}}]
    entry = {"clusters": [{"name": "c", "cluster": {"server": url}}], "users": users}
    context = {"contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}], "current-context": "x"}
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **entry, **context}))
    return path


class KubeScene:
    """``api``: the stand-in; with a real server it stands idle."""

    def __init__(self, api: KubeApi, client: KubernetesClient) -> None:
        self.api, self.clock, self.client = api, Clock(), client
        self.namespace = f"pla-{secrets.token_hex(4)}"
        self.cluster = KubeCluster(client, self.namespace)
        self.actuators: list[KubernetesActuator] = []

    def open_actuator(self, identity: str = "router-1", clock: Callable[[], float] | None = None) -> KubernetesActuator:
        made = KubernetesActuator(self.namespace, FLEET, identity, clock=clock or self.clock)
        self.actuators.append(made)
        return made

    async def acquire(self, actuator: KubernetesActuator) -> bool:
        """What the lease says once the server has answered."""
        with contextlib.suppress(ActuatorError):  # of the time before
            actuator.lease.acquire()
        while actuator.lease._task is not None and not actuator.lease._task.done():
            await asyncio.sleep(0)
        return actuator.lease.acquire()

    async def find_group(self, group: str) -> str:
        """Its newest version at the server, as in "apis/GROUP/v1"."""
        if not REAL:
            return f"apis/{group}/v1"
        found = await self.client.ask("GET", f"/apis/{group}")
        return f"apis/{found['preferredVersion']['groupVersion']}"

    def later(self, seconds: float = 10.0) -> None:
        self.clock.now_s += seconds


@asynccontextmanager
async def kube_scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubeScene]:
    """A namespace of its own."""
    api = KubeApi()
    await api.start()
    monkeypatch.setenv("KUBECONFIG", REAL or str(write_kubeconfig(tmp_path / "kubeconfig", api.url)))
    client = KubernetesClient("test")
    made = KubeScene(api, client)
    try:
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": made.namespace}}
        await client.ask("POST", "/api/v1/namespaces", body)
        yield made
    finally:
        for actuator in made.actuators:
            await actuator.close()
        await client.close()
        await api.stop()
