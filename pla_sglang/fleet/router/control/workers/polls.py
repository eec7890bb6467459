"""Polls instances that push no load reports: a GET to each of them, several times a second.

Polls use the relays' own connections. With the client library that serves the rarer calls, a poll blocked the control
plane's event loop for about as long as twenty requests.
"""

from __future__ import annotations

import asyncio

from pla_sglang.common.secret_names import HIDDEN, hide_in_text
from pla_sglang.fleet.router.control.workers.errors import NoResponseError
from pla_sglang.fleet.router.control.workers.table import Worker
from pla_sglang.fleet.router.http.head import ResponseHead
from pla_sglang.fleet.router.relay.proxied_call import ProxiedCall
from pla_sglang.fleet.router.relay.request_translation import host_header
from pla_sglang.fleet.router.relay.upstream_connection import UpstreamPool
from pla_sglang.fleet.router.tls import TlsContext
from pla_sglang.fleet.router.wire.messages import FailureKind, WorkerEntry

RESPONSE_BYTES = 4 << 20
IDLE_S = 3.0  # as relays keep a connection
QUOTED_CHARS = 200


def quote_response(body: bytes, *keys: str) -> str:
    """The beginning of an answer, for logs and operators' pages. An instance may repeat what it was sent: not ``keys``,
    nor other secrets."""
    text = body[:4096].decode("utf-8", "replace")
    for key in keys:
        text = text.replace(key, HIDDEN) if key else text
    return hide_in_text(text)[:QUOTED_CHARS]


class Polls:
    """Close it with ``close_polls``."""

    def __init__(self, tls: TlsContext, *, timeout_s: float, api_key: str = "") -> None:
        self._timeout_s = timeout_s
        self._key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._pool = UpstreamPool(asyncio.get_running_loop(), tls, connect_timeout_s=timeout_s, idle_s=IDLE_S)

    async def fetch_body(self, worker: Worker, target: str) -> bytes:
        """The answer's body. Raises NoResponseError, also where nobody listens."""
        host, port = worker.address.host, worker.address.port
        head = f"GET {target} HTTP/1.1\r\nhost: {host_header(host, port).decode()}\r\n{self._key}\r\n".encode()
        poll = _Poll(self._pool, f"{worker.url}{target}", timeout_s=self._timeout_s)
        tls = worker.address.tls
        entry = WorkerEntry(worker.number, worker.view.name, host, port, worker.view.kind.value, tls=tls)
        poll.send_request(entry, head)
        try:
            return await poll.future
        finally:
            poll.drop_response()

    async def close_polls(self) -> None:
        await self._pool.close_pool()


class _Poll(ProxiedCall):
    """One GET; ``future`` gets its body."""

    def __init__(self, pool: UpstreamPool, what: str, *, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(pool, loop, timeout_s=timeout_s)
        self.future: asyncio.Future[bytes] = loop.create_future()
        self._what, self._timeout_s = what, timeout_s
        self._status = 0
        self._parts: list[bytes] = []
        self._bytes = 0

    def send_request(self, worker: WorkerEntry, head: bytes) -> None:
        self._send_to(worker, "GET", head, b"")

    def drop_response(self) -> None:
        """The rest of the answer is not needed."""
        self._drop_connection()
        self._finish_call()

    def on_head(self, head: ResponseHead) -> None:
        self._status = head.status

    def on_body(self, data: bytes) -> None:
        self._bytes += len(data)
        if self._bytes <= RESPONSE_BYTES:
            self._parts.append(data)

    def on_done(self) -> None:
        self._finish_call()
        body = b"".join(self._parts)
        if self._status >= 400:
            self._report_failure(f"answered {self._status}: {quote_response(body)}")
        elif self._bytes > RESPONSE_BYTES:
            self._report_failure(f"answered more than {RESPONSE_BYTES} bytes")
        elif not self.future.done():
            self.future.set_result(body)

    def on_lost(self, kind: FailureKind, detail: str) -> None:
        self._finish_call()
        self._report_failure(f"no answer within {self._timeout_s:g} s" if kind is FailureKind.TIMEOUT else detail)

    def _report_failure(self, why: str) -> None:
        if not self.future.done():
            self.future.set_exception(NoResponseError(f"{self._what}: {why}", self._status))
