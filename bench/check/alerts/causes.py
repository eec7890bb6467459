"""What makes the alerts fire: each is a block that something is wrong in, and that leaves the fleet as it was."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from bench.check.faults.fleet import Fleet, find_processes, find_schedulers, order, read_workers, send_signal
from bench.check.leftovers import try_flush
from bench.harness.load_client import Answer, StreamClient
from bench.harness.servers import ROUTER_START_S, ROUTER_STOP_S, is_healthy, running_child, wait_until_ready
from pla_sglang.common.errors import PlaError
from pla_sglang.policy.common.fleet_policy import NO_PLANNER
from pla_sglang.sim import chain

ANSWER_TOKENS = (60, 240)  # so that answers take seconds: what plans moves looks at them a few times
PROMPT_TOKENS = (1000, 4000)  # long passes, beside which the time of this machine is small
SHARED_TOKENS = 2000  # of the prompt that caches are to hold
REQUEST_S = 60.0  # for one request, of real time
LATE = {"x-slo-ttft-ms": "1", "x-slo-tpot-ms": "1"}  # no request can meet these
MISSTATED = {"x-answer-tokens": "20000"}
STILL_S, MOVING_S = 2.5, 1.0  # of a server that stutters; when it moves, first tokens have to come
DRAINED_S = 2.0  # of one instance after the other: its streams have moved, or not
CROWD = 25  # requests at once
FEW = 8  # one request in so many
POLL_S = 0.2


class Load:
    """Streams through the router at random times, ``rate`` a second, in a task of its own.

    Attributes:
        headers: of the next requests, of one in ``one_in``.
        is_held: True while none are sent.
    """

    def __init__(self, url: str, rate: float, seed: int) -> None:
        self.headers: Mapping[str, str] = {}
        self.one_in = 1
        self.is_held = False
        self._sent = 0
        self._url, self._rate, self._rng = url, rate, random.Random(seed)
        self._open: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until it is cancelled; its requests end with it."""
        try:
            while True:
                if not self.is_held:
                    self.send_some(1)
                await asyncio.sleep(self._rng.expovariate(self._rate))
        finally:
            for task in self._open:
                task.cancel()

    def send_some(self, count: int) -> None:
        for _ in range(count):
            tokens = self._rng.randint(*ANSWER_TOKENS)
            prompt = chain.prompt_of(self._rng.randint(*PROMPT_TOKENS), tokens, self._rng)
            self._sent += 1
            further = {} if self._sent % self.one_in else self.headers
            headers = {"x-answer-tokens": str(tokens), **further}
            task = asyncio.create_task(send_request(self._url, prompt, tokens, headers))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def wait_until_idle(self) -> None:
        while self._open:
            await asyncio.wait(self._open)


async def send_request(url: str, prompt: Sequence[int], tokens: int, headers: Mapping[str, str]) -> None:
    """Whatever comes of it."""
    sampling = {"temperature": 0, "max_new_tokens": tokens}
    body = msgspec.json.encode({"input_ids": list(prompt), "sampling_params": sampling, "stream": True})
    async with StreamClient(url, timeout_s=REQUEST_S) as client:
        await client.stream(Answer(), body, 0.0, headers={"Content-Type": "application/json", **headers})


