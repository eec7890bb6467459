"""One process of a router that is kept running, and what is said between it and its launcher."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
import time
from typing import Any, Protocol

from pla_sglang.common.cli import EXIT_BAD_ARGUMENTS

RESTART_S = (0.1, 5.0)  # first and longest wait before a process is started again
STEADY_S = 30.0  # one that ran for so long starts over with the first wait
BEATS_BYTES = 4096  # read at once; a beat has one


class Watcher(Protocol):
    """Hears of the life of processes."""

    def on_start(self, child: Child) -> None: ...

    def on_beat(self, child: Child) -> None: ...

    def on_end(self, child: Child) -> None: ...


class Child:
    """One process that is kept running. Its standard input is a socket: it reads lines of JSON from it, first its
    settings, and writes beats to it, where it has a ``watcher``."""

    def __init__(self, name: str, kind: str, settings: dict[str, Any], watcher: Watcher | None = None) -> None:
        self.name = name
        self._kind, self._settings, self._watcher = kind, settings, watcher
        self._process: asyncio.subprocess.Process | None = None
        self._channel: socket.socket | None = None
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
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                # a session of its own: a Ctrl-C reaches the launcher only, which ends the others in order
                self._process = process = await asyncio.create_subprocess_exec(
                    *command, stdin=theirs.fileno(), start_new_session=True
                )
            self._channel = ours
            try:
                self.send_line(self._settings)
                self._watch()
                return await process.wait()
            except asyncio.CancelledError:
                self.kill()
                await process.wait()
                raise
            finally:
                self._unwatch()

    def send_line(self, line: dict[str, Any]) -> None:
        """It may have ended."""
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.sendall(json.dumps(line).encode() + b"\n")

    def _watch(self) -> None:
        if self._watcher is not None and self._channel is not None:
            asyncio.get_running_loop().add_reader(self._channel.fileno(), self._on_beats, self._channel)
            self._watcher.on_start(self)

    def _unwatch(self) -> None:
        channel, self._channel = self._channel, None
        if self._watcher is not None and channel is not None:
            asyncio.get_running_loop().remove_reader(channel.fileno())
            self._watcher.on_end(self)

    def _on_beats(self, channel: socket.socket) -> None:
        beats = b""
        with contextlib.suppress(OSError):
            beats = channel.recv(BEATS_BYTES)
        if beats and self._watcher is not None:
            self._watcher.on_beat(self)
        else:
            asyncio.get_running_loop().remove_reader(channel.fileno())

    def kill(self) -> None:
        """It runs no further instruction, be it stopped (SIGSTOP) or not."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

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
            self.kill()
