"""Requests of clients that any instance can answer, such as the tokens of a text: sent to one, relayed as they are."""

from __future__ import annotations

from pla_sglang.fleet.router.http.head import RequestHead, ResponseHead
from pla_sglang.fleet.router.relay.context import RelayContext
from pla_sglang.fleet.router.relay.proxied_call import ProxiedCall
from pla_sglang.fleet.router.relay.request_translation import head_for_worker, passed_on_lines
from pla_sglang.fleet.router.relay.response_writer import ResponseWriter
from pla_sglang.fleet.router.wire.messages import FailureKind, WorkerEntry


class PassThrough(ProxiedCall):
    """One request of a client, until the instance has answered."""

    def __init__(self, context: RelayContext, client: ResponseWriter, head: RequestHead) -> None:
        super().__init__(context.pool, timeout_s=context.config.first_byte_timeout_s)
        self.plain = not client.understands_chunks
        self._context, self._client, self._request = context, client, head
        self._head: ResponseHead | None = None
        self._begun = False
        self._waiting_bytes = 0

    def send_request(self, worker: WorkerEntry, body: bytes) -> None:
        """``body`` is counted as incoming, until the end of the call."""
        self._waiting_bytes = len(body)
        keep_key = not self._context.config.checks_keys and not worker.api_key
        lines = passed_on_lines(self._request, keep_key=keep_key)
        self.send_to(worker, "POST", head_for_worker(worker, self._request, len(body), lines, method="POST"), body)

    def on_head(self, head: ResponseHead) -> None:
        self._head = head

    def on_body(self, data: bytes) -> None:
        assert self._head is not None
        if not self._begun:
            self._begun = True
            data = self._client.forwarded_head(self._head, self._context.ids.make_rid()) + data
        self._client.write_bytes(data)

    def on_done(self) -> None:
        if not self._begun:
            self.on_body(b"")
        self._finish_call()
        assert self._head is not None
        self._client.finish_response(reusable=self._head.length is not None or self._head.chunked)

    def on_lost(self, kind: FailureKind, detail: str) -> None:
        self._finish_call()
        if self._begun:
            self._client.cut_connection()
        else:
            self._client.send_error(502, "upstream_lost", f"the instance did not answer: {detail}")

    def _finish_call(self) -> None:
        super()._finish_call()
        self._context.incoming.free_bytes(self._waiting_bytes)
        self._waiting_bytes = 0

    def set_paused(self, paused: bool) -> None:
        if self._connection is not None:
            self._connection.set_paused(paused)
