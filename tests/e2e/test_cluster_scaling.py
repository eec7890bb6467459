"""A cluster of one stateless instance gets a second one while it serves, and loses it, by orders of an actuator."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from e2e.test_router_control import call
from support.clusters import family
from support.serving import until

from pla_sglang.fleet.actuators import open_actuator
from pla_sglang.fleet.actuators.interface import Actuator, StartedInstance

pytestmark = pytest.mark.e2e

LIMIT_S = 240.0  # of a start or an end, on a busy machine
BODY = {"text": "hello", "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
PLANS = itertools.count(1)  # a test that runs again has a new one


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, forked_cluster: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    pytest.importorskip("nixl", reason="stateless instances need NIXL")
    arguments = ("--stateless", "1", "--policy", "least-tokens", "--pla-emulate", "h100-llama3.1-8b-tp1")
    with forked_cluster(tmp_path_factory.mktemp("scaling"), *arguments) as described:
        yield described


async def until_listed(actuator: Actuator, name: str, state: str | None) -> StartedInstance | None:
    """The instance, once it has a state; None: once it is gone."""
    end_s = time.monotonic() + LIMIT_S
    while True:
        found = {one.name: one for one in await actuator.list_instances()}.get(name)
        if (found.state if found is not None else None) == state:
            return found
        assert time.monotonic() < end_s, f"{found} is not {state}"
        assert found is None or found.state != "dead", found
        await asyncio.sleep(0.1)


def ready_workers(url: str) -> dict[str, int]:
    """Their numbers at the router, by address."""
    return {row["url"]: row["number"] for row in call(f"{url}/workers")[1]["workers"] if row["state"] == "ready"}


def listens(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", urlsplit(url).port or 0)) == 0


def test_an_instance_is_added_serves_and_is_removed(cluster: dict[str, Any]) -> None:
    launcher, url = cluster["process"].pid, cluster["router"]["url"]
    before = len(family(launcher))

    plan = next(PLANS)
    actuator = open_actuator(f"local:{cluster['state_file']}")

    async def act() -> StartedInstance:
        assert actuator.lease.acquire()
        added = await actuator.start_instance("stateless", plan)
        assert (added.state, added.plan) == ("starting", plan)
        assert await actuator.start_instance("stateless", plan) == added
        assert await until_listed(actuator, added.name, "ready") == dataclasses.replace(added, state="ready")
        assert (await asyncio.to_thread(call, f"{added.url}/health"))[0] == 200
        assert (await asyncio.to_thread(call, f"{url}/workers", {"url": added.url}))[0] == 202
        await asyncio.to_thread(until, lambda: added.url in ready_workers(url), what="the router has the newcomer")
        assert (await asyncio.to_thread(call, f"{added.url}/generate", BODY))[0] == 200
        assert len(await asyncio.to_thread(family, launcher)) > before
        number = (await asyncio.to_thread(ready_workers, url))[added.url]
        assert (await asyncio.to_thread(call, f"{url}/workers/{number}", None, "DELETE"))[0] == 202
        await asyncio.to_thread(until, lambda: added.url not in ready_workers(url), what="the router has let it go")
        await actuator.stop_instance(added.name)
        await actuator.stop_instance(added.name)
        await until_listed(actuator, added.name, None)
        assert not listens(added.url)
        assert await actuator.start_instance("stateless", plan) == dataclasses.replace(added, state="dead")
        return added

    try:
        added = asyncio.run(act())
    finally:
        asyncio.run(actuator.close())
    names = [row["name"] for row in json.loads(Path(cluster["state_file"]).read_text())["instances"]]
    assert names == ["stateless-0"]
    assert len(family(launcher)) == before
    assert call(f"{url}/generate", BODY)[0] == 200, "the cluster serves on"
    log = Path(cluster["log"])
    until(lambda: f"[cluster] {added.name} is gone" in log.read_text(errors="replace"), what="all of it is forgotten")
    assert "Traceback" not in log.read_text(errors="replace")
