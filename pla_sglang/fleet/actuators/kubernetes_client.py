"""Kubernetes' API as JSON over its official client (``kubernetes.aio``), which is imported only where it is named.

The client brings credentials, their renewal, and TLS. Objects stay JSON: we read few fields of few of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import yaml

from pla_sglang.common.checks import Pattern
from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.actuators.interface import ActuatorError

INSTALL = "install it: pip install 'pla-sglang[kubernetes]'"
ANSWER_TIMEOUT_S = 10.0
WATCH_S = 60  # the server ends a watch by then
_LABEL = "[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
PLACE = Pattern(f"{_LABEL}/{_LABEL}", "NAMESPACE/NAME, of small letters, digits and hyphens")
CONFLICT, GONE, NOT_FOUND = 409, 410, 404
MERGE = "application/merge-patch+json"


class ApiError(ActuatorError):
    """``status``: of the answer; None: there was none."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


@dataclasses.dataclass(frozen=True, slots=True)
class Resource:
    """Objects of one sort in one namespace. ``group``: "api/v1", or "apis/GROUP/VERSION"."""

    group: str
    namespace: str
    plural: str

    def path(self, name: str = "") -> str:
        return f"/{self.group}/namespaces/{self.namespace}/{self.plural}" + (f"/{name}" if name else "")


def parse_place(flag: str, text: str) -> tuple[str, str]:
    """NAMESPACE/NAME. Raises ConfigError."""
    if not PLACE.allows(text):
        raise ConfigError(f"{flag} {text!r} is not valid; allowed: {PLACE}")
    namespace, _, name = text.partition("/")
    return namespace, name


class KubernetesClient:
    """Sends requests with the credentials of the pod, or of ``KUBECONFIG`` (``~/.kube/config``).

    Raises:
        ConfigError: the package ``kubernetes`` is not there, or credentials cannot be read.
    """

    def __init__(self, flag: str) -> None:
        self._configuration = load_configuration(flag)
        from aiohttp import ClientError  # of that package, which is there

        self._failures = (OSError, ClientError, TimeoutError)
        self._client: Any = None

    async def ask(
        self, method: str, path: str, body: Any = None, *, query: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The object of the answer. A body of PATCH is merged into the object. Raises ApiError."""
        what = f"{method} {path}"
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                response = await self._send(method, path, body, query or {})
                answer = await response.read()
        except self._failures as error:
            raise ApiError(f"{what}: no answer of Kubernetes: {_say(error)}") from None
        if response.status >= 400:
            raise ApiError(f"{what}: {response.status} {_read_reason(answer)}", response.status)
        return _decode(what, answer)

    async def watch(self, path: str, query: Mapping[str, str], version: str) -> AsyncIterator[dict[str, Any]]:
        """Events after ``version`` until the server ends it, which it does. Raises ApiError; 410: list again."""
        what = f"watch {path}"
        query = {**query, "watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true"}
        try:
            response = await self._send("GET", path, None, {**query, "timeoutSeconds": str(WATCH_S)}, watches=True)
            async with response:
                if response.status >= 400:
                    answer = await response.read()
                    raise ApiError(f"{what}: {response.status} {_read_reason(answer)}", response.status)
                async for line in response.content:
                    event = _decode(what, line)
                    if event.get("type") == "ERROR":
                        status = event.get("object") or {}
                        raise ApiError(f"{what}: {status.get('message')}", status.get("code"))
                    yield event
        except (*self._failures, ValueError) as error:
            raise ApiError(f"{what}: broke off: {_say(error)}") from None

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _send(self, method: str, path: str, body: Any, query: Mapping[str, str], *, watches: bool = False) -> Any:
        from kubernetes.aio import client

        if self._client is None:  # its connections belong to the event loop
            self._client = client.ApiClient(self._configuration)
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = MERGE if method == "PATCH" else "application/json"
        return await self._client.call_api(
            path,
            method,
            query_params=list(query.items()),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=(ANSWER_TIMEOUT_S, WATCH_S + ANSWER_TIMEOUT_S) if watches else None,
        )


def load_configuration(flag: str) -> Any:
    """Blocks. A plugin of a kubeconfig may run. Raises ConfigError, without a word of what the files say."""
    try:
        from kubernetes.aio import client, config
    except ImportError as error:
        raise ConfigError(f"{flag} needs the package kubernetes ({error}); {INSTALL}") from None
    made = client.Configuration()
    file = os.environ.get("KUBECONFIG", "")
    inside = not file and "KUBERNETES_SERVICE_HOST" in os.environ
    where = "of the pod" if inside else file or "~/.kube/config"
    try:
        if inside:
            config.load_incluster_config(made)
        else:
            # A coroutine, and the caller may or may not have an event loop.
            _run_apart(config.load_kube_config(file or "~/.kube/config", client_configuration=made))
    except config.ConfigException as error:
        raise ConfigError(f"{flag}: credentials {where}: {_say(error)}") from None
    except OSError as error:
        raise ConfigError(f"{flag}: credentials {where}: {error.strerror or type(error).__name__}") from None
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:  # texts quote the file
        raise ConfigError(f"{flag}: credentials {where}: not a kubeconfig ({type(error).__name__})") from None
    return made


def _run_apart(work: Coroutine[Any, Any, None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()


def _decode(what: str, data: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ApiError(f"{what}: not an answer of Kubernetes") from None


def _read_reason(data: bytes) -> str:
    """The message of a ``Status``, in one line."""
    try:
        return " ".join(str(_decode("", data).get("message", "")).split())[:300]
    except ApiError:
        return "without a reason"


def _say(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
