"""A client's question about an instance: asked of one, and answered with what clients may know."""

from __future__ import annotations

from pla_sglang.fleet.router.http import responses
from pla_sglang.fleet.router.http.head import RequestHead, ResponseHead
from pla_sglang.fleet.router.http.instance_facts import answer_about_instance
from pla_sglang.fleet.router.relay.context import RelayContext
from pla_sglang.fleet.router.relay.proxied_call import ProxiedCall
from pla_sglang.fleet.router.relay.request_translation import head_for_worker
from pla_sglang.fleet.router.relay.response_writer import ClientWork, ResponseWriter
from pla_sglang.fleet.router.wire.messages import FailureKind, WorkerEntry

RESPONSE_BYTES = 4 << 20  # of one answer; those of SGLang have some 30 KB


class InstanceResponse(ProxiedCall, ClientWork):
    """One such question, until the instance has answered. Of the client's headers it gets the key at most: its answer
    is to be whole and plain JSON."""

    def __init__(self, context: RelayContext, client: ResponseWriter, head: RequestHead) -> None:
        super().__init__(context.pool, context.loop, timeout_s=context.config.first_byte_timeout_s)
        self._context, self._client, self._request = context, client, head
        self._status = 0
        self._body = bytearray()

    def send_request(self, worker: WorkerEntry) -> None:
        keeps_key = not self._context.config.checks_keys and not worker.api_key
        key = self._request.get_header(b"authorization") if keeps_key else None
        line = b"" if key is None else b"authorization: %s\r\n" % key
        self._send_to(worker, "GET", head_for_worker(worker, self._request, 0, line, method="GET"), b"")

    def on_head(self, head: ResponseHead) -> None:
        self._status = head.status

    def on_body(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > RESPONSE_BYTES:
            self._drop_connection()
            self._fail(f"the instance's answer has more than {RESPONSE_BYTES} bytes")

    def on_done(self) -> None:
        self._finish_call()
        status, body = answer_about_instance(self._request.path, self._status, bytes(self._body))
        self._client.send_response(status, body, headers=(("x-request-id", self._context.ids.make_rid()),))

    def on_lost(self, kind: FailureKind, detail: str) -> None:
        self._fail(f"the instance did not answer: {detail}")

    def _fail(self, text: str) -> None:
        self._finish_call()
        self._client.send_response(502, responses.error_body(502, "upstream_lost", text))

    def on_disconnect(self, detail: str) -> None:
        self._drop_connection()
        self._finish_call()
