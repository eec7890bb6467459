"""One part of a setting: answers of requests that are left alone, then the same ones with all that befalls them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from bench.check.faults.client import FaultClient, Stream
from bench.check.faults.fleet import FREEZE, Fleet
from bench.check.faults.table import Due, drain_for_a_while, inject
from bench.check.hops.instances import Instances
from bench.check.hops.judge import Reference, Row, judge_rides, judge_routed, make_references
from bench.check.hops.plans import Event, Life, plan_lives
from bench.check.hops.rider import HOLD_OVER, STEP_LIMIT_S, Ride, Rider
from bench.check.hops.settings import ENGINES, Setting
from bench.check.leftovers import sum_series, wait_until_at_rest
from bench.harness import servers
from pla_sglang.testing.server import HttpError, fetch

AT_ONCE = 24  # requests that run at a time
APART_S = 0.3  # from one drain to the next
BEGUN_S = 0.5  # of streams, until their instance is frozen
ROUTER = servers.Router("pla", "round-robin", ("--migration", "on"))
PREFIX = "hops"


@dataclasses.dataclass(frozen=True)
class Part:
    """So many requests of one model under a setting; ``number``: which of its parts."""

    setting: Setting
    model: str
    number: int
    requests: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.setting.name}-{self.model}-{self.number}-{self.seed}"

    def plan(self) -> list[Life]:
        return plan_lives(self.requests, self.model, instances=ENGINES, seed=self.name)


@contextlib.contextmanager
def environment(pairs: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Of processes that are started within."""
    before = {name: os.environ.get(name) for name, _ in pairs}
    os.environ.update(pairs)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


async def run_part(part: Part, described: Mapping[str, Any], on_done: Callable[[], None]) -> Row:
    """Counts and what is left behind. Raises ServerError."""
    return await judge_lives(part.plan(), described, part.name, on_done)


async def judge_lives(
    lives: Sequence[Life], described: Mapping[str, Any], name: str, on_done: Callable[[], None]
) -> Row:
    """As ``run_part``; ``name``: what decides rooms, and stands in the ids of requests."""
    async with open_session() as http:
        instances = Instances(http, described, name)
        await instances.tell_peers()
        references, errors = await ask_references(instances, lives, f"{PREFIX}-ref-{name}")
        before = await instances.wait_until_at_rest()  # which empties the caches
        gone_on = -await instances.count_gone_on()
        rides = await ride_all(instances, lives, f"{PREFIX}-{name}", on_done)
        left = await instances.wait_until_at_rest()
        gone_on += await instances.count_gone_on()
    row = judge_rides(rides, references)
    left += describe_lost_holds(row["events"], gone_on)
    return row | {"reference_errors": errors[:5], "references_wrong": len(errors), "leftovers": before + left}


def describe_lost_holds(events: Mapping[str, int], gone_on: int) -> list[str]:
    """``gone_on``: held requests that went on by themselves, as the instances say. Any other hold ends by an order."""
    over = events.get(HOLD_OVER, 0)
    return [f"{over} holds were over, {gone_on} went on by themselves"] if over > gone_on else []


def open_session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout, trust_env=False)


async def ask_references(
    instances: Instances, lives: Sequence[Life], prefix: str, *, marked: bool = True
) -> tuple[dict[str, Reference], list[str]]:
    """Each body once, at the first instance, where nothing befalls it; ``marked``: as a stream that says its tokens."""
    alone = {life.body.key: Life(index, life.body, (), 0, marked=marked) for index, life in enumerate(lives)}
    return make_references(await ride_all(instances, list(alone.values()), prefix, lambda: None))


async def ride_all(instances: Instances, lives: Sequence[Life], prefix: str, on_done: Callable[[], None]) -> list[Ride]:
    places = asyncio.Semaphore(AT_ONCE)

    async def ride(life: Life) -> Ride:
        async with places:
            done = await Rider(instances, life, prefix).run()
        on_done()
        return done

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ride(life)) for life in lives]
    return [task.result() for task in tasks]


