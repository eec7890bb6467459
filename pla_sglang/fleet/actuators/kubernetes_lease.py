"""The lease of a planner as a ``Lease`` of Kubernetes (``coordination.k8s.io/v1``), by the rules of its own leaders."""

from __future__ import annotations

import asyncio
import datetime
import math
import time
from collections.abc import Callable
from typing import Any

from pla_sglang.fleet.actuators.interface import ActuatorError
from pla_sglang.fleet.actuators.kubernetes_client import CONFLICT, NOT_FOUND, ApiError, KubernetesClient, Resource

GROUP = "apis/coordination.k8s.io/v1"
# As of Kubernetes' own leaders. Asked for each third, it outlives one answer that fails, so an API server that is away
# for 5 s. With half of it such a one changes the owner; with twice as much nobody scales for half a minute where the
# owner is gone.
DURATION_S = 15


class KubernetesLease:
    """Asked often, it asks the server every third of its duration. What it has it loses that long after it last asked.

    Another's lease is over once it has not changed for its duration, by the clock here: clocks of machines differ.
    """

    def __init__(
        self,
        client: KubernetesClient,
        namespace: str,
        name: str,
        identity: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._name, self._identity = client, name, identity
        self._leases = Resource(GROUP, namespace, "leases")
        self._clock = clock
        self._owner = self._error = ""
        self._held_until_s = self._next_s = -math.inf
        self._seen: tuple[str, float] | None = None  # the version of the lease, and since when it has been this one
        self._task: asyncio.Task[None] | None = None

    @property
    def owner(self) -> str:
        """See ``Lease``."""
        return self._owner

    @property
    def held(self) -> bool:
        return self._clock() < self._held_until_s

    def acquire(self) -> bool:
        """See ``Lease``: what is known; the first answer of the server comes a moment later."""
        if (self._task is None or self._task.done()) and self._clock() >= self._next_s:
            self._task = asyncio.get_running_loop().create_task(self._renew())
        if self._error and not self.held:
            raise ActuatorError(f"lease of the planner: {self._error}")
        return self.held

    def release(self) -> None:
        """See ``Lease``: the server hears of it a moment later."""
        if self.held:
            before = self._task
            self._task = asyncio.get_running_loop().create_task(self._give_back(before))
        self._held_until_s, self._next_s = -math.inf, -math.inf

    async def close(self) -> None:
        """Give it back, and wait until the server has heard of it, or does not answer."""
        self.release()
        if self._task is not None:
            await self._task
            self._task = None

    async def _renew(self) -> None:
        self._next_s = self._clock() + DURATION_S / 3
        try:
            await self._ask()
        except ApiError as error:
            self._error = str(error)
        else:
            self._error = ""

    async def _ask(self) -> None:
        began_s = self._clock()
        lease = await self._read()
        if lease is not None and not self._is_free(lease, began_s):
            self._held_until_s = -math.inf
            return
        try:
            mine = await self._take(lease)
        except ApiError as error:
            if error.status != CONFLICT:
                raise
            self._held_until_s = -math.inf  # another was faster
            self._next_s = -math.inf
            return
        self._note(mine, began_s)
        self._held_until_s = began_s + DURATION_S

    async def _read(self) -> dict[str, Any] | None:
        try:
            return await self._client.ask("GET", self._leases.path(self._name))
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def _is_free(self, lease: dict[str, Any], now_s: float) -> bool:
        since_s = self._note(lease, now_s)
        lasts_s = (lease.get("spec") or {}).get("leaseDurationSeconds") or DURATION_S
        return self._owner in ("", self._identity) or now_s >= since_s + lasts_s

    def _note(self, lease: dict[str, Any], now_s: float) -> float:
        """Since when it has been as it is."""
        version = str(lease["metadata"]["resourceVersion"])
        self._owner = str((lease.get("spec") or {}).get("holderIdentity") or "")
        if self._seen is None or self._seen[0] != version:
            self._seen = version, now_s
        return self._seen[1]

    async def _take(self, lease: dict[str, Any] | None) -> dict[str, Any]:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: dict[str, Any] = {"holderIdentity": self._identity, "leaseDurationSeconds": DURATION_S}
        spec["renewTime"] = now
        if lease is None:
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self._name}}
            return await self._client.ask("POST", self._leases.path(), {**body, "spec": {**spec, "acquireTime": now}})
        if self._owner != self._identity:
            spec |= {"acquireTime": now, "leaseTransitions": (lease["spec"].get("leaseTransitions") or 0) + 1}
        return await self._patch(str(lease["metadata"]["resourceVersion"]), spec)

    async def _patch(self, version: str, spec: dict[str, Any]) -> dict[str, Any]:
        body = {"metadata": {"resourceVersion": version}, "spec": spec}
        return await self._client.ask("PATCH", self._leases.path(self._name), body)

    async def _give_back(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        self._held_until_s = -math.inf
        try:
            lease = await self._read()
            if lease is not None and (lease.get("spec") or {}).get("holderIdentity") == self._identity:
                await self._patch(str(lease["metadata"]["resourceVersion"]), {"holderIdentity": ""})
                self._owner = ""
        except ApiError:
            pass  # it is over after its duration
