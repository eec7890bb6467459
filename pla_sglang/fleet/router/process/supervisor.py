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

from pla_sglang.common.cli import EXIT_BAD_ARGUMENTS, Settings
from pla_sglang.fleet.reserved import make_router_key
from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.process.process_main import Stop, until_first

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

    async def keep_running(self) -> int:
        """Returns the exit status once it is not to be started again."""
        wait_s = RESTART_S[0]
        while True:
            started_s = time.monotonic()
            status = await self._run_once()
            if self._stopping or status == EXIT_BAD_ARGUMENTS:
                return status
            if time.monotonic() - started_s > STEADY_S:
                wait_s = RESTART_S[0]
            print(f"pla_sglang: {self.name} ended with status {status}; starting it again", file=sys.stderr, flush=True)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RESTART_S[1])

    async def _run_once(self) -> int:
        command = [sys.executable, "-m", "pla_sglang.fleet.router.process.process_main", self._kind]
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

    def send_sigterm(self) -> asyncio.subprocess.Process | None:
        """It is not started again. Returns the process, where it runs."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return None
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        return process

    async def stop_child(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL for who has not ended after ``grace_s``."""
        process = self.send_sigterm()
        if process is None:
            return
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


async def supervise_processes(config: RelayConfig, relays: int, settings: Settings) -> int:
    """Run ``relays`` relays, and the control plane with its part of ``settings``, until a signal. Returns the exit
    status."""
    stop = Stop(watch_stdin=False, pause_s=config.drain_pause_s)
    with tempfile.TemporaryDirectory(prefix="pla_router.") as folder:
        address = str(Path(folder) / "control")
        # Relays name instances by number, so a control plane that is started again must know who had which.
        given = {"memory-file": ("--memory-file", str(Path(folder) / "memory.json")), **settings.given}
        common = {"address": address, "given": given}
        # One key for this start: instances know it also after the control plane was started again.
        control = Child("the control plane", "control", {**common, "router_key": make_router_key()})
        members = [
            Child(f"relay {number}", "relay", {"number": number, "port": config.port, **common})
            for number in range(relays)
        ]
        keeping = {asyncio.ensure_future(child.keep_running()) for child in (control, *members)}
        stopped = asyncio.ensure_future(stop.asked.wait())
        done, _ = await asyncio.wait({*keeping, stopped}, return_when=asyncio.FIRST_COMPLETED)
        failed = [task.result() for task in done - {stopped}]  # a child that refuses its settings
        if config.drain_pause_s:
            for child in members:
                child.send_sigterm()  # the first of two: it is not ready any more
        if not failed:
            await stop.wait_pause()
        drain_s = 0.0 if failed else config.drain_timeout_s
        ends = asyncio.gather(*(child.stop_child(drain_s + STOP_GRACE_S) for child in members))
        await until_first(ends, stop.forced.wait())
        await control.stop_child(STOP_GRACE_S)
        for task in (*keeping, stopped):
            task.cancel()
        await asyncio.gather(*keeping, stopped, return_exceptions=True)
    return failed[0] if failed else 0
