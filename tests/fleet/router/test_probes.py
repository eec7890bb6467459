"""/livez, /readyz and /startupz of a relay. Those of a router as processes: ``test_launch``."""

from __future__ import annotations

from pathlib import Path

from fake_sglang import Script
from support.relays import Setting, read_answer, request_bytes, setting

from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.relay.routes import LOST_CONTROL_S
from pla_sglang.fleet.router.wire import endpoints
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.fleet.router.wire.endpoints import RelayWire

ASK = {"text": "hello"}
PROBES = ("/livez", "/readyz", "/startupz")


async def probe(here: Setting) -> dict[str, str]:
    """Why each probe says no; empty where it says yes. A client without a key asks."""
    found = {}
    for path in PROBES:
        answer = await here.ask(None, path, method="GET")
        assert (answer.status == 200) is (answer.body == b"")
        assert answer.status in (200, 503)
        assert "retry-after" not in answer.headers
        found[path] = "" if answer.status == 200 else answer.error["type"]
    return found


async def test_each_probe_says_what_it_is_for() -> None:
    async with setting("unified", config=RelayConfig(api_key="users", admin_key="operators")) as here:
        context = here.relay.context
        assert await probe(here) == dict.fromkeys(PROBES, "")
        here.control.workers = ()
        here.relay.on_message(here.control.table())
        assert await probe(here) == {"/livez": "", "/readyz": "not_serving", "/startupz": ""}
        context.control_is_silent = lambda: True
        context.control_lost_s = lambda: LOST_CONTROL_S
        assert await probe(here) == {"/livez": "", "/readyz": "no_control", "/startupz": ""}
        context.control_lost_s = lambda: LOST_CONTROL_S + 1
        assert await probe(here) == {"/livez": "no_control", "/readyz": "no_control", "/startupz": ""}
        context.workers.known = False
        assert await probe(here) == {"/livez": "no_control", "/readyz": "starting", "/startupz": "starting"}
        assert not any(name.startswith("bad_requests_total") for name in context.counters.values)


async def test_it_lives_as_long_as_requests_may_wait() -> None:
    async with setting("unified", config=RelayConfig(dispatch_timeout_s=4 * LOST_CONTROL_S)) as here:
        here.relay.context.control_lost_s = lambda: 3 * LOST_CONTROL_S
        assert (await probe(here))["/livez"] == ""
        here.relay.context.control_lost_s = lambda: 5 * LOST_CONTROL_S
        assert (await probe(here))["/livez"] == "no_control"


async def test_a_relay_that_ends_serves_on_and_lets_its_clients_go() -> None:
    async with setting("unified", scripts={0: Script(events=3)}) as here:
        reader, writer = await here.connect()
        writer.write(request_bytes(ASK))
        assert "connection" not in (await read_answer(reader)).headers
        here.relay.end_readiness()
        assert await probe(here) == {"/livez": "", "/readyz": "ending", "/startupz": ""}
        assert (await here.ask(None, "/health", method="GET")).status == 200
        assert len((await here.ask(ASK | {"stream": True})).events) == 4
        writer.write(request_bytes(ASK))
        answer = await read_answer(reader)
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await reader.read() == b""
        writer.close()


async def test_how_long_a_control_plane_was_not_heard(tmp_path: Path) -> None:
    now_s = [100.0]
    wire = RelayWire(str(tmp_path / "control"), 0, now_s=lambda: now_s[0])
    wire.start_wire(lambda message: None, lambda: None)
    now_s[0] += 70.0
    assert wire.silent_s() == 70.0
    wire._on_frame(endpoints.FramedConnection(lambda *_: None, lambda _: None), endpoints._encode([m.Heartbeat()]))
    now_s[0] += 2.0
    assert wire.silent_s() == 2.0
    wire.close_wire()
