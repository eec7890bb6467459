"""What a client without the key, or with bad intent, may cost: nothing before its head was found good, little after."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any

import pytest
from fake_sglang import Script
from support.lone_connection import LoneConnection
from support.relays import read_answer, request_bytes, setting

from pla_sglang.common.checks import describe_bad_ms
from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.http import json_body
from pla_sglang.fleet.router.http.head import BadMessage, RequestHead
from pla_sglang.fleet.router.relay import client_connection, routes
from pla_sglang.fleet.router.wire import messages as m

ASK: dict[str, Any] = {"text": "hello"}
KEYS = RelayConfig(api_key="users", admin_key="root")
RIGHT = {"authorization": "Bearer users"}


def head_of(path: str = "/generate", *lines: str, method: str = "POST", version: str = "1.1") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", "host: x", *lines, "", ""]).encode()


# -- the head is judged first ------------------------------------------------------------------------------------------

FROM_THE_HEAD = {
    "no key": (head_of("/generate", "content-length: 8000000"), 401),
    "no key, chunks": (head_of("/generate", "transfer-encoding: chunked"), 401),
    "no such path": (head_of("/nope", "content-length: 8000000", "authorization: Bearer users"), 404),
    "another method": (head_of("/generate", "content-length: 8000000", method="PUT"), 405),
    "no key for operators": (head_of("/workers", "content-length: 8000000"), 401),
    "a long body of an operator": (
        head_of("/workers", "content-length: 65537", "authorization: Bearer root", "content-type: application/json"),
        413,
    ),
    "a long body of a scrape": (head_of("/metrics", "content-length: 60000000", method="GET"), 413),
    "a long body of a list": (
        head_of("/v1/models", "content-length: 65537", "authorization: Bearer users", method="GET"),
        413,
    ),
    "our header": (head_of("/generate", "content-length: 9", "authorization: Bearer users", "x-pla-a: 1"), 400),
}


@pytest.mark.parametrize("name", FROM_THE_HEAD)
@pytest.mark.parametrize("expects", [False, True])
async def test_a_request_is_refused_from_its_head(name: str, expects: bool) -> None:
    """Before 100 Continue, and before a byte of its body; nothing of it is counted as buffered."""
    head, status = FROM_THE_HEAD[name]
    if expects:
        head = head[:-2] + b"expect: 100-continue\r\n\r\n"
    async with setting("unified", config=KEYS) as here:
        reader, writer = await here.connect()
        writer.write(head)
        raw = await asyncio.wait_for(reader.read(), 5)
        assert raw.startswith(b"HTTP/1.1 %d " % status), raw
        assert b"connection: close" in raw
        assert here.relay.read_gauges()["buffered_bytes"] == 0
        writer.close()
        assert here.instances[0].requests == []
        assert here.control.of(m.AdminAsk) == []


async def test_a_refused_request_whose_body_is_here_leaves_the_connection() -> None:
    async with setting("unified", config=KEYS) as here:
        reader, writer = await here.connect()
        writer.write(request_bytes(ASK) + request_bytes(ASK, headers=RIGHT))
        statuses = [(await read_answer(reader)).status]  # its reader takes what is there, so one write for both
        data = b""
        while b'"w0"' not in data and len(statuses) == 1:
            data += await asyncio.wait_for(reader.read(1 << 16), 5)
        assert statuses == [401]
        assert data.startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_an_old_client_is_not_told_to_continue() -> None:
    async with setting("unified") as here:
        reader, writer = await here.connect()
        head, _, body = request_bytes(ASK, headers={"Expect": "100-continue"}).partition(b"\r\n\r\n")
        writer.write(head.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n\r\n")
        await asyncio.sleep(0.05)
        writer.write(body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


@pytest.mark.parametrize("streams", [False, True])
async def test_an_old_client_is_told_that_its_connection_stays(streams: bool) -> None:
    """Or it waits for the end of the connection, which is the end of the answer for it."""
    async with setting("unified") as here:
        raw = request_bytes(ASK | {"stream": streams}, headers={"connection": "keep-alive"})
        for request in (raw, request_bytes(None, "/health", method="GET", headers={"connection": "keep-alive"})):
            reader, writer = await here.connect()
            writer.write(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            # A stream of chunks has no end that such a client could see but the connection's.
            assert (b"connection: close" if streams and request is raw else b"connection: keep-alive") in head
            writer.close()


# -- what a connection may cost ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("segment_chunks", [1, 10_000])
async def test_small_chunks_cost_what_they_hold(segment_chunks: int) -> None:
    """Each in a segment of its own, and many in one: what is kept is what is counted."""
    chunks = 100_000
    lone = LoneConnection()
    lone.connection.data_received(head_of("/generate", "transfer-encoding: chunked"))
    segment = b"2\r\nab\r\n" * segment_chunks
    tracemalloc.start()
    for _ in range(chunks // segment_chunks):
        lone.connection.data_received(segment)
    kept_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert lone.context.incoming.held_bytes == 2 * chunks
    assert kept_bytes < 1.2 * 2 * chunks
    lone.connection.data_received(b"0\r\n\r\n")
    assert [body for _, body in lone.requests] == [b"ab" * chunks]
    assert lone.context.incoming.held_bytes == 0


@pytest.mark.parametrize("piece_bytes", [1, 2, 4096])
async def test_blank_lines_in_front_count_against_the_limit_of_heads(piece_bytes: int) -> None:
    lone = LoneConnection()
    blank = b"\r\n" * (lone.config.max_head_bytes // 2 + 1)
    for start in range(0, len(blank), piece_bytes):
        lone.connection.data_received(blank[start : start + piece_bytes])
    assert lone.transport.written.startswith(b"HTTP/1.1 431 ")


async def test_some_blank_lines_in_front_are_skipped() -> None:
    lone = LoneConnection()
    for piece in (b"\r", b"\n\r\n", b"\r\n" * 100 + b"GET /a HT", b"TP/1.1\r\nhost: x\r\n\r\n"):
        lone.connection.data_received(piece)
    assert [body for _, body in lone.requests] == [b""]


async def test_a_client_that_sends_far_ahead_and_leaves_is_noticed() -> None:
    async with setting("unified", scripts={0: Script(first_s=30)}) as here:
        _, writer = await here.connect()
        writer.write(request_bytes(ASK) + b"x" * (client_connection.PIPELINE_BYTES + 5_000))
        await here.until(lambda: here.instances[0].held)
        writer.close()
        [ended] = await here.until(here.ended)
        assert ended.outcome is m.Outcome.CLIENT_GONE


async def test_a_client_that_sends_too_far_ahead_gets_its_answer_and_no_other() -> None:
    async with setting("unified", scripts={0: Script(first_s=0.2)}) as here:
        reader, writer = await here.connect()
        writer.write(request_bytes(ASK) + request_bytes(ASK | {"text": "x" * client_connection.PIPELINE_BYTES}))
        raw = await asyncio.wait_for(reader.read(), 5)
        assert raw.count(b"HTTP/1.1 200 ") == 1
        assert b"connection: close" in raw
        assert len(here.instances[0].bodies) == 1
        writer.close()


async def test_a_client_that_sends_without_end_is_cut() -> None:
    async with setting("unified", scripts={0: Script(first_s=30)}) as here:
        _, writer = await here.connect()
        writer.write(request_bytes(ASK))
        await here.until(lambda: here.instances[0].held)
        writer.write(b"x" * (client_connection.DROPPED_BYTES + 500_000))
        [ended] = await here.until(here.ended)
        assert ended.outcome is m.Outcome.CLIENT_GONE
        assert here.relay.context.counters.values["client_floods_total"] == 1
        writer.transport.abort()


# -- what a request may say --------------------------------------------------------------------------------------------

TWICE = [
    "authorization",
    "x-slo-ttft-ms",
    "x-slo-tpot-ms",
    "x-priority",
    "x-tenant-id",
    "x-session-id",
    "x-answer-tokens",
]


@pytest.mark.parametrize("name", TWICE)
async def test_a_header_that_is_acted_on_comes_once(name: str) -> None:
    async with setting("unified") as here:
        raw = request_bytes(ASK).replace(b"\r\n\r\n", f"\r\n{name}: 5\r\n{name}: 6\r\n\r\n".encode(), 1)
        reader, writer = await here.connect()
        writer.write(raw)
        assert (await read_answer(reader)).status == 400
        writer.close()
        assert here.instances[0].requests == []


@pytest.mark.parametrize("value", ["1_000", "1e3", "0x10", "+5", "", "1.", " 7 "])
async def test_a_target_is_written_in_digits(value: str) -> None:
    async with setting("unified") as here:
        answer = await here.ask(ASK, headers={"x-slo-ttft-ms": value})
        assert answer.status == (200 if value in ("1.", " 7 ") else 400)


async def test_a_bad_target_is_refused_in_the_words_of_an_instance() -> None:
    async with setting("unified") as here:
        answer = await here.ask(ASK, headers={"x-slo-ttft-ms": "soon"})
        assert answer.error["message"] == describe_bad_ms("header x-slo-ttft-ms", "soon")
        assert answer.error["message"].endswith("a number of milliseconds from 1 to 3600000, got 'soon'")


@pytest.mark.parametrize("blanks", [0, 63, 64, 65, 70, 5000])
def test_blanks_in_an_empty_object(blanks: int) -> None:
    front, rest = json_body.with_members(b"{" + b" " * blanks + b"}", b'"rid":"r"')
    assert json.loads(front + bytes(rest)) == {"rid": "r"}


async def test_names_of_prompts_are_used_once_at_a_time() -> None:
    async with setting("unified", scripts={0: Script(first_s=0.3)}) as here:
        batch = {"text": ["a", "b"], "rid": ["first-of-all", "second"]}
        open_request = asyncio.ensure_future(here.ask(batch))
        await here.until(lambda: here.relay.requests)
        for rid in ("second", ["third", "first-of-all"]):
            refused = await here.ask(ASK | {"rid": rid})
            assert (refused.status, refused.error["type"]) == (409, "rid_in_use")
        assert (await open_request).status == 200
        assert (await here.ask(batch)).status == 200


# -- operators' requests -----------------------------------------------------------------------------------------------

NEW = {"url": "http://127.0.0.1:1"}
CHANGES = {
    "json": ({"content-type": "application/json; charset=utf-8"}, 200),
    "curl's own": ({"content-type": "application/x-www-form-urlencoded"}, 200),
    "no type": ({}, 200),
    "text": ({"content-type": "text/plain"}, 415),
    "form": ({"content-type": "multipart/form-data; boundary=x"}, 415),
    "page of another address": ({"content-type": "application/json", "origin": "http://evil.example"}, 403),
    "page of a file": ({"origin": "null"}, 403),
    "page whose name leads to the router": ({"origin": "http://Router"}, 403),
}


@pytest.mark.parametrize("path", ["/workers", "/workers/"])
@pytest.mark.parametrize("name", CHANGES)
async def test_a_web_page_cannot_add_a_worker(name: str, path: str) -> None:
    headers, status = CHANGES[name]
    async with setting("unified") as here:
        assert (await here.ask(NEW, path, headers=headers)).status == status
        drained = await here.ask(None, "/workers/0/drain", headers=headers)
        assert drained.status == (403 if status == 403 else 200)
        assert (await here.ask(None, "/workers", method="GET", headers=headers)).status == 200
        assert len(here.control.of(m.AdminAsk)) == 1 + (status == 200) + (status != 403)


@pytest.mark.parametrize(
    ("host", "key", "status"),
    [
        ("127.0.0.1:30000", "", 200),
        ("[::1]:30000", "", 200),
        ("LOCALHOST", "", 200),
        ("evil.example:30000", "", 403),
        ("127.0.0.1.evil.example", "", 403),
        ("router.example", "k", 200),
    ],
)
async def test_a_page_of_the_routers_own_address(host: str, key: str, status: int) -> None:
    """Whoever owns a name may let it lead to the router, and then its page has the router's origin (DNS rebinding)."""
    async with setting("unified", config=RelayConfig(admin_key=key)) as here:
        lines = f"POST /workers HTTP/1.1\r\nhost: {host}\r\norigin: http://{host}\r\nauthorization: Bearer k"
        reader, writer = await here.connect()
        writer.write(f"{lines}\r\ncontent-length: 2\r\n\r\n{{}}".encode())
        assert (await read_answer(reader)).status == status
        writer.close()
        assert len(here.control.of(m.AdminAsk)) == (status == 200)


async def test_only_a_post_takes_its_body_to_the_control_plane() -> None:
    async with setting("unified") as here:
        for method in ("GET", "HEAD", "DELETE", "POST"):
            raw = request_bytes(b"{}", "/pla/state", method=method)
            reader, writer = await here.connect()
            writer.write(raw)
            assert (await read_answer(reader, method=method)).status == 200
            writer.close()
        asks = [(ask.method, ask.body) for ask in here.control.of(m.AdminAsk)]
        assert asks == [("GET", b""), ("GET", b""), ("DELETE", b""), ("POST", b"{}")]


def test_no_key_is_compared_where_there_is_none() -> None:
    routes.check_key(RequestHead(("GET", b"/", "/", 1), []), "")
    for headers in ([], [(b"authorization", b"Bearer k")] * 2, [(b"authorization", b"k")]):
        with pytest.raises(BadMessage):
            routes.check_key(RequestHead(("GET", b"/", "/", 1), headers), "k")