class RestartedRouter:
    """A router that is killed and started again on the same port.

    Args:
        command: that starts it; further flags may follow.
    """

    def __init__(self, command: Sequence[str], url: str, log: Path) -> None:
        self.url = url
        self._command, self._log = [*command], log
        self._running = contextlib.ExitStack()

    def start(self, *further: str) -> None:
        """Until it serves, from now on with these flags. Raises ServerError."""
        self._command += further
        process = self._running.enter_context(running_child(self._command, self._log, stop_s=ROUTER_STOP_S))
        wait_until_ready(process, lambda: is_healthy(self.url), self._log, name="the router", limit_s=ROUTER_START_S)
        self._pid = process.pid

    def kill(self) -> None:
        """SIGKILL, which nothing of it survives."""
        os.kill(self._pid, signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        self._running.close()


@dataclasses.dataclass(frozen=True)
class Site:
    """What scenes act upon."""

    fleet: Fleet
    router: RestartedRouter
    load: Load

    def list_names(self) -> list[str]:
        return [one["name"] for one in self.fleet.described["instances"]]

    def find_servers(self) -> list[int]:
        """All processes of the instances but the schedulers: HTTP, tokens."""
        pids = [self.fleet.instance(name)["pid"] for name in self.list_names()]
        return [pid for one in pids for pid in set(find_processes(one)) - set(find_schedulers(one))]

    async def order_all(self, what: str) -> None:
        for row in await asyncio.to_thread(read_workers, self.fleet.url):
            with contextlib.suppress(PlaError):  # one that starts cannot be drained
                await asyncio.to_thread(order, self.fleet.url, row["number"], what)

    async def wait_until_ready(self, count: int) -> None:
        """Raises TimeoutError."""
        async with asyncio.timeout(ROUTER_START_S):
            while await asyncio.to_thread(self._count_ready) < count:
                await asyncio.sleep(POLL_S)

    def find_state(self) -> Path:
        """The file of the cluster."""
        assert self.fleet.state is not None, "a cluster of processes"
        return self.fleet.state

    async def start_planner(self, state: Path, count: int) -> None:
        """One that wants so many instances of the cluster of ``state``. Raises ServerError."""
        flags = ["--planner", "sla", "--actuator", f"local:{state}", "--plan-interval-s", "1"]
        await self.restart_router(*flags, "--instances-min", str(count), "--instances-max", str(count))

    async def restart_router(self, *further: str) -> None:
        """With these flags, of which the last of a name counts. Raises ServerError."""
        await asyncio.to_thread(self.router.stop)
        await asyncio.to_thread(self.router.start, *further)

    def _count_ready(self) -> int:
        return sum(row["state"] == "ready" for row in read_workers(self.fleet.url))


@contextlib.asynccontextmanager
async def meanwhile(work: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """``work`` again and again while the block runs; its last turn is finished."""
    over = asyncio.Event()

    async def repeat() -> None:
        while not over.is_set():
            await work()

    async with asyncio.TaskGroup() as group:
        group.create_task(repeat())
        try:
            yield
        finally:
            over.set()


# -- causes ------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def killed_twice(site: Site) -> AsyncIterator[None]:
    name = site.list_names()[0]
    await site.fleet.kill(name)
    await site.fleet.start_again(name)
    await site.fleet.kill(name)
    yield
    await site.fleet.start_again(name)


@contextlib.asynccontextmanager
async def frozen(site: Site) -> AsyncIterator[None]:
    pids = find_processes(site.fleet.instance(site.list_names()[1])["pid"])
    send_signal(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        send_signal(pids, signal.SIGCONT)


@contextlib.asynccontextmanager
async def promised_too_much(site: Site) -> AsyncIterator[None]:
    """Requests come with targets that nobody meets, and state lengths that their answers do not have."""
    site.load.headers = LATE | MISSTATED
    yield
    site.load.headers = {}


@contextlib.asynccontextmanager
async def promised_a_little_too_much(site: Site) -> AsyncIterator[None]:
    """Too few requests are late for the short windows of the rules, too many for the long ones."""
    site.load.headers, site.load.one_in = LATE, FEW
    yield
    site.load.headers, site.load.one_in = {}, 1


@contextlib.asynccontextmanager
async def stuttering(site: Site) -> AsyncIterator[None]:
    """Servers, not their schedulers: tokens come late that were computed when it was predicted."""
    pids = site.find_servers()

    async def stand_still() -> None:
        send_signal(pids, signal.SIGSTOP)
        try:
            await asyncio.sleep(STILL_S)
        finally:
            send_signal(pids, signal.SIGCONT)
        await asyncio.sleep(MOVING_S)

    async with meanwhile(stand_still):
        yield


@contextlib.asynccontextmanager
async def flushed(site: Site) -> AsyncIterator[None]:
    """One prompt again and again, and caches that are emptied each time, without a word to the router."""
    site.load.is_held = True
    await site.load.wait_until_idle()
    prompt = chain.prompt_of(SHARED_TOKENS, 4, random.Random(0))

    async def ask_and_flush() -> None:
        await send_request(site.router.url, prompt, 4, {})
        async with aiohttp.ClientSession(trust_env=False) as http:
            for url in site.fleet.urls_of("stateless"):
                await try_flush(http, url)

    try:
        async with meanwhile(ask_and_flush):
            yield
    finally:
        site.load.is_held = False


@contextlib.asynccontextmanager
async def drained_in_turns(site: Site) -> AsyncIterator[None]:
    """Streams have to move again and again, over links that lose what they carry."""
    turns = 0

    async def drain_next() -> None:
        nonlocal turns
        rows = [row for row in await asyncio.to_thread(read_workers, site.fleet.url) if row["state"] == "ready"]
        number, turns = rows[turns % len(rows)]["number"], turns + 1
        await asyncio.to_thread(order, site.fleet.url, number, "drain")
        await asyncio.sleep(DRAINED_S)
        await asyncio.to_thread(order, site.fleet.url, number, "undrain")

    async with meanwhile(drain_next):
        yield


@contextlib.asynccontextmanager
async def all_drained(site: Site) -> AsyncIterator[None]:
    """No instance takes anything, and many want something: they wait, and then they are refused."""
    await site.order_all("drain")

    async def crowd() -> None:
        site.load.send_some(CROWD)
        await asyncio.sleep(2.0)

    async with meanwhile(crowd):
        yield
    await site.order_all("undrain")


@contextlib.asynccontextmanager
async def router_gone(site: Site) -> AsyncIterator[None]:
    await asyncio.to_thread(site.router.kill)
    yield
    await asyncio.to_thread(site.router.start)
    await site.wait_until_ready(len(site.list_names()))


@contextlib.asynccontextmanager
async def router_killed_twice(site: Site) -> AsyncIterator[None]:
    for _ in range(2):
        await asyncio.to_thread(site.router.kill)
        started_s = time.monotonic()
        await asyncio.to_thread(site.router.start)
        await asyncio.sleep(max(0.0, started_s + 2.0 - time.monotonic()))
    yield
    await site.wait_until_ready(len(site.list_names()))


@contextlib.asynccontextmanager
async def actuator_away(site: Site) -> AsyncIterator[None]:
    """A planner wants one instance more of a cluster that is not there."""
    await site.start_planner(site.find_state().with_name("nobody.json"), len(site.list_names()) + 1)
    yield
    await site.restart_router("--planner", NO_PLANNER)
    await site.wait_until_ready(len(site.list_names()))


@contextlib.asynccontextmanager
async def planned_in_vain(site: Site) -> AsyncIterator[None]:
    """A planner wants one instance more, and each that it starts is killed before it is ready; then one is not."""
    names, state = site.list_names(), site.find_state()
    count = len(names) + 1
    await site.start_planner(state, count)

    async def kill_newcomers() -> None:
        for one in json.loads(state.read_text(encoding="utf-8"))["instances"]:
            if one["name"] not in names and one["state"] == "starting" and one["pid"]:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one["pid"], signal.SIGKILL)
        await asyncio.sleep(POLL_S)

    async with meanwhile(kill_newcomers):
        yield
    await site.wait_until_ready(count)
