"""A fleet in a Ray of two nodes behind our router: an instance whose actor is killed is started again and serves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e.test_cluster_scaling import BODY, LIMIT_S, ready_workers
from e2e.test_router_control import call
from support.clusters import STOP_S, wait_ready
from support.rays import running_ray
from support.serving import until

pytestmark = pytest.mark.e2e

ARGUMENTS = ("--stateless", "1", "--policy", "least-tokens", "--pla-emulate", "h100-llama3.1-8b-tp1")


def command(address: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "pla_sglang.launch_cluster", "--on", "ray", "--ray-address", address, *arguments]


@contextlib.contextmanager
def running(address: str, folder: Path) -> Iterator[dict[str, Any]]:
    """``launch_cluster --on ray``, which ends as with Ctrl-C."""
    state, log = folder / "state.json", folder / "log"
    words = command(address, *ARGUMENTS, "--state-file", str(state))
    with log.open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield wait_ready(process, state, log) | {"process": process, "state_file": state, "log": log}
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        process.kill()
        process.wait()


def test_a_fleet_in_ray_serves_and_heals(tmp_path: Path) -> None:
    pytest.importorskip("nixl", reason="stateless instances need NIXL")
    with running_ray() as ray_cluster:
        with running(ray_cluster.address, tmp_path) as cluster:
            url, lost = cluster["url"], cluster["instances"][0]
            assert call(f"{url}/generate", BODY)[0] == 200
            os.kill(lost["actor_pid"], signal.SIGKILL)
            until(
                lambda: serves_elsewhere(url, lost["url"]), patience_s=LIMIT_S, what="it is back, and the router knows"
            )
            assert not psutil.pid_exists(lost["pid"])
            again = subprocess.run(
                command(ray_cluster.address, *ARGUMENTS), capture_output=True, text=True, check=False
            )
            assert (again.returncode, again.stderr.count("\n")) == (1, 1)
            assert "is there already" in again.stderr
        log = cluster["log"].read_text(errors="replace")
        assert cluster["process"].returncode == 0, log[-3000:]
        assert "[cluster] stopped, nothing left running" in log
        assert "Traceback" not in log
        assert not Path(cluster["state_file"]).exists()


def serves_elsewhere(url: str, lost_url: str) -> bool:
    ready = ready_workers(url)
    return len(ready) == 1 and lost_url not in ready and call(f"{url}/generate", BODY)[0] == 200
