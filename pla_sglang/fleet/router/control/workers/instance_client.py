"""Calls to instances over HTTP: what are you, are you well, about to end, how loaded, your class, your peers, drop a
request.

The only file of the control plane that talks to instances. Every call has a time limit, and every failure is one of
two kinds: nobody listens, or no proper answer.

What is asked several times a second (``_poll``) goes over connections as relays have them: with the client library that
serves the rarer calls, a poll blocked the control plane's event loop for about as long as twenty requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from pla_sglang.common.connection_errors import describe_connection_error
from pla_sglang.common.secret_names import HIDDEN, hide_in_text
from pla_sglang.fleet.router.control.workers.discovery import Address, Description, describe, polled_load
from pla_sglang.fleet.router.control.workers.errors import ControlError, NoResponseError, UnreachableError, WorkerError
from pla_sglang.fleet.router.control.workers.table import Worker
from pla_sglang.fleet.router.relay.proxied_call import RESPONSE_BYTES, WholeCall
from pla_sglang.fleet.router.relay.upstream_connection import UpstreamPool
from pla_sglang.fleet.router.tls import TlsContext
from pla_sglang.fleet.router.wire.messages import FailureKind, WorkerEntry
from pla_sglang.load.instance_load import InstanceLoad
from pla_sglang.policy.dopd.batching import BatchingKnobs
from pla_sglang.policy.interface.prefill import PrefillClass

IDLE_S = 3.0  # as relays keep a connection
QUOTED_CHARS = 200


class InstanceClient:
    """A client for all instances; ``close`` it. ``tls``: for those with https."""

    def __init__(self, tls: TlsContext, *, timeout_s: float, api_key: str = "", admin_key: str = "") -> None:
        self._tls, self._keys = tls, (api_key, admin_key)
        self._admin = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=8),
            headers=headers,
            trust_env=False,
        )
        self._timeout_s = timeout_s
        self._polls = UpstreamPool(asyncio.get_running_loop(), tls, connect_timeout_s=timeout_s, idle_s=IDLE_S)

    async def close(self) -> None:
        await self._polls.close_pool()
        await self._http.close()

    async def describe(self, address: Address, *, with_model: bool = False) -> Description:
        """``with_model``: whether its model generates is asked for too, where the instance can tell.

        Raises UnreachableError, NoResponseError, WorkerError.
        """
        url = f"{address.url}/server_info"
        info = _object(await self._call("GET", url), url)
        return describe(info, await self._read_model(address) if with_model else None)

    async def _read_model(self, address: Address) -> dict[str, Any]:
        """Empty where the instance does not say. Raises UnreachableError, NoResponseError."""
        url = f"{address.url}/model_info"
        try:
            content = await self._call("GET", url)
        except NoResponseError as error:
            if error.status:
                return {}
            raise
        try:
            return _object(content, url)
        except ControlError:
            return {}

    async def health(self, address: Address) -> None:
        """Returns if it is well. Raises UnreachableError, NoResponseError."""
        await self._call("GET", f"{address.url}/health")

    async def is_ending(self, worker: Worker) -> bool:
        """True if the instance says that it was told to end (SIGTERM). Raises NoResponseError, WorkerError."""
        return (await self._poll(worker, "/pla/ending")).get("ending") is True

    async def loads(self, worker: Worker) -> InstanceLoad:
        """Raises NoResponseError, WorkerError."""
        return polled_load(await self._poll(worker, "/v1/loads?include=core"), worker.view.kind)

    async def set_class(self, worker: Worker, length_class: PrefillClass | None) -> None:
        """Where the instance has no classes, the pool is a matter of the router alone.

        Raises UnreachableError, NoResponseError.
        """
        role = "mixed" if length_class is None else length_class.value
        try:
            await self._call("POST", f"{worker.url}/pla/role", {"role": role})
        except NoResponseError as error:
            if error.status not in (404, 405):
                raise

    async def set_batching(self, worker: Worker, knobs: BatchingKnobs) -> None:
        """The threshold and the timeout (by the clock of the device) of DOPD's Algorithm 1 there.

        Raises UnreachableError, NoResponseError.
        """
        told = {"boundary_tokens": knobs.i_next_tokens, "batch_timeout_ms": knobs.timeout_s * 1e3}
        await self._call("POST", f"{worker.url}/pla/config", told)

    async def abort(self, worker: Worker, rid: str) -> None:
        """The instance drops ``rid``; it answers the same for one it does not have.

        Raises UnreachableError, NoResponseError.
        """
        await self._call("POST", f"{worker.url}/abort_request", {"rid": rid})

    async def tell_peers(self, worker: Worker, peers: Mapping[str, Any]) -> dict[str, str]:
        """``peers``: the body of ``POST /pla/peers``. Returns what the instance says of each peer, by its name.

        Raises UnreachableError, NoResponseError, WorkerError.
        """
        url = f"{worker.url}/pla/peers"
        states = _object(await self._call("POST", url, peers), url).get("peers")
        if not isinstance(states, dict):
            raise WorkerError(f"{url} answered without peers", status=502)
        return {name: str(state) for name, state in states.items()}

    async def order_commands(self, worker: Worker, commands: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """``commands``: of ``POST /pla/hops`` (docs/protocol.md). Returns an answer for each, in order.

        Raises UnreachableError, NoResponseError, WorkerError.
        """
        url = f"{worker.url}/pla/hops"
        answers = _object(await self._call("POST", url, {"commands": commands}), url).get("answers")
        if not isinstance(answers, list) or len(answers) != len(commands):
            raise WorkerError(f"{url} answered {answers!r:.100}", status=502)
        return answers

    async def _poll(self, worker: Worker, target: str) -> dict[str, Any]:
        """Raises NoResponseError, also where nobody listens, and WorkerError."""
        loop, url, address = asyncio.get_running_loop(), f"{worker.url}{target}", worker.address
        done = asyncio.Event()
        call = WholeCall(self._polls, loop, lambda _: done.set(), timeout_s=self._timeout_s)
        kind, api_key = worker.view.kind.value, self._keys[0]
        entry = WorkerEntry(
            worker.number, worker.view.name, address.host, address.port, kind, api_key=api_key, tls=address.tls
        )
        call.send_request(entry, "GET", target, admin=False)
        try:
            await done.wait()
        finally:
            call.on_disconnect("")
        why = call.detail
        if call.failure is FailureKind.TIMEOUT:
            why = f"no answer within {self._timeout_s:g} s"
        elif call.failure is None and call.status >= 400:
            why = f"answered {call.status}: {quote_response(call.body, *self._keys)}"
        elif call.is_too_long:
            why = f"answered {call.detail}"
        elif call.failure is None:
            return _object(call.body, url)
        raise NoResponseError(f"{url}: {why}", call.status)

    async def _call(self, method: str, url: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Those with a body are an operator's: they bring the admin key, where there is one. No answer sends a request,
        and with it a key, elsewhere: a redirect is an error."""
        headers = {} if body is None else self._admin
        tls = self._tls.context if url.startswith("https:") else True
        try:
            async with self._http.request(
                method, url, json=body, headers=headers, ssl=tls, allow_redirects=False
            ) as response:
                content = await response.content.read(RESPONSE_BYTES)
                if response.status >= 300:
                    text = quote_response(content, *self._keys)
                    raise NoResponseError(f"{url} answered {response.status}: {text}", response.status)
                while more := await response.content.read(RESPONSE_BYTES):
                    content += more
                    if len(content) > RESPONSE_BYTES:
                        raise NoResponseError(f"{url} answered more than {RESPONSE_BYTES} bytes")
                return content
        except aiohttp.ClientConnectorError as error:
            raise UnreachableError(f"{url}: {describe_connection_error(error)}") from None
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise NoResponseError(f"{url}: {describe_connection_error(error)}") from None


def quote_response(body: bytes, *keys: str) -> str:
    """The beginning of an answer, for logs and operators' pages. An instance may repeat what it was sent: not ``keys``,
    nor other secrets."""
    text = body[:4096].decode("utf-8", "replace")
    for key in keys:
        text = text.replace(key, HIDDEN) if key else text
    return hide_in_text(text)[:QUOTED_CHARS]


def _object(data: bytes, url: str) -> dict[str, Any]:
    """Raises NoResponseError, WorkerError."""
    try:
        parsed = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NoResponseError(f"{url} answered no JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise WorkerError(f"{url} answered {type(parsed).__name__}, not an object", status=502)
    return parsed
