"""The router's key: told to stateless instances, sent with requests for them, and shown to nobody else."""

from __future__ import annotations

import asyncio
import gzip
import sys
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest
from fake_sglang import FakeSglang
from support.relays import setting
from support.router_scene import QUICK, FakeRelay
from support.serving import wait_until

from pla_sglang.fleet.cluster.ports import free_port
from pla_sglang.fleet.reserved import ROUTER_KEY_FORM, ROUTER_KEY_HEADER
from pla_sglang.fleet.router.control.control_plane import ControlPlane
from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.fleet.router.wire import messages as m

KEY = "key-of-this-router"


async def test_stateless_instances_are_told_the_key_and_no_others() -> None:
    engines = [await FakeSglang(mode).start() for mode in ("stateless", "stateless", "null", "prefill")]
    knobs = ControlKnobs(health=QUICK, poll_interval_s=0.05, workers=tuple(one.url for one in engines))
    plane, relay = ControlPlane(knobs, router_key=KEY), FakeRelay()
    plane.attach_relay(0, relay)
    await plane.start()
    try:
        await wait_until(lambda: len(plane.table.fleet.ready) == 4)
        await wait_until(lambda: engines[0].told and engines[1].told)
        assert [{told["router_key"] for told in one.told} for one in engines[:2]] == [{KEY}, {KEY}]
        entries = relay.last(m.Table).workers
        assert [entry.router_key for entry in entries] == [KEY, KEY, "", ""]
        assert KEY.encode() not in msgspec.json.encode(plane.read_state())
    finally:
        await plane.stop()
        for one in engines:
            await one.stop()


@pytest.mark.parametrize("keys", [[KEY, KEY], [KEY, ""], ["", KEY], ["", ""]])
async def test_both_legs_bring_the_key_where_the_instance_has_one(keys: list[str]) -> None:
    async with setting("prefill", "decode") as here:
        here.control.workers = tuple(one.worker(router_key=key) for one, key in zip(here.instances, keys, strict=True))
        here.relay.on_message(here.control.table())
        assert (await here.ask({"text": "hello"})).status == 200
        sent = [dict(one.requests[-1][0].headers) for one in here.instances]
        assert [headers.get(ROUTER_KEY_HEADER.encode(), b"").decode() for headers in sent] == keys
        refused = await here.ask({"text": "hello"}, headers={ROUTER_KEY_HEADER: KEY})
        assert (refused.status, refused.error["type"]) == (400, "reserved_header")
        assert KEY not in refused.error["message"]


async def test_what_only_passes_through_has_no_key() -> None:
    """Such requests are the client's own, but for the address."""
    async with setting("unified") as here:
        here.control.workers = (here.instances[0].worker(router_key=KEY),)
        here.relay.on_message(here.control.table())
        assert (await here.ask(None, "/v1/models", method="GET")).status == 200
        names = {name for name, _ in here.instances[0].requests[-1][0].headers}
        assert ROUTER_KEY_HEADER.encode() not in names


@pytest.mark.parametrize("relays", ["0", "1"])
async def test_one_key_for_a_start_that_no_page_and_no_file_shows(relays: str, tmp_path: Path) -> None:
    """Here another control process takes over where there is one."""
    record, access, log = (tmp_path / name for name in ("run.jsonl.gz", "access", "log"))
    engines = [await FakeSglang("stateless").start() for _ in range(2)]
    port = free_port()
    flags = ["--policy", "static-pd", "--port", str(port), "--relay-workers", relays]
    flags += ["--access-log", str(access), *(("--record", str(record)) if relays == "0" else ())]
    for number, one in enumerate(engines):
        one.info["disaggregation_bootstrap_port"] += number
        flags += ["--worker", one.url]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pla_sglang.launch_router", *flags), stdout=output, stderr=output
        )
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            await wait_until(
                lambda: all(len(one.told[-1:] and one.told[-1]["peers"]) for one in engines), patience_s=60
            )
            if relays == "1":
                [control] = [one for one in psutil.Process(process.pid).children() if "control" in one.cmdline()]
                told = len(engines[0].told)
                control.kill()
                await wait_until(lambda: len(engines[0].told) > told, patience_s=60)
            pages = await ask_and_read(http, engines)
    finally:
        process.terminate()
        await process.wait()
        for one in engines:
            await one.stop()
    keys = {told["router_key"] for one in engines for told in one.told}
    assert len(keys) == 1
    [key] = keys
    assert ROUTER_KEY_FORM.allows(key)
    assert {key for one in engines for key in one.keys} == {key}
    files = [log.read_text(), access.read_text()]
    if relays == "0":
        files.append(gzip.decompress(record.read_bytes()).decode())
    assert all(len(text) > 100 for text in files), "something was written"
    assert not [text for text in (*pages, *files) if key in text]


async def ask_and_read(http: aiohttp.ClientSession, engines: list[FakeSglang]) -> list[str]:
    """Pages that operators see, once requests were answered by pairs."""
    for number in range(1000):
        with_status = 0
        try:
            body = {"rid": f"r{number:04d}", "input_ids": [1, 2, 3]}
            async with http.post("/generate", json=body) as answer:
                with_status = answer.status
        except aiohttp.ClientError:
            pass
        if with_status == 200 and any(one.legs.count("decode") for one in engines):
            break
        await asyncio.sleep(0.03)
    assert any(one.legs.count("decode") for one in engines), "no pair"
    pages = []
    for path in ("/pla/state", "/workers", f"/pla/explain/r{number:04d}", "/metrics", "/pla/view", "/openapi.json"):
        async with http.get(path) as answer:
            pages.append(await answer.text())
            assert answer.status == 200, path
    return pages
