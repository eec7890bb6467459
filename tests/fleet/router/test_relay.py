"""A relay between real sockets: dispatch, streams, pairs, failures, disconnects, limits."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from fake_sglang import Script, end_of_words
from support.relays import read_answer, request_bytes, setting

from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.wire import messages as m

ASK = {"text": "hello", "sampling_params": {"max_new_tokens": 4}}
STREAM = ASK | {"stream": True}
PAIR = ("prefill", "decode")


async def test_a_unified_instance_answers() -> None:
    async with setting("unified") as here:
        answer = await here.ask(ASK, headers={"X-Mine": "kept", "Connection": "keep-alive"})
        assert (answer.status, json.loads(answer.body)["text"]) == (200, "w0")
        rid = here.ended()[0].rid
        assert answer.headers["x-request-id"] == rid
        request, body = here.instances[0].requests[0]
        assert json.loads(body) == ASK | {"rid": rid}
        headers = {name.decode(): value.decode() for name, value in request.headers}
        assert headers["x-mine"] == "kept"
        assert headers["host"] == f"127.0.0.1:{here.instances[0].port}"
        assert headers["traceparent"] == here.control.of(m.Ask)[0].trace
        assert "connection" not in headers
        assert [progress.milestone for progress in here.control.of(m.Progress)] == [
            m.Milestone.SENT,
            m.Milestone.FIRST_TOKEN,
        ]
        assert here.ended()[0].outcome is m.Outcome.OK


@pytest.mark.parametrize("kinds", [("unified",), PAIR])
async def test_a_stream_is_passed_on(kinds: tuple[str, ...]) -> None:
    async with setting(*kinds, scripts={len(kinds) - 1: Script(events=5, gap_s=0.01)}) as here:
        answer = await here.ask(STREAM)
        assert answer.events == [*(json.dumps({"text": f"w{index}"}) for index in range(5)), "[DONE]"]
        [ended] = here.ended()
        assert (ended.outcome, ended.events, ended.aborted) == (m.Outcome.OK, 6, ())
        assert ended.first_s is not None


async def test_a_pair_gets_one_room() -> None:
    async with setting(*PAIR) as here:
        answer = await here.ask(b" {} ")
        assert answer.status == 200
        prefill, decode = (one.bodies[0] for one in here.instances)
        assert prefill == decode
        assert {name: prefill[name] for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room")} == {
            "bootstrap_host": "10.0.0.9",
            "bootstrap_port": 8998,
            "bootstrap_room": 1000,
        }
        await here.until(lambda: not here.instances[0].held)
        milestones = [progress.milestone for progress in here.control.of(m.Progress)]
        assert milestones[0] is m.Milestone.SENT
        assert m.Milestone.FIRST_TOKEN in milestones


async def test_connections_are_used_again() -> None:
    async with setting(*PAIR) as here:
        reader, writer = await here.connect()
        for _ in range(20):
            writer.write(request_bytes(ASK))
            assert (await read_answer(reader)).status == 200
        writer.close()
        assert [one.connections for one in here.instances] == [1, 1]


async def test_pipelined_requests_are_answered_in_turn() -> None:
    async with setting("unified") as here:
        reader, writer = await here.connect()
        writer.write(b"\r\n" + request_bytes(ASK | {"rid": "first"}) + request_bytes(ASK | {"rid": "second"}))
        data = b""
        while data.count(b'"w0"') < 2:
            data += await reader.read(1 << 16)
        assert data.index(b"first") < data.index(b"second")
        writer.close()


GONE = [("unified",), PAIR]


@pytest.mark.parametrize("kinds", GONE)
@pytest.mark.parametrize("body", [ASK, STREAM])
async def test_a_client_that_goes_frees_the_instances(kinds: tuple[str, ...], body: dict[str, Any]) -> None:
    slow = {0: Script(first_s=30), 1: Script(gap_s=30)}
    async with setting(*kinds, scripts=slow) as here:
        _, writer = await here.connect()
        writer.write(request_bytes(body))
        await here.until(lambda: all(one.held for one in here.instances))
        writer.close()
        await here.until(lambda: not any(one.held for one in here.instances))
        [ended] = here.ended()
        assert ended.outcome is m.Outcome.CLIENT_GONE
        assert sorted(ended.aborted) == list(range(len(kinds)))
        await here.until(lambda: all(ended.rid in one.aborted for one in here.instances))


@pytest.mark.parametrize("how", ["abort", "cut"])
@pytest.mark.parametrize("body", [ASK, STREAM])
async def test_decode_is_freed_when_the_prefill_fails(how: str, body: dict[str, Any]) -> None:
    async with setting(*PAIR, scripts={0: Script(fail_prefill=how, first_s=0.05)}) as here:
        answer = await here.ask(body)
        assert (answer.status, answer.error["type"]) == (502, "prefill_failed")
        await here.until(lambda: not here.instances[1].held)
        [ended] = here.ended()
        assert (ended.outcome, ended.aborted[0]) == (m.Outcome.PREFILL_FAILED, 1)
        assert bool(here.control.of(m.Failure)) == (how == "cut")


async def test_a_prefill_that_is_lost_behind_the_first_token_costs_nothing() -> None:
    scripts = {0: Script(fail_prefill="cut", first_s=0.1), 1: Script(events=3, holds=[end_of_words(1)])}
    async with setting(*PAIR, scripts=scripts) as here:
        rooms = here.instances[1].rooms
        assert rooms is not None
        rooms.event(1000).set()  # decode has the KV
        asked = asyncio.ensure_future(here.ask(STREAM))
        await here.until(lambda: here.control.of(m.Failure))
        assert m.Milestone.FIRST_TOKEN in [progress.milestone for progress in here.control.of(m.Progress)]
        here.instances[1].words.put_nowait("go")
        assert len((await asked).events) == 4
        assert (here.ended()[0].outcome, here.ended()[0].aborted) == (m.Outcome.OK, (0,))


async def test_a_refused_prefill_is_not_waited_for() -> None:
    """Decode would answer the bad request as well; where it does not, the client is told after a moment."""
    async with setting(*PAIR, scripts={0: Script(fail_prefill="error")}) as here:
        answer = await here.ask(STREAM)
        assert (answer.status, answer.error["type"]) == (400, "prefill_refused")
        await here.until(lambda: not here.instances[1].held)
    async with setting(*PAIR, scripts={0: Script(status=400), 1: Script(status=422)}) as here:
        assert (await here.ask(STREAM)).status == 422
        assert here.ended()[0].outcome is m.Outcome.CLIENT_ERROR


@pytest.mark.parametrize("kinds", [("unified", "unified"), ("prefill", "decode", "decode")])
async def test_an_unreachable_instance_costs_another_dispatch(kinds: tuple[str, ...]) -> None:
    """Nothing was sent to anybody, so it may be asked again; the connections made for it are kept."""
    async with setting(*kinds) as here:
        await here.instances[-1].stop()
        for _ in range(4):
            assert (await here.ask(ASK)).status == 200
        assert {(over.attempt, over.cause, over.avoid) for over in here.control.overs} == {
            (1, m.Cause.NOT_SENT, (len(kinds) - 1,))
        }
        assert {failure.kind for failure in here.control.of(m.Failure)} == {m.FailureKind.CONNECT}
        assert len(here.instances[0].bodies) == (2 + 2 if kinds[0] == "unified" else 4)


async def test_nobody_reachable() -> None:
    async with setting("unified", config=RelayConfig(connect_attempts=2)) as here:
        await here.instances[0].stop()
        here.control.answer = lambda ask: m.Assign(ask.rid, here.control.next_attempt(ask.rid), 0)
        answer = await here.ask(ASK)
        assert (answer.status, answer.error["type"]) == (502, "upstream_unreachable")
        assert [over.attempt for over in here.control.overs] == [1]


async def test_what_control_says_is_done() -> None:
    async with setting("unified", scripts={0: Script(gap_s=30)}) as here:
        here.control.answer = lambda ask: m.Refuse(ask.rid, 429, "overloaded", "later", 1.2)
        answer = await here.ask(ASK)
        assert (answer.status, answer.headers["retry-after"], answer.error["type"]) == (429, "2", "overloaded")
        here.control.answer = None
        request = asyncio.ensure_future(here.ask(STREAM))
        await here.until(lambda: len(here.control.of(m.Progress)) == 2)
        rid = next(iter(here.relay.requests._by_rid))
        here.relay.on_message(m.Abort(rid, 499, "aborted", "by an operator"))
        assert json.loads((await request).events[-1])["error"]["type"] == "aborted"
        assert [ended.outcome for ended in here.ended()] == [m.Outcome.REFUSED, m.Outcome.ABORTED]


async def test_time_limits() -> None:
    limits = RelayConfig(dispatch_timeout_s=0.1, first_byte_timeout_s=0.3, stall_timeout_s=0.2)
    async with setting("unified", scripts={0: Script(gap_s=30)}, config=limits) as here:
        assert json.loads((await here.ask(STREAM)).events[-1])["error"]["type"] == "timeout"
        here.instances[0].script = Script(first_s=30)
        assert (await here.ask(ASK)).status == 504
        here.control.answer = lambda ask: None
        assert (await here.ask(ASK)).status == 503
        outcomes = [m.Outcome.TIMED_OUT, m.Outcome.TIMED_OUT, m.Outcome.NO_CONTROL]
        assert [ended.outcome for ended in here.ended()] == outcomes
        assert here.ended()[0].aborted == (0,)


async def test_a_new_control_plane_learns_what_is_open() -> None:
    scripts = {0: Script(events=3, holds=[end_of_words(1)])}
    async with setting("unified", scripts=scripts, comes_to_rest=False) as here:  # what it heard is cleared
        stream = asyncio.ensure_future(here.ask(STREAM))
        await here.until(lambda: len(here.control.of(m.Progress)) == 2)
        here.control.answer = lambda ask: None
        waiting = asyncio.ensure_future(here.ask(ASK))
        await here.until(lambda: len(here.control.of(m.Ask)) == 2)
        here.control.answer, here.control.epoch = None, 2
        here.control.heard.clear()
        here.relay.on_message(here.control.table())
        hello = here.control.of(m.Hello)[0]
        assert [len(one.progress) for one in hello.open] == [2]
        assert (await waiting).status == 200
        here.instances[0].words.put_nowait("go")
        assert len((await stream).events) == 4
        assert len(here.ended()) == 2


async def test_a_slow_reader_is_not_buffered_without_end() -> None:
    big = Script(events=400, event=lambda index, body: b"x" * 100_000)
    limits = RelayConfig(write_timeout_s=0.5)
    async with setting("unified", scripts={0: big}, config=limits) as here:
        _, writer = await here.connect()
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(request_bytes(STREAM))
        ended = await here.until(lambda: here.ended())
        assert ended[0].outcome is m.Outcome.CLIENT_GONE
        assert ended[0].output_bytes < 20_000_000
        writer.transport.abort()


async def test_drain_ends_what_is_open_and_takes_nothing_new() -> None:
    async with setting("unified", scripts={0: Script(events=3, gap_s=0.1)}) as here:
        stream = asyncio.ensure_future(here.ask(STREAM))
        await here.until(lambda: here.control.of(m.Progress))
        draining = asyncio.ensure_future(here.relay.drain_requests())
        await asyncio.sleep(0)
        with pytest.raises(ConnectionRefusedError):
            await here.connect()
        assert len((await stream).events) == 4
        await draining


async def test_small_writes_are_not_held_back() -> None:
    async with setting("unified") as here:
        reader, writer = await here.connect()
        writer.write(request_bytes(ASK))
        await read_answer(reader)
        [client] = here.relay.listener._connections
        [upstream] = here.relay.context.pool._idle[0]
        for transport in (client._transport, upstream.transport):
            sock = transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
