"""Calls to instances over HTTP: what are you, are you well, how loaded, change your class, drop a request.

The only file of the control plane that talks to instances. Every call has a time limit, and every failure is one of
two kinds: nobody listens, or no proper answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import aiohttp
import orjson

from pla_sglang.policy.types import PrefillClass
from pla_sglang.router.control.discovery import Address, Description, describe, polled_report
from pla_sglang.router.control.errors import NoAnswerError, NobodyListensError, WorkerError
from pla_sglang.router.control.loads import Report
from pla_sglang.router.control.polls import ANSWER_BYTES, Polls
from pla_sglang.router.control.workers import Worker


class Instances:
    """A client for all instances; ``close`` it."""

    def __init__(self, *, timeout_s: float, api_key: str = "", admin_key: str = "") -> None:
        self._admin = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=8),
            headers=headers,
            trust_env=False,
        )
        self._polls = Polls(timeout_s=timeout_s, api_key=api_key)

    async def close(self) -> None:
        await self._polls.close()
        await self._http.close()

    async def describe(self, address: Address) -> Description:
        """Raises NobodyListensError, NoAnswerError, WorkerError."""
        return describe(await self._json("GET", f"{address.url}/server_info"))

    async def health(self, address: Address) -> None:
        """Returns if it is well. Raises NobodyListensError, NoAnswerError."""
        await self._call("GET", f"{address.url}/health", None)

    async def loads(self, worker: Worker) -> Report:
        """Raises NoAnswerError, WorkerError."""
        target = "/v1/loads?include=core"
        answer = _object(await self._polls.get(worker, target), f"{worker.url}{target}")
        return polled_report(answer, worker.view.kind)

    async def set_class(self, worker: Worker, length_class: PrefillClass | None) -> bool:
        """False where the instance has no classes: then the pool is a matter of the router alone.

        Raises NobodyListensError, NoAnswerError.
        """
        role = "mixed" if length_class is None else length_class.value
        try:
            await self._call("POST", f"{worker.url}/pla/role", {"role": role}, self._admin)
        except NoAnswerError as error:
            if error.status in (404, 405):
                return False
            raise
        return True

    async def abort(self, worker: Worker, rid: str) -> None:
        """The instance drops ``rid``; it answers the same for one it does not have.

        Raises NobodyListensError, NoAnswerError.
        """
        await self._call("POST", f"{worker.url}/abort_request", {"rid": rid}, self._admin)

    async def _json(self, method: str, url: str) -> dict[str, Any]:
        return _object(await self._call(method, url, None), url)

    async def _call(
        self, method: str, url: str, body: dict[str, Any] | None, key: Mapping[str, str] = MappingProxyType({})
    ) -> bytes:
        """``key``: in place of the usual one."""
        data = None if body is None else orjson.dumps(body)
        headers = dict(key) if body is None else {**key, "Content-Type": "application/json"}
        try:
            async with self._http.request(method, url, data=data, headers=headers) as answer:
                content = await answer.content.read(ANSWER_BYTES)
                if answer.status >= 400:
                    text = content[:200].decode("utf-8", "replace")
                    raise NoAnswerError(f"{url} answered {answer.status}: {text}", answer.status)
                while more := await answer.content.read(ANSWER_BYTES):
                    content += more
                    if len(content) > ANSWER_BYTES:
                        raise NoAnswerError(f"{url} answered more than {ANSWER_BYTES} bytes")
                return content
        except aiohttp.ClientConnectorError as error:
            raise NobodyListensError(f"{url}: {error}") from None
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise NoAnswerError(f"{url}: {type(error).__name__} {error}") from None


def _object(data: bytes, url: str) -> dict[str, Any]:
    """Raises NoAnswerError, WorkerError."""
    try:
        parsed = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise NoAnswerError(f"{url} answered no JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise WorkerError(f"{url} answered {type(parsed).__name__}, not an object", status=502)
    return parsed
