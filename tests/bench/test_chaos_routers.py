"""The chaos bench with routers of its own: when which is ended, what may fail for that, and the audit of caches."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.check.chaos import bench as storm
from bench.check.chaos.caches import CacheAudit, audit_caches, prompt_of
from bench.check.faults.bodies import make_ids, make_sampled
from bench.check.faults.client import Stream
from bench.check.faults.routers import CONTROL, WHOLE, Restart, Routers, label_instances, plan_restarts
from bench.harness.catalogue import BENCHES
from bench.harness.servers import Router
from pla_sglang import launch_cluster
from pla_sglang.sim import chain
from pla_sglang.testing.server import HttpError


def stream(index: int, error: str | None = None) -> Stream:
    body = make_ids(chain.prompt_of(20, 4, random.Random(index)), 4)
    made = Stream(rid=f"r{index}", body=body, error=error)
    made.output_ids = (body.oracle or ()) if error is None else ()
    return made


def test_control_processes_and_routers_are_ended_in_turns() -> None:
    turns = [(CONTROL, 0), (WHOLE, 1), (CONTROL, 1), (WHOLE, 0), (CONTROL, 0)]
    assert plan_restarts(5, 2) == turns
    assert plan_restarts(2, 1) == [(CONTROL, 0), (WHOLE, 0)]
    options = BENCHES["chaos"].parse("--restarts", "5", "--kills", "0", "--requests", "10")
    streams = [Stream(rid=f"r{place}", body=make_sampled(random.Random(0)), due_s=1.0 + place) for place in range(60)]
    planned = [due for due in storm.plan_faults(streams, 2, options) if due.fault in (CONTROL, WHOLE)]
    assert [(due.fault, int(due.where)) for due in planned] == turns
    assert [due.at_s for due in planned] == pytest.approx([9.0, 18.0, 27.0, 36.0, 45.0])


def make_routers(restarts: list[Restart], count: int = 2) -> Routers:
    routers = Routers(Router("pla", "least-tokens"), {"instances": []}, Path("unused"), count)
    routers.restarts = restarts
    return routers


def test_only_the_end_of_their_router_excuses_requests() -> None:
    routers = make_routers([Restart(WHOLE, 1, 10.0, 12.0), Restart(CONTROL, 0, 20.0, 21.0)])
    assert routers.is_excused(1, 9.0, 10.5)
    assert routers.is_excused(1, 11.0, 11.1)
    assert not routers.is_excused(1, 9.0, 9.9)
    assert not routers.is_excused(1, 12.1, 13.0)
    assert not routers.is_excused(0, 9.0, 30.0), "another router's, and a control process has to come back unseen"


def test_moves_count_for_the_latest_restart_of_their_router(monkeypatch: pytest.MonkeyPatch) -> None:
    series = {
        'pla_router_migrations_total{how="pull",reason="prefilled"}': 3.0,
        'pla_router_migrations_total{how="redo"}': 5.0,
    }
    monkeypatch.setattr("bench.check.faults.routers.fetch", lambda url: "")
    monkeypatch.setattr("bench.check.leftovers.read_series", lambda text: series)
    first, second, other = Restart(CONTROL, 0, 1.0, 2.0), Restart(WHOLE, 0, 3.0, 4.0), Restart(WHOLE, 1, 3.0, 4.0)
    routers = make_routers([first, second, other])
    routers.count_moves(0)
    assert ([one.moves for one in routers.restarts], routers.moves) == ([0, 3, 0], 3)


def test_instances_are_labelled_once_a_new_control_process_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses at first, and one of four is down."""
    roles, asked = dict.fromkeys("abcd", "unified"), list[int]()

    def fetch(url: str, body: dict[str, str] | None = None) -> Any:
        if body is None:
            return {"workers": [{"number": n, "url": name, "role": roles[name]} for n, name in enumerate(roles)]}
        number = int(url.split("/")[-2])
        asked.append(number)
        if len(asked) <= 3:
            raise HttpError(url, 409, "it is not ready")
        roles["abcd"[number]] = {"prefill": "decode_to_prefill"}.get(body["role"], body["role"])
        return {}

    monkeypatch.setattr("bench.check.faults.routers.fetch", fetch)
    monkeypatch.setattr("bench.check.faults.routers.is_healthy", lambda url: url != "d")
    label_instances("http://router")
    assert roles == {"a": "decode_to_prefill", "b": "decode_to_prefill", "c": "decode", "d": "unified"}
    assert asked == [0, 1, 2, 0, 1, 2]


def test_the_cluster_has_no_router_then() -> None:
    options = BENCHES["chaos"].parse("--moves", "--stateless", "3", "--routers", "2", "--policy", "least-tokens")
    assert launch_cluster.read_config(storm.cluster_arguments(options)).config.to_cluster().router == "none"
    assert "--migration on --relay-workers 1 --place-decode prefilled" in storm.router_flags(options)
    assert storm.name_of(options) == "chaos_routers"


def test_an_entry_under_another_prompt_shows_in_the_audit() -> None:
    """Of three requests at one instance: one right, one wrong, and one that failed, whose prompt is asked alone."""
    streams = [stream(0), stream(1), stream(2, "reset")]
    spoiled = prompt_of(streams[1])
    assert prompt_of(streams[2]) == streams[2].body.prompt_ids

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        tokens = list(chain.expected(body["input_ids"], body["sampling_params"]["max_new_tokens"]).tokens)
        if body["input_ids"] == spoiled:
            tokens[0] += 1
        cached = 0 if body["input_ids"] == streams[2].body.prompt_ids else len(body["input_ids"]) - 4
        return web.json_response({"output_ids": tokens, "meta_info": {"cached_tokens": cached}})

    async def audit() -> CacheAudit:
        app = web.Application()
        app.router.add_post("/generate", answer)
        async with TestServer(app) as server:
            described: dict[str, Any] = {"instances": [{"url": str(server.make_url("")).rstrip("/")}]}
            return await audit_caches(described, streams)

    found = asyncio.run(audit())
    assert (found.cache_entries, found.cache_entries_wrong, len(found.wrong)) == (2, 1, 1)
    assert found.cache_tokens == len(prompt_of(streams[0])) + len(spoiled) - 8
