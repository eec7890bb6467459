"""Faults at planned times: aborts at prefill instances, and instances that are killed and started again."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

from bench.lib.report import say
from bench.replaying.client import START_DELAY_S

DOWN_S = 3.0  # from a kill to the order to start again


class Fault(enum.Enum):
    ABORT = "abort"
    KILL = "kill"


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """A fault that has happened. ``at_s``: CLOCK_MONOTONIC, which all processes of a machine share."""

    kind: Fault
    name: str  # of the request, or of the instance
    at_s: float
    since_start_s: float


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
                self.done.append(Done(kind, name, time.monotonic(), at_s))
                if kind is Fault.ABORT:
                    group.create_task(self._abort(http, name))
                else:
                    group.create_task(self._kill(name))

    async def _abort(self, http: aiohttp.ClientSession, rid: str) -> None:
        """At every prefill instance: an operator does not know which one has it."""
        for one in self._instances.values():
            if one["kind"] == "prefill":
                try:
                    await http.post(f"{one['url']}/abort_request", json={"rid": rid})
                except (aiohttp.ClientError, OSError):
                    continue  # it has been killed

    async def _kill(self, name: str) -> None:
        os.killpg(self._instances[name]["pid"], signal.SIGKILL)
        say(f"killed {name}")
        await asyncio.sleep(DOWN_S)
        command = [sys.executable, "-m", "pla_sglang.launch_cluster", "--restart", name]
        restart = await asyncio.create_subprocess_exec(
            *command, "--state-file", str(self._state), stdout=asyncio.subprocess.DEVNULL
        )
        status = await restart.wait()
        say(f"{name} is back" if status == 0 else f"{name} was not started again: status {status}")
