"""Instances that are emptied by moves: where the requests go, how many at once, and what comes after a SIGTERM."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from fleet.router.control.test_router_migration import (
    ON,
    THREE,
    TWO,
    done,
    drop,
    find_moves,
    join,
    move,
    move_of,
    start,
)
from support.router_scene import Scene, count_moves, scene

from pla_sglang.fleet.router.control import drains
from pla_sglang.fleet.router.control import migration as mig
from pla_sglang.fleet.router.control.requests import moves
from pla_sglang.fleet.router.wire import messages as m


async def start_many(one: Scene, count: int) -> list[str]:
    """Requests by id, as evenly as the policy spreads them."""
    rids = [f"r{number}" for number in range(count)]
    for rid in rids:
        await start(one, rid)
    return rids


async def test_moves_of_a_drain_are_spread() -> None:
    """Before any of them is held, and so counted at its target."""
    async with scene(THREE, **ON) as one:
        rids = await start_many(one, 12)
        records = one.plane.dispatcher.ledger.records
        there = [rid for rid in rids if records[rid].present.decode is one.plane.table.by_number[0]]
        assert len(there) == 4
        assert one.admin("POST", "/workers/0/drain")[0] == 202
        await one.until(lambda: len(find_moves(one)) == 4)
        assert Counter(order.decode for order in find_moves(one)) == {1: 2, 2: 2}
        for rid in there:
            join(one, 2, rid)
        await one.until(lambda: done(one, 0).count("commit") == 4)
        for rid in rids:
            one.ended(rid)
        await one.at_rest()


async def test_only_so_many_leave_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drains, "MOVES_AT_ONCE", 1)
    async with scene(TWO, **ON) as one:
        rids = await start_many(one, 6)
        assert one.admin("POST", "/workers/0/drain")[0] == 202
        moved: list[str] = []
        for turn in range(1, 4):
            await one.until(lambda turn=turn: len(find_moves(one)) == turn)  # type: ignore[misc]
            assert count_moves(one.plane) == 1
            moved.append(find_moves(one)[-1].rid)
            join(one, 2, moved[-1])
        assert len(set(moved)) == 3
        for rid in rids:
            one.ended(rid)
        await one.at_rest()


@pytest.mark.parametrize("drain_rest_s", [0.0, 100.0])
async def test_what_could_not_leave_a_drain_tries_again_soon(
    drain_rest_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused request keeps memory of its instance, so some may be refused while others are on their way."""
    monkeypatch.setattr(moves, "DRAIN_COOL_DOWN_S", drain_rest_s)
    async with scene(TWO, **ON) as one:
        source = await start(one)
        one.instances[source].hop_answers["hold"] = {"status": "refused", "reason": "memory"}
        assert one.admin("POST", f"/workers/{source}/drain")[0] == 202
        await one.until(lambda: one.plane.migration.failed)
        del one.instances[source].hop_answers["hold"]
        if drain_rest_s:
            assert move(one, 1 - source) == "it is in its cool-down, as its last move failed"
        else:
            await one.until(lambda: find_moves(one))
            join(one, find_moves(one)[-1].attempt)
        one.ended("r")
        await one.at_rest()


async def test_what_never_can_leave_is_held_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each hold keeps its client waiting."""
    monkeypatch.setattr(moves, "DRAIN_COOL_DOWN_S", 0.3)
    async with scene(TWO, **ON) as one:
        source = await start(one)
        failed_s: list[float] = []  # by the clock that says how long a request has rested
        migration = one.plane.migration
        fail = migration._fail

        def note_and_fail(move: mig.RunningMove, *args: Any, **kwargs: Any) -> None:
            fail(move, *args, **kwargs)
            failed_s.append(move.record.move_failed_s or 0.0)

        monkeypatch.setattr(migration, "_fail", note_and_fail)
        one.instances[source].hop_answers["hold"] = {"status": "refused", "reason": "memory"}
        assert one.admin("POST", f"/workers/{source}/drain")[0] == 202
        await one.until(lambda: len(failed_s) == 3)
        assert failed_s[1] - failed_s[0] >= 0.3
        assert failed_s[2] - failed_s[1] >= 0.6
        one.ended("r")
        await one.at_rest()


@pytest.mark.parametrize("undrained", [False, True])
async def test_an_undrain_keeps_what_has_not_left(undrained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves that are open go on; no other follows."""
    monkeypatch.setattr(drains, "MOVES_AT_ONCE", 1)
    async with scene(TWO, **ON) as one:
        rids = await start_many(one, 4)
        assert one.admin("POST", "/workers/0/drain")[0] == 202
        await one.until(lambda: find_moves(one))
        if undrained:
            assert one.admin("POST", "/workers/0/undrain")[0] == 202
        join(one, 2, find_moves(one)[0].rid)
        await one.until(lambda: "commit" in done(one, 0))
        assert count_moves(one.plane) == (0 if undrained else 1)
        for rid in rids:
            one.ended(rid)
        await one.at_rest()


