"""Instances with https, as the control plane calls them: all that it asks and orders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fake_sglang import FakeSglang
from support.certificates import Authority, server_context
from support.router_scene import QUICK, scene

from pla_sglang.fleet.router.control.workers.table import WorkerState
from pla_sglang.fleet.router.tls import WorkerTls
from pla_sglang.fleet.router.wire import messages as m


def make_instances(authority: Authority, *modes: str, **options: Any) -> list[FakeSglang]:
    """They ask for a certificate too."""
    context = server_context(authority.issue("instance"), authority.ca)
    return [FakeSglang(mode, tls=context, **options) for mode in modes]


async def test_health_loads_and_moves_go_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    instances = make_instances(authority, "stateless", "stateless")
    tls = WorkerTls(*authority.issue("router"), authority.ca)
    on: dict[str, Any] = {"policy": "least-tokens", "migration": "on", "hops": True}
    async with scene(instances, worker_tls=tls, **on) as one:
        workers = one.plane.table.workers
        assert [worker.url.split("//")[0] for worker in workers] == ["https:", "https:"]
        table = one.relay.last(m.Table)
        assert [entry.tls for entry in table.workers] == [True, True]
        await one.until(lambda: all(list((w.peers or {}).values()) == ["ready"] for w in workers))
        await one.until(lambda: all(worker.load.reported_s is not None for worker in workers))  # polls
        rid = "moves"
        assign = one.assign(rid)
        one.reach(rid, m.Milestone.SENT)
        one.reach(rid, m.Milestone.FIRST_TOKEN, movable=True)
        one.plane.migration.move_request(rid, one.plane.table.by_number[1 - assign.decode], "policy")
        await one.until(lambda: [c["do"] for c in instances[assign.decode].commands] == ["hold"])
        one.ended(rid, m.Outcome.CLIENT_GONE, aborted=(0, 1))
        assert [instance.connections > 0 for instance in instances] == [True, True]


async def test_a_drain_of_an_instance_by_its_https_address(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls = WorkerTls(None, None, authority.ca)
    instances = [FakeSglang(tls=server_context(authority.issue("instance"))) for _ in range(2)]
    async with scene(instances, worker_tls=tls) as one:
        for order in ("drain", "undrain"):
            url = instances[0].url.replace(":", "%3A").replace("/", "%2F")
            assert one.admin("POST", f"/workers/{url}/{order}")[0] == 202
        assert one.admin("POST", "/workers", {"url": instances[0].url})[0] == 409


async def test_an_instance_that_nobody_vouches_for_does_not_start_to_serve(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    good, bad = make_instances(authority, "null"), make_instances(stranger, "null")
    await bad[0].start()
    try:
        tls = WorkerTls(*authority.issue("router"), authority.ca)
        async with scene(good, worker_tls=tls, health=QUICK) as one:
            assert one.admin("POST", "/workers", {"url": bad[0].url})[0] == 202
            added = one.plane.table.workers[1]
            await one.until(lambda: ": TLS: self-signed certificate" in added.detail)
            assert added.state is WorkerState.STARTING
            assert bad[0].requests == []
    finally:
        await bad[0].stop()
