"""Clients that are slow, wrong, old or hostile; endpoints, keys, and streams cut at every place."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.relays import read_answer, request_bytes, run, setting

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.wire import messages as m

ASK = {"text": "hello"}
STREAM = ASK | {"stream": True}


@settings(max_examples=40)
@given(st.lists(st.integers(0, 2000), max_size=12), st.booleans())
def test_requests_in_any_pieces(cuts: list[int], chunks: bool) -> None:
    """Two requests on one connection, cut anywhere; as one body or in chunks."""

    async def scenario() -> None:
        async with setting("unified") as here:
            reader, writer = await here.connect()
            for number in range(2):
                fields = {"text": "x" * 50, "number": number}
                raw = chunked_request(fields) if chunks else request_bytes(fields)
                marks = sorted({cut % len(raw) for cut in cuts})
                for start, end in zip([0, *marks], [*marks, len(raw)], strict=True):
                    writer.write(raw[start:end])
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                assert (await read_answer(reader)).status == 200
            writer.close()
            assert [fields["number"] for fields in here.instances[0].bodies] == [0, 1]

    run(scenario)


def chunked_request(fields: Any) -> bytes:
    body = json.dumps(fields).encode()
    halves = [part for part in (body[:9], body[9:]) if part]
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(half), half) for half in halves) + b"0\r\n\r\n"


@settings(max_examples=30)
@given(st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=6), st.lists(st.integers(0, 600), max_size=12))
def test_streams_in_any_pieces(contents: list[bytes], cuts: list[int]) -> None:
    """Bytes of an instance's answer arrive in any pieces: the client gets them all, unchanged and in order."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    body = b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in contents) + b"0\r\n\r\n"

    async def scenario() -> None:
        async def instance(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            raw = head + body
            marks = sorted({cut % len(raw) for cut in cuts})
            for start, end in zip([0, *marks], [*marks, len(raw)], strict=True):
                writer.write(raw[start:end])
                await writer.drain()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            await reader.read()
            writer.close()

        server = await asyncio.start_server(instance, "127.0.0.1", 0)
        async with setting() as here:
            port = server.sockets[0].getsockname()[1]
            here.control.workers = (m.WorkerEntry(0, "127.0.0.1", port, "unified"),)
            here.relay.on_message(here.control.table())
            answer = await here.ask(STREAM)
            assert answer.body == b"".join(contents)
            assert here.ended()[0].output_bytes == len(body)
        server.close()

    run(scenario)


@settings(max_examples=60)
@given(st.binary(max_size=200))
def test_noise_never_reaches_an_instance(noise: bytes) -> None:
    async def scenario() -> None:
        async with setting("unified", config=RelayConfig(head_timeout_s=0.05, body_timeout_s=0.05)) as here:
            reader, writer = await here.connect()
            writer.write(noise + b"\r\n\r\n")
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 5)
            writer.close()
            assert here.instances[0].requests == []
            assert (await here.ask(ASK)).status == 200

    run(scenario)


