"""A control plane that is restarted while operators ask it."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from support.loop_time import LoopTime
from support.relays import TurnControl, request_bytes, setting

from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.relay.context import RelayContext
from pla_sglang.fleet.router.relay.server import Relay
from pla_sglang.fleet.router.wire import endpoints
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.fleet.router.wire.endpoints import ControlWire, RelayWire

REPEATED = [("GET", "/pla/ledger"), ("GET", "/metrics"), ("POST", "/workers/0/drain"), ("POST", "/pla/reload")]
ONCE = [("POST", "/workers"), ("POST", "/workers/"), ("DELETE", "/workers/0")]


@pytest.mark.parametrize(("method", "path"), [*REPEATED, *ONCE])
async def test_operators_are_answered_by_the_next_control_plane_or_told_at_once(method: str, path: str) -> None:
    async with setting("unified") as here:
        heard: list[m.AdminAsk] = []
        on_message = here.control.on_message

        def lose(message: m.FromRelay) -> None:
            if isinstance(message, m.AdminAsk):
                heard.append(message)
            else:
                on_message(message)

        here.relay.context.send_to_control = lose  # its former life
        asking = asyncio.ensure_future(here.ask(None, path, method=method))
        await here.until(lambda: heard)
        here.relay.context.send_to_control = on_message
        here.control.epoch = 2
        here.relay.on_message(here.control.table())
        answer = await asyncio.wait_for(asking, 5)
        if (method, path) in REPEATED:
            assert (answer.status, json.loads(answer.body)["path"]) == (200, path)
            assert here.control.of(m.AdminAsk) == heard
        else:
            assert (answer.status, answer.error["type"]) == (503, "control_restarted")
            assert answer.headers["retry-after"] == "1"
            assert here.control.of(m.AdminAsk) == []


@pytest.mark.parametrize(("method", "path"), [*REPEATED, *ONCE])
async def test_what_may_not_be_done_twice_is_not_begun_in_a_gap(method: str, path: str) -> None:
    async with setting("unified") as here:
        here.relay.context.control_is_silent = lambda: True
        here.relay.context.send_to_control = lambda message: None
        health = await here.ask(None, "/health", method="GET")
        assert (health.status, health.error["type"], health.headers["retry-after"]) == (503, "no_control", "1")
        asking = asyncio.ensure_future(here.ask(None, path, method=method))
        if (method, path) in ONCE:
            answer = await asyncio.wait_for(asking, 5)
            assert (answer.status, answer.error["type"]) == (503, "no_control")
        else:
            await here.until(lambda: here.relay.read_gauges()["admin_requests"])
            here.relay.context.send_to_control = here.control.on_message
            here.control.epoch = 2
            here.relay.on_message(here.control.table())
            assert (await asyncio.wait_for(asking, 5)).status == 200
        here.relay.context.control_is_silent = lambda: False
        assert (await here.ask(None, "/health", method="GET")).status == 200


async def test_health_follows_the_wire(tmp_path: Any) -> None:
    """No control plane yet, one that is there, and one that has gone."""
    path = str(tmp_path / "control")
    loop = asyncio.get_running_loop()
    wire = RelayWire(path, 0, now_s=loop.time)
    relay = Relay(
        RelayContext(
            RelayConfig(port=0),
            number=0,
            send_to_control=wire.send_message,
            rng=random.Random(1),
            control_is_silent=wire.is_silent,
        )
    )
    wire.start_wire(relay.on_message, relay.on_attached)
    await relay.start_serving()

    async def health() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.listener.port)
        writer.write(request_bytes(None, "/health", method="GET", headers={"connection": "close"}))
        raw = await reader.read()
        writer.close()
        return raw

    assert b"no_control" in await health()
    control = TurnControl((m.WorkerEntry(0, "127.0.0.1", 1, "unified"),))
    other_end = ControlWire(path, control, now_s=loop.time)
    await other_end.start_listening()
    async with asyncio.timeout(10):
        while b" 200 " not in await health():
            await asyncio.sleep(0.02)
    other_end.close_wire()
    async with LoopTime() as ran, asyncio.timeout(20):
        while b"no_control" not in await health():
            await asyncio.sleep(0.02)
    assert ran.seconds < endpoints.GONE_S / 2, "the end of the connection says so at once"
    await relay.stop_serving()
    wire.close_wire()


async def test_a_control_plane_that_stands_still_is_silent(tmp_path: Any) -> None:
    """Its connection is open, and nothing comes."""
    path, now_s = str(tmp_path / "control"), [100.0]
    wire = RelayWire(path, 0, now_s=lambda: now_s[0])
    attached = asyncio.Event()
    wire.start_wire(lambda message: None, attached.set)
    other_end = ControlWire(path, TurnControl(), now_s=asyncio.get_running_loop().time)
    await other_end.start_listening()
    await asyncio.wait_for(attached.wait(), 10)
    assert not wire.is_silent()
    now_s[0] += endpoints.GONE_S + 0.1
    assert wire.is_silent()
    wire.close_wire()
    other_end.close_wire()
