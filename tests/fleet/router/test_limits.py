"""What a client may take: time, bytes, connections; and what the router writes down of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import Script
from support.loop_time import LoopTime
from support.relays import read_answer, request_bytes, setting

from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.wire import messages as m

ASK = {"text": "hello"}
STREAM = ASK | {"stream": True}


async def test_slow_clients_are_not_waited_for() -> None:
    limits = RelayConfig(head_timeout_s=0.3, body_timeout_s=0.3, idle_timeout_s=0.3)
    async with setting("unified", config=limits) as here:
        for sent, status in [
            (b"POST /gen", b"408"),
            (b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{", b"408"),
            (b"", b""),
        ]:
            reader, writer = await here.connect()
            writer.write(sent)
            async with LoopTime() as ran:
                assert status in await asyncio.wait_for(reader.read(), 20)
            assert ran.seconds < 2
            writer.close()
        reader, writer = await here.connect()  # a drop every now and then is no better
        answer = asyncio.ensure_future(reader.read())
        for byte in request_bytes(ASK)[:60]:
            if not answer.done():
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)
        assert b"408" in await asyncio.wait_for(answer, 5)
        writer.close()
        assert here.instances[0].requests == []


@pytest.mark.parametrize("chunks", [False, True])
async def test_a_body_in_drops_is_not_waited_for(chunks: bool) -> None:
    """Each byte comes in time, the body never does."""
    async with setting("unified", config=RelayConfig(body_timeout_s=0.3)) as here:
        reader, writer = await here.connect()
        length = "transfer-encoding: chunked" if chunks else "content-length: 100000"
        writer.write(f"POST /generate HTTP/1.1\r\nhost: x\r\n{length}\r\n\r\n".encode())
        answer = asyncio.ensure_future(reader.read())
        async with LoopTime() as ran:
            while not answer.done() and ran.seconds < 3:
                writer.write(b"1\r\n{\r\n" if chunks else b"{")
                await asyncio.sleep(0.05)
            assert b"408" in await answer
        assert ran.seconds < 2
        writer.close()


async def test_a_long_body_may_take_longer_than_its_time_limit() -> None:
    """As long as it comes on."""
    now_s = 100.0
    async with setting("unified", config=RelayConfig(body_timeout_s=0.5), now_s=lambda: now_s) as here:
        reader, writer = await here.connect()
        raw = request_bytes({"text": "x" * 200_000})
        for end in range(20_000, len(raw), 20_000):
            writer.write(raw[end - 20_000 : end])
            await here.until(lambda end=end: here.relay.read_gauges()["buffered_bytes"] > end - 1000)
            now_s += 0.4
        writer.write(raw[end:])
        assert (await read_answer(reader)).status == 200
        writer.close()


async def test_bodies_on_their_way_are_bounded_together() -> None:
    async with setting("unified", config=RelayConfig(max_buffered_bytes=1000)) as here:
        writers = []
        for _ in range(2):
            reader, writer = await here.connect()
            writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n" + b"x" * 600)
            writers.append((reader, writer))
            await here.until(lambda: here.relay.read_gauges()["buffered_bytes"] > 0)
        assert b"503" in await asyncio.wait_for(writers[1][0].read(), 5)
        writers[0][1].close()
        await here.until(lambda: here.relay.read_gauges()["buffered_bytes"] == 0)
        writers[1][1].close()


async def test_connections_are_bounded() -> None:
    async with setting("unified", config=RelayConfig(max_connections=2)) as here:
        held = [await here.connect() for _ in range(2)]
        await here.until(lambda: here.relay.read_gauges()["client_connections"] == 2)
        reader, writer = await here.connect()
        assert await asyncio.wait_for(reader.read(), 5) == b""
        for _, other in [*held, (reader, writer)]:
            other.close()


async def test_the_access_log_has_one_line_a_request(tmp_path: Any) -> None:
    log = tmp_path / "access.jsonl"
    async with setting("unified", config=RelayConfig(access_log=str(log)), scripts={0: Script(events=3)}) as here:
        await here.ask(STREAM | {"text": "secret words"})
        await here.ask(STREAM)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["rid"] for line in lines] == [ended.rid for ended in here.ended()]
    assert (lines[0]["outcome"], lines[0]["events"], lines[0]["decode"]) == ("ok", 4, 0)
    assert 0 < lines[0]["first_byte_ms"] <= lines[0]["duration_ms"]
    assert "secret" not in log.read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
async def test_a_full_disk_costs_lines_of_the_log_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """Time limits go on: they share a timer with the log."""
    limits = RelayConfig(access_log="/dev/full", first_byte_timeout_s=0.5)
    async with setting("unified", config=limits) as here:
        assert (await here.ask(ASK)).status == 200
        await asyncio.sleep(1.3)  # written once a second
        here.instances[0].script.first_s = 30
        assert (await here.ask(ASK)).status == 504
        await here.until(lambda: here.control.of(m.RelayReport)[-1].counters["access_lines_lost_total"] == 2)
    assert len([one for one in caplog.records if "access log" in one.message]) == 1


@pytest.mark.parametrize("path", ["/generate", "/tokenize"])
async def test_bodies_that_wait_for_an_instance_are_bounded_together(path: str) -> None:
    """Complete ones: nobody says where the first goes. There is room again at its end, whatever came after it."""
    config = RelayConfig(max_buffered_bytes=1000)
    async with setting("unified", config=config, answer=lambda ask: None) as here:
        _, writer = await here.connect()
        writer.write(request_bytes({"text": "x" * 600}))
        await here.until(lambda: here.relay.read_gauges()["buffered_bytes"] > 600)
        refused = await here.ask({"text": "x" * 600}, path)
        assert (refused.status, refused.error["type"]) == (503, "buffers_full")
        assert refused.headers["retry-after"] == "1"
        writer.close()
        await here.until(lambda: here.relay.read_gauges()["buffered_bytes"] == 0)
        assert (await here.ask({"text": "x" * 600}, "/tokenize")).status == 200


async def test_a_body_that_was_sent_waits_for_nothing() -> None:
    async with setting("unified", scripts={0: Script(first_s=30)}) as here:
        _, writer = await here.connect()
        writer.write(request_bytes(ASK))
        await here.until(lambda: here.instances[0].requests)
        assert here.relay.read_gauges()["buffered_bytes"] == 0
        writer.close()
