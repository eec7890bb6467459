"""Calls to instances over HTTP: what are you, are you well, about to end, how loaded, your class, your peers, drop a
request.

The only file of the control plane that talks to instances. Every call has a time limit, and every failure is one of
two kinds: nobody listens, or no proper answer.

Connections are as relays have them. Loads are asked several times a second, and with ``aiohttp`` a poll blocked the
control plane's event loop for about as long as twenty requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from pla_sglang.common.secret_names import HIDDEN, hide_in_text
from pla_sglang.fleet.router.control.workers.discovery import Address, Description, describe, polled_load
from pla_sglang.fleet.router.control.workers.errors import ControlError, NoResponseError, UnreachableError, WorkerError
from pla_sglang.fleet.router.control.workers.table import Worker
from pla_sglang.fleet.router.control.workers.tasks import Tasks
from pla_sglang.fleet.router.relay.proxied_call import WholeCall
from pla_sglang.fleet.router.relay.upstream_connection import UpstreamPool
from pla_sglang.fleet.router.tls import TlsContext
from pla_sglang.fleet.router.wire.messages import FailureKind, WorkerEntry
from pla_sglang.load.instance_load import InstanceLoad
from pla_sglang.policy.dopd.batching import BatchingKnobs
from pla_sglang.policy.interface.prefill import PrefillClass

SWEEP_S = 1.0
FORGET_S = 60.0  # an address that nobody has asked for so long
ORDERS_AT_ONCE = 8  # to one instance: where a relay is lost, all of its requests are aborted in one moment
QUOTED_CHARS = 200


@dataclasses.dataclass(slots=True)
class _Host:
    """An address that was asked. ``entry`` has a number of its own: it is asked what it is before it is a worker."""

    entry: WorkerEntry
    turns: asyncio.Semaphore  # for orders
    asked_s: float = 0.0


class InstanceClient:
    """A client for all instances, with the tasks that ask them; ``close`` it. ``tls``: for those with https."""

    def __init__(self, tls: TlsContext, *, timeout_s: float, api_key: str = "", admin_key: str = "") -> None:
        self._timeout_s, self._keys = timeout_s, (api_key, admin_key)
        self._pool = UpstreamPool(tls, connect_timeout_s=timeout_s)
        self._tasks = Tasks()
        self._swept_s = 0.0
        self._numbers = itertools.count()
        self._hosts: dict[Address, _Host] = {}

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """A task that ends with this client at the latest."""
        self._tasks.spawn(work)

    async def close(self) -> None:
        await self._tasks.close()
        await self._pool.close_pool()

    async def describe(self, address: Address, *, with_model: bool = False) -> Description:
        """``with_model``: whether its model generates is asked for too, where the instance can tell.

        Raises UnreachableError, NoResponseError, WorkerError.
        """
        info = await self._call_object(address, "/server_info")
        return describe(info, await self._read_model(address) if with_model else None)

    async def _read_model(self, address: Address) -> dict[str, Any]:
        """Empty where the instance does not say. Raises UnreachableError, NoResponseError."""
        try:
            content = await self._call(address, "/model_info")
        except NoResponseError as error:
            if error.status:
                return {}
            raise
        try:
            return _decode_object(content, f"{address.url}/model_info")
        except ControlError:
            return {}

    async def health(self, address: Address) -> None:
        """Returns if it is well. Raises UnreachableError, NoResponseError."""
        await self._call(address, "/health")

    async def is_ending(self, worker: Worker) -> bool:
        """True if the instance says that it was told to end (SIGTERM).

        Raises UnreachableError, NoResponseError, WorkerError.
        """
        return (await self._call_object(worker.address, "/pla/ending")).get("ending") is True

    async def loads(self, worker: Worker) -> InstanceLoad:
        """Raises UnreachableError, NoResponseError, WorkerError."""
        said = await self._call_object(worker.address, "/v1/loads?include=core")
        return polled_load(said, worker.view.kind)

    async def set_class(self, worker: Worker, length_class: PrefillClass | None) -> None:
        """Where the instance has no classes, the pool is a matter of the router alone.

        Raises UnreachableError, NoResponseError.
        """
        role = "mixed" if length_class is None else length_class.value
        try:
            await self._call(worker.address, "/pla/role", {"role": role})
        except NoResponseError as error:
            if error.status not in (404, 405):
                raise

    async def set_batching(self, worker: Worker, knobs: BatchingKnobs) -> None:
        """The threshold and the timeout (by the clock of the device) of DOPD's Algorithm 1 there.

        Raises UnreachableError, NoResponseError.
        """
        told = {"boundary_tokens": knobs.i_next_tokens, "batch_timeout_ms": knobs.timeout_s * 1e3}
        await self._call(worker.address, "/pla/config", told)

    async def abort(self, worker: Worker, rid: str) -> None:
        """The instance drops ``rid``; it answers the same for one it does not have.

        Raises UnreachableError, NoResponseError.
        """
        await self._call(worker.address, "/abort_request", {"rid": rid})

    async def tell_peers(self, worker: Worker, peers: Mapping[str, Any]) -> dict[str, str]:
        """``peers``: the body of ``POST /pla/peers``. Returns what the instance says of each peer, by its name.

        Raises UnreachableError, NoResponseError, WorkerError.
        """
        states = (await self._call_object(worker.address, "/pla/peers", peers)).get("peers")
        if not isinstance(states, dict):
            raise WorkerError(f"{worker.url}/pla/peers answered without peers", status=502)
        return {name: str(state) for name, state in states.items()}

    async def order_commands(self, worker: Worker, commands: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """``commands``: of ``POST /pla/hops`` (docs/protocol.md). Returns an answer for each, in order.

        Raises UnreachableError, NoResponseError, WorkerError.
        """
        answers = (await self._call_object(worker.address, "/pla/hops", {"commands": commands})).get("answers")
        if not isinstance(answers, list) or len(answers) != len(commands):
            raise WorkerError(f"{worker.url}/pla/hops answered {answers!r:.100}", status=502)
        return answers

    async def _call_object(
        self, address: Address, target: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Raises UnreachableError, NoResponseError, WorkerError."""
        return _decode_object(await self._call(address, target, body), f"{address.url}{target}")

    async def _call(self, address: Address, target: str, body: Mapping[str, Any] | None = None) -> bytes:
        """A GET, or a POST of ``body``, which is an operator's and brings the admin key.

        A redirect is an error: no answer sends a request, and with it a key, elsewhere.

        Raises UnreachableError, NoResponseError.
        """
        url, host = f"{address.url}{target}", self._find_host(address)
        try:
            async with asyncio.timeout(self._timeout_s), contextlib.nullcontext() if body is None else host.turns:
                call = await self._send(host.entry, target, body)
        except TimeoutError:
            raise NoResponseError(f"{url}: no answer within {self._timeout_s:g} s") from None
        if call.failure is FailureKind.CONNECT:
            raise UnreachableError(f"{url}: {call.detail}")
        if call.failure is not None:
            raise NoResponseError(f"{url}: {call.detail}")
        if call.status >= 300:
            text = quote_response(call.body, *self._keys)
            raise NoResponseError(f"{url} answered {call.status}: {text}", call.status)
        if call.is_too_long:
            raise NoResponseError(f"{url} answered {call.detail}")
        return call.body

    async def _send(self, entry: WorkerEntry, target: str, body: Mapping[str, Any] | None) -> WholeCall:
        """Until it has ended, however that is."""
        done = asyncio.Event()
        call = WholeCall(self._pool, lambda _: done.set(), timeout_s=self._timeout_s)
        method, content = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
        call.send_request(entry, method, target, content, admin=body is not None)
        try:
            await done.wait()
        finally:
            call.on_disconnect("")
        return call

    def _find_host(self, address: Address) -> _Host:
        now_s = time.monotonic()
        if now_s >= self._swept_s + SWEEP_S:
            self._swept_s = now_s
            self._sweep(now_s)
        if (host := self._hosts.get(address)) is None:
            api_key, admin_key = self._keys
            entry = WorkerEntry(
                number=next(self._numbers),
                host=address.host,
                port=address.port,
                kind="",
                api_key=api_key,
                admin_key=admin_key,
                tls=address.tls,
            )
            host = self._hosts[address] = _Host(entry, asyncio.Semaphore(ORDERS_AT_ONCE))
        host.asked_s = now_s
        return host

    def _sweep(self, now_s: float) -> None:
        """An instance that closes a connection while a request is on its way would be taken for one that is ill. And
        instances come and go: those that are gone are asked no more."""
        self._pool.close_unused(now_s)
        self._hosts = {address: host for address, host in self._hosts.items() if now_s - host.asked_s < FORGET_S}


def quote_response(body: bytes, *keys: str) -> str:
    """The beginning of an answer, for logs and operators' pages. An instance may repeat what it was sent: not ``keys``,
    nor other secrets."""
    text = body[:4096].decode("utf-8", "replace")
    for key in keys:
        text = text.replace(key, HIDDEN) if key else text
    return hide_in_text(text)[:QUOTED_CHARS]


def _decode_object(data: bytes, url: str) -> dict[str, Any]:
    """Raises NoResponseError, WorkerError."""
    try:
        parsed = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NoResponseError(f"{url} answered no JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise WorkerError(f"{url} answered {type(parsed).__name__}, not an object", status=502)
    return parsed
