"""Where the ranks of an instance meet: at ``--host`` and nowhere else."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pla_sglang.fleet.cluster.ports import free_port
from pla_sglang.fleet.stateless.host.rendezvous import keep_to_host, meet


def args(**changes: Any) -> Any:
    return SimpleNamespace(**{"nnodes": 1, "dist_init_addr": None, "host": "127.0.0.1", **changes})


@pytest.mark.parametrize(
    ("method", "changes", "kept"),
    [
        ("tcp://127.0.0.1:29500", {}, "pla-tcp://127.0.0.1:29500"),
        ("tcp://[::1]:29500", {"host": "::1"}, "pla-tcp://[::1]:29500"),
        ("tcp://10.0.0.1:29500", {"host": "10.0.0.1"}, "pla-tcp://10.0.0.1:29500"),
        ("tcp://0.0.0.0:29500", {"host": "0.0.0.0"}, None),
        ("tcp://node:29500", {"host": "node"}, None),
        ("tcp://127.0.0.1:29500", {"nnodes": 2}, None),
        ("tcp://10.0.0.9:29500", {"dist_init_addr": "10.0.0.9:29500"}, None),
        ("env://", {}, None),
    ],
)
def test_a_single_address_of_one_machine_is_kept_to(method: str, changes: dict[str, Any], kept: str | None) -> None:
    assert keep_to_host(method, args(**changes)) == kept


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_two_ranks_meet_there(host: str) -> None:
    port = free_port()
    url, stores = f"pla-tcp://{host}:{port}?world_size=2&rank=", {}

    def join(rank: int) -> None:
        stores[rank] = next(meet(f"{url}{rank}", timeout=timedelta(seconds=20)))

    other = threading.Thread(target=join, args=(1,))
    other.start()
    join(0)
    other.join()
    stores[0][0].set("said", "by the first")
    assert stores[1][0].get("said") == b"by the first"
    assert [stores[rank][1:] for rank in (0, 1)] == [(0, 2), (1, 2)]
    listening = [one.laddr for one in psutil.Process(os.getpid()).net_connections("tcp") if one.status == "LISTEN"]
    assert [address.ip for address in listening if address.port == port] == [host.strip("[]")]
