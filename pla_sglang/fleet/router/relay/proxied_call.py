"""Requests to one instance that need no dispatch: those whose answer is wanted whole, the router's own and clients'
questions. What is passed through to a client is in ``pass_through``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pla_sglang.fleet.router.http.head import ResponseHead
from pla_sglang.fleet.router.relay.request_translation import host_header
from pla_sglang.fleet.router.relay.response_writer import ClientWork
from pla_sglang.fleet.router.relay.upstream_connection import UpstreamConnection, UpstreamPool
from pla_sglang.fleet.router.wire.messages import FailureKind, WorkerEntry

RESPONSE_BYTES = 4 << 20  # of an answer that is wanted whole; those of SGLang have some 30 KB


class ProxiedCall(ClientWork):
    """One request to one instance, with a time limit. A subclass is the ``ResponseSink`` of its answer.

    ``on_lost`` is called for every kind of failure, at most once, and never after ``_finish_call``.
    """

    plain = True

    def __init__(self, pool: UpstreamPool, *, timeout_s: float) -> None:
        self._pool = pool
        self._connection: UpstreamConnection | None = None
        self._finished = False
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._time_out)

    def on_lost(self, kind: FailureKind, detail: str) -> None:
        raise NotImplementedError

    def send_to(self, worker: WorkerEntry, method: str, head: bytes, body: bytes) -> None:
        def on_connection(connection: UpstreamConnection | None, why: str) -> None:
            if self._finished:
                if connection is not None:
                    self._pool.give_back(connection)
            elif connection is None:
                self.on_lost(FailureKind.CONNECT, why)
            else:
                self._connection = connection
                connection.send_request(method, head, body, self)  # type: ignore[arg-type]

        self._pool.take_connection(worker, on_connection)

    def _time_out(self) -> None:
        self._drop_connection()
        self.on_lost(FailureKind.TIMEOUT, "too slow")

    def _finish_call(self) -> None:
        self._timer.cancel()
        self._finished, self._connection = True, None

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop_connection()

    def on_disconnect(self, detail: str) -> None:
        """Nobody wants the answer any more."""
        self._drop_connection()
        self._finish_call()


class WholeCall(ProxiedCall):
    """A request whose answer is wanted whole; ``on_end`` is called once, with this call.

    Attributes:
        status: 0: there was no answer.
        body: longer than ``RESPONSE_BYTES``: the beginning of one that is too long.
        failure: why there was no answer, or not all of it; None: there was.
        detail: for people, of either.
    """

    def __init__(self, pool: UpstreamPool, on_end: Callable[[WholeCall], None], *, timeout_s: float) -> None:
        super().__init__(pool, timeout_s=timeout_s)
        self._on_end = on_end
        self.status, self.body = 0, b""
        self.failure: FailureKind | None = None
        self.detail = ""

    @property
    def is_too_long(self) -> bool:
        return len(self.body) > RESPONSE_BYTES

    def send_request(self, worker: WorkerEntry, method: str, path: str, body: bytes = b"", *, admin: bool) -> None:
        """A request of the router itself. ``admin``: the path needs the instance's admin key, where it has one."""
        token = (admin and worker.admin_key) or worker.api_key
        key = f"authorization: Bearer {token}\r\n" if token else ""
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {host_header(worker.host, worker.port).decode()}\r\n{key}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.send_to(worker, method, head.encode(), body)

    def on_head(self, head: ResponseHead) -> None:
        self.status = head.status

    def on_body(self, data: bytes) -> None:
        self.body += data
        if self.is_too_long:
            self.detail = f"more than {RESPONSE_BYTES} bytes"
            self._drop_connection()
            self.on_done()

    def on_done(self) -> None:
        self._finish_call()
        self._on_end(self)

    def on_lost(self, kind: FailureKind, detail: str) -> None:
        self.failure, self.detail = kind, detail
        self.on_done()
