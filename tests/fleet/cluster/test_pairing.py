"""Why a prefill instance stays down for a while: what stock SGLang's decode side keeps of one that was restarted.

SGLang's own bootstrap server, heartbeat and receiver run here; only their engines are missing.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, CommonKVManager, CommonKVReceiver
from sglang.srt.environ import envs
from support.serving import until

from pla_sglang.fleet.cluster.ports import free_port
from pla_sglang.fleet.cluster.supervisor import FORGOTTEN_S

FORMER, PRESENT = 1111, 2222  # where a prefill's scheduler takes the decode side's messages, before and after
_rooms = itertools.count(1)
_session = requests.Session()
_session.trust_env = False


@pytest.fixture(autouse=True)
def arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the decode side's process that later versions of SGLang compare with the prefill side's."""
    disagg = SimpleNamespace(disaggregation_decode_allocation_policy="early")
    monkeypatch.setattr(conn, "get_disagg", lambda: disagg, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


class Heart(requests.Session):
    """The session of a decode side's heartbeats, each of which waits here until ``beat`` lets it go."""

    def __init__(self) -> None:
        super().__init__()
        self._came, self._may_go = threading.Semaphore(0), threading.Semaphore(0)

    def get(self, *args: Any, **kwargs: Any) -> requests.Response:
        self._came.release()
        self._may_go.acquire()
        return super().get(*args, **kwargs)

    def beat(self) -> None:
        """One of them. What comes of it is known once the next one is due, if there is a next one."""
        assert self._came.acquire(timeout=20)
        self._may_go.release()

    def stop(self) -> None:
        self._may_go.release(1000)


class Receiver(CommonKVReceiver):
    """The common part of all backends, with what makes it a class that can be made."""

    def poll(self) -> int:
        return self.kv_mgr.check_status(self.bootstrap_room)

    def _register_kv_args(self) -> bool:
        return True  # nobody listens


def prefill_side(port: int, rank_port: int) -> CommonKVBootstrapServer:
    """A bootstrap server with which one scheduler has registered, as ``register_to_bootstrap`` does."""
    server = CommonKVBootstrapServer("127.0.0.1", port)
    ranks = dict.fromkeys(("attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "pp_rank", "system_dp_rank"), 0)
    sizes = dict.fromkeys(("attn_tp_size", "attn_cp_size", "attn_dp_size", "pp_size", "system_dp_size"), 1)
    where = {"rank_ip": "127.0.0.1", "rank_port": rank_port, "page_size": 1, "kv_cache_dtype": "auto"}
    end_s = time.monotonic() + 10
    while True:
        try:
            _session.put(f"http://127.0.0.1:{port}/route", json=ranks | sizes | where, timeout=2).raise_for_status()
            return server
        except requests.ConnectionError:
            assert time.monotonic() < end_s
            time.sleep(0.02)


def decode_side(heart: Heart) -> CommonKVManager:
    """A manager as a decode instance has it, without device and sockets, for any version. Its heartbeats wait."""
    manager = CommonKVManager.__new__(CommonKVManager)
    alone = {"attn_tp_size": 1, "attn_cp_size": 1, "attn_cp_rank": 0, "dcp_size": 1, "pp_size": 1, "pp_rank": 0}
    plain = ("is_mla_backend", "is_hybrid_mla_backend", "enable_all_cp_ranks_for_transfer", "enable_staging")
    plain += ("defer_decode_allocation",)
    tables = ("connection_pool", "prefill_info_table", "heartbeat_failures", "request_status", "failure_records")
    tables += ("_deferred_ack_targets", "_staging_outstanding")
    manager.__dict__ |= alone | dict.fromkeys(plain, False) | {name: {} for name in tables}
    manager.__dict__ |= {name: threading.Lock() for name in ("connection_lock", "session_pool_lock", "failure_lock")}
    manager.kv_args = SimpleNamespace(page_size=1, engine_rank=0)
    manager.kv_cache_dtype_str = "auto"
    manager.required_prefill_response_num_table = {}
    manager.session_pool, manager.addr_to_rooms_tracker = defaultdict(lambda: heart), defaultdict(set)
    manager.prefill_response_tracker, manager._heartbeat_shutdown = defaultdict(set), threading.Event()
    manager._deferred_ack_poisoned_rooms = set()
    manager.heartbeat_interval = 0.01
    manager.max_failures = envs.SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE.default
    manager._start_heartbeat_checker_thread()
    return manager


def stop(manager: CommonKVManager, heart: Heart) -> None:
    manager.heartbeat_interval = 3600.0  # the thread has no other end
    manager.prefill_info_table.clear()
    heart.stop()


def port_for_next_request(manager: CommonKVManager, address: str) -> int:
    """Where the next request's KV indices would be sent."""
    end_s = time.monotonic() + 5
    while not manager.try_ensure_parallel_info(address):
        assert time.monotonic() < end_s
        time.sleep(0.1)
    receiver: Any = Receiver(manager, address, next(_rooms))
    receiver.init(0)
    [found] = receiver.bootstrap_infos
    return int(found["rank_port"])


@pytest.mark.parametrize(("beats_down", "expected"), [(0, FORMER), (1, FORMER), (2, PRESENT)])
def test_the_addresses_of_a_prefill_instance_outlive_it_for_two_heartbeats(beats_down: int, expected: int) -> None:
    """One that comes back before that is written to at ports that nobody has any more, and this does not heal."""
    port = free_port()
    address, heart = f"127.0.0.1:{port}", Heart()
    server, manager = prefill_side(port, FORMER), decode_side(heart)
    try:
        assert port_for_next_request(manager, address) == FORMER
        server.close()
        for _ in range(beats_down):
            heart.beat()
        if expected == PRESENT:
            until(lambda: address not in manager.prefill_info_table, what="an address that is forgotten")
        server = prefill_side(port, PRESENT)
        for _ in range(3 if expected == FORMER else 0):
            heart.beat()
        assert port_for_next_request(manager, address) == expected
    finally:
        stop(manager, heart)
        server.close()


def test_a_prefill_instance_at_a_new_bootstrap_port_is_paired_at_once() -> None:
    """What is kept is kept by its address."""
    former, present = free_port(), free_port()
    heart = Heart()
    server, manager = prefill_side(former, FORMER), decode_side(heart)
    try:
        assert port_for_next_request(manager, f"127.0.0.1:{former}") == FORMER
        server.close()
        server = prefill_side(present, PRESENT)
        assert port_for_next_request(manager, f"127.0.0.1:{present}") == PRESENT
    finally:
        stop(manager, heart)
        server.close()


def test_a_restart_waits_long_enough() -> None:
    interval_s = envs.SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL.default
    failures = envs.SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE.default
    assert interval_s * failures < FORGOTTEN_S <= interval_s * failures + 5
