"""A small stand-in for Kubernetes' API server: objects in memory, not etcd; nothing is validated, defaulted or allowed.

What it has behaves as the API does: optimistic locking by ``resourceVersion`` (409), names that are taken (409), merge
patches, label selectors, ``status`` beside ``spec``, ``scale`` of Deployments, graceful deletion of pods that have a
node, watches from a version on that end after ``timeoutSeconds``, and 410 for a version that is too old. The same
tests run against a real server: see ``tests/fleet/actuators/test_kubernetes.py``.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import datetime
import json
from typing import Any

from aiohttp import web

Key = tuple[str, str, str]  # namespace, plural, name


@dataclasses.dataclass(frozen=True)
class Request:
    """``verb``: "get", "post", ..., or "watch"; ``token``: of its header."""

    verb: str
    path: str
    token: str


@dataclasses.dataclass
class Fault:
    """``times`` requests of ``method`` whose path ends with ``path`` get ``status``."""

    method: str
    path: str
    status: int
    message: str
    times: int


class KubeApi:
    """``url`` is where it listens."""

    def __init__(self) -> None:
        self.url = ""
        self.objects: dict[Key, dict[str, Any]] = {}
        self.events: list[tuple[int, str, Key, dict[str, Any]]] = []
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.watches: set[web.StreamResponse] = set()
        self._version = 100
        self._oldest = 0
        self._changed = asyncio.Event()
        self._cut = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        for root in ("/api/v1", "/apis/{group}/{version}"):
            base = root + "/namespaces/{namespace}/{plural}"
            app.router.add_route("*", base, self._answer)
            app.router.add_route("*", base + "/{name}", self._answer)
            app.router.add_route("*", base + "/{name}/{sub}", self._answer)
        app.router.add_post("/api/v1/namespaces", _take_namespace)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        assert self._runner.addresses
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        self.cut_watches()
        if self._runner is not None:
            await self._runner.cleanup()

    # -- what a test does to it --------------------------------------------------------------------------------------

    def fail(self, method: str, path: str, status: int, message: str = "no", times: int = 1) -> None:
        self.faults.append(Fault(method, path, status, message, times))

    def cut_watches(self) -> None:
        """The connections of all watches end, in the middle."""
        self._cut.set()
        self._cut = asyncio.Event()

    def forget_history(self) -> None:
        """Watches from any version before now get 410."""
        self._oldest = self._version
        self.events.clear()
        self._changed.set()

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        verb = "watch" if "watch" in request.query else request.method.lower()
        self.requests.append(Request(verb, request.path, request.headers.get("Authorization", "")))
        for fault in self.faults:
            if fault.times and fault.method == request.method and request.path.endswith(fault.path):
                fault.times -= 1
                return _refuse(fault.status, fault.message)
        match = request.match_info
        place, name = (match["namespace"], match["plural"]), match.get("name")
        if name is None:
            if request.method == "POST":
                return self._create(place, await request.json())
            return await self._watch(place, request) if "watch" in request.query else self._list(place, request)
        found = self.objects.get((*place, name))
        if found is None:
            return _refuse(404, f'{place[1]} "{name}" not found')
        if request.method == "GET":
            return web.json_response(_scale_of(found) if match.get("sub") == "scale" else found)
        if request.method == "DELETE":
            return self._delete((*place, name), found, request, await request.text())
        return self._patch((*place, name), found, await request.json(), match.get("sub", ""))

    def _create(self, place: tuple[str, str], body: dict[str, Any]) -> web.Response:
        key = (*place, body["metadata"]["name"])
        if key in self.objects:
            return _refuse(409, f'{place[1]} "{key[2]}" already exists')
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body["metadata"] |= {"namespace": place[0], "creationTimestamp": now}
        if place[1] in ("pods", "deployments"):
            body["status"] = {"phase": "Pending"} if place[1] == "pods" else {}
        return web.json_response(self._keep("ADDED", key, body), status=201)

    def _patch(self, key: Key, found: dict[str, Any], body: dict[str, Any], sub: str) -> web.Response:
        asked = (body.get("metadata") or {}).get("resourceVersion")
        if asked is not None and asked != found["metadata"]["resourceVersion"]:
            return _refuse(409, "the object has been modified; please apply your changes to the latest version")
        if sub == "scale":
            body = {"spec": {"replicas": body["spec"]["replicas"]}}
        elif sub == "status":
            body = {"status": body["status"]}
        elif "status" in found:
            body = {name: value for name, value in body.items() if name != "status"}
        return web.json_response(self._keep("MODIFIED", key, _merge(found, body)))

    def _delete(self, key: Key, found: dict[str, Any], request: web.Request, body: str) -> web.Response:
        grace = request.query.get("gracePeriodSeconds") or (json.loads(body) if body else {}).get("gracePeriodSeconds")
        if key[1] == "pods" and found["spec"].get("nodeName") and str(grace) != "0":
            marked = _merge(found, {"metadata": {"deletionTimestamp": found["metadata"]["creationTimestamp"]}})
            return web.json_response(self._keep("MODIFIED", key, marked))
        del self.objects[key]
        self._version += 1
        self.events.append((self._version, "DELETED", key, found))
        self._changed.set()
        return web.json_response(found)

    def _keep(self, event: str, key: Key, body: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        body["metadata"]["resourceVersion"] = str(self._version)
        self.objects[key] = body
        self.events.append((self._version, event, key, copy.deepcopy(body)))
        self._changed.set()
        return body

    def _list(self, place: tuple[str, str], request: web.Request) -> web.Response:
        items = [one for key, one in self.objects.items() if key[:2] == place and _is_selected(one, request)]
        return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": items})

    async def _watch(self, place: tuple[str, str], request: web.Request) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        cut, end_s = self._cut, asyncio.get_running_loop().time() + int(request.query.get("timeoutSeconds", "60"))
        self.watches.add(response)
        try:
            while not cut.is_set():
                if since < self._oldest:
                    status = {"kind": "Status", "code": 410, "message": f"too old resource version: {since}"}
                    await _tell(response, "ERROR", status)
                    break
                for version, event, key, one in [each for each in self.events if each[0] > since]:
                    since = version
                    if key[:2] == place and _is_selected(one, request):
                        await _tell(response, event, one)
                self._changed.clear()
                left_s = end_s - asyncio.get_running_loop().time()
                if left_s <= 0:
                    break
                waits = [asyncio.ensure_future(event.wait()) for event in (self._changed, cut)]
                await asyncio.wait(waits, timeout=min(left_s, 0.05), return_when=asyncio.FIRST_COMPLETED)
                for one in waits:
                    one.cancel()
        finally:
            self.watches.discard(response)
        return response


async def _take_namespace(_: web.Request) -> web.Response:
    """A namespace needs no making here."""
    return web.json_response({})


async def _tell(response: web.StreamResponse, event: str, body: dict[str, Any]) -> None:
    await response.write(json.dumps({"type": event, "object": body}).encode() + b"\n")


def _refuse(status: int, message: str) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "code": status, "message": message}
    return web.json_response(body, status=status)


def _is_selected(one: dict[str, Any], request: web.Request) -> bool:
    labels = one["metadata"].get("labels") or {}
    wanted = [each.split("=", 1) for each in request.query.get("labelSelector", "").split(",") if each]
    return all(labels.get(name) == value for name, value in wanted)


def _scale_of(one: dict[str, Any]) -> dict[str, Any]:
    replicas = one["spec"]["replicas"]
    return {"kind": "Scale", "metadata": one["metadata"], "spec": {"replicas": replicas} if replicas else {}}


def _merge(before: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(before) if isinstance(before, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge(merged.get(name), value)
    return merged
