"""Starts the processes of a router, restarts those that end by themselves, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pla_sglang.router.children import EXIT_BAD_ARGUMENTS, Stop, until_first
from pla_sglang.router.config import RelayConfig
from pla_sglang.router.links import STREAM

RESTART_S = (0.1, 5.0)  # first and longest wait before a process is started again
STEADY_S = 30.0  # one that ran for so long starts over with the first wait
STOP_GRACE_S = 5.0


class Child:
    """One process that is kept running."""

    def __init__(self, name: str, kind: str, settings: dict[str, Any]) -> None:
        self.name = name
        self._kind, self._settings = kind, settings
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def keep(self) -> int:
        """Returns the exit status once it is not to be started again."""
        wait_s = RESTART_S[0]
        while True:
            started_s = time.monotonic()
            status = await self._run()
            if self._stopping or status == EXIT_BAD_ARGUMENTS:
                return status
            if time.monotonic() - started_s > STEADY_S:
                wait_s = RESTART_S[0]
            print(f"pla_sglang: {self.name} ended with status {status}; starting it again", file=sys.stderr, flush=True)
            self.restarts += 1
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RESTART_S[1])

    async def _run(self) -> int:
        command = [sys.executable, "-m", "pla_sglang.router.children", self._kind]
        # a session of its own: a Ctrl-C reaches the launcher only, which ends the others in order
        self._process = process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(self._settings).encode() + b"\n")
        try:
            return await process.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL for who has not ended after ``grace_s``."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def with_memory(arguments: list[str], folder: Path) -> list[str]:
    """Relays name instances by number, so a control plane that is started again must know who had which."""
    if any(one.split("=")[0] == "--memory-file" for one in arguments):
        return arguments
    return [*arguments, "--memory-file", str(folder / "memory.json")]


async def supervise(config: RelayConfig, relays: int, control_arguments: list[str], *, carrier: str = STREAM) -> int:
    """Run the control plane and ``relays`` relays, joined by ``carrier`` (``links.py``), until a signal. The exit
    status."""
    stop = Stop(watch_stdin=False)
    with tempfile.TemporaryDirectory(prefix="pla_router.") as folder:
        address = f"{carrier}{Path(folder) / 'control'}"
        arguments = with_memory(control_arguments, Path(folder))
        control = Child("the control plane", "control", {"address": address, "arguments": arguments})
        members = [
            Child(f"relay {number}", "relay", {"number": number, "address": address, "config": config.to_json()})
            for number in range(relays)
        ]
        keeping = {asyncio.ensure_future(child.keep()) for child in (control, *members)}
        stopped = asyncio.ensure_future(stop.asked.wait())
        done, _ = await asyncio.wait({*keeping, stopped}, return_when=asyncio.FIRST_COMPLETED)
        failed = [task.result() for task in done - {stopped}]  # a child that refuses its settings
        drain_s = 0.0 if failed else config.drain_timeout_s
        ends = asyncio.gather(*(child.stop(drain_s + STOP_GRACE_S) for child in members))
        await until_first(_wait(ends), stop.forced.wait())
        await control.stop(STOP_GRACE_S)
        for task in (*keeping, stopped):
            task.cancel()
        await asyncio.gather(*keeping, stopped, return_exceptions=True)
    return failed[0] if failed else 0


async def _wait(ends: asyncio.Future[Any]) -> None:
    await ends
