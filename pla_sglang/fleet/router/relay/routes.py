"""Which path is answered by whom.

| path | answered by |
| --- | --- |
| /generate, /v1/chat/completions and the other paths of ``wire/inference.py`` | dispatched to instances |
| /v1/models, /v1/models/ID, /model_info, /server_info and their old names, /tokenize and the like | any instance |
| /health, /health_generate, /livez, /readyz, /startupz, /openapi.json | the relay |
| /workers, /pla/... (admin key), /metrics | the control plane |

The admin key is a bearer token; for ``/pla/view``, which people open in a browser, also the password of its dialogue.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hmac
import time
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import unquote

import msgspec

from pla_sglang.common.origins import is_foreign_page, is_unsafe_name
from pla_sglang.fleet.router.http.head import BadMessage, RequestHead
from pla_sglang.fleet.router.http.instance_facts import FACTS, answer_about_instance
from pla_sglang.fleet.router.http.json_body import read_body
from pla_sglang.fleet.router.http.responses import RETRY_SOON
from pla_sglang.fleet.router.keys_file import ClientKeys, has_expired
from pla_sglang.fleet.router.relay.admin_requests import AdminRequests
from pla_sglang.fleet.router.relay.client_connection import AcceptedRequest
from pla_sglang.fleet.router.relay.context import RelayContext
from pla_sglang.fleet.router.relay.open_requests import OpenRequests
from pla_sglang.fleet.router.relay.pass_through import PassThrough
from pla_sglang.fleet.router.relay.proxied_call import WholeCall
from pla_sglang.fleet.router.relay.request_translation import RequestHeaders, build_ask, head_for_worker
from pla_sglang.fleet.router.relay.response_writer import ClientWork, ResponseWriter
from pla_sglang.fleet.router.wire.inference import PATHS, find_refusal
from pla_sglang.fleet.router.wire.messages import WorkerEntry

PASSED_GET = tuple(FACTS)  # what clients may read of the answers stands there
PASSED_GET_PREFIX = "/v1/models/"
# Work of an instance's tokenizer process alone: nothing reaches its scheduler.
PASSED_POST = (
    *("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/v1/messages/count_tokens"),
    *("/parse_function_call", "/separate_reasoning"),
)
SMALL_BODY_BYTES = 65_536  # of requests that need none, whose body is dropped, and of operators' requests
PAGE = "/pla/view"
WRONG_KEY = "the key is missing or wrong (Authorization: Bearer KEY)"
HEALTH_TIMEOUT_S = 20.0  # SGLang's own limit for its generation check
# A control process that ends is started again, after 5 s at most. One that is silent for so long stands still, or has
# failed to start a dozen times. The end of the router ends what still runs and waits, too: so not before
# --dispatch-timeout-s, where that is longer.
LOST_CONTROL_S = 60.0
# Of POST /workers; the second is what curl names without being asked, the third that of no body.
WORKER_TYPES = frozenset({b"application/json", b"application/x-www-form-urlencoded", b""})


class Routes:
    """Says from the head of a request what serves it, so that one which is refused costs no body."""

    def __init__(self, context: RelayContext, requests: OpenRequests, admin: AdminRequests) -> None:
        self._context, self._requests, self._admin = context, requests, admin

    def accept_request(self, head: RequestHead) -> AcceptedRequest:
        """Raises BadMessage: 401, 404, 405, and what else is wrong whatever the body says."""
        path, method = head.path, "GET" if head.method == "HEAD" else head.method
        if path == "/workers" or path.startswith(("/workers/", "/pla/")):
            return self._accept_operator(head)
        route = ROUTES.get(path)
        if route is None:
            if (why := find_refusal(path)) is not None:
                raise BadMessage("not_served", f"{path} is not served: {why}", 501)
            if not names_model(path):
                raise BadMessage("not_found", f"there is no {path}", 404)
            route = _MODEL_ROUTE
        if method != route.method:
            allowed = "GET, HEAD" if route.method == "GET" else route.method
            raise BadMessage("method", f"only {allowed} is allowed here", 405, headers=(("allow", allowed),))
        if route.needs_key:
            keys = self._context.keys
            if keys is None:
                check_key(head, self._context.config.api_key)
            else:
                head.tenant = find_tenant(head, keys.keys)
        return route.accept(self, head)

    # -- dispatched --------------------------------------------------------------------------------------------------

    def accept_dispatched(self, head: RequestHead) -> AcceptedRequest:
        if self._context.draining:
            raise BadMessage("draining", "the router is shutting down", 503, headers=RETRY_SOON)
        headers = RequestHeaders(head)
        return AcceptedRequest(self._context.config.max_body_bytes, functools.partial(self._dispatch_request, headers))

    def _dispatch_request(self, headers: RequestHeaders, client: ResponseWriter, head: RequestHead, raw: bytes) -> None:
        context = self._context
        body = read_body(raw, PATHS[head.path])
        rid = body.rid if body.rid is not None else context.ids.make_rid()
        for name in (rid, *body.rids):
            if name in self._requests:
                raise BadMessage("rid_in_use", f"a request with rid {name!r} is under way", 409)
        share = context.workers.trace_share
        if share is not None:
            headers.trace, headers.parent = context.ids.make_span(headers.trace, share)
        elif not headers.trace:
            headers.trace = context.ids.make_trace()
        ask = build_ask(
            PATHS[head.path].endpoint,
            headers,
            body,
            rid=rid,
            relay=context.number,
            arrived_s=context.now_s(),
            body_bytes=len(raw),
        )
        if context.workers.wants_bodies:
            ask = msgspec.structs.replace(ask, body=raw)
        self._hold_body(raw)
        self._requests.begin_request(client, head, raw=raw, body=body, ask=ask)

    def _hold_body(self, raw: bytes) -> None:
        """Until it is sent to an instance. Raises BadMessage where too many wait already."""
        if not self._context.incoming.try_hold(len(raw)):
            raise BadMessage("buffers_full", "too many requests wait for an instance", 503, headers=RETRY_SOON)

    # -- any instance ------------------------------------------------------------------------------------------------

    def accept_passed(self, head: RequestHead) -> AcceptedRequest:
        RequestHeaders(head)  # reserved headers are refused here as well
        return AcceptedRequest(self._context.config.max_body_bytes, self._pass_through)

    def _pass_through(self, client: ResponseWriter, head: RequestHead, body: bytes) -> None:
        worker = self._pick_any()
        self._hold_body(body)
        call = PassThrough(self._context, client, head)
        client.attach_work(call)
        call.send_request(worker, body)

    def accept_question(self, head: RequestHead) -> AcceptedRequest:
        """About an instance."""
        RequestHeaders(head)
        return AcceptedRequest(SMALL_BODY_BYTES, self._ask_instance)

    def _ask_instance(self, client: ResponseWriter, head: RequestHead, body: bytes) -> None:
        context, worker = self._context, self._pick_any()
        on_end = functools.partial(self._answer_question, client, head.path)
        call = WholeCall(context.pool, on_end, timeout_s=context.config.first_byte_timeout_s)
        client.attach_work(call)
        # Of the client's headers the instance gets the key at most: its answer is to be whole and plain JSON.
        keeps_key = not context.config.checks_keys and not worker.api_key
        key = head.get_header(b"authorization") if keeps_key else None
        line = b"" if key is None else b"authorization: %s\r\n" % key
        call.send_to(worker, "GET", head_for_worker(worker, head, 0, line, method="GET"), b"")

    def _answer_question(self, client: ResponseWriter, path: str, call: WholeCall) -> None:
        """With what clients may know."""
        if call.failure is not None or call.is_too_long:
            text = f"the instance did not answer: {call.detail}"
            if call.is_too_long:
                text = f"the instance's answer has {call.detail}"
            client.send_error(502, "upstream_lost", text)
            return
        status, body = answer_about_instance(path, call.status, call.body)
        client.send_response(status, body, headers=(("x-request-id", self._context.ids.make_rid()),))

    def _pick_any(self) -> WorkerEntry:
        """Raises BadMessage."""
        worker = self._context.workers.pick_any()
        if worker is None:
            raise BadMessage("no_worker", "no instance is ready", 503, headers=RETRY_SOON)
        return worker

    # -- the relay itself --------------------------------------------------------------------------------------------

    def accept_health(self, head: RequestHead) -> AcceptedRequest:
        """Answers whether a request could be dispatched now."""
        self._check_serving()
        return AcceptedRequest(SMALL_BODY_BYTES, lambda client, head, body: client.send_response(200))

    def accept_health_generate(self, head: RequestHead) -> AcceptedRequest:
        """As ``accept_health``, and one instance of each kind generates a token."""
        self._check_serving()
        return AcceptedRequest(SMALL_BODY_BYTES, self._check_generation)

    def _check_serving(self) -> None:
        context = self._context
        if context.draining:
            raise BadMessage("draining", "the router is shutting down", 503, headers=RETRY_SOON)
        if context.control_is_silent():
            raise BadMessage(*_NO_CONTROL, 503, headers=RETRY_SOON)
        if not context.workers.serving:
            raise BadMessage(*_NO_INSTANCE, 503, headers=RETRY_SOON)

    def accept_probe(self, find_reason: Callable[[Routes], ProbeFailure | None]) -> AcceptedRequest:
        """An answer no is none to a bad request, and is not counted as one."""

        def answer_probe(client: ResponseWriter, head: RequestHead, body: bytes) -> None:
            reason = find_reason(self)
            if reason is None:
                client.send_response(200)
            else:
                client.send_error(503, *reason)

        return AcceptedRequest(SMALL_BODY_BYTES, answer_probe)

    def find_no_life(self) -> ProbeFailure | None:
        """Why a new process would be better off. That an instance is missing is no reason."""
        lost_s = self._context.control_lost_s()
        if lost_s <= max(LOST_CONTROL_S, self._context.config.dispatch_timeout_s):
            return None
        return "no_control", f"the control plane has said nothing for {lost_s:.0f} s"

    def find_unfinished_start(self) -> ProbeFailure | None:
        """The start is over with instances or without."""
        return None if self._context.workers.known else _NO_TABLE

    def find_unreadiness(self) -> ProbeFailure | None:
        """Why not to send requests here."""
        context = self._context
        if context.ending:
            return _ENDS
        if not context.workers.known:
            return _NO_TABLE
        if context.control_is_silent():
            return _NO_CONTROL
        return None if context.workers.serving else _NO_INSTANCE

    def _check_generation(self, client: ResponseWriter, head: RequestHead, body: bytes) -> None:
        context = self._context
        workers = context.workers.pick_of_each_kind()
        if not workers:
            client.send_response(200)
            return
        checks = _GenerationChecks(client, len(workers))
        client.attach_work(checks)
        for worker in workers:
            call = WholeCall(context.pool, checks.on_response, timeout_s=HEALTH_TIMEOUT_S)
            call.send_request(worker, "GET", "/health_generate", admin=False)

    def accept_description(self, head: RequestHead) -> AcceptedRequest:
        return AcceptedRequest(SMALL_BODY_BYTES, self._describe_routes)

    def _describe_routes(self, client: ResponseWriter, head: RequestHead, body: bytes) -> None:
        from pla_sglang.fleet.router.http import openapi

        client.send_response(200, openapi.document_text())

    # -- the control plane -------------------------------------------------------------------------------------------

    def _accept_operator(self, head: RequestHead) -> AcceptedRequest:
        config = self._context.config
        check_key(head, config.admin_key or config.api_key, by_password=is_page(head))
        if head.method not in ("GET", "HEAD"):
            check_origin(head)
            if not (config.admin_key or config.checks_keys):
                check_host(head, config.host)
        if head.method == "POST" and head.path.rstrip("/") == "/workers":  # the control plane takes it either way
            kind = (head.get_header(b"content-type") or b"").partition(b";")[0].strip().lower()
            if kind not in WORKER_TYPES:
                raise BadMessage("content_type", "the body must be application/json", 415)
        return self.accept_control(head)

    def accept_control(self, head: RequestHead) -> AcceptedRequest:
        return AcceptedRequest(SMALL_BODY_BYTES, self._admin.ask_control)


# Why a probe is answered with 503: a word, and a text for people.
ProbeFailure = tuple[str, str]
_ENDS = "ending", "the router was told to end"
_NO_TABLE = "starting", "the control plane has not connected yet"
_NO_CONTROL = "no_control", "the control plane does not answer"
_NO_INSTANCE = "not_serving", "no instance is ready"


class Route(NamedTuple):
    """What serves a path. ``method``: the one that is allowed, HEAD besides where it is GET."""

    method: str
    accept: Callable[[Routes, RequestHead], AcceptedRequest]
    needs_key: bool = True


def _make_probe(find_reason: Callable[[Routes], ProbeFailure | None]) -> Route:
    return Route("GET", lambda routes, head: routes.accept_probe(find_reason), needs_key=False)


# Every path that is one string, but for operators'; those are in ``control/admin.py``.
ROUTES: dict[str, Route] = {
    **dict.fromkeys(PATHS, Route("POST", Routes.accept_dispatched)),
    **dict.fromkeys(PASSED_GET, Route("GET", Routes.accept_question)),
    **dict.fromkeys(PASSED_POST, Route("POST", Routes.accept_passed)),
    "/health": Route("GET", Routes.accept_health, needs_key=False),
    "/health_generate": Route("GET", Routes.accept_health_generate, needs_key=False),
    "/livez": _make_probe(Routes.find_no_life),
    "/readyz": _make_probe(Routes.find_unreadiness),
    "/startupz": _make_probe(Routes.find_unfinished_start),
    "/metrics": Route("GET", Routes.accept_control, needs_key=False),
    "/openapi.json": Route("GET", Routes.accept_description, needs_key=False),
}
_MODEL_ROUTE = Route("GET", Routes.accept_question)


def names_model(path: str) -> bool:
    """``/v1/models/ID``, and nothing that something on the way to an instance could read as another path."""
    return path.startswith(PASSED_GET_PREFIX) and not {".", ".."} & set(unquote(path).replace("\\", "/").split("/"))


def is_page(head: RequestHead) -> bool:
    """True if a person reads the page in a browser, which sends no bearer token by itself. Reading changes nothing."""
    return head.method in ("GET", "HEAD") and (head.path == PAGE or head.path.startswith(f"{PAGE}/"))


def check_key(head: RequestHead, key: str, *, by_password: bool = False) -> None:
    """Raises BadMessage where ``key`` is set and the request does not bring it, once.

    ``by_password``: it may also be the password of basic authentication, whatever the user's name is.
    """
    if not key:
        return
    scheme, token = read_authorization(head)
    if by_password and scheme == b"basic":
        scheme, token = b"bearer", read_password(token)
    if scheme != b"bearer" or not hmac.compare_digest(token, key.encode()):
        challenge = 'Basic realm="router", charset="UTF-8"' if by_password else "Bearer"
        raise BadMessage("key", WRONG_KEY, 401, headers=(("www-authenticate", challenge),))


def find_tenant(head: RequestHead, keys: ClientKeys) -> str:
    """Whose key the request brings. Raises BadMessage; a wrong key and none are told alike."""
    scheme, token = read_authorization(head)
    key = keys.find_key(token) if scheme == b"bearer" else None
    if key is not None and not has_expired(key, time.time()):
        return key.tenant
    text = WRONG_KEY if key is None else "the key has expired"
    raise BadMessage("key", text, 401, headers=(("www-authenticate", "Bearer"),))


def read_authorization(head: RequestHead) -> tuple[bytes, bytes]:
    """The scheme, in small letters, and what stands behind it; both empty unless the header comes once."""
    given = [value for name, value in head.headers if name == b"authorization"]
    scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
    return scheme.lower(), token


def read_password(credentials: bytes) -> bytes:
    """The password of basic authentication; empty without one."""
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def check_origin(head: RequestHead) -> None:
    """Raises BadMessage where a page of another address than the router's makes a browser send this."""
    if is_foreign_page(_read_text(head, b"origin"), _read_text(head, b"host")):
        raise BadMessage("origin", "a page of another address may not change anything here", 403)


def check_host(head: RequestHead, own: str) -> None:
    """For a router without keys, which listens at ``own``. Raises BadMessage where a page names it unsafely."""
    if is_unsafe_name(_read_text(head, b"origin"), _read_text(head, b"host"), own):
        text = "without a key, pages may change something here under an IP address or localhost only"
        raise BadMessage("host", text, 403)


def _read_text(head: RequestHead, name: bytes) -> str | None:
    value = head.get_header(name)
    return None if value is None else value.decode("latin-1")


class _GenerationChecks(ClientWork):
    """Answers the client when all instances have answered."""

    def __init__(self, client: ResponseWriter, count: int) -> None:
        self._client: ResponseWriter | None = client
        self._left = count
        self._failed = 0

    def on_response(self, call: WholeCall) -> None:
        self._left -= 1
        self._failed += call.failure is not None or call.status != 200
        if self._left or self._client is None:
            return
        if self._failed:
            self._client.send_error(503, "unhealthy", f"{self._failed} instance(s) did not generate")
        else:
            self._client.send_response(200)

    def on_disconnect(self, detail: str) -> None:
        self._client = None
