"""A Ray of two nodes on this machine, for tests; all its processes end with the context."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.serving import until

HEAD_S, STOP_S = 60.0, 20.0


def environment() -> dict[str, str]:
    """In which Ray's processes find this checkout and ``tests``.

    Ray's workers, and so the engines, would be nice to all others on this machine: a start could take minutes.
    """
    path = os.pathsep.join(path for path in sys.path if path)
    return {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "PYTHONPATH": path}


@contextlib.contextmanager
def running_ray(*, nodes: int = 2, gpus: int = 0) -> Iterator[Any]:
    """Skips the test where Ray is not installed. What runs in it finds this checkout and ``tests``.

    Each node has another address of this machine, and Ray believes in its ``gpus``.
    """
    pytest.importorskip("ray", reason="Ray is an extra")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # of this process, where a test before has hidden all
        has = {"num_cpus": 4, "num_gpus": gpus}
        cluster = Cluster(initialize_head=True, head_node_args={**has, "include_dashboard": False})
        try:
            for number in range(1, nodes):
                cluster.add_node(**has, node_ip_address=f"127.0.0.{number + 1}")
            yield cluster
        finally:
            cluster.shutdown()


@contextlib.contextmanager
def running_nodes(commands: Sequence[Sequence[str]], folder: Path) -> Iterator[None]:
    """Nodes by their ``env ... ray start --block``, one after the other. All that they start is ended, by its id."""
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        ray = [sys.executable, "-m", "ray.scripts.scripts"]
        for number, words in enumerate(commands):
            place = words.index("ray")
            log = folder / f"node-{number}.log"
            with log.open("wb") as output:
                node = subprocess.Popen(
                    [*words[:place], *ray, *words[place + 1 :]],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=os.environ | environment(),
                    start_new_session=True,
                )
            nodes.append(node)
            until(lambda log=log: "Ray runtime started" in log.read_text(), what=f"node {number}", patience_s=HEAD_S)
        yield
    finally:
        for node in reversed(nodes):
            end_family(node)


def end_family(process: subprocess.Popen[bytes]) -> None:
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.kill()
    process.wait()
