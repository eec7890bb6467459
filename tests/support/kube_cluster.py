"""The parts of a cluster that an API server does not have: what makes and removes pods, and what runs them.

One step at a time, as a test wants it, over the API: a stand-in (``kube_api``) or a real server.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from typing import Any

from pla_sglang.fleet.actuators.kubernetes_actuator import (
    DELETION_COST,
    FLEET_LABEL,
    KIND_LABEL,
    read_pod,
)
from pla_sglang.fleet.actuators.kubernetes_client import ApiError, KubernetesClient, Resource

FLEET = "sglang"
GRACE_0 = {"gracePeriodSeconds": "0"}


def make_template(kind: str, port_name: str, port_number: int) -> dict[str, Any]:
    port = {"name": port_name, "containerPort": port_number}
    return {
        "metadata": {"labels": {FLEET_LABEL: FLEET, KIND_LABEL: kind}},
        "spec": {"containers": [{"name": "server", "image": "sglang", "ports": [port]}]},
    }


class KubeCluster:
    """Deployments of one namespace, whose pods have addresses of ``network``.

    ``starts``: new pods get an address and become ready at once.
    """

    def __init__(self, client: KubernetesClient, namespace: str) -> None:
        self.client, self.namespace = client, namespace
        self.deployments = Resource("apis/apps/v1", namespace, "deployments")
        self.pods = Resource("api/v1", namespace, "pods")
        self.starts = True
        self.network = "10.0.0"
        self._addresses = itertools.count(1)

    async def create(
        self, kind: str, replicas: int, *, name: str = "", port_name: str = "http", port: int = 30000
    ) -> None:
        template = make_template(kind, port_name, port)
        labels = template["metadata"]["labels"]
        body = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name or f"{FLEET}-{kind}", "labels": labels},
            "spec": {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template},
        }
        await self.client.ask("POST", self.deployments.path(), body)
        await self.step()

    async def step(self) -> None:
        """Each Deployment gets the pods that it should have; the order of removals is that of a ReplicaSet."""
        for deployment in (await self.client.ask("GET", self.deployments.path()))["items"]:
            labels = deployment["spec"]["selector"]["matchLabels"]
            live = [pod for pod in await self.list_pods(labels) if not pod["metadata"].get("deletionTimestamp")]
            live = [pod for pod in live if pod["status"].get("phase") not in ("Failed", "Succeeded")]
            wanted = deployment["spec"]["replicas"]
            for _ in range(wanted - len(live)):
                await self._make_pod(deployment)
            live.sort(key=lambda pod: (read_pod(pod).removal_rank(), _cost(pod)))
            for pod in live[: max(0, len(live) - wanted)]:
                await self.client.ask("DELETE", self.pods.path(pod["metadata"]["name"]))

    async def list_pods(self, labels: dict[str, str] | None = None) -> list[dict[str, Any]]:
        query = {"labelSelector": ",".join(f"{name}={value}" for name, value in (labels or {}).items())}
        found: list[dict[str, Any]] = (await self.client.ask("GET", self.pods.path(), query=query))["items"]
        return found

    async def _make_pod(self, deployment: dict[str, Any]) -> None:
        template = deployment["spec"]["template"]
        name = f"{deployment['metadata']['name']}-{secrets.token_hex(3)}"
        meta = {"name": name, "labels": template["metadata"]["labels"]}
        spec = {"containers": template["spec"]["containers"], "nodeName": "node"}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
        await self.client.ask("POST", self.pods.path(), body)
        if self.starts:
            await self.run(name)

    async def run(self, name: str, *, ready: bool = True, phase: str = "Running") -> None:
        """The pod has an address and is or is not ready."""
        condition = {"type": "Ready", "status": str(ready)}
        status: dict[str, Any] = {"phase": phase, "conditions": [condition]}
        status |= {"podIP": f"{self.network}.{next(self._addresses)}"}
        await self.client.ask("PATCH", self.pods.path(f"{name}/status"), {"status": status})

    async def end(self, name: str) -> None:
        """The pod is gone."""
        with contextlib.suppress(ApiError):
            await self.client.ask("DELETE", self.pods.path(name), query=GRACE_0)

    async def finish(self) -> None:
        """All that was told to end has ended."""
        for pod in await self.list_pods():
            if pod["metadata"].get("deletionTimestamp"):
                await self.end(pod["metadata"]["name"])

    async def scale(self, kind: str, replicas: int) -> None:
        """As ``kubectl scale`` does."""
        path = self.deployments.path(f"{FLEET}-{kind}/scale")
        await self.client.ask("PATCH", path, {"spec": {"replicas": replicas}})

    async def count(self, kind: str) -> int:
        found = await self.client.ask("GET", self.deployments.path(f"{FLEET}-{kind}/scale"))
        return int(found["spec"].get("replicas", 0))


def _cost(pod: dict[str, Any]) -> int:
    return int((pod["metadata"].get("annotations") or {}).get(DELETION_COST, 0))