# -- through a router that drains instance after instance --------------------------------------------------------------


async def run_routed_part(
    part: Part, described: dict[str, Any], url: str, state: Path, on_done: Callable[[], None]
) -> Row:
    """As ``run_part``; it is the router at ``url`` that moves what runs at an instance which drains, or whose scheduler
    is frozen. ``state``: the file of the cluster, which knows its process."""
    lives = part.plan()
    before = fetch(f"{url}/metrics")
    async with open_session() as http:
        instances = Instances(http, described, part.name)
        references, errors = await ask_references(instances, lives, f"{PREFIX}-ref-{part.name}", marked=False)
        await instances.wait_until_at_rest()
        streams = [Stream(rid=f"{PREFIX}-{part.name}-{life.index:06d}", body=life.body) for life in lives]
        fleet = Fleet(described | {"url": url}, state, streams=streams)
        drains = await _storm_router(fleet, lives, on_done, frozen=random.Random(part.name).choice(instances.names))
        rest = await wait_until_at_rest({**described, "url": url})
        left = [*rest.details, *await instances.wait_until_at_rest()]
    after = fetch(f"{url}/metrics")
    moved, failures = (
        sum_series(after, name) - sum_series(before, name)
        for name in ("pla_router_migrations_total", "pla_router_migration_failures_total")
    )
    return {
        "requests": len(lives),
        **judge_routed(fleet, streams, references),
        "hops": int(moved),
        "redos": 0,
        "resumes": 0,
        "events": {**drains, "move_failures": int(failures)},
        "pauses_s": [],
        "ledger_balanced": rest.ledger_balanced and rest.gauges_zero,
        "wrong_by_kind": {},
        "reference_errors": errors[:5],
        "references_wrong": len(errors),
        "leftovers": left,
    }


async def _storm_router(
    fleet: Fleet, lives: Sequence[Life], on_done: Callable[[], None], *, frozen: str
) -> Counter[str]:
    """Half of the streams while one instance after the other is drained, then half while the schedulers of one are
    frozen. Counts the answers to the orders, and the freeze."""
    places, counts, half = asyncio.Semaphore(AT_ONCE), Counter[str](), len(lives) // 2
    pairs = list(zip(lives, fleet.streams.values(), strict=True))

    async def send(client: FaultClient, life: Life, stream: Stream) -> None:
        async with places, asyncio.TaskGroup() as group:
            group.create_task(inject(fleet, plan_end(life, stream.rid)))
            group.create_task(client.send(stream))
        on_done()

    async with FaultClient(fleet.url, timeout_s=2 * STEP_LIMIT_S) as client:
        drains = asyncio.create_task(drain_in_turns(fleet, counts))
        try:
            async with asyncio.TaskGroup() as group:
                for life, stream in pairs[:half]:
                    group.create_task(send(client, life, stream))
        finally:
            drains.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await drains
        async with asyncio.TaskGroup() as group:
            group.create_task(inject(fleet, [Due(FREEZE, frozen, at_s=time.perf_counter() + BEGUN_S)]))
            for life, stream in pairs[half:]:
                group.create_task(send(client, life, stream))
    return counts + Counter(still.fault for still in fleet.standstills)


def plan_end(life: Life, rid: str) -> list[Due]:
    """Of what befalls a life, only its end is the client's to decide."""
    if not life.ends_early:
        return []
    events, end = life.events[-1]
    return [Due("leave" if end in (Event.LEAVE, Event.LEAVE_HELD) else "abort_routed", rid, events=events)]


async def drain_in_turns(fleet: Fleet, counts: Counter[str]) -> None:
    """Until cancelled; at the end every instance serves again."""
    for number in itertools.cycle(range(ENGINES)):
        try:
            await drain_for_a_while(fleet, str(number))
            counts["drain_200"] += 1
        except HttpError as error:
            counts[f"drain_{error.status}"] += 1
        await asyncio.sleep(APART_S)
