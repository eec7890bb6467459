"""One server process: started in a process group of its own, frozen while another arm runs, never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.lib.client import Client

_PR_SET_PDEATHSIG = 1
_STOP_GRACE_S = 10.0
_LOG_TAIL_LINES = 25


class ServerError(RuntimeError):
    """A server that did not start, or died. The message holds the end of its log."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    """In the child, before exec: if the bench is killed, so is the server. SGLang's own children follow theirs."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Server:
    """Owns one process group from ``start`` to ``stop``.

    An idle SGLang scheduler polls without pause and takes a whole core. ``pause`` stops the group (SIGSTOP) so that the
    arm under test has the machine to itself; a frozen server keeps its sockets and memory.
    """

    def __init__(self, name: str, command: Sequence[str], *, env: Mapping[str, str], log_path: Path, port: int) -> None:
        self.name = name
        self.command = list(command)
        self.base_url = f"http://127.0.0.1:{port}"
        self.log_path = log_path
        self._env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **env}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def wait_ready(self, timeout_s: float) -> None:
        """Raises ServerError when the process ends, or is not healthy in time."""
        end_s = time.monotonic() + timeout_s
        async with Client(self.base_url) as client:
            while not await client.healthy():
                if not self.alive:
                    raise ServerError(f"{self.name} ended during start-up; the end of its log:\n{self.log_tail()}")
                if time.monotonic() > end_s:
                    raise ServerError(f"{self.name} not ready after {timeout_s:g} s; its log:\n{self.log_tail()}")
                await asyncio.sleep(0.3)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the whole group, politely first. Safe to call twice, and on a frozen server."""
        if self._process is None:
            return
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_GRACE_S)
        self._signal(signal.SIGKILL)  # children that outlived the leader
        self._process.wait()
        self._process = None

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def log_text(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace") if self.log_path.exists() else ""

    def log_tail(self) -> str:
        return "\n".join(line[:400] for line in self.log_text().splitlines()[-_LOG_TAIL_LINES:])
