"""A Ray of two nodes on this machine, for tests; all its processes end with the context."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def running_ray(*, nodes: int = 2) -> Iterator[Any]:
    """Skips the test where Ray is not installed. What runs in it finds this checkout and ``tests``."""
    pytest.importorskip("ray", reason="Ray is an extra")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
        try:
            for _ in range(nodes - 1):
                cluster.add_node(num_cpus=4)
            yield cluster
        finally:
            cluster.shutdown()
