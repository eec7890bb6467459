"""One fleet, two versions of SGLang: who gets KV cache from whom, who is paired, how requests move between them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from fake_sglang import INFO, FakeSglang
from fleet.router.control.test_router_migration import done, find_moves, join, move, move_of
from support.router_scene import Scene, scene

from pla_sglang.fleet.router.control.workers.discovery import Description, describe
from pla_sglang.fleet.router.control.workers.peering import find_misfit
from pla_sglang.fleet.router.wire import messages as m

OLD = {"transfer_protocol": "nixl-a", "kv_layout": "pages of 1"}
NEW = OLD | {"transfer_protocol": "nixl-b"}
ON: dict[str, Any] = {"policy": "least-tokens", "migration": "on", "hops": True}


def make_instance(said: dict[str, str], mode: str = "stateless", **info: Any) -> FakeSglang:
    fake = FakeSglang(mode, **info)
    fake.transfers = said
    return fake


def ours(**fields: Any) -> Description:
    return dataclasses.replace(describe(INFO), **(OLD | fields))


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        (ours(), ours(), None),
        (ours(version="0.5.23"), ours(), None),
        (ours(transfer_protocol="nixl-b"), ours(), "its transfer protocol is nixl-b, not nixl-a"),
        (ours(kv_layout="pages of 16"), ours(), "its KV layout is pages of 16; not pages of 1"),
        (ours(tensor_parallel=2), ours(), "it has --tp-size 2, not 1"),
        (ours(transfer_protocol=""), ours(), None),
        (ours(transfer_protocol="", version="0.5.23"), ours(), "it has SGLang 0.5.23, not 0.5.17"),
        (ours(transfer_protocol="", kv_layout="", tensor_parallel=2), ours(), None),
        (ours(transfer_protocol="", version=""), ours(), None),
    ],
)
def test_what_two_instances_must_have_in_common(source: Description, target: Description, reason: str | None) -> None:
    found = find_misfit(source, target)
    assert found == reason or (reason is not None and (found or "").startswith(reason))
    assert (find_misfit(target, source) is None) is (reason is None), "either way"


async def until_told(one: Scene, ready: int) -> None:
    """So many peers of all are ready, and nobody is waited for."""
    states = [state for worker in one.plane.table for state in (worker.peers or {"": "untold"}).values()]
    await one.until(
        lambda: (
            sum(state == "ready" for worker in one.plane.table for state in (worker.peers or {}).values()) == ready
            and all(worker.peers is not None for worker in one.plane.table)
        )
    )
    assert "warming" not in states


async def test_only_instances_of_one_version_are_paired(caplog: pytest.LogCaptureFixture) -> None:
    fleet = [make_instance(OLD), make_instance(OLD), make_instance(NEW), make_instance(NEW)]
    async with scene(fleet, policy="static-pd") as one:
        await until_told(one, 4)  # of twelve: one each, although the fakes say that all are
        for number in range(16):
            assign = one.assign(f"r{number}")
            assert assign.prefill is None or assign.prefill // 2 == assign.decode // 2
        rows = one.admin("GET", "/workers")[1]["workers"]
        assert rows[0]["peers"]["1"] == "ready"
        assert rows[0]["peers"]["2"] == "failed: its transfer protocol is nixl-b, not nixl-a"
        lines = [record.message for record in caplog.records if rows[0]["url"] in record.message]
        assert len([line for line in lines if "transfer protocol" in line]) == 1


async def test_a_new_version_that_joins_is_not_waited_for_because_the_old_one_does_not_fit() -> None:
    """Who has a peer that never fits is asked as often as before how far the others are."""
    async with scene([make_instance(OLD), make_instance(NEW)], policy="static-pd") as one:
        await until_told(one, 0)
        late = await make_instance(NEW).start()
        late.peer_states = {worker.view.name: "warming" for worker in one.plane.table}
        one.instances[1].peer_states = {late.url.removeprefix("http://"): "warming"}
        one.admin("POST", "/workers", {"url": late.url})
        await one.ready(3)
        await one.until(lambda: one.instances[1].told[-1]["peers"][1:])
        told = len(one.instances[1].told)
        await one.until(lambda: len(one.instances[1].told) >= told + 3, limit_s=2.0)
        await late.stop()


async def test_prefill_and_decode_instances_of_two_versions() -> None:
    """A policy does not know of versions: where it names two that do not fit, another pair serves."""
    versions = ("0.5.17", "0.5.23")
    fleet = [FakeSglang(mode, version=version) for version in versions for mode in ("prefill", "decode")]
    async with scene(fleet, policy="static-pd") as one:
        for number in range(12):
            assign = one.assign(f"r{number}")
            assert assign.prefill is not None
            assert (assign.prefill < 2) is (assign.decode < 2), assign
    async with scene([fleet[0], fleet[3]], policy="static-pd") as one:
        assert not isinstance(one.ask("r"), m.Assign), "there is no pair"


async def test_a_move_between_versions_is_computed_again() -> None:
    fleet = [make_instance(OLD), make_instance(NEW)]
    async with scene(fleet, **ON) as one:
        await until_told(one, 0)
        source = await start_here(one)
        assert move(one, 1 - source) is None
        order = await move_of(one)
        assert (order.prefill, order.decode, order.held_tokens) == (None, 1 - source, 3), "no KV cache is pulled"
        assert (order.bootstrap_host, order.bootstrap_port, order.bootstrap_room) == ("", 0, 0)
        target = one.plane.table.by_number[1 - source]
        assert (target.view.queued_prefills, target.view.waiting_decodes) == (1, 0), "it is a prefill there"
        join(one)
        await one.until(lambda: done(one, source) == ["hold", "commit"])
        attempt = one.admin("GET", "/pla/explain/r")[1]["attempts"][1]
        assert (attempt["how"], attempt["delivered_tokens"], attempt["kv_tokens"]) == ("redo", 3, 0)
        one.ended("r", output_tokens=9)
        await one.at_rest()
        assert 'pla_router_migrations_total{how="redo",reason="policy"} 1.0' in one.admin("GET", "/metrics")[1]


async def start_here(one: Scene, rid: str = "r") -> int:
    """As ``start``, where not all instances are connected."""
    assign = one.assign(rid)
    one.reach(rid, m.Milestone.SENT)
    one.reach(rid, m.Milestone.FIRST_TOKEN, movable=True)
    return assign.decode


async def test_an_instance_that_drains_prefers_its_own_version() -> None:
    fleet = [make_instance(OLD), make_instance(OLD), make_instance(NEW)]
    async with scene(fleet, **ON) as one:
        await until_told(one, 2)
        records = one.plane.dispatcher.ledger.records
        rids = [f"r{number}" for number in range(6)]
        for rid in rids:
            await start_here(one, rid)
        assert sorted(records[rid].present.decode.number for rid in rids) == [0, 0, 1, 1, 2, 2]  # type: ignore[union-attr]
        assert one.admin("POST", "/workers/0/drain")[0] == 202
        await one.until(lambda: len(find_moves(one)) == 2)
        assert {(order.decode, order.prefill) for order in find_moves(one)} == {(1, 0)}, "KV cache is pulled"
        for order in find_moves(one):
            join(one, 2, order.rid)
        await one.until(lambda: done(one, 0).count("commit") == 2)
        assert one.admin("POST", "/workers/1/drain")[0] == 202
        await one.until(lambda: len(find_moves(one)) == 6)
        assert {(order.decode, order.prefill) for order in find_moves(one)[2:]} == {(2, None)}, "computed again"
        for order in find_moves(one)[2:]:
            join(one, order.attempt, order.rid)
        for rid in rids:
            one.ended(rid)
        await one.at_rest()
