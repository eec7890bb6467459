"""Polls of instances: a GET several times a second at each one that does not report by itself.

Over connections as relays have them. With the client library that the rarer calls go through, a poll held up the
control plane's event loop for about as long as twenty requests.
"""

from __future__ import annotations

import asyncio

from pla_sglang.router import messages as m
from pla_sglang.router.control.errors import NoAnswerError
from pla_sglang.router.control.workers import Worker
from pla_sglang.router.http.head import AnswerHead
from pla_sglang.router.messages import FailureKind
from pla_sglang.router.upstream import UpstreamConnection, UpstreamPool

ANSWER_BYTES = 4 << 20
IDLE_S = 3.0  # as relays keep a connection


class Polls:
    """``close`` it."""

    def __init__(self, *, timeout_s: float, api_key: str = "") -> None:
        self._timeout_s = timeout_s
        self._key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._pool = UpstreamPool(asyncio.get_running_loop(), connect_timeout_s=timeout_s, idle_s=IDLE_S)

    async def get(self, worker: Worker, target: str) -> bytes:
        """The answer's body. Raises NoAnswerError, also where nobody listens."""
        host, port = worker.address.host, worker.address.port
        shown = f"[{host}]" if ":" in host else host
        head = f"GET {target} HTTP/1.1\r\nhost: {shown}:{port}\r\n{self._key}\r\n".encode()
        answer = _Answer(f"{worker.url}{target}", head)
        where = m.Worker(worker.number, worker.view.name, host, port, worker.view.kind.value)
        self._pool.take(where, answer.send)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer.future
        except TimeoutError:
            raise NoAnswerError(f"{worker.url}{target}: no answer within {self._timeout_s:g} s") from None
        finally:
            answer.drop()

    async def close(self) -> None:
        await self._pool.close()


class _Answer:
    """An ``AnswerSink`` that ends in ``future``."""

    plain = True

    def __init__(self, what: str, head: bytes) -> None:
        self.future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._what, self._head = what, head
        self._connection: UpstreamConnection | None = None
        self._status = 0
        self._parts: list[bytes] = []
        self._bytes = 0

    def send(self, connection: UpstreamConnection | None, why: str) -> None:
        if connection is None:
            self._fail(why)
        elif self.future.done():
            connection.drop()
        else:
            self._connection = connection
            connection.send("GET", self._head, b"", self)

    def drop(self) -> None:
        """Whatever still comes is of no interest."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop()

    def on_head(self, head: AnswerHead) -> None:
        self._status = head.status

    def on_body(self, data: bytes) -> None:
        self._bytes += len(data)
        if self._bytes <= ANSWER_BYTES:
            self._parts.append(data)

    def on_done(self) -> None:
        self._connection = None
        body = b"".join(self._parts)
        if self._status >= 400:
            self._fail(f"answered {self._status}: {body[:200].decode('utf-8', 'replace')}")
        elif self._bytes > ANSWER_BYTES:
            self._fail(f"answered more than {ANSWER_BYTES} bytes")
        elif not self.future.done():
            self.future.set_result(body)

    def on_lost(self, kind: FailureKind, detail: str) -> None:
        self._connection = None
        self._fail(detail)

    def _fail(self, why: str) -> None:
        if not self.future.done():
            self.future.set_exception(NoAnswerError(f"{self._what}: {why}", self._status))