@pytest.mark.parametrize("drained", [False, True])
async def test_an_instance_that_was_told_to_end_may_come_back(drained: bool) -> None:
    """Unless an operator has drained it: that one is to stay away, as ever."""
    async with scene(TWO, **ON) as one:
        source = await start(one)
        one.instances[source].ending = True
        order = await move_of(one)
        assert (order.reason, order.decode) == ("drain", 1 - source)
        join(one, order.attempt)
        await one.until(lambda: done(one, source) == ["hold", "commit"])
        one.ended("r")
        await one.at_rest()
        status, said = one.admin("POST", f"/workers/{source}/undrain")
        assert (status, "was told to end" in said["error"]["message"]) == (409, True)
        if drained:
            assert one.admin("POST", f"/workers/{source}/drain")[0] == 202
        worker = one.plane.table.by_number[source]
        await one.instances[source].stop()
        await one.until(lambda: worker.state.value == "dead")
        one.instances[source].ending = False
        await one.instances[source].start()
        if drained:
            assert [row["state"] for row in one.admin("GET", "/workers")[1]["workers"]].count("starting") == 0
        else:
            await one.ready(2)


@pytest.mark.parametrize("migration", ["on", "off"])
@pytest.mark.parametrize("busy", [True, False])
async def test_who_is_to_end_gets_nothing_new(migration: str, busy: bool) -> None:
    """Nor while it streams nothing that could move: what it still got would only keep it from its end."""
    async with scene(TWO, **ON | {"migration": migration}) as one:
        first = one.ask("whole") if busy else None
        assert first is None or isinstance(first, m.Assign)
        ends = 0 if first is None else first.decode
        one.instances[ends].ending = True
        worker = one.plane.table.by_number[ends]
        await one.until(lambda: worker.state.value == "draining")
        assert worker.reason.value == "ending"
        assigned = [one.ask(f"r{number}") for number in range(4)]
        assert {assign.decode for assign in assigned if isinstance(assign, m.Assign)} == {1 - ends}
        assert count_moves(one.plane) == 0, "nothing of it can move"
        for rid in ("whole", "r0", "r1", "r2", "r3")[0 if busy else 1 :]:
            one.ended(rid)
        await one.at_rest()


async def test_an_instance_that_does_not_answer_whether_it_ends_goes_on() -> None:
    """Health checks judge it. A stock one is not asked at all."""
    async with scene(["stateless", "null"], hops=True, policy="round-robin") as one:
        await one.until(lambda: one.instances[0].asked_ending > 1)
        one.instances[1].ending = True  # which it says by /health alone
        asked = one.instances[0].asked_ending
        await one.until(lambda: one.instances[0].asked_ending > asked + 1)
        assert [worker.state.value for worker in one.plane.table] == ["ready", "ready"]
        assert one.instances[1].asked_ending == 0


async def test_a_target_that_vanishes_silently_gives_the_request_back() -> None:
    """Its relay has noticed nothing: the source is told to go on, and what it streams wins."""
    async with scene(TWO, **ON) as one:
        source = await start(one)
        assert move(one, 1 - source) is None
        await move_of(one)
        await one.instances[1 - source].stop()
        await one.until(lambda: "resume" in done(one, source))
        assert count_moves(one.plane) == 1
        drop(one, 2, m.Cause.RESUMED)
        assert count_moves(one.plane) == 0
        one.ended("r")
        await one.instances[1 - source].start()
        await one.at_rest()


async def test_a_target_that_dies_before_the_hold_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(TWO, **ON) as one:
        source = await start(one)
        target = one.plane.table.by_number[1 - source]
        order_commands = one.plane._client.order_commands

        async def slowly(worker: Any, commands: Any) -> Any:
            if commands[0]["do"] == "hold":
                await one.instances[1 - source].stop()
                await one.until(lambda: target.state.value == "dead")
            return await order_commands(worker, commands)

        monkeypatch.setattr(one.plane._client, "order_commands", slowly)
        assert move(one, target.number) is None
        await one.until(lambda: one.plane.migration.failed == 1)
        await one.until(lambda: done(one, source) == ["hold", "resume"])
        assert find_moves(one) == []
        assert 'pla_router_migration_failures_total{reason="dead"} 1.0' in one.admin("GET", "/metrics")[1]
        one.ended("r")
        await one.instances[1 - source].start()
        await one.at_rest()
