"""What a client may not do: steer the router, reach what it does not serve, or hold it up half-open."""

from __future__ import annotations

import base64
import json
import socket
from typing import Any

import pytest
from fake_sglang import FakeSglang, Rooms
from support.relays import Setting, read_answer, request_bytes, setting

from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.http.json_body import RESERVED_FIELDS
from pla_sglang.fleet.router.relay import client_connection as front
from pla_sglang.fleet.router.wire import messages as m

ASK: dict[str, Any] = {"text": "hello"}
PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", sorted(RESERVED_FIELDS))
async def test_reserved_fields_are_refused_at_every_endpoint(path: str, name: str) -> None:
    values: tuple[Any, ...] = (1, "evil", None, [1], {})
    async with setting("prefill", "decode") as here:
        for value in values:
            answer = await here.ask(ASK | {name: value}, path)
            assert (answer.status, answer.error["type"]) == (400, "reserved_field"), value
        assert name in answer.error["message"]
        assert [one.requests for one in here.instances] == [[], []]
        assert here.control.of(m.Ask) == []


STEERS = ("host", "x-forwarded-host", "x-forwarded-for", "forwarded", "x-real-ip", "x-original-url", "x-rewrite-url")


@pytest.mark.parametrize("name", STEERS)
async def test_no_header_becomes_an_address(name: str) -> None:
    """Each names an instance that would answer; it hears nothing, and the listed ones get their own addresses."""
    async with setting("prefill", "decode") as here, FakeSglang(number=9, rooms=Rooms()) as decoy:
        there = f"127.0.0.1:{decoy.port}"
        value = f"host={there}" if name == "forwarded" else there
        headers = [(key, value) for key in (name,)] + ([] if name == "host" else [("host", "router")])
        lines = "".join(f"{key}: {text}\r\n" for key, text in headers)
        body = json.dumps(ASK)
        raw = f"POST /generate?host={there} HTTP/1.1\r\n{lines}content-length: {len(body)}\r\n\r\n{body}"
        reader, writer = await here.connect()
        writer.write(raw.encode())
        assert (await read_answer(reader)).status == 200
        writer.close()
        check_addresses(here, decoy)


@pytest.mark.parametrize(
    "target", ["http://127.0.0.1:{port}/generate", "127.0.0.1:{port}", "//127.0.0.1:{port}/x", "*"]
)
async def test_no_target_becomes_an_address(target: str) -> None:
    async with setting("prefill", "decode") as here, FakeSglang(number=9) as decoy:
        raw = request_bytes(ASK).replace(b"/generate", target.format(port=decoy.port).encode(), 1)
        for method in (b"POST", b"GET", b"CONNECT"):
            reader, writer = await here.connect()
            writer.write(raw.replace(b"POST", method, 1))
            served = target.startswith("http:") and method == b"POST"  # by those that are listed
            assert (await read_answer(reader)).status in ((200,) if served else (400, 404, 405))
            writer.close()
        check_addresses(here, decoy)


def check_addresses(here: Setting, decoy: FakeSglang) -> None:
    assert decoy.connections == 0
    for one in here.instances:
        for request, _ in one.requests:
            hosts = [value for name, value in request.headers if name == b"host"]
            assert hosts == [f"127.0.0.1:{one.port}".encode()]


