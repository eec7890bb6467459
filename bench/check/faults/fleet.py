"""A fleet under faults: instances of ``launch_cluster`` behind a router, what is done to them, and what they say."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bench.check.faults.client import Stream
from bench.check.faults.routers import Routers
from bench.check.leftovers import abort_request
from bench.harness.report import say
from bench.harness.steps import Row
from pla_sglang.common.errors import PlaError
from pla_sglang.testing.server import HttpError, fetch

DOWN_S = 3.0  # from a kill to the order to start again
STILL_S = 20.0  # for which an instance is frozen, or cannot be reached
KILL, CRASH, FREEZE, FREEZE_ALL, BLACKHOLE = "kill", "crash", "freeze", "freeze_all", "blackhole"  # of the table
SCHEDULER = "sglang::scheduler"  # as SGLang names the process
DEAD_POLL_S, POLL_S = 0.005, 0.03
PAIRED_LIMIT_S, EMPTY_S, END_S = 300.0, 120.0, 60.0  # of real time


# -- what a router says and is told ------------------------------------------------------------------------------------


def read_workers(url: str) -> list[Row]:
    """Those that are not dead."""
    return [row for row in fetch(f"{url}/workers")["workers"] if row["state"] != "dead"]


def order(url: str, number: int, what: str, **body: Any) -> Row:
    """To a router, about one of its workers: drain, undrain, role. Raises ServerError."""
    return dict(fetch(f"{url}/workers/{number}/{what}", body))


def explain_request(url: str, rid: str) -> Row:
    """The router's story of a request; empty if it knows none."""
    with contextlib.suppress(HttpError):
        return dict(fetch(f"{url}/pla/explain/{rid}"))
    return {}


def find_present(story: Row) -> Row:
    """The attempt that its client sees, or has seen last."""
    return dict(next(attempt for attempt in story["attempts"] if attempt["state"] != "over"))


def find_hops(story: Row) -> list[Row]:
    """The attempts that went on with it at another instance, without those of moves that came to nothing."""
    later = [attempt for attempt in story.get("attempts", ()) if attempt["how"] is not None]
    return [one for one in later if one["state"] != "over" or one["over"] is not None or one["gap_s"] is not None]


async def wait_until_empty(url: str, number: int, start_s: float) -> float:
    """Until a router has nothing at a worker; seconds since ``start_s``. Raises TimeoutError."""
    while time.monotonic() < start_s + EMPTY_S:
        rows = [row for row in await asyncio.to_thread(read_workers, url) if row["number"] == number]
        if not rows or rows[0]["open_requests"] == 0:
            return time.monotonic() - start_s
        await asyncio.sleep(POLL_S)
    raise TimeoutError(f"worker {number} has requests {EMPTY_S:g} s after it was to be empty")


def is_paired(rows: Sequence[Mapping[str, Any]], count: int) -> bool:
    """``rows``: of the router's ``/workers``; ``count``: of its stateless instances."""
    ready = [row["peers"] or {} for row in rows if row["kind"] == "stateless" and row["state"] == "ready"]
    return len(ready) == count and all(list(peers.values()) == ["ready"] * (count - 1) for peers in ready)


# -- the fleet ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Kill:
    """An instance that was ended. Times are of ``time.monotonic``, which all processes of a machine share."""

    name: str
    at_s: float  # when it was ordered
    # When nobody listened there any more. The kernel closes sockets last when a process ends, so a request that is sent
    # before that is accepted by a process that is dead.
    over_s: float
    crashed: bool = False  # its scheduler raised


@dataclasses.dataclass(frozen=True, slots=True)
class Standstill:
    """An instance that stood still for a while, or what goes through to it. ``fault``: of the table."""

    fault: str
    name: str
    at_s: float
    over_s: float


