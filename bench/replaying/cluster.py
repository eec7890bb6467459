"""A cluster as a context: started by its own command, described by its state file, always stopped."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.lib.child import running_child
from bench.lib.report import say
from pla_sglang.testing.server import ServerError

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 40.0
LOG_TAIL_LINES = 25
IDLE_S = 20.0


@contextlib.contextmanager
def running_cluster(arguments: Sequence[str], folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Start ``python -m pla_sglang.launch_cluster`` and yield its state file's content once everything is ready.

    Raises ServerError, with the end of the log, when it does not get ready.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state, log = folder / f"{name}.state.json", folder / f"{name}.log"
    state.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pla_sglang.launch_cluster", "--state-file", str(state), *arguments]
    with running_child(command, log, stop_s=STOP_TIMEOUT_S) as process:
        described = _wait(process, state, log)
        say(f"{name}: ready after {described['ready_s']:.0f} s, {described['pss_bytes'] / 2**30:.2f} GiB")
        yield described


def _wait(process: subprocess.Popen[bytes], state: Path, log: Path) -> dict[str, Any]:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        if state.exists():
            described: dict[str, Any] = json.loads(state.read_text(encoding="utf-8"))
            if "pss_bytes" in described:
                return described
        time.sleep(0.2)
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:])
    raise ServerError(f"the cluster did not get ready; its last lines:\n{tail}")


def emulation_of(described: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What each engine says about its emulated device, by instance."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    states = {}
    for one in described["instances"]:
        info = json.loads(opener.open(f"{one['url']}/server_info", timeout=60).read())
        states[one["name"]] = info["internal_states"][0]["pla_emulation"]
    return states


def flush_cache(engine_url: str) -> None:
    """Empty the prefix cache; an engine refuses until it is idle. Raises ServerError when it does not get so."""
    end_s = time.monotonic() + IDLE_S
    while True:
        try:
            return post(f"{engine_url}/flush_cache")
        except ServerError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.5)


def post(url: str, body: Any = None) -> None:
    """Raises ServerError unless it is answered with 200."""
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.open(request, timeout=60).read()
    except OSError as error:
        raise ServerError(f"{url}: {error}") from None
