"""What is done to an instance while its streams run: SIGKILL at a random token, drain, SIGTERM; how long it takes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from bench.check.chaos.faults import explain_request, restart_instance, wait_until_closed, wait_until_paired
from bench.check.leftovers import read_series
from bench.check.survive.streams import Stream, send_stream, until
from bench.harness.report import say
from bench.harness.steps import Row
from pla_sglang.common.errors import PlaError
from pla_sglang.testing.server import fetch

BEGUN_S, EMPTY_S, END_S, OVER_S = 300.0, 120.0, 60.0, 600.0  # limits, of real time
POLL_S = 0.02
OPENED_GAP_S = 0.02  # between two streams of a wave


class Cluster:
    """Stateless instances behind a router of ours, as a state file describes them."""

    def __init__(self, described: Mapping[str, Any], state: Path) -> None:
        self.described, self.state = described, state
        self.url = str(described["url"])

    def workers(self) -> list[dict[str, Any]]:
        """Of the router; those that are dead are left out."""
        rows = fetch(f"{self.url}/workers")["workers"]
        return [row for row in rows if row["state"] != "dead"]

    def worker_at(self, url: str) -> dict[str, Any]:
        """The last one at the address."""
        return [row for row in self.workers() if row["url"] == url][-1]

    def instance_at(self, url: str) -> dict[str, Any]:
        """As it is now: the file is kept up to date."""
        instances = json.loads(self.state.read_text(encoding="utf-8"))["instances"]
        [found] = [instance for instance in instances if instance["url"] == url]
        return dict(found)

    def order(self, number: int, what: str) -> None:
        fetch(f"{self.url}/workers/{number}/{what}", {})

    def count_aborts(self) -> float:
        series = read_series(fetch(f"{self.url}/metrics"))
        return sum(value for name, value in series.items() if name.startswith("pla_router_aborts_total{"))

    async def start_again(self, name: str) -> None:
        """Raises PlaError where it cannot be started."""
        if (status := await restart_instance(name, self.state)) != 0:
            raise PlaError(f"{name} was not started again: status {status}")
        await asyncio.wait_for(wait_until_paired(self.described), BEGUN_S)


async def open_streams(group: asyncio.TaskGroup, http: aiohttp.ClientSession, url: str, streams: list[Stream]) -> None:
    for stream in streams:
        group.create_task(send_stream(http, url, stream))
        await asyncio.sleep(OPENED_GAP_S)


def make_session() -> aiohttp.ClientSession:
    connector, timeout = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(total=OVER_S)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)


# -- SIGKILL -----------------------------------------------------------------------------------------------------------


async def kill_at_random(cluster: Cluster, streams: list[Stream], rng: random.Random) -> Row:
    """All streams at once; when one of them has reached a random place of its answer, the instance where it is gets
    SIGKILL. Returns once all have ended and the instance is back."""
    chosen = rng.choice(streams)
    place = rng.randint(1, max(1, chosen.tokens - 10))
    async with make_session() as http, asyncio.TaskGroup() as group:
        await open_streams(group, http, cluster.url, streams)
        what = f"event {place} of {chosen.rid}"
        await until(lambda: len(chosen.event_s) >= place or chosen.is_over, limit_s=BEGUN_S, what=what)
        instance = cluster.instance_at("http://" + await asyncio.to_thread(find_instance, cluster.url, chosen.rid))
        os.killpg(instance["pid"], signal.SIGKILL)
        await wait_until_closed(instance["url"])
        say(f"killed {instance['name']} at event {place} of {chosen.rid}")
    stories = await asyncio.to_thread(read_stories, cluster.url, streams)
    await cluster.start_again(instance["name"])
    return describe_streams(streams, stories) | {"killed": 1}


def find_instance(url: str, rid: str) -> str:
    """Where a request is, by the name that its router has for an instance."""
    story = explain_request(url, rid)
    return str((story.get("hops") or [story])[-1]["decode"])


def read_stories(url: str, streams: Sequence[Stream]) -> list[dict[str, Any]]:
    return [explain_request(url, stream.rid) for stream in streams]


def describe_streams(streams: Sequence[Stream], stories: Sequence[Mapping[str, Any]]) -> Row:
    """Counts, and the gaps of all hops in seconds of this machine."""
    done = [stream for stream in streams if stream.error is None]
    wrong, broken = 0, [f"{stream.rid}: {stream.error}" for stream in streams if stream.error is not None]
    for stream in done:
        try:
            wrong += stream.count_wrong()
        except (ValueError, KeyError) as error:
            wrong += stream.tokens
            broken.append(f"{stream.rid}: {error!r}"[:400])
    hops = [hop for story in stories for hop in (story.get("hops") or [])[1:]]
    return {
        "streams": len(streams),
        "completed": len(done),
        "tokens": sum(stream.tokens for stream in done),
        "tokens_wrong": wrong,
        "hops": [{"why": hop["why"], "tokens": hop["tokens"], "gap_s": hop["gap_s"]} for hop in hops],
        "errors": broken[:5],
    }


# -- drain and SIGTERM -------------------------------------------------------------------------------------------------


async def empty_one(cluster: Cluster, streams: list[Stream], *, by_signal: bool) -> Row:
    """All streams at one instance, as the others are drained before; then that one is drained, or gets SIGTERM, and the
    others take its streams. ``empty_s``: until the router has nothing there, of real time."""
    first, *others = cluster.workers()
    for row in others:
        cluster.order(row["number"], "drain")
    aborts = await asyncio.to_thread(cluster.count_aborts)
    async with make_session() as http, asyncio.TaskGroup() as group:
        await open_streams(group, http, cluster.url, streams)
        begun = "first tokens of all streams"
        await until(lambda: all(stream.event_s or stream.is_over for stream in streams), limit_s=BEGUN_S, what=begun)
        for row in others:
            cluster.order(row["number"], "undrain")
        row = cluster.worker_at(first["url"])
        here, start_s = row["open_requests"], time.monotonic()
        if by_signal:
            os.kill(cluster.instance_at(first["url"])["pid"], signal.SIGTERM)
        else:
            cluster.order(first["number"], "drain")
        empty_s = await wait_until_empty(cluster, first["number"], start_s)
        left = sum(not stream.is_over for stream in streams)
        ended_s = await wait_until_ended(cluster, first["url"], start_s) if by_signal else None
    stories = await asyncio.to_thread(read_stories, cluster.url, streams)
    aborted = await asyncio.to_thread(cluster.count_aborts) - aborts
    if by_signal:
        await cluster.start_again(cluster.instance_at(first["url"])["name"])
    else:
        cluster.order(first["number"], "undrain")
    what = {"streams_here": here, "streams_left": left, "empty_s": empty_s, "ended_s": ended_s, "aborted": aborted}
    return describe_streams(streams, stories) | what


async def wait_until_empty(cluster: Cluster, number: int, start_s: float) -> float:
    """Seconds since ``start_s``. Raises TimeoutError."""
    while time.monotonic() < start_s + EMPTY_S:
        rows = [row for row in await asyncio.to_thread(cluster.workers) if row["number"] == number]
        if not rows or rows[0]["open_requests"] == 0:
            return time.monotonic() - start_s
        await asyncio.sleep(POLL_S)
    raise TimeoutError(f"worker {number} has requests {EMPTY_S:g} s after it was to be empty")


async def wait_until_ended(cluster: Cluster, url: str, start_s: float) -> float:
    """Until its process has ended, as the cluster says. Raises TimeoutError."""
    while time.monotonic() < start_s + EMPTY_S + END_S:
        if cluster.instance_at(url)["state"] == "dead":
            return time.monotonic() - start_s
        await asyncio.sleep(POLL_S)
    raise TimeoutError(f"{url} has not ended {EMPTY_S + END_S:g} s after SIGTERM")