class Fleet:
    """All that one run does to a cluster.

    Args:
        state: the cluster's file, which knows the process that an instance is now.
        streams: all that are sent.
        routers: in place of the cluster's one.
        moves: requests go on elsewhere when their instance ends.

    Attributes:
        start_s: when the run began; 0 until then.
        aborted: requests for which an abort was sent.
        paired_s: from the order to start a stateless instance again, or from the end of its standstill, until it and
            all others are ready and connected, by name; of several the longest.
    """

    def __init__(
        self,
        described: Mapping[str, Any],
        state: Path | None = None,
        *,
        streams: Sequence[Stream] = (),
        routers: Routers | None = None,
        moves: bool = True,
    ) -> None:
        self.described, self.state, self.routers, self.moves = described, state, routers, moves
        self.streams = {stream.rid: stream for stream in streams}
        self._numbers = {rid: number for number, rid in enumerate(self.streams)}
        self.start_s = 0.0
        self.aborted: set[str] = set()
        self.kills: list[Kill] = []
        self.standstills: list[Standstill] = []
        self.paired_s: dict[str, float] = {}
        self._down: dict[str, asyncio.Lock] = {}  # from a kill until it is paired again
        self._out: set[str] = set()  # from a kill or the begin of a standstill until its end

    @property
    def url(self) -> str:
        """Of the router, or the first of several."""
        return str(self.described["url"])

    @property
    def router_urls(self) -> list[str]:
        return [self.url] if self.routers is None else self.routers.urls

    def router_of(self, stream: Stream) -> int:
        """Several routers get requests in turns; one that the fleet was not told of has gone to the first."""
        return self._numbers.get(stream.rid, 0) % len(self.router_urls)

    def urls_of(self, *kinds: str) -> list[str]:
        return [instance["url"] for instance in self.described["instances"] if instance["kind"] in kinds]

    def instance(self, what: str) -> Row:
        """By its name or address, as it is now: the file is kept up to date. The file has no proxies."""
        assert self.state is not None, "its processes are known"
        name = next((one["name"] for one in self.described["instances"] if one["url"] == what), what)
        instances = json.loads(self.state.read_text(encoding="utf-8"))["instances"]
        return dict(next(one for one in instances if name in (one["name"], one["url"])))

    def find_instance(self, rid: str) -> Row:
        """Where a request is, or was last."""
        return self.instance(f"http://{find_present(explain_request(self.url, rid))['decode']}")

    def explain(self, stream: Stream) -> Row:
        return explain_request(self.router_urls[self.router_of(stream)], stream.rid)

    async def abort(self, rid: str) -> None:
        """At every instance that prefills: an operator does not know which one has it."""
        self.aborted.add(rid)
        async with aiohttp.ClientSession(trust_env=False) as http, asyncio.TaskGroup() as group:
            for url in self.urls_of("prefill", "stateless"):  # at once: one may be frozen
                group.create_task(self._abort_at(http, url, rid))

    async def _abort_at(self, http: aiohttp.ClientSession, url: str, rid: str) -> None:
        with contextlib.suppress(aiohttp.ClientError, OSError):  # it has been killed
            await abort_request(http, url, rid)

    async def kill(self, name: str) -> None:
        """SIGKILL; until nobody listens there any more."""
        instance, at_s = self.instance(name), time.monotonic()
        os.killpg(instance["pid"], signal.SIGKILL)
        over_s = await wait_until_closed(instance["url"])
        self.kills.append(Kill(name, at_s, over_s))
        say(f"killed {name}; its sockets were closed after {over_s - at_s:.2f} s")

    async def crash(self, name: str) -> None:
        """Its scheduler raises at its next pass; until all of it has ended, which SGLang takes its time for."""
        instance, at_s = self.instance(name), time.monotonic()
        os.kill(find_schedulers(instance["pid"])[0], signal.SIGUSR1)  # pla_sglang/sim/emulate/hooks.py
        over_s = await wait_until_closed(instance["url"], poll_s=POLL_S)
        self.kills.append(Kill(name, at_s, over_s, crashed=True))
        say(f"the scheduler of {name} raised; its sockets were closed after {over_s - at_s:.2f} s")

    async def kill_for_a_while(self, name: str) -> None:
        await self._end_for_a_while(name, self.kill)

    async def crash_for_a_while(self, name: str) -> None:
        await self._end_for_a_while(name, self.crash)

    async def _end_for_a_while(self, name: str, end: Callable[[str], Awaitable[None]]) -> None:
        """It is started again, and connected with all others. One that is down is ended when it is back."""
        async with self._down.setdefault(name, asyncio.Lock()):
            self._out.add(name)
            await end(name)
            await asyncio.sleep(DOWN_S)
            try:
                await self.start_again(name)
            except (PlaError, TimeoutError) as error:  # the bench shows that it was late
                say(str(error))

    async def freeze(self, name: str) -> None:
        """Its schedulers, and nothing else of it."""
        await self._stand_still(FREEZE, name, lambda: find_schedulers(self.instance(name)["pid"]))

    async def freeze_all(self, name: str) -> None:
        await self._stand_still(FREEZE_ALL, name, lambda: find_processes(self.instance(name)["pid"]))

    async def cut_off(self, name: str) -> None:
        """Its proxy: nothing goes through, and nothing is closed."""
        proxies = {one["name"]: one["proxy_pid"] for one in self.described["instances"]}
        await self._stand_still(BLACKHOLE, name, lambda: [proxies[name]])

    async def _stand_still(self, fault: str, name: str, find: Callable[[], list[int]]) -> None:
        """For ``STILL_S``, and until it serves again. However it is ended, the processes go on."""
        async with self._down.setdefault(name, asyncio.Lock()):
            pids, at_s = find(), time.monotonic()
            self._out.add(name)
            try:
                send_signal(pids, signal.SIGSTOP)
                await asyncio.sleep(STILL_S)
            finally:
                send_signal(pids, signal.SIGCONT)
                over_s = time.monotonic()
                self.standstills.append(Standstill(fault, name, at_s, over_s))
            say(f"{fault} of {name} is over after {over_s - at_s:.2f} s")
            try:
                await self._wait_until_back(name, over_s)
            except TimeoutError as error:  # the bench shows that it was late
                say(str(error))

    async def start_again(self, name: str) -> None:
        """Raises PlaError where it cannot be started, TimeoutError where it is not connected with the others."""
        ordered_s = time.monotonic()
        if (status := await restart_instance(name, self.state)) != 0:
            raise PlaError(f"{name} was not started again: status {status}")
        say(f"{name} is back")
        await self._wait_until_back(name, ordered_s)

    async def _wait_until_back(self, name: str, since_s: float) -> None:
        """For its router, where it is a stateless one. While another one is out, it cannot be paired with all, so its
        time begins after that. Raises TimeoutError."""
        self._out.discard(name)
        if (count := len(self.urls_of("stateless"))) and self.instance(name)["kind"] == "stateless":
            while not is_paired(await asyncio.to_thread(self._read_rows), count):
                if time.monotonic() > since_s + PAIRED_LIMIT_S:
                    raise TimeoutError(f"{name} is not connected with all others after {PAIRED_LIMIT_S:g} s")
                if self._out:
                    since_s = time.monotonic()
                await asyncio.sleep(POLL_S)
            paired_s = time.monotonic() - since_s
            self.paired_s[name] = max(self.paired_s.get(name, 0.0), paired_s)
            say(f"{name} is paired with all others after {paired_s:.1f} s")

    def _read_rows(self) -> list[Row]:
        with contextlib.suppress(PlaError, OSError):  # the router may be down itself
            return read_workers(self.url)
        return []

    async def terminate(self, name: str) -> float:
        """SIGTERM; seconds until its process has ended, as the cluster says. Raises TimeoutError."""
        start_s = time.monotonic()
        os.kill(self.instance(name)["pid"], signal.SIGTERM)
        while self.instance(name)["state"] != "dead":
            if time.monotonic() > start_s + EMPTY_S + END_S:
                raise TimeoutError(f"{name} has not ended {EMPTY_S + END_S:g} s after SIGTERM")
            await asyncio.sleep(POLL_S)
        return time.monotonic() - start_s


async def restart_instance(name: str, state: Path | None) -> int:
    """Until it is ready. The exit status of the order."""
    command = [sys.executable, "-m", "pla_sglang.launch_cluster", "--restart", name, "--state-file", str(state)]
    restart = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    return await restart.wait()


def find_schedulers(pid: int) -> list[int]:
    """``pid``: of an engine. Raises PlaError where there is none."""
    found = [child.pid for child in psutil.Process(pid).children(recursive=True) if is_scheduler(child)]
    if not found:
        raise PlaError(f"process {pid} has no scheduler")
    return found


def is_scheduler(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "".join(process.cmdline()[:1]).startswith(SCHEDULER)
    return False


def find_processes(pid: int) -> list[int]:
    """Of an engine, the one that serves HTTP first."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def send_signal(pids: Sequence[int], number: signal.Signals) -> None:
    """Those that have ended do not matter."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


async def wait_until_closed(url: str, *, poll_s: float = DEAD_POLL_S) -> float:
    """When nobody listens at the address any more."""
    address = urllib.parse.urlsplit(url)
    while True:
        try:
            _, writer = await asyncio.open_connection(address.hostname, address.port)
        except OSError:
            return time.monotonic()
        writer.transport.abort()
        await asyncio.sleep(poll_s)
