"""Which path is answered by whom.

| path | answered by |
| --- | --- |
| /generate, /v1/completions, /v1/chat/completions | dispatched to instances |
| /v1/models, /v1/models/ID, /model_info, /server_info and their old names, /tokenize, /detokenize | any instance |
| /health, /health_generate, /openapi.json | the relay |
| /workers, /pla/... (admin key), /metrics | the control plane |
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import unquote

import msgspec

from pla_sglang.router import body as bodies
from pla_sglang.router.calls import Call, PassThrough
from pla_sglang.router.exchange import Exchange
from pla_sglang.router.http import answers
from pla_sglang.router.http.head import BadMessage, RequestHead
from pla_sglang.router.request import ENDPOINTS, Wishes, ask_of

if TYPE_CHECKING:
    from pla_sglang.router.front import ClientConnection
    from pla_sglang.router.relay import Relay

PASSED_GET = ("/v1/models", "/model_info", "/get_model_info", "/server_info", "/get_server_info")
PASSED_GET_PREFIX = "/v1/models/"
PASSED_POST = ("/tokenize", "/detokenize")
RETRY_SOON = (("retry-after", "1"),)
HEALTH_TIMEOUT_S = 20.0  # SGLang's own limit for its generation check


def serve(relay: Relay, client: ClientConnection, head: RequestHead, body: bytes) -> None:
    """Raises BadMessage for a request that is answered with an error at once."""
    path = head.path
    found = ROUTES.get(path)
    if found is not None:
        method, answer = found
        need(head.method, method)
        answer(relay, client, head, body)
    elif path == "/workers" or path.startswith(("/workers/", "/pla/")):
        check_key(head, relay.config.admin_key or relay.config.api_key)
        relay.ask_admin(client, head, body)
    elif names_a_model(path):
        need(head.method, "GET")
        pass_through(relay, client, head, body)
    else:
        raise BadMessage("not_found", f"there is no {path}", 404)


def names_a_model(path: str) -> bool:
    """``/v1/models/ID``, and nothing that something on the way to an instance could read as another path."""
    return path.startswith(PASSED_GET_PREFIX) and not {".", ".."} & set(unquote(path).replace("\\", "/").split("/"))


def need(method: str, allowed: str) -> None:
    if method != allowed:
        raise BadMessage("method", f"only {allowed} is allowed here", 405, headers=(("allow", allowed),))


def check_key(head: RequestHead, key: str) -> None:
    """Raises BadMessage where ``key`` is set and the request does not bring it."""
    if not key:
        return
    given = head.get(b"authorization") or b""
    if not hmac.compare_digest(given, b"Bearer " + key.encode()):
        raise BadMessage("key", "the key is missing or wrong (Authorization: Bearer KEY)", 401)


def dispatch(relay: Relay, client: ClientConnection, head: RequestHead, raw: bytes) -> None:
    check_key(head, relay.config.api_key)
    if relay.draining:
        raise BadMessage("draining", "the router is shutting down", 503, headers=RETRY_SOON)
    wishes = Wishes(head)
    try:
        body = bodies.read(raw)
    except bodies.BadBody as error:
        raise BadMessage(error.code, str(error)) from None
    rid = body.rid if body.rid is not None else relay.names.rid()
    if rid in relay.open:
        raise BadMessage("rid_in_use", f"a request with rid {rid!r} is under way", 409)
    share = relay.trace_share
    if share is not None:
        wishes.trace, wishes.parent = relay.names.span(wishes.trace, share)
    elif not wishes.trace:
        wishes.trace = relay.names.trace()
    ask = ask_of(
        ENDPOINTS[head.path],
        wishes,
        body,
        rid=rid,
        relay=relay.number,
        arrived_s=relay.now_s(),
        body_bytes=len(raw),
    )
    if relay.wants_bodies:
        ask = msgspec.structs.replace(ask, body=raw)
    exchange = Exchange(relay, client, head, raw=raw, body=body, ask=ask)
    client.works(exchange)
    relay.begin(exchange)
    exchange.start()


def pass_through(relay: Relay, client: ClientConnection, head: RequestHead, body: bytes) -> None:
    check_key(head, relay.config.api_key)
    Wishes(head)  # reserved headers are refused here as well
    worker = relay.any_worker()
    if worker is None:
        raise BadMessage("no_worker", "no instance is ready", 503, headers=RETRY_SOON)
    work = PassThrough(relay, client, head)
    client.works(work)
    work.start(worker, body)


def health(relay: Relay, client: ClientConnection, head: RequestHead, body: bytes) -> None:
    """Whether a request could be dispatched now."""
    if relay.draining:
        raise BadMessage("draining", "the router is shutting down", 503, headers=RETRY_SOON)
    if relay.table is None or not relay.table.serving:
        raise BadMessage("not_serving", "no instance is ready", 503, headers=RETRY_SOON)
    client.answer(200)


def health_generate(relay: Relay, client: ClientConnection, head: RequestHead, body: bytes) -> None:
    """As ``health``, and one instance of each kind generates a token."""
    workers = relay.workers_by_kind()
    if relay.draining or relay.table is None or not relay.table.serving or not workers:
        health(relay, client, head, body)
        return
    waiting = _Several(client, len(workers))
    client.works(waiting)
    for worker in workers:
        Call(relay, waiting.answered, timeout_s=HEALTH_TIMEOUT_S).start(worker, "GET", "/health_generate")


def metrics(relay: Relay, client: ClientConnection, head: RequestHead, body: bytes) -> None:
    relay.ask_admin(client, head, body)


def describe(relay: Relay, client: ClientConnection, head: RequestHead, body: bytes) -> None:
    from pla_sglang.router import openapi  # few ask for it, and every relay would hold it

    client.answer(200, openapi.text())


# Every path that is one string; the others are in ``serve`` and in ``control/admin.py``.
ROUTES: dict[str, tuple[str, Callable[[Relay, ClientConnection, RequestHead, bytes], None]]] = {
    **dict.fromkeys(ENDPOINTS, ("POST", dispatch)),
    **dict.fromkeys(PASSED_GET, ("GET", pass_through)),
    **dict.fromkeys(PASSED_POST, ("POST", pass_through)),
    "/health": ("GET", health),
    "/health_generate": ("GET", health_generate),
    "/metrics": ("GET", metrics),
    "/openapi.json": ("GET", describe),
}


class _Several:
    """Answers the client when all calls have been answered."""

    def __init__(self, client: ClientConnection, count: int) -> None:
        self._client: ClientConnection | None = client
        self._left = count
        self._bad = 0

    def answered(self, status: int) -> None:
        self._left -= 1
        self._bad += status != 200
        if self._left or self._client is None:
            return
        if self._bad:
            message = f"{self._bad} instance(s) did not generate"
            self._client.answer(503, answers.error_body(503, "unhealthy", message))
        else:
            self._client.answer(200)

    def client_gone(self, detail: str) -> None:
        self._client = None

    def pause(self) -> None:
        """Nothing is being written."""

    def resume(self) -> None:
        """Nothing is being written."""
