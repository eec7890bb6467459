"""A Service of Kubernetes as the list of workers: what its EndpointSlices say, and watches that end.

The server is the stand-in, or a real one: see ``tests/fleet/actuators/test_kubernetes.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes.aio", reason="needs pla-sglang[kubernetes]")

from support.kube_scene import KubeScene, kube_scene, stand_in_only
from support.serving import wait_until

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.actuators.kubernetes_client import Resource
from pla_sglang.fleet.router.control.control_plane import ControlPlane
from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.fleet.router.control.workers import worker_service
from pla_sglang.fleet.router.control.workers.breaker import BreakerKnobs
from pla_sglang.fleet.router.control.workers.errors import WorkerError
from pla_sglang.fleet.router.control.workers.state_file import StateFile
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerReason, WorkerState, WorkerTable
from pla_sglang.fleet.router.control.workers.worker_service import WorkerService, read_endpoints

SERVICE = "sglang"
READY, STARTING, ENDING = {"ready": True}, {"ready": False}, {"ready": False, "serving": True, "terminating": True}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_service, "RETRY_S", 0.02)
    monkeypatch.setattr(worker_service, "PAUSE_S", 0.01)


def to_slice(name: str, port: int, conditions: dict[str, dict[str, Any]], **fields: Any) -> dict[str, Any]:
    endpoints = [{"addresses": [host], "conditions": said} for host, said in conditions.items()]
    meta = {"name": name, "labels": {"kubernetes.io/service-name": SERVICE}}
    ports = [{"name": "http", "port": port, "protocol": "TCP"}]
    body = {"kind": "EndpointSlice", "metadata": meta, "addressType": "IPv4", "endpoints": endpoints, "ports": ports}
    return body | fields


class Slices:
    """The EndpointSlices of the service, as its controller writes them, and a table that follows them."""

    def __init__(self, one: KubeScene, group: str) -> None:
        self.one, self.group = one, group
        self.resource = Resource(group, one.namespace, "endpointslices")
        self.table, self.state_file = WorkerTable(BreakerKnobs()), StateFile(None)
        self.service = WorkerService(f"{one.namespace}/{SERVICE}", self.table, self.state_file, lambda: 0.0)

    async def write(self, name: str, conditions: dict[str, dict[str, Any]] | None) -> None:
        """``None``: the slice is deleted."""
        path, client = self.resource.path(name), self.one.client
        if conditions is None:
            await client.ask("DELETE", path)
            return
        body = to_slice(name, 30000, conditions)
        names = [each["metadata"]["name"] for each in (await client.ask("GET", self.resource.path()))["items"]]
        if name in names:
            await client.ask("PATCH", path, {"endpoints": body["endpoints"]})
        else:
            version = self.group.removeprefix("apis/")
            await client.ask("POST", self.resource.path(), {"apiVersion": version, **body})

    def at(self, host: str) -> Worker | None:
        return next((worker for worker in self.table if worker.address.host == host), None)

    async def until(self, *hosts: str) -> None:
        await wait_until(lambda: sorted(worker.address.host for worker in self.table) == sorted(hosts))


@contextlib.asynccontextmanager
async def slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Slices]:
    async with kube_scene(tmp_path, monkeypatch) as one:
        monkeypatch.setattr(worker_service, "GROUP", await one.find_group("discovery.k8s.io"))
        made = Slices(one, worker_service.GROUP)
        task = asyncio.create_task(made.service.follow())
        try:
            yield made
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_endpoints_come_when_they_are_ready_drain_when_they_end_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with slices(tmp_path, monkeypatch) as one:
        await one.write("a", {"10.0.0.1": READY, "10.0.0.2": STARTING})
        await one.until("10.0.0.1")
        await one.write("b", {"10.0.1.1": READY})
        await one.until("10.0.0.1", "10.0.1.1")
        await one.write("a", {"10.0.0.1": STARTING, "10.0.0.2": READY, "10.0.0.3": ENDING})
        await one.until("10.0.0.1", "10.0.0.2", "10.0.1.1")
        first = one.at("10.0.0.1")
        assert first is not None
        assert first.url == "http://10.0.0.1:30000"
        one.table.move(first, WorkerState.READY, WorkerReason.ANSWERS, 0.0)
        await one.write("a", {"10.0.0.1": ENDING, "10.0.0.2": READY})
        await wait_until(lambda: first.state is WorkerState.DRAINING)
        assert not first.leaves
        await one.write("a", {"10.0.0.2": READY})
        await wait_until(lambda: first.leaves)
        await one.write("b", None)
        await one.until("10.0.0.1", "10.0.0.2")


async def test_what_was_removed_stays_so_until_its_endpoint_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with slices(tmp_path, monkeypatch) as one:
        await one.write("a", {"10.0.0.1": READY})
        await one.until("10.0.0.1")
        first = one.at("10.0.0.1")
        assert first is not None
        one.state_file.mark_changed(removed=first.url)  # as an operator or a planner does
        one.table.drain(first, 0.0, then_remove=True)
        await one.write("a", {"10.0.0.1": READY, "10.0.0.2": READY})
        await one.until("10.0.0.2")
        await one.write("a", {"10.0.0.2": READY})
        await wait_until(lambda: not one.state_file.is_removed(first.url))
        await one.write("a", {"10.0.0.1": READY, "10.0.0.2": READY})  # another pod at its address
        await one.until("10.0.0.1", "10.0.0.2")


@stand_in_only
async def test_a_watch_that_ends_goes_on_and_one_that_is_too_old_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with slices(tmp_path, monkeypatch) as one:
        api = one.one.api
        await one.write("a", {"10.0.0.1": READY})
        await one.until("10.0.0.1")
        for number in range(2, 5):
            await wait_until(lambda: api.watches)
            api.cut_watches()
            await one.write("a", {f"10.0.0.{each}": READY for each in range(1, number + 1)})
            await one.until(*(f"10.0.0.{each}" for each in range(1, number + 1)))
        await wait_until(lambda: api.watches)
        await one.write("a", {"10.0.0.9": READY})
        api.forget_history()
        await wait_until(lambda: one.at("10.0.0.9") is not None)
        assert one.service.to_dict()["error"] == ""


@stand_in_only
async def test_a_server_that_is_away_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with slices(tmp_path, monkeypatch) as one:
        api = one.one.api
        await one.write("a", {"10.0.0.1": READY})
        await one.until("10.0.0.1")
        await wait_until(lambda: api.watches)
        api.fail("GET", "endpointslices", 503, "etcd is away", times=1000)
        api.cut_watches()
        await wait_until(lambda: one.service.to_dict()["error"])
        assert one.at("10.0.0.1") is not None
        await asyncio.sleep(0.1)
        api.faults.clear()
        await wait_until(lambda: not one.service.to_dict()["error"])
        said = [record.message for record in caplog.records if "stay as they are" in record.message]
        assert len(said) == 1, "once, not at each try"
        assert "503 etcd is away" in said[0]
        await one.write("a", {"10.0.0.1": READY, "10.0.0.2": READY})
        await one.until("10.0.0.1", "10.0.0.2")


@pytest.mark.parametrize(
    ("one", "says"),
    [
        (to_slice("s", 1, {"10.0.0.1": {}}), {"http://10.0.0.1:1": False}),
        (to_slice("s", 1, {"fd00::1": READY}), {"http://[fd00::1]:1": False}),
        (to_slice("s", 1, {"10.0.0.1": STARTING}), {"http://10.0.0.1:1": None}),
        (to_slice("s", 1, {"10.0.0.1": ENDING}), {"http://10.0.0.1:1": True}),
        (to_slice("s", 1, {"h": READY}, ports=[{"port": 8}]), {"http://h:8": False}),
        (
            to_slice("s", 1, {"h": READY}, ports=[{"name": "m", "port": 8}, {"name": "http", "port": 9}]),
            {"http://h:9": False},
        ),
        (to_slice("s", 1, {"h": READY}, ports=[{"name": "https", "port": 8}]), {"https://h:8": False}),
        (to_slice("s", 1, {"h": READY}, ports=[{"port": 8, "appProtocol": "https"}]), {"https://h:8": False}),
        (to_slice("s", 1, {}, ports=None), {}),
        (to_slice("s", 1, {}, endpoints=None), {}),
    ],
)
def test_what_a_slice_says(one: dict[str, Any], says: dict[str, bool | None]) -> None:
    assert {address.url: drain for address, drain in read_endpoints([one]).items()} == says


def test_an_endpoint_in_two_slices_is_one() -> None:
    for order in (1, -1):
        both = [to_slice("a", 1, {"h": ENDING}), to_slice("b", 1, {"h": READY})][::order]
        assert list(read_endpoints(both).values()) == [False]


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"ports": [{"name": "a", "port": 1}, {"name": "b", "port": 2}]}, "s has 2 ports, and none is named http"),
        ({"ports": []}, "s has 0 ports"),
        ({"endpoints": [{}]}, "not as expected: KeyError"),
        ({"endpoints": 7}, "not as expected: TypeError"),
        ({"endpoints": [{"addresses": ["a b"]}]}, "worker 'http://a b:1'"),
    ],
)
def test_what_is_no_slice_of_instances_is_said(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(WorkerError, match=line):
        read_endpoints([to_slice("s", 1, {"h": READY}, **fields)])


def test_a_bad_place_or_no_credentials_are_refused_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--worker-service 'sglang' is not valid; allowed: NAMESPACE/NAME"):
        ControlPlane(ControlKnobs(worker_service="sglang"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"--worker-service: credentials .*/nothing: "):
        ControlPlane(ControlKnobs(worker_service="llm/sglang"))