LIMITS = RelayConfig(max_head_bytes=1024, max_body_bytes=100, max_headers=20)
REFUSED: dict[str, tuple[bytes, int]] = {
    "bad head": (b"nonsense\r\n\r\n", 400),
    "head too long": (b"POST /generate HTTP/1.1\r\nhost: x\r\na: " + b"x" * 2000, 431),
    "too many headers": (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 21 + b"\r\n", 431),
    "body too long": (b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 101\r\n\r\n", 413),
    "chunks too long": (
        b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nffffff\r\n", 413,
    ),
    "no such path": (request_bytes(ASK, "/v1/nothing"), 404),
    "wrong method": (request_bytes(None, method="GET"), 405),
    "no json": (request_bytes(b"hello"), 400),
    "reserved field": (request_bytes({"bootstrap_room": 1}), 400),
    "reserved header": (request_bytes(ASK, headers={"X-Data-Parallel-Rank": "1"}), 400),
    "override header": (request_bytes(ASK, headers={"x-override-bootstrap-host": "evil"}), 400),
    "our header": (request_bytes(ASK, headers={"x-pla-anything": "1"}), 400),
    "slo out of range": (request_bytes(ASK, headers={"x-slo-ttft-ms": "0"}), 400),
    "slo not a number": (request_bytes(ASK, headers={"x-slo-tpot-ms": "nan"}), 400),
    "priority": (request_bytes(ASK, headers={"x-priority": "1e3"}), 400),
    "tenant": (request_bytes(ASK, headers={"x-tenant-id": "a b"}), 400),
    "length of the answer": (request_bytes(ASK, headers={"x-answer-tokens": "0"}), 400),
    "compressed": (request_bytes(ASK, headers={"content-encoding": "gzip"}), 415),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused(name: str) -> None:
    raw, status = REFUSED[name]
    async with setting("unified", config=LIMITS) as here:
        reader, writer = await here.connect()
        writer.write(raw)
        answer = await read_answer(reader)
        assert answer.status == status
        assert answer.error["message"]
        assert here.instances[0].requests == []
        assert here.control.of(m.Ask) == []
        assert any(key.startswith("bad_requests_total") for key in here.relay.context.counters.values)
        writer.close()


async def test_a_client_that_still_sends_reads_why_it_is_refused() -> None:
    async with setting("unified", config=LIMITS) as here:
        reader, writer = await here.connect()
        writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 9000000\r\n\r\n")
        for _ in range(90):
            writer.write(b"x" * 100_000)
        assert (await read_answer(reader)).status == 413
        await here.until(lambda: here.relay.read_gauges()["client_connections"] == 0)
        writer.transport.abort()


async def test_headers_say_what_a_request_wants() -> None:
    async with setting("unified") as here:
        trace = f"00-{'a' * 32}-{'b' * 16}-01"
        wishes = {"x-slo-ttft-ms": "400", "x-slo-tpot-ms": "50.5", "x-priority": "-3", "traceparent": trace}
        await here.ask(STREAM | {"max_tokens": 7}, headers={**wishes, "authorization": "Bearer k", "x-session-id": "s"})
        [ask] = here.control.of(m.Ask)
        found = (
            ask.ttft_slo_ms,
            ask.tpot_slo_ms,
            ask.priority,
            ask.trace,
            ask.session,
            ask.output_tokens,
            ask.stream,
        )
        assert found == (400.0, 50.5, -3, trace, "s", 7, True)
        assert ask.tenant is not None
        assert "Bearer" not in ask.tenant
        assert here.instances[0].bodies[0]["priority"] == -3
        assert ask.answer_tokens is None
        stated = {"x-tenant-id": "acme", "authorization": "Bearer k", "x-answer-tokens": "1200"}
        await here.ask(ASK, headers=stated)
        assert here.control.of(m.Ask)[1].tenant == "acme"
        assert here.control.of(m.Ask)[1].answer_tokens == 1200


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "title": "\u00fc \u2028"}}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


async def test_the_openai_clients_fields_reach_the_instances_unchanged() -> None:
    """Tools, a JSON schema, logprobs, and whatever else the router knows nothing of."""
    from openai import AsyncOpenAI

    async with setting("prefill", "decode") as here:
        url = f"http://127.0.0.1:{here.relay.listener.port}/v1"
        fields: dict[str, Any] = {
            "model": "m",
            "messages": [{"role": "user", "content": "\u00fc \U0001f600"}],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "look_up"}},
            "response_format": SCHEMA,
            "logprobs": True,
            "top_logprobs": 3,
        }
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=10) as client:
            await client.chat.completions.create(**fields, extra_body={"chat_template_kwargs": {"thinking": True}})
        wanted = fields | {"chat_template_kwargs": {"thinking": True}}
        for one in here.instances:
            assert {name: one.bodies[0][name] for name in wanted} == wanted
            added = set(one.bodies[0]) - set(wanted)
            assert added == {"rid", "bootstrap_host", "bootstrap_port", "bootstrap_room"}


