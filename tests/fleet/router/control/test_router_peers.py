"""Stateless instances behind the control plane: what they are, with which role they come, which peers they are told."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import INFO, FakeSglang
from support.router_scene import QUICK, Scene, scene

from pla_sglang.fleet.router.control.control_plane import ControlPlane
from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.fleet.router.control.workers.discovery import describe
from pla_sglang.fleet.router.control.workers.errors import WorkerError
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.load.legs import LegLoad
from pla_sglang.load.report import Report
from pla_sglang.load.sockets import Pusher
from pla_sglang.policy.common.joining import join_role
from pla_sglang.policy.interface.fleet import InstanceKind, Role

STATE: dict[str, Any] = {
    **{end: {"legs": {}, "kv_tokens": 0} for end in ("sending", "receiving")},
    "quarantine": {"requests": 0, "kv_tokens": 0},
    "refused": 0,
    "faults": 0,
}
P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED


def info(**stateless: Any) -> Mapping[str, Any]:
    return {**INFO, "internal_states": [{"pla": {"stateless": stateless}}]}


def roles_of(one: Scene) -> list[str]:
    return [worker.view.role.value for worker in one.plane.table]


async def until_connected(one: Scene) -> None:
    """All stateless instances of the scene can get KV cache from all others."""
    fleet, peering = one.plane.table.fleet, one.plane._peering
    stateless = [view for view in fleet.ready if view.kind is InstanceKind.STATELESS]
    pairs = [(a, b) for a in stateless for b in stateless if a is not b]
    await one.until(lambda: all(peering.is_connected(a, b) for a, b in pairs))


@asynccontextmanager
async def another_router(one: Scene, *further: str, timeout_s: float = 2.0) -> AsyncIterator[Scene]:
    """Before the instances of the scene, and those at ``further`` addresses; it has just started."""
    health = dataclasses.replace(QUICK, timeout_s=timeout_s)
    workers = (*(fake.url for fake in one.instances), *further)
    plane = ControlPlane(ControlKnobs(policy="static-pd", health=health, poll_interval_s=0.05, workers=workers))
    await plane.start()
    try:
        yield Scene(plane, one.instances)
    finally:
        await plane.stop()


def test_a_stateless_instance_says_its_kind_its_port_and_its_incarnation() -> None:
    said = describe(info(bootstrap_port=7001, incarnation="a" * 16, transfer_backend="nixl"))
    assert (said.kind, said.bootstrap_port, said.incarnation) == (InstanceKind.STATELESS, 7001, "a" * 16)
    other = describe(info(bootstrap_port=7001, incarnation="b" * 16))
    assert other.identity != said.identity, "another process"
    plain = describe(info())
    assert (plain.kind, plain.bootstrap_port, plain.incarnation) == (InstanceKind.UNIFIED, None, "")
    with pytest.raises(WorkerError, match="server_info"):
        describe(info(bootstrap_port="many", incarnation="a"))
    with pytest.raises(WorkerError, match="incarnation"):
        describe(info(bootstrap_port=7001))


@pytest.mark.parametrize(
    ("split", "members", "joins"),
    [
        ([], [P, D], M),
        ([M, M], [M], M),
        ([P, P, D, D], [], P),
        ([P, P, D, D], [P], D),
        ([P, P, D, D], [P, D], P),
        ([P, D, D, D], [P], D),
        ([P, D, D, D], [P, D, D, D], P),
        ([P, D, D, D], [P, P, D, D, D], D),
        ([P, P, D, D], [Role.PREFILL_TO_DECODE, P], P),
        ([P, P, D, D], [Role.DECODE_TO_PREFILL, P], D),
    ],
)
def test_a_newcomer_has_the_role_that_is_lacking(split: list[Role], members: list[Role], joins: Role) -> None:
    assert join_role(split, members) is joins


async def test_a_fleet_starts_with_the_split_of_its_policy() -> None:
    async with scene(["stateless"] * 4, policy="static-pd") as one:
        assert sorted(roles_of(one)) == ["decode", "decode", "prefill", "prefill"]
        rows = one.admin("GET", "/workers")[1]["workers"]
        assert {row["kind"] for row in rows} == {"stateless"}
    async with scene(["stateless"] * 2, policy="round-robin") as one:
        assert roles_of(one) == ["mixed", "mixed"]
        assign = one.assign("r1")
        assert assign.prefill is None
    async with scene(["prefill", "decode", "null", "stateless"], policy="static-pd") as one:
        by_kind = {worker.view.kind.value: worker.view.role.value for worker in one.plane.table}
        assert by_kind.items() >= {"prefill": "prefill", "decode": "decode", "unified": "mixed"}.items()
        assert [worker.view.fixed_role for worker in one.plane.table] == [True, True, True, False]


async def test_everybody_is_told_all_others_and_pairs_go_between_any_two() -> None:
    async with scene(["stateless"] * 3, policy="static-pd") as one:
        await until_connected(one)
        names = {worker.view.name for worker in one.plane.table}
        for worker, fake in zip(one.plane.table, one.instances, strict=True):
            told = fake.told[-1]
            assert told["self"] == {"name": worker.view.name, "host": "127.0.0.1", "bootstrap_port": 8998}
            assert set(fake.peers_told()) == names - {worker.view.name}
            assert set(fake.peers_told().values()) == {f"{1:016x}"}
            assert worker.peers == {other.number: "ready" for other in one.plane.table if other is not worker}
        assign = one.assign("r1")
        assert (assign.prefill, assign.decode) in {(0, 1), (0, 2), (2, 1)}, roles_of(one)
        assert (assign.bootstrap_host, assign.bootstrap_port) == ("127.0.0.1", 8998)
        one.reach("r1", m.Milestone.SENT, m.Milestone.PREFILL_DONE, m.Milestone.FIRST_TOKEN)
        one.ended("r1")
        one.assert_at_rest()
        metrics = one.admin("GET", "/metrics")[1]
        assert 'pla_router_peer_lists_total{outcome="told"}' in metrics
        assert f'pla_router_worker_peers{{state="ready",worker="{worker.view.name}"}} 2.0' in metrics


async def test_a_pair_that_is_not_connected_is_served_whole() -> None:
    async with scene(["stateless"] * 2, policy="static-pd") as one:
        await until_connected(one)
        workers, fakes = list(one.plane.table), one.instances
        for state in ("warming", "failed: page size 16, not 1"):
            for fake, other in zip(fakes, reversed(workers), strict=True):
                fake.peer_states[other.view.name] = state
            one.plane._peering.update_peers()
            await one.until(lambda state=state: all(state in (w.peers or {}).values() for w in workers))  # type: ignore[misc]
            rid = f"r-{state[:4]}"
            assign = one.assign(rid)
            assert (assign.prefill, assign.bootstrap_port) == (None, 0)
            assert workers[assign.decode].view.role is Role.PREFILL, "where its prefill would be anyway"
            one.reach(rid, m.Milestone.SENT, m.Milestone.FIRST_TOKEN)
            one.ended(rid)
        assert 'pla_router_placements_total{reason="any.not_connected"} 2.0' in one.admin("GET", "/metrics")[1]
        for fake in fakes:
            fake.peer_states.clear()
        one.plane._peering.update_peers()
        await until_connected(one)
        paired = one.assign("r3")
        assert paired.prefill is not None


async def test_what_needs_one_instance_goes_whole_to_the_least_loaded() -> None:
    async with scene(["stateless"] * 2, policy="static-pd") as one:
        await until_connected(one)
        first = one.ask("n1", samples=4)
        second = one.ask("n2", endpoint=m.Endpoint.EMBEDDINGS)
        assert isinstance(first, m.Assign)
        assert isinstance(second, m.Assign)
        assert (first.prefill, second.prefill) == (None, None)
        assert {first.decode, second.decode} == {0, 1}
    async with scene(["prefill", "decode", "stateless"], policy="static-pd") as one:
        whole = one.assign("n1", samples=4)
        assert (whole.prefill, whole.decode) == (None, 2)


async def test_a_process_that_comes_back_is_a_new_peer_at_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with scene(["stateless"] * 2, policy="static-pd") as one:
        await until_connected(one)
        gone, stays = one.instances
        old = one.plane.table.workers[0]
        await gone.stop()
        await gone.start()
        name = old.view.name
        await one.until(lambda: stays.peers_told() == {name: f"{2:016x}"})
        await one.ready(2)
        await until_connected(one)
        fresh = one.plane.table.at(old.address)
        assert fresh is not None
        assert fresh is not old
        assert one.plane.table.workers[1].peers == {fresh.number: "ready"}
        assert [f"gets KV cache from worker {number} ({name})" in caplog.text for number in (0, 1, 2)] == [
            True,
            False,
            True,
        ]
        assert sorted(roles_of(one)) == ["decode", "prefill"], "it takes the place of the one that has gone"


@pytest.mark.parametrize("reports", [False, True])
async def test_an_instance_whose_hand_over_has_ended_gets_no_legs(tmp_path: Path, *, reports: bool) -> None:
    """Neither as a source nor as a target; what is whole is served there as before."""
    address = f"ipc://{tmp_path}/reports" if reports else ""
    async with scene(["stateless", "stateless"], policy="static-pd", telemetry=address) as one:
        await until_connected(one)
        fake, worker = one.instances[0], one.plane.table.workers[0]
        first, second = worker.view, one.plane.table.workers[1].view
        peering, state = one.plane._peering, STATE | {"ready": False, "reason": "a thread has ended"}
        if reports:
            pusher, said = Pusher(address), worker.description
            assert said is not None
            report = Report(instance=said.report_key, sequence=1, legs=LegLoad.of_state(state))
            with contextlib.closing(pusher):
                await one.until(lambda: pusher.send(report))
        else:
            was = fake.says_stateless()
            fake.says_stateless = lambda: was | state  # type: ignore[method-assign]
        await one.until(lambda: not peering.is_connected(first, second))
        assert not peering.is_connected(second, first)
        assert worker.is_ready()
        assign = one.assign("r1")
        assert assign.prefill is None, "served whole"
        assert "leg_ready" in one.admin("GET", "/metrics")[1]
        if not reports:
            fake.says_stateless = lambda: was | STATE  # type: ignore[method-assign]
            await until_connected(one)


async def test_who_cannot_be_told_is_told_again_and_dispatch_never_waits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    other = FakeSglang("stateless")
    other.peers_status = 500
    async with scene(["stateless"], policy="static-pd") as one:
        await other.start()
        one.admin("POST", "/workers", {"url": other.url})
        await one.ready(2)
        worker = one.plane.table.workers[1]
        await one.until(lambda: worker.detail.startswith("does not know its peers"))
        assign = one.assign("r1")
        assert assign.prefill is None
        other.peers_status = 200
        await until_connected(one)
        assert worker.detail == ""
        assert len(other.told) >= 1
        assert caplog.text.count("does not know its peers") == 1
        assert f"gets KV cache from worker 1 ({other.url.removeprefix('http://')})" in caplog.text
        metrics = one.admin("GET", "/metrics")[1]
        assert 'pla_router_peer_lists_total{outcome="failed"}' in metrics
    await other.stop()


async def test_a_stateless_instance_gets_kv_from_stock_prefill_instances_that_it_was_told() -> None:
    async with scene(["prefill"], policy="static-pd") as one:
        one.instances.append(await FakeSglang("stateless").start())
        one.admin("POST", "/workers", {"url": one.instances[1].url})  # after the other: roles go by who is there
        await one.ready(2)
        stock, ours = one.plane.table.workers
        assert ours.view.role is Role.DECODE, "the phase that is lacking"
        await one.until(lambda: one.plane._peering.is_connected(stock.view, ours.view))
        assert one.instances[1].peers_told() == {stock.view.name: stock.description.identity}  # type: ignore[union-attr]
        assign = one.assign("r1")
        assert (assign.prefill, assign.decode) == (0, 1)
        one.instances[1].peer_states[stock.view.name] = "failed: no"
        one.plane._peering.update_peers()
        await one.until(lambda: not one.plane._peering.is_connected(stock.view, ours.view))
        whole = one.assign("r2")
        assert (whole.prefill, whole.decode) == (None, 1)


async def test_no_list_lacks_an_instance_whose_answer_waits_for_a_long_pass() -> None:
    async with scene(["stateless"] * 3, policy="static-pd") as one:
        await until_connected(one)
        busy = one.instances[2]
        busy.info_gate = asyncio.Event()
        told_before = [len(fake.told) for fake in one.instances]
        async with another_router(one) as other:
            await other.ready(2)
            await asyncio.sleep(0.5)  # longer than others would wait for a peer that warms
            assert all(worker.peers is None for worker in other.plane.table)
            busy.info_gate.set()
            await other.until(lambda: all(worker.peers is not None for worker in other.plane.table))
            await other.ready(3)
            await until_connected(other)
        for fake, before in zip(one.instances, told_before, strict=True):
            assert len(fake.told) > before
            assert {len(told["peers"]) for told in fake.told[before:]} == {2}


async def test_an_address_where_nobody_answers_keeps_no_list_back_for_long() -> None:
    gone = await FakeSglang().start()
    await gone.stop()
    silent = await FakeSglang().start()
    silent.info_gate = asyncio.Event()
    async with scene(["stateless"] * 2, policy="static-pd") as one:
        async with another_router(one, gone.url) as other:
            await other.ready(2)
            await until_connected(other)
        async with another_router(one, silent.url, timeout_s=0.2) as other:
            await other.ready(2)
            assert all(worker.peers is None for worker in other.plane.table)
            await until_connected(other)
            assert other.plane.table.workers[2].misses >= 3
    silent.info_gate.set()
    await silent.stop()


async def test_nobody_is_told_after_the_end() -> None:
    async with scene(["stateless"] * 2, policy="static-pd") as one:
        await until_connected(one)
        fakes = one.instances
    told = [len(fake.told) for fake in fakes]
    await asyncio.sleep(0.05)
    assert [len(fake.told) for fake in fakes] == told
