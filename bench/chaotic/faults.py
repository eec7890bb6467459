"""Faults at planned times: aborts at prefill instances, and instances that are killed and started again."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import os
import signal
import sys
import time
import urllib.parse
from pathlib import Path
from typing import Any

import aiohttp

from bench.lib.report import say
from bench.replaying.client import START_DELAY_S

DOWN_S = 3.0  # from a kill to the order to start again
DEAD_POLL_S = 0.005


class Fault(enum.Enum):
    ABORT = "abort"
    KILL = "kill"


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """A fault that has happened. Times are CLOCK_MONOTONIC's, which all processes of a machine share.

    Attributes:
        name: of the request, or of the instance.
        at_s: when it was ordered.
        over_s: of a kill: when nobody listened there any more. The kernel closes sockets last when a process ends, so a
            request that is sent before that is accepted by a process that is dead.
    """

    kind: Fault
    name: str
    at_s: float
    since_start_s: float
    over_s: float


class Faults:
    """All faults of one run. Plan first, then ``run`` beside the clients."""

    def __init__(self, described: dict[str, Any], state: Path) -> None:
        self.done: list[Done] = []
        self._instances = {one["name"]: one for one in described["instances"]}
        self._state = state
        self._planned: list[tuple[float, Fault, str]] = []

    def plan_abort(self, at_s: float, rid: str) -> None:
        self._planned.append((at_s, Fault.ABORT, rid))

    def plan_kill(self, at_s: float, instance: str) -> None:
        self._planned.append((at_s, Fault.KILL, instance))

    def aborted(self) -> set[str]:
        """Requests for which an abort was sent."""
        return {one.name for one in self.done if one.kind is Fault.ABORT}

    async def run(self) -> None:
        start_s = time.monotonic() + START_DELAY_S
        async with aiohttp.ClientSession(trust_env=False) as http, asyncio.TaskGroup() as group:
            for at_s, kind, name in sorted(self._planned, key=lambda one: one[0]):
                await asyncio.sleep(max(0.0, start_s + at_s - time.monotonic()))
                if kind is Fault.ABORT:
                    now_s = time.monotonic()
                    self.done.append(Done(kind, name, now_s, at_s, now_s))
                    group.create_task(self._abort(http, name))
                else:
                    group.create_task(self._kill(name, at_s))

    async def _abort(self, http: aiohttp.ClientSession, rid: str) -> None:
        """At every prefill instance: an operator does not know which one has it."""
        for one in self._instances.values():
            if one["kind"] == "prefill":
                try:
                    await http.post(f"{one['url']}/abort_request", json={"rid": rid})
                except (aiohttp.ClientError, OSError):
                    continue  # it has been killed

    async def _kill(self, name: str, since_start_s: float) -> None:
        at_s = time.monotonic()
        os.killpg(self._instances[name]["pid"], signal.SIGKILL)
        over_s = await self._closed(name)
        self.done.append(Done(Fault.KILL, name, at_s, since_start_s, over_s))
        say(f"killed {name}; its sockets were closed after {over_s - at_s:.2f} s")
        await asyncio.sleep(DOWN_S)
        command = [sys.executable, "-m", "pla_sglang.launch_cluster", "--restart", name]
        restart = await asyncio.create_subprocess_exec(
            *command, "--state-file", str(self._state), stdout=asyncio.subprocess.DEVNULL
        )
        status = await restart.wait()
        say(f"{name} is back" if status == 0 else f"{name} was not started again: status {status}")

    async def _closed(self, name: str) -> float:
        """When nobody listens at an instance's address any more."""
        address = urllib.parse.urlsplit(self._instances[name]["url"])
        while True:
            try:
                _, writer = await asyncio.open_connection(address.hostname, address.port)
            except OSError:
                return time.monotonic()
            writer.transport.abort()
            await asyncio.sleep(DEAD_POLL_S)
