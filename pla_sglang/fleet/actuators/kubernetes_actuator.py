"""Instances as pods of Deployments, one Deployment a kind: orders are changes of its ``replicas``.

The number and the orders behind it are one patch with the ``resourceVersion`` that was read, so that a change of
somebody else in between is a conflict, after which all is read again. The scale subresource alone would not do: it
has no annotations.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from pla_sglang.fleet.actuators.interface import ActuatorError, StartedInstance
from pla_sglang.fleet.actuators.kubernetes_client import CONFLICT, NOT_FOUND, ApiError, KubernetesClient, Resource
from pla_sglang.fleet.actuators.kubernetes_lease import KubernetesLease
from pla_sglang.fleet.actuators.kubernetes_orders import Orders, Pod, find_obstacle

FLEET_LABEL, KIND_LABEL = "pla-sglang/fleet", "pla-sglang/kind"  # of a Deployment and of its pods
ORDERS = "pla-sglang/orders"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
LEAVES_FIRST = "-2147483648"
PORT_NAMES = ("http", "https")  # of the container's port; the latter: it takes TLS
LOOK_S = 2.0  # between two looks at the API server; the router asks more often
TRIES, PAUSE_S, MOST_PAUSE_S = 10, 0.02, 0.5  # after a conflict; 3 s in all


class Deployment(msgspec.Struct):
    """What we know of one, and its pods. ``scheme``: how they are reached; ``news``: its annotation is not up to
    date."""

    name: str
    kind: str
    version: str
    replicas: int
    port: int | None
    orders: Orders
    pods: list[Pod]
    scheme: str = "http"
    news: bool = False

    def list_instances(self) -> list[StartedInstance]:
        """Raises ActuatorError."""
        if self.port is None:
            raise ActuatorError(f"Deployment {self.name} has no container port named {' or '.join(PORT_NAMES)}")
        rows = [self._to_instance(pod) for pod in self.pods]
        waiting = [plan for plan, pod in self.orders.started.items() if not pod]
        return rows + [StartedInstance(f"{self.kind}-{plan}", "", self.kind, "starting", plan) for plan in waiting]

    def _to_instance(self, pod: Pod) -> StartedInstance:
        plan = self.orders.find_plan(pod.name)
        leaves = pod.ends or pod.name in self.orders.stopping
        state = "stopping" if leaves else "ready" if pod.ready else "starting"
        host = f"[{pod.address}]" if ":" in pod.address else pod.address
        url = f"{self.scheme}://{host}:{self.port}" if pod.address else ""
        return StartedInstance(pod.name if plan is None else f"{self.kind}-{plan}", url, self.kind, state, plan)


class KubernetesActuator:
    """Actuator of the Deployments with the label ``pla-sglang/fleet: FLEET`` in a namespace.

    Raises:
        ConfigError: the package ``kubernetes`` is not there, or credentials cannot be read.
    """

    def __init__(
        self,
        namespace: str,
        fleet: str,
        identity: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = KubernetesClient("--actuator kubernetes")
        self._fleet, self._clock = fleet, clock
        self._deployments = Resource("apis/apps/v1", namespace, "deployments")
        self._pods = Resource("api/v1", namespace, "pods")
        self.lease = KubernetesLease(self._client, namespace, f"{fleet}-planner", identity, clock=clock)
        self._changing = asyncio.Lock()
        self._listed: tuple[float, list[StartedInstance]] | None = None

    async def start_instance(self, kind: str, plan: int) -> StartedInstance:
        name = f"{kind}-{plan}"

        def order(deployment: Deployment) -> int | None:
            orders = deployment.orders
            if plan in orders.started or plan in orders.ended:
                return None
            if any(pod.name in orders.stopping and not pod.ends for pod in deployment.pods):
                raise ApiError(f"start {name}: a pod is to leave that Kubernetes has not removed", CONFLICT)
            orders.order_start(plan, deployment.pods)
            return deployment.replicas + 1

        deployment = await self._change(f"start {kind}", kind, order)
        found = next((one for one in deployment.list_instances() if one.plan == plan), None)
        return found or StartedInstance(name, "", kind, "dead", plan)

    async def stop_instance(self, name: str) -> None:
        for deployment in await self._read():
            pod = self._find_pod(deployment, name)
            if pod is not None:
                await self._stop(deployment.kind, name)

    async def list_instances(self) -> list[StartedInstance]:
        async with self._changing:
            if self._listed is None or self._clock() >= self._listed[0] + LOOK_S:
                self._listed = self._clock(), await self._look()
            return list(self._listed[1])

    async def _look(self) -> list[StartedInstance]:
        found = await self._read()
        if not found:
            where = f"namespace {self._deployments.namespace} with the label {FLEET_LABEL}={self._fleet}"
            raise ActuatorError(f"list: there is no Deployment in {where}")
        for deployment in found:
            if deployment.news and self.lease.held:
                await self._keep(deployment)
        return [row for deployment in found for row in deployment.list_instances()]

    async def close(self) -> None:
        await self.lease.close()
        await self._client.close()

    @staticmethod
    def _find_pod(deployment: Deployment, name: str) -> str | None:
        """The pod of the instance ``name``, empty if it has not come yet. None: it is not of this Deployment."""
        number = name.removeprefix(f"{deployment.kind}-")
        if number != name and number.isdecimal():
            return deployment.orders.find_pod(int(number))
        return name if any(pod.name == name for pod in deployment.pods) else None

    async def _stop(self, kind: str, name: str) -> None:
        what = f"stop {name}"
        marked = self._choose(what, await self._read_one(what, kind), name)
        if marked is not None:
            await self._mark(marked.name)

        def order(deployment: Deployment) -> int | None:
            if self._find_pod(deployment, name) == "":
                deployment.orders.end(int(name.removeprefix(f"{kind}-")))
                return max(0, deployment.replicas - 1)
            pod = self._choose(what, deployment, name)
            if pod is None:
                return None
            if pod != marked:
                raise ActuatorError(f"{what}: it has changed meanwhile")
            deployment.orders.order_stop(pod.name)
            return max(0, deployment.replicas - 1)

        await self._change(what, kind, order)

    def _choose(self, what: str, deployment: Deployment, name: str) -> Pod | None:
        """The pod that is to leave; None: there is none, or it leaves already. Raises ActuatorError."""
        wanted, stopping = self._find_pod(deployment, name), deployment.orders.stopping
        pod = next((one for one in deployment.pods if one.name == wanted), None)
        if pod is None or pod.ends or pod.name in stopping:
            return None
        obstacle = find_obstacle(pod, deployment.pods, stopping)
        if obstacle is not None:
            raise ActuatorError(f"{what}: {obstacle}")
        return pod

    # -- the API server ----------------------------------------------------------------------------------------------

    async def _change(self, what: str, kind: str, decide: Callable[[Deployment], int | None]) -> Deployment:
        """Has ``decide`` change the orders, and writes them with the number it returns; None: nothing to write."""
        why = ""
        async with self._changing:
            for number in range(TRIES):
                deployment = await self._read_one(what, kind)
                try:
                    replicas = decide(deployment)
                    if replicas is not None:
                        await self._write(deployment, replicas)
                    return deployment
                except ApiError as error:
                    if error.status != CONFLICT:
                        raise
                    why = str(error)
                    await asyncio.sleep(min(PAUSE_S * 2**number, MOST_PAUSE_S))
                finally:
                    self._listed = None
        raise ActuatorError(f"{what}: given up after {TRIES} tries: {why}")

    async def _write(self, deployment: Deployment, replicas: int) -> None:
        body: dict[str, Any] = {
            "metadata": {
                "resourceVersion": deployment.version,
                "annotations": {ORDERS: msgspec.json.encode(deployment.orders).decode()},
            },
            "spec": {"replicas": replicas},
        }
        await self._client.ask("PATCH", self._deployments.path(deployment.name), body)

    async def _mark(self, pod: str) -> None:
        """Have Kubernetes choose it: among pods that are equally far, deletion costs decide."""
        body = {"metadata": {"annotations": {DELETION_COST: LEAVES_FIRST}}}
        try:
            await self._client.ask("PATCH", self._pods.path(pod), body)
        except ApiError as error:
            if error.status != NOT_FOUND:  # else it has gone by itself; all is read again
                raise

    async def _read_one(self, what: str, kind: str) -> Deployment:
        found = [one for one in await self._read() if one.kind == kind]
        if len(found) != 1:
            labels = f"{FLEET_LABEL}={self._fleet},{KIND_LABEL}={kind}"
            text = (
                f"{what}: {len(found) or 'no'} Deployments in namespace {self._deployments.namespace} have the labels"
            )
            raise ActuatorError(f"{text} {labels}; allowed: one")
        return found[0]

    async def _read(self) -> list[Deployment]:
        """What is there, with orders that are brought up to date."""
        query = {"labelSelector": f"{FLEET_LABEL}={self._fleet}"}
        deployments = await self._client.ask("GET", self._deployments.path(), query=query)
        pods = await self._client.ask("GET", self._pods.path(), query=query)
        try:
            found = [read_deployment(one, pods["items"]) for one in deployments["items"]]
        except (KeyError, TypeError, ValueError, msgspec.MsgspecError) as error:
            raise ActuatorError(f"list: a Deployment or a pod is not as expected: {type(error).__name__}") from None
        for deployment in found:
            before = msgspec.json.encode(deployment.orders)
            deployment.orders.settle(deployment.replicas, deployment.pods)
            deployment.news = msgspec.json.encode(deployment.orders) != before
        return found

    async def _keep(self, deployment: Deployment) -> None:
        """So that which pod stands for which plan is known to the next router."""
        try:
            await self._write(deployment, deployment.replicas)
        except ApiError as error:
            if error.status != CONFLICT:  # else somebody has changed it: seen at the next look
                raise


def read_deployment(item: dict[str, Any], pods: list[dict[str, Any]]) -> Deployment:
    """From JSON. Raises KeyError, TypeError, ValueError or MsgspecError for what is none."""
    meta, spec = item["metadata"], item["spec"]
    kind = meta["labels"].get(KIND_LABEL, "")
    text = (meta.get("annotations") or {}).get(ORDERS)
    ports = [
        (port["name"], port["containerPort"])
        for container in spec["template"]["spec"]["containers"]
        for port in container.get("ports") or ()
        if port.get("name") in PORT_NAMES
    ]
    scheme, port = min(ports, default=(PORT_NAMES[0], None))
    return Deployment(
        name=meta["name"],
        kind=kind,
        version=meta["resourceVersion"],
        replicas=1 if spec.get("replicas") is None else spec["replicas"],
        port=port,
        scheme=scheme,
        orders=Orders() if not text else msgspec.json.decode(text, type=Orders),
        pods=[
            read_pod(pod)
            for pod in pods
            if pod["metadata"]["labels"].get(KIND_LABEL) == kind
            and (pod.get("status") or {}).get("phase") not in ("Failed", "Succeeded")  # Kubernetes replaces it
        ],
    )


def read_pod(item: dict[str, Any]) -> Pod:
    """From JSON."""
    meta, status = item["metadata"], item.get("status") or {}
    conditions = {one["type"]: one["status"] for one in status.get("conditions") or ()}
    return Pod(
        name=meta["name"],
        created=meta["creationTimestamp"],
        address=status.get("podIP") or "",
        phase=status.get("phase") or "Pending",
        scheduled=bool(item["spec"].get("nodeName")),
        ready=conditions.get("Ready") == "True",
        ends=bool(meta.get("deletionTimestamp")),
        template=meta["labels"].get("pod-template-hash", ""),
    )
