"""What instances are told to drop, under which names and with which key."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_sglang import Script
from support.relays import request_bytes, setting

from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.wire import messages as m

ASK = {"text": "hello", "sampling_params": {"max_new_tokens": 4}}
PAIR = ("prefill", "decode")


@pytest.mark.parametrize(
    ("fields", "rids"),
    [
        ({"rid": ["a", "b"]}, ["a", "b"]),
        ({"rid": "mine"}, ["mine_0", "mine_1"]),
        ({"rid": "mine", "text": "x"}, ["mine"]),
    ],
)
async def test_aborts_name_requests_as_the_instance_does(fields: dict[str, Any], rids: list[str]) -> None:
    async with setting("unified", scripts={0: Script(first_s=30)}) as here:
        _, writer = await here.connect()
        writer.write(request_bytes({"text": ["x", "y"], **fields}))
        await here.until(lambda: here.instances[0].held)
        writer.close()
        await here.until(lambda: len(here.instances[0].aborted) >= len(rids))
        assert sorted(here.instances[0].aborted[: len(rids)]) == rids
        assert here.control.of(m.Ask)[0].rids == tuple(rids if isinstance(fields.get("rid"), list) else ())


async def test_aborts_bring_the_instances_admin_key() -> None:
    """With one, SGLang refuses aborts that come with the other key."""
    async with setting("unified", scripts={0: Script(first_s=30)}) as here:
        here.control.workers = (here.instances[0].worker(api_key="users", admin_key="boss"),)
        here.relay.on_message(here.control.table())
        _, writer = await here.connect()
        writer.write(request_bytes(ASK))
        await here.until(lambda: here.instances[0].held)
        writer.close()
        await here.until(lambda: here.instances[0].aborted)
        keys = {request.target: dict(request.headers)[b"authorization"] for request, _ in here.instances[0].requests}
        assert keys == {b"/generate": b"Bearer users", b"/abort_request": b"Bearer boss"}


@pytest.mark.parametrize("kinds", [("unified",), PAIR])
async def test_a_rid_that_is_null_is_none(kinds: tuple[str, ...]) -> None:
    """Clients that write every field send it; the instance must know the request under the router's name."""
    async with setting(*kinds, scripts={0: Script(first_s=30)}) as here:
        _, writer = await here.connect()
        writer.write(request_bytes({"text": "x", "rid": None}))
        await here.until(lambda: here.instances[0].held)
        [ask] = here.control.of(m.Ask)
        assert all(json.loads(one.requests[0][1])["rid"] == ask.rid for one in here.instances)
        writer.close()
        await here.until(lambda: not any(one.held for one in here.instances))


@pytest.mark.parametrize("kinds", [("unified",), PAIR])
async def test_what_outlasts_a_drain_is_told_and_freed(kinds: tuple[str, ...]) -> None:
    """The relay ends right after; its aborts still arrive."""
    async with setting(*kinds, config=RelayConfig(drain_timeout_s=0.2), scripts={0: Script(first_s=30)}) as here:
        late = asyncio.ensure_future(here.ask(ASK))
        await here.until(lambda: all(one.held for one in here.instances))
        await here.relay.drain_requests()
        await here.relay.stop_serving()
        answer = await late
        assert (answer.status, answer.error["type"]) == (503, "draining")
        [ended] = here.ended()
        assert (ended.outcome, sorted(ended.aborted)) == (m.Outcome.DRAINED, list(range(len(kinds))))
        assert all(one.aborted == [ended.rid] for one in here.instances)
        assert not any(one.held for one in here.instances)
