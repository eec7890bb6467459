"""A Service of Kubernetes as a list of workers: its EndpointSlices are listed once, then watched.

A watch that ends goes on at the version that it has come to. One that is too old for the server (410), or whose server
is away, begins with a new list; workers stay as they are until then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pla_sglang.fleet.actuators.kubernetes_client import (
    GONE,
    ApiError,
    KubernetesClient,
    Resource,
    parse_place,
)
from pla_sglang.fleet.router.control.workers.discovery import Address, parse_url
from pla_sglang.fleet.router.control.workers.errors import WorkerError
from pla_sglang.fleet.router.control.workers.state_file import StateFile
from pla_sglang.fleet.router.control.workers.table import WorkerTable
from pla_sglang.fleet.router.control.workers.worker_list import WorkerList

logger = logging.getLogger(__name__)
FLAG = "--worker-service"
GROUP = "apis/discovery.k8s.io/v1"
PORT_NAMES = ("http", "https")
RETRY_S = 1.0  # after a server that is away, or a version that is too old
PAUSE_S = 0.1  # between two watches


class WorkerService:
    """Raises ConfigError: no place, the package ``kubernetes`` is not there, or credentials cannot be read."""

    def __init__(self, place: str, table: WorkerTable, state_file: StateFile, clock: Callable[[], float]) -> None:
        namespace, name = parse_place(FLAG, place)
        self._place, self._table, self._state_file, self._clock = place, table, state_file, clock
        self._client = KubernetesClient(FLAG)
        self._path = Resource(GROUP, namespace, "endpointslices").path()
        self._query = {"labelSelector": f"kubernetes.io/service-name={name}"}
        self._slices: dict[str, Any] = {}
        self._list = WorkerList(table)
        self._endpoints: set[Address] = set()
        self._away = ""

    async def follow(self) -> None:
        """Until it is cancelled."""
        try:
            while True:
                try:
                    await self._list_and_watch()
                except ApiError as error:
                    if error.status != GONE:
                        self._note_away(str(error))
                except (KeyError, TypeError, AttributeError) as error:
                    self._note_away(f"not an answer of Kubernetes: {type(error).__name__}")
                await asyncio.sleep(RETRY_S)
        finally:
            await self._client.close()

    def to_dict(self) -> dict[str, Any]:
        """For /pla/state."""
        return {"service": self._place, "endpoints": len(self._endpoints), "error": self._away}

    async def _list_and_watch(self) -> None:
        """Raises ApiError; there is no other end."""
        answer = await self._client.ask("GET", self._path, query=self._query)
        self._slices = {one["metadata"]["name"]: one for one in answer["items"]}
        if self._away:
            logger.info("worker service %s: the API server answers again", self._place)
        self._away = ""
        self._apply()
        version = str(answer["metadata"]["resourceVersion"])
        while True:
            async for event in self._client.watch(self._path, self._query, version):
                version = str(event["object"]["metadata"]["resourceVersion"])
                self._take(event["type"], event["object"])
            await asyncio.sleep(PAUSE_S)

    def _take(self, kind: str, one: dict[str, Any]) -> None:
        if kind == "BOOKMARK":
            return
        if kind == "DELETED":
            self._slices.pop(one["metadata"]["name"], None)
        else:
            self._slices[one["metadata"]["name"]] = one
        self._apply()

    def _note_away(self, why: str) -> None:
        if not self._away:
            logger.error("worker service %s: workers stay as they are: %s", self._place, why)
        self._away = why

    def _apply(self) -> None:
        try:
            drains = read_endpoints(self._slices.values())
            self._follow(drains)
        except WorkerError as error:
            logger.error("worker service %s: %s", self._place, error)

    def _follow(self, drains: Mapping[Address, bool | None]) -> None:
        """What was removed here stays so until its endpoint has gone: the next one at its address is another."""
        for address in self._endpoints - drains.keys():
            if self._state_file.is_removed(address.url):
                self._state_file.mark_changed(added=address.url)
        self._endpoints = set(drains)
        before = self._list.drain_by_address
        wanted: dict[Address, bool] = {}
        for address, drain in drains.items():
            if self._state_file.is_removed(address.url):
                continue
            if address in before:
                wanted[address] = before[address] if drain is None else drain
            elif drain is False:
                wanted[address] = False
        changes = self._list.follow(wanted, self._clock())
        if any((changes.add, changes.remove, changes.drain)):
            counts = len(changes.add), len(changes.remove), len(changes.drain)
            logger.info("worker service %s: %d added, %d removed, %d to drain", self._place, *counts)


def read_endpoints(slices: Iterable[dict[str, Any]]) -> dict[Address, bool | None]:
    """Address -> whether it is to drain, as it is being terminated; None: it is not ready, as it may still start.

    While an endpoint moves between slices it stands in two: the better word counts. Raises WorkerError for what is no
    EndpointSlice, or has no port that could be meant.
    """
    order = (True, None, False)
    found: dict[Address, bool | None] = {}
    for one in slices:
        try:
            endpoints = one.get("endpoints") or ()
            port, tls = _choose_port(one["metadata"]["name"], one.get("ports") or ()) if endpoints else (0, False)
            for endpoint in endpoints:
                drain = _read_conditions(endpoint.get("conditions") or {})
                for host in endpoint["addresses"]:
                    address = parse_url(Address(host, port, tls=tls).url)
                    found[address] = max(found.get(address, True), drain, key=order.index)
        except (KeyError, TypeError, AttributeError) as error:
            raise WorkerError(f"an EndpointSlice is not as expected: {type(error).__name__}") from None
    return found


def _read_conditions(conditions: Mapping[str, Any]) -> bool | None:
    if conditions.get("terminating"):
        return True
    return None if conditions.get("ready") is False else False  # none: not known, which counts as ready


def _choose_port(name: str, ports: Iterable[Mapping[str, Any]]) -> tuple[int, bool]:
    """The port named "http", else "https", else the only one; and whether it takes TLS."""
    by_name = {port.get("name") or "": port for port in ports if port.get("port")}
    named = [by_name[one] for one in PORT_NAMES if one in by_name]
    if not named and len(by_name) != 1:
        raise WorkerError(f"EndpointSlice {name} has {len(by_name)} ports, and none is named {' or '.join(PORT_NAMES)}")
    port = (named or list(by_name.values()))[0]
    return int(port["port"]), "https" in (port.get("name"), port.get("appProtocol"))