@pytest.mark.parametrize(
    "path",
    [
        *("/abort_request", "/flush_cache", "/update_weights_from_disk", "/start_profile", "/set_internal_state"),
        *("/v1/models/../../flush_cache", "/v1/models/%2e%2e/flush_cache", "/v1/models/..%2fflush_cache"),
        *("/v1/models/..%5cflush_cache", "/generate/", "/Generate", "/health/../flush_cache", "/%67enerate"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_what_is_not_served_does_not_reach_an_instance(path: str, method: str) -> None:
    async with setting("unified") as here:
        answer = await here.ask(ASK if method == "POST" else None, path, method=method)
        assert answer.status in (404, 405)
        assert here.instances[0].requests == []


ADMIN = [
    ("GET", "/workers"),
    ("POST", "/workers"),
    ("DELETE", "/workers/0"),
    ("POST", "/workers/0/drain"),
    ("GET", "/pla/state"),
    ("GET", "/pla/ledger"),
    ("GET", "/pla/explain/r"),
]
WRONG = [None, "Bearer users", "Bearer roo", "Bearer root ", "Bearer root root", "root", "Basic root", "Bearer rööt"]


@pytest.mark.parametrize(("method", "path"), ADMIN)
async def test_operators_need_their_key(method: str, path: str) -> None:
    async with setting("unified", config=RelayConfig(api_key="users", admin_key="root")) as here:
        for key in WRONG:
            headers = {} if key is None else {"authorization": key}
            refused = await here.ask({"url": "http://127.0.0.1:1"}, path, method=method, headers=headers)
            stripped = key is not None and key.strip() == "Bearer root"  # blanks around a value are not part of it
            assert refused.status == (200 if stripped else 401), key
            assert stripped or refused.headers["www-authenticate"] == "Bearer"
        asked = len(here.control.of(m.AdminAsk))
        assert asked == 1
        for key in ("Bearer root", "bearer root"):
            right = await here.ask(None, path, method=method, headers={"authorization": key})
            assert json.loads(right.body)["path"] == path


def basic(password: str, user: str = "me") -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


async def test_the_key_is_the_password_of_the_page_and_of_nothing_else() -> None:
    wrong = [
        *WRONG[:-1],
        basic("users"),
        basic("roo"),
        basic("root", "me:"),
        "Basic root",
        "Basic =",
        "Basic",
        "basic bWU=",
    ]
    async with setting("unified", config=RelayConfig(api_key="users", admin_key="root")) as here:
        for path in ("/pla/view", "/pla/view/since/0"):
            for key in [text for text in wrong if text is None or text.strip() != "Bearer root"]:
                refused = await here.ask(None, path, method="GET", headers={"authorization": key} if key else {})
                assert (refused.status, refused.headers["www-authenticate"][:6]) == (401, "Basic "), key
            for key in (basic("root"), basic("root", ""), "Bearer root"):
                right = await here.ask(None, path, method="GET", headers={"authorization": key})
                assert json.loads(right.body)["path"] == path
        asked = len(here.control.of(m.AdminAsk))
        # A browser adds a password by itself, wherever the request comes from: it may change nothing.
        for method, path in (*ADMIN, ("POST", "/pla/view"), ("GET", "/pla/viewer"), ("GET", "/pla/state")):
            refused = await here.ask(None, path, method=method, headers={"authorization": basic("root")})
            assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer"), path
        assert len(here.control.of(m.AdminAsk)) == asked


async def test_the_kernel_ends_half_open_connections() -> None:
    """A client that vanishes without a word: no packet ever says so, only silence does."""
    async with setting("unified") as here:
        _, writer = await here.connect()
        await here.until(lambda: here.relay.listener._connections)
        [client] = here.relay.listener._connections
        assert client._transport is not None
        sock = client._transport.get_extra_info("socket")
        found = [
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
            sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
            sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
            sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
        ]
        intervals = [
            front.KEEPALIVE_IDLE_S,
            front.KEEPALIVE_INTERVAL_S,
            front.KEEPALIVE_COUNT,
        ]
        assert found == [1, *intervals, front.USER_TIMEOUT_MS]
        assert front.KEEPALIVE_IDLE_S + front.KEEPALIVE_INTERVAL_S * front.KEEPALIVE_COUNT <= 60
        writer.close()


async def test_a_client_that_closes_its_half_is_gone() -> None:
    """Nobody who closes waits for an answer; its instances are freed."""
    async with setting("prefill", "decode") as here:
        here.instances[0].script.first_s = 30
        _, writer = await here.connect()
        writer.write(request_bytes(ASK))
        await here.until(lambda: all(one.held for one in here.instances))
        writer.write_eof()
        [ended] = await here.until(here.ended)
        assert ended.outcome is m.Outcome.CLIENT_GONE
        await here.until(lambda: not any(one.held for one in here.instances))
        writer.close()


async def test_many_idle_clients_leave_room_for_others() -> None:
    """Slow-loris: connections that send nothing, or a byte, are closed; nobody else notices them."""
    limits = RelayConfig(head_timeout_s=0.4, max_connections=64)
    async with setting("unified", config=limits) as here:
        held = [await here.connect() for _ in range(60)]
        for _, writer in held[::2]:
            writer.write(b"P")
        assert (await here.ask(ASK)).status == 200
        await here.until(lambda: here.relay.read_gauges()["client_connections"] <= 1)
        assert (await here.ask(ASK)).status == 200
        for _, writer in held:
            writer.close()
