"""Two relays and a control process in front of a real PD pair: every token is right."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from e2e.test_emulation import ask, get, launch, wait_ready

pytestmark = pytest.mark.e2e

SCALE = 4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    pytest.importorskip("nixl", reason="PD disaggregation needs NIXL")
    folder = tmp_path_factory.mktemp("relays")
    state, log = folder / "state.json", folder / "log"
    process = launch(
        *(state, log, "--prefill", "1", "--decode", "1", "--pla-emulate", "h100-llama3.1-8b-tp1"),
        *("--pla-time-scale", str(SCALE), "--incremental-streaming-output", "--router", "pla"),
        *("--policy", "static-pd-round-robin", "--router-args", "--relay-workers 2"),
    )
    try:
        yield wait_ready(process, state, log) | {"process": process, "log": log}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(40)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait()


def held(cluster: dict[str, Any], kind: str) -> int:
    """Requests that an instance runs or has waiting, in any of its queues."""
    [one] = [one for one in cluster["instances"] if one["kind"] == kind]
    loads = get(one["url"] + "/v1/loads?include=core")["loads"]
    return sum(rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in loads)


def idle(cluster: dict[str, Any]) -> bool:
    state = get(cluster["url"] + "/pla/state")
    return state["open_requests"] == 0 and held(cluster, "prefill") == held(cluster, "decode") == 0


def test_every_token_is_right(cluster: dict[str, Any]) -> None:
    ask(cluster["url"], 40, seed=11, gap_s=0.03)
