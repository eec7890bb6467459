"""Relay and control in two event-loop ends joined by a socket: order, restarts of either side, silence."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from fake_sglang import FakeSglang, Script
from support.relays import Setting, TurnControl

from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.relay.context import RelayContext
from pla_sglang.fleet.router.relay.server import Relay
from pla_sglang.fleet.router.wire import endpoints
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.fleet.router.wire.endpoints import ControlWire, RelayWire
from pla_sglang.fleet.router.wire.frames import FramedConnection
from pla_sglang.fleet.router.wire.protocols import RelayPort

NOBODY = (1 << 22) + 1  # no process has such an id


@contextlib.asynccontextmanager
async def control_end(address: str, plane: TurnControl) -> AsyncIterator[ControlWire]:
    end = ControlWire(address, plane, now_s=time.monotonic)
    await end.start_listening()
    beats = asyncio.ensure_future(beat(plane))
    try:
        yield end
    finally:
        beats.cancel()
        end.close_wire()


async def beat(plane: TurnControl) -> None:
    while True:
        for port in plane.ports.values():
            port.on_message(m.Heartbeat())
        await asyncio.sleep(m.HEARTBEAT_INTERVAL_S)


@contextlib.asynccontextmanager
async def relay_end(address: str, number: int = 0) -> AsyncIterator[Relay]:
    end = RelayWire(address, number, now_s=time.monotonic)
    relay = Relay(
        RelayContext(RelayConfig(port=0), number=number, send_to_control=end.send_message, rng=random.Random(number))
    )
    end.start_wire(relay.on_message, relay.on_attached)
    await relay.start_serving()
    try:
        yield relay
    finally:
        await relay.stop_serving()
        end.close_wire()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return str(tmp_path / "c")


@pytest.mark.parametrize("step", [1, 3, 4, 5, 1000])
def test_frames_arrive_whole_however_they_are_cut(step: int) -> None:
    frames = [b"", b"a", b"bc" * 300, b"", bytes(range(256))]
    data = b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)
    got: list[bytes] = []
    connection = FramedConnection(lambda _, frame: got.append(frame), lambda _: None)
    for start in range(0, len(data), step):
        connection.data_received(data[start : start + step])
    assert got == frames


async def test_stages_wait_for_a_question(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody waits for goes with what somebody does, in order."""
    monkeypatch.setattr(endpoints, "LAZY_S", 60.0)
    async with control_end(address, plane := TurnControl()), relay_end(address) as relay:
        here = Setting(relay, plane, [])
        await here.until(lambda: plane.of(m.Hello))
        ask = m.Ask("a", 0, m.Endpoint.GENERATE, False, 0.0, 1, 1)
        relay.context.send_to_control(m.Progress("b", m.Milestone.SENT, 0.0))
        await asyncio.sleep(0.1)
        assert not plane.of(m.Progress)
        plane.answer = lambda _: None
        relay.context.send_to_control(ask)
        relay.context.send_to_control(m.Completed("b", m.Outcome.OK, 200, 0.0))
        await here.until(lambda: plane.of(m.Ask))
        assert [type(one) for one in plane.heard if not isinstance(one, m.Hello | m.RelayReport)] == [
            *(m.Progress, m.Ask, m.Completed),
        ]


async def test_a_stage_alone_goes_a_little_later(address: str) -> None:
    async with control_end(address, plane := TurnControl()), relay_end(address) as relay:
        here = Setting(relay, plane, [])
        await here.until(lambda: plane.of(m.Hello))
        relay.context.send_to_control(m.Progress("c", m.Milestone.SENT, 0.0))
        await here.until(lambda: plane.of(m.Progress))


async def test_a_relay_that_is_gone_is_forgotten(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "GONE_S", 0.5)
    async with control_end(address, plane := TurnControl()) as end:
        async with relay_end(address) as relay:
            await Setting(relay, plane, []).until(lambda: 0 in plane.ports)
        await Setting(relay, plane, []).until(lambda: not plane.ports)
        assert not end._relays


