"""Clusters of ``launch_cluster`` in end-to-end tests: a context from the start to an end without leftovers."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.forked_servers import ForkedProcess, ForkParent

START_S, STOP_S = 280.0, 40.0
POLL_S = 0.1
Launcher = subprocess.Popen[bytes] | ForkedProcess


@contextlib.contextmanager
def running_cluster(
    parent: ForkParent, folder: Path, *arguments: str, env: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """``launch_cluster`` as a fork: what its state file says once all are ready, its launcher, and its files.

    A test may end it before, with SIGINT and ``end_cluster``.
    """
    state, log = folder / "state.json", folder / "log"
    with log.open("wb") as output:
        words = ["--state-file", str(state), *arguments]
        process = parent.fork_program("pla_sglang.launch_cluster", words, env or {}, output.fileno())
    try:
        yield wait_ready(process, state, log) | {"process": process, "state_file": state, "log": log}
    finally:
        end_cluster(process)


def end_cluster(process: ForkedProcess) -> None:
    """As with Ctrl-C; killed where that does not do. Twice does no harm."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    process.end(0.0)


def wait_ready(process: Launcher, state: Path, log: Path) -> dict[str, Any]:
    """What the state file says once everything is ready; the test fails where it never is."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            described: dict[str, Any] = json.loads(state.read_text())
            if described.get("pss_bytes"):
                return described
        time.sleep(POLL_S)
    pytest.fail(f"not ready:\n{log.read_text()[-3000:]}")


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)
