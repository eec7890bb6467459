"""The page's fleet in a Ray of two nodes: an instance whose actor is killed is started again, and all of it serves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from e2e.test_cluster_scaling import BODY, LIMIT_S, ready_workers
from e2e.test_planner_live import ARGUMENTS, PLANNER
from e2e.test_planner_live import test_a_fleet_grows_under_load_and_shrinks_after_it as grow_and_shrink
from e2e.test_router_control import call
from support.clusters import STOP_S, wait_ready
from support.doc_commands import BLOCKS
from support.forked_servers import ONE_MODEL
from support.rays import running_nodes, running_ray
from support.serving import until, until_ended

from pla_sglang.fleet.cluster.ports import free_port
from pla_sglang.testing.server import greedy_body

pytestmark = pytest.mark.e2e

PAGE = "docs/reference/actuators.md"
PORT = "6380"  # on the page


def read_tutorial() -> tuple[list[list[str]], list[str]]:
    """The commands of the page that start nodes, and the one that starts the fleet, on a free port."""
    (block,) = (block for block in BLOCKS if block.page == PAGE and " ray start " in block.text)
    port = str(free_port())
    *nodes, (_, *fleet) = [[word.replace(PORT, port) for word in command.words] for command in block.commands]
    return nodes, [sys.executable, *fleet]


@contextlib.contextmanager
def running(command: Sequence[str], folder: Path) -> Iterator[dict[str, Any]]:
    """``launch_cluster --on ray``, which ends as with Ctrl-C."""
    state, log = folder / "state.json", folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--state-file", str(state)], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield wait_ready(process, state, log) | {"process": process, "state_file": state, "log": log}
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        process.kill()
        process.wait()


def test_the_tutorial_of_the_page_serves_and_heals(tmp_path: Path) -> None:
    pytest.importorskip("nixl", reason="stateless instances need NIXL")
    pytest.importorskip("ray", reason="Ray is an extra")
    nodes, command = read_tutorial()
    with running_nodes(nodes, tmp_path):
        with running(command, tmp_path) as cluster:
            url, (lost, other) = cluster["url"], cluster["instances"]
            assert call(f"{url}/generate", BODY)[0] == 200
            os.kill(lost["actor_pid"], signal.SIGKILL)
            until(lambda: is_replaced(url, lost, other), patience_s=LIMIT_S, what="it is back, and the router knows")
            until_ended(lost["pid"])
            again = subprocess.run(command, capture_output=True, text=True, check=False)
            assert (again.returncode, again.stderr.count("\n")) == (1, 1)
            assert "is there already" in again.stderr
        log = cluster["log"].read_text(errors="replace")
        assert cluster["process"].returncode == 0, log[-3000:]
        assert "[cluster] stopped, nothing left running" in log
        assert "Traceback" not in log
        assert not Path(cluster["state_file"]).exists()


def is_replaced(url: str, lost: dict[str, Any], other: dict[str, Any]) -> bool:
    ready = ready_workers(url)
    here = len(ready) == 2 and other["url"] in ready and lost["url"] not in ready
    return here and call(f"{url}/generate", BODY)[0] == 200


def test_a_planner_scales_it(tmp_path: Path) -> None:
    """As a cluster on this machine."""
    pytest.importorskip("nixl", reason="stateless instances need NIXL")
    with running_ray(nodes=1) as rays:
        command = [sys.executable, "-m", "pla_sglang.launch_cluster", "--on", "ray", "--ray-address", rays.address]
        with running([*command, *ARGUMENTS, f"--router-args={PLANNER}"], tmp_path) as cluster:
            grow_and_shrink(cluster)


def test_ranks_on_two_nodes_serve_and_come_back_whole(
    tmp_path: Path,
    tiny_model: Callable[[str], Path],
    prompts: list[list[int]],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens are those of one process without ranks, before the second node's server is killed and after."""
    for name, value in ONE_MODEL.items():
        monkeypatch.setenv(name, value)
    engine = ("--model-path", str(tiny_model("float32")), "--device", "cpu", "--tp-size", "2", "--nnodes", "2")
    with running_ray() as rays:
        command = [sys.executable, "-m", "pla_sglang.launch_cluster", "--on", "ray", "--ray-address", rays.address]
        options = ("--unified", "1", "--router", "pla", "--sleep-on-idle", "--max-total-tokens", "4096")
        with running([*command, *options, *engine], tmp_path) as cluster:
            url, (lost,) = cluster["url"], cluster["instances"]

            def read_instance() -> dict[str, Any]:
                return dict(json.loads(Path(cluster["state_file"]).read_text())["instances"][0])

            def check_answers() -> None:
                for prompt, tokens in zip(prompts[2:5], expected[2:5], strict=True):
                    status, answer = call(f"{url}/generate", greedy_body(prompt, len(tokens)))
                    assert (status, answer["output_ids"]) == (200, tokens)

            assert len({node["node"] for node in lost["nodes"]}) == 2
            check_answers()
            os.kill(lost["nodes"][1]["pid"], signal.SIGKILL)
            until(lambda: read_instance()["url"] != lost["url"], patience_s=LIMIT_S, what="it is started again")
            back = read_instance()
            until(lambda: list(ready_workers(url)) == [back["url"]], patience_s=LIMIT_S, what="the router has it")
            check_answers()
            for node in lost["nodes"]:
                until_ended(node["pid"])
        assert cluster["process"].returncode == 0, cluster["log"].read_text(errors="replace")[-3000:]
        for node in back["nodes"]:
            until_ended(node["pid"])
