"""Requests of the router's own to instances (aborts, health), and requests of clients that need no dispatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pla_sglang.router.http import answers
from pla_sglang.router.http.head import AnswerHead, RequestHead
from pla_sglang.router.messages import FailureKind, Worker
from pla_sglang.router.request import head_to, passed_on
from pla_sglang.router.upstream import UpstreamConnection

if TYPE_CHECKING:
    from pla_sglang.router.front import ClientConnection
    from pla_sglang.router.relay import Relay

UNREACHABLE = 0  # status of a call that got no answer


class Call:
    """One request to one instance; ``then`` gets the status (UNREACHABLE without an answer) and is called once."""

    plain = True

    def __init__(self, relay: Relay, then: Callable[[int], None], *, timeout_s: float) -> None:
        self._relay = relay
        self._then: Callable[[int], None] | None = then
        self._status = UNREACHABLE
        self._connection: UpstreamConnection | None = None
        self._timer = relay.later(timeout_s, self._expire)

    def start(self, worker: Worker, method: str, path: str, body: bytes = b"", *, admin: bool = False) -> None:
        """``admin``: the path needs the instance's admin key, where it has one."""
        token = (admin and worker.admin_key) or worker.api_key
        key = f"authorization: Bearer {token}\r\n" if token else ""
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {worker.host}:{worker.port}\r\n{key}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )

        def taken(connection: UpstreamConnection | None, why: str) -> None:
            if connection is None:
                self._end(UNREACHABLE)
            elif self._then is None:
                self._relay.pool.give(connection)
            else:
                self._connection = connection
                connection.send(method, head.encode(), body, self)

        self._relay.pool.take(worker, taken)

    def on_head(self, head: AnswerHead) -> None:
        self._status = head.status

    def on_body(self, data: bytes) -> None:
        """What it says does not matter."""

    def on_done(self) -> None:
        self._connection = None
        self._end(self._status)

    def on_lost(self, kind: FailureKind, detail: str) -> None:
        self._connection = None
        self._end(UNREACHABLE)

    def _expire(self) -> None:
        if self._then is not None:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.drop()
            self._end(UNREACHABLE)

    def _end(self, status: int) -> None:
        self._timer.cancel()
        then, self._then = self._then, None
        if then is not None:
            then(status)


class PassThrough:
    """A client's request that any instance can answer, such as the list of models: sent to one, relayed as it is."""

    def __init__(self, relay: Relay, client: ClientConnection, head: RequestHead) -> None:
        self.plain = not client.understands_chunks
        self._relay, self._client, self._request = relay, client, head
        self._connection: UpstreamConnection | None = None
        self._head: AnswerHead | None = None
        self._begun = self._over = False
        self._timer = relay.later(relay.config.first_byte_timeout_s, self._expire)

    def start(self, worker: Worker, body: bytes) -> None:
        keep_key = not self._relay.config.api_key and not worker.api_key
        head = head_to(worker, self._request, len(body), passed_on(self._request, keep_key=keep_key))

        def taken(connection: UpstreamConnection | None, why: str) -> None:
            if connection is None:
                self.on_lost(FailureKind.CONNECT, why)
            elif self._over:
                self._relay.pool.give(connection)
            else:
                self._connection = connection
                connection.send(self._request.method, head, body, self)

        self._relay.pool.take(worker, taken)

    def on_head(self, head: AnswerHead) -> None:
        self._head = head

    def on_body(self, data: bytes) -> None:
        assert self._head is not None
        if not self._begun:
            self._begun = True
            data = self._client.head_of(self._head, self._relay.names.rid()) + data
        self._client.write(data)

    def on_done(self) -> None:
        if not self._begun:
            self.on_body(b"")
        self._finish()
        assert self._head is not None
        self._client.done(reusable=self._head.length is not None or self._head.chunked)

    def on_lost(self, kind: FailureKind, detail: str) -> None:
        if self._over:
            return
        self._finish()
        if self._begun:
            self._client.cut()
        else:
            body = answers.error_body(502, "upstream_lost", f"the instance did not answer: {detail}")
            self._client.answer(502, body)

    def _expire(self) -> None:
        if not self._over:
            self._drop()
            self.on_lost(FailureKind.TIMEOUT, "too slow")

    def _finish(self) -> None:
        self._timer.cancel()
        self._over, self._connection = True, None

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop()

    # -- Work --------------------------------------------------------------------------------------------------------

    def client_gone(self, detail: str) -> None:
        self._drop()
        self._finish()

    def pause(self) -> None:
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()