async def test_a_relay_that_was_forgotten_by_mistake_says_what_is_open(address: str) -> None:
    """Its loop stood still for too long, say: what it had asked meanwhile must not wait for the time limit."""
    async with (
        FakeSglang(script=Script(first_s=4)) as one,
        control_end(address, plane := TurnControl((one.worker(),))) as end,
        relay_end(address) as relay,
    ):
        here = Setting(relay, plane, [one])
        await here.until(lambda: relay.context.workers.serving)
        stream = asyncio.ensure_future(here.ask({"stream": True}))
        await here.until(lambda: plane.of(m.Progress))
        end._detach_relay(next(iter(end._relays)))
        lost = asyncio.ensure_future(here.ask({"text": "asked while nobody listens"}))
        await here.until(lambda: len(plane.of(m.Hello)) == 2)
        assert [one.ask.rid for one in plane.of(m.Hello)[1].open] == [plane.of(m.Ask)[0].rid]
        assert {(await stream).status, (await lost).status} == {200}


async def test_who_stood_still_does_not_take_the_others_for_gone(address: str) -> None:
    """A stopped machine goes on: the first thing that the control process sees is that nobody has said anything."""
    async with control_end(address, plane := TurnControl()) as end, relay_end(address) as relay:
        await Setting(relay, plane, []).until(lambda: 0 in plane.ports)
        end._now_s = lambda: time.monotonic() + 10 * endpoints.GONE_S
        end._check_relays()
        assert 0 in plane.ports
        end._checked_s = end._now_s()
        [identity] = end._relays
        for attached in end._relays.values():
            attached.last_frame_s -= 2 * endpoints.GONE_S
        end._check_relays()
        assert 0 in plane.ports  # a relay whose process lives is forgiven for longer
        end._relays = {b"0/%d" % NOBODY: end._relays[identity]}
        end._check_relays()
        assert 0 not in plane.ports


async def test_a_relay_that_stands_still_is_kept_while_its_process_lives(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after SIGSTOP and SIGCONT: it says nothing for a while, and goes on. No longer than ``STOPPED_S``."""
    monkeypatch.setattr(endpoints, "GONE_S", 0.6)
    monkeypatch.setattr(endpoints, "STOPPED_S", 3.0)
    async with control_end(address, plane := TurnControl()):
        heard = len(plane.heard)
        still = RelayWire(address, 3, now_s=time.monotonic)
        still.start_wire(lambda message: None, lambda: None)
        here = Setting(None, plane, [])  # type: ignore[arg-type]
        await here.until(lambda: 3 in plane.ports)
        assert still._timer is not None
        still._timer.cancel()  # it asks for nothing any more
        await here.until(lambda: "relay 3 stands still" in caplog.text)
        assert 3 in plane.ports
        still.send_message(m.RelayReport(3, {}, {}))
        await here.until(lambda: "relay 3 goes on" in caplog.text)
        assert len(plane.heard) > heard
        await here.until(lambda: 3 not in plane.ports, patience_s=10.0)
        assert "relay 3 is gone" in caplog.text
        still.close_wire()


async def test_nonsense_from_a_relay_ends_its_membership(address: str) -> None:
    async with control_end(address, plane := TurnControl()):
        stranger = RelayWire(address, 7, now_s=time.monotonic)
        stranger.start_wire(lambda message: None, lambda: None)
        await Setting(None, plane, []).until(lambda: 7 in plane.ports)  # type: ignore[arg-type]
        assert stranger._connection is not None
        stranger._connection.send_frame(b"\x91\x92nonsense")
        await Setting(None, plane, []).until(lambda: 7 not in plane.ports)  # type: ignore[arg-type]
        stranger.close_wire()


@pytest.mark.parametrize("table", [m.Table(1, (), serving=True, protocol=m.PROTOCOL + 1), None])
async def test_a_control_plane_of_another_version_is_refused_with_one_line(
    table: m.Table | None, address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its messages cannot even be read."""

    class Stranger(TurnControl):
        def attach_relay(self, relay: int, port: RelayPort) -> None:
            self.ports[relay] = port
            for _ in range(3):
                port.on_message(m.Heartbeat() if table is None else table)

    end = RelayWire(address, 0, now_s=time.monotonic)
    told: list[m.FromControl] = []
    if table is None:
        monkeypatch.setattr(endpoints, "_encode", lambda messages: msgspec.msgpack.encode([["Unheard", 1]]))
    async with control_end(address, plane := Stranger()):
        end.start_wire(told.append, lambda: None)
        async with asyncio.timeout(10):
            while not caplog.records:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert end.is_silent()
        end.close_wire()
    assert plane.ports
    assert not any(isinstance(message, m.Table) for message in told)
    assert len([record for record in caplog.records if "does not know" in record.getMessage()]) == 1