@pytest.mark.parametrize("body", [ASK, STREAM])
async def test_an_old_client_gets_an_answer_that_it_can_read(body: dict[str, Any]) -> None:
    async with setting("unified") as here:
        reader, writer = await here.connect()
        writer.write(request_bytes(body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        raw = await asyncio.wait_for(reader.read(), 5)
        head, _, content = raw.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert content.startswith(b"data: {" if body is STREAM else b"{")
        assert content.endswith(b"[DONE]\n\n" if body is STREAM else b"}")
        writer.close()


async def test_expect_continue() -> None:
    async with setting("unified") as here:
        reader, writer = await here.connect()
        head, _, body = request_bytes(ASK, headers={"Expect": "100-continue"}).partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await read_answer(reader)).status == 200
        writer.close()


async def test_what_is_about_the_clients_connection_stays_here() -> None:
    async with setting("unified") as here:
        for options in ("keep-alive", "Keep-Alive, X-Mine"):
            headers = {"connection": options, "x-mine": "1", "x-yours": "2", "keep-alive": "timeout=5"}
            assert (await here.ask(ASK, headers=headers)).status == 200
        first, second = ({name for name, _ in one.headers} for one, _ in here.instances[0].requests)
        assert first - second == {b"x-mine"}
        assert not {b"connection", b"keep-alive"} & first


async def test_keys() -> None:
    config = RelayConfig(api_key="users", admin_key="root")
    async with setting("unified", config=config) as here:
        right = {"authorization": "Bearer users"}
        assert (await here.ask(ASK)).status == 401
        assert (await here.ask(ASK, headers={"authorization": "Bearer user"})).status == 401
        assert (await here.ask(ASK, headers=right)).status == 200
        seen = {name for name, _ in here.instances[0].requests[0][0].headers}
        assert b"authorization" not in seen, "the router's key is not the instances' matter"
        for path in ("/pla/state", "/workers", "/workers/3/drain"):
            assert (await here.ask(None, path, method="GET", headers=right)).status == 401
            admin = await here.ask(None, path, method="GET", headers={"authorization": "Bearer root"})
            assert json.loads(admin.body)["path"] == path
        assert (await here.ask(None, "/metrics", method="GET")).status == 200
        assert (await here.ask(None, "/health", method="GET")).status == 200
    async with setting("unified", config=RelayConfig(api_key="users")) as here:  # then it is the operators' as well
        assert (await here.ask({"url": "http://127.0.0.1:1"}, "/workers")).status == 401
        assert (await here.ask(None, "/workers", method="GET", headers=right)).status == 200


async def test_what_any_instance_can_answer() -> None:
    async with setting("prefill", "decode") as here:
        answers = [await here.ask(None, "/v1/models", method="GET") for _ in range(4)]
        assert [(answer.status, answer.body) for answer in answers] == [(200, b"{}")] * 4
        assert [len(one.requests) for one in here.instances] == [2, 2]
        health = await here.ask(None, "/health_generate", method="GET")
        assert health.status == 200
        assert [one.requests[-1][0].target for one in here.instances] == [b"/health_generate"] * 2
        await here.instances[1].stop()
        assert (await here.ask(None, "/health_generate", method="GET")).status == 503
        here.control.workers = ()
        here.relay.on_message(here.control.table())
        assert (await here.ask(None, "/health", method="GET")).status == 503
        nobody = await here.ask(None, "/v1/models", method="GET")
        assert (nobody.status, nobody.headers["retry-after"]) == (503, "1")


def test_settings_check_themselves() -> None:
    for bad in ({"port": 70_000}, {"head_timeout_s": 0.0}, {"connect_attempts": 0}, {"max_body_bytes": 0}):
        with pytest.raises(ConfigError, match="--" + next(iter(bad)).replace("_", "-")):
            RelayConfig(**bad)


@pytest.mark.parametrize("path", ["/health", "/generate", "/nowhere", "/v1/models", "/metrics", "/openapi.json"])
async def test_an_answer_to_head_has_no_body(path: str) -> None:
    """Its client takes what follows the head for the beginning of the next answer."""
    async with setting("unified") as here:
        reader, writer = await here.connect()
        writer.write(request_bytes(None, path, method="HEAD"))
        answer = await read_answer(reader, method="HEAD")
        assert answer.status == {"/health": 200, "/generate": 405, "/nowhere": 404}.get(path, 200)
        writer.write(request_bytes(None, "/health", method="GET"))
        assert (await read_answer(reader, method="GET")).status == 200
        writer.close()
