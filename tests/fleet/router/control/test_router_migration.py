"""Moves of running requests: commands to instances, orders to relays, ledger, loads, failures, and drains."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from support.router_scene import Scene, count_moves, scene

from pla_sglang.fleet.router.control.requests import moves
from pla_sglang.fleet.router.wire import messages as m

ON: dict[str, Any] = {"policy": "least-tokens", "migration": "on", "hops": True}
TWO, THREE = ["stateless"] * 2, ["stateless"] * 3


async def start(one: Scene, rid: str = "r", *, movable: bool = True) -> int:
    """A request that streams, in a fleet whose instances know each other; its instance."""
    ready = len(one.instances) - 1
    await one.until(lambda: all(list((w.peers or {}).values()).count("ready") == ready for w in one.plane.table))
    assign = one.assign(rid)
    one.reach(rid, m.Milestone.SENT)
    one.reach(rid, m.Milestone.FIRST_TOKEN, movable=movable)
    return assign.decode


def move(one: Scene, target: int, rid: str = "r", reason: str = "policy") -> str | None:
    return one.plane.migration.move_request(rid, one.plane.table.by_number[target], reason)


def find_moves(one: Scene) -> list[m.Assign]:
    """What relays were told of requests that are held."""
    return [said for said in one.relay.told if isinstance(said, m.Assign) and said.held_tokens is not None]


async def move_of(one: Scene, attempt: int = 2) -> m.Assign:
    """The order to the relay, once the request is held."""
    await one.until(lambda: any(said.attempt == attempt for said in find_moves(one)))
    return find_moves(one)[-1]


def join(one: Scene, attempt: int = 2, rid: str = "r") -> None:
    one.reach(rid, m.Milestone.FIRST_TOKEN, attempt=attempt, movable=True, gap_s=0.125)


def drop(one: Scene, attempt: int = 2, cause: m.Cause = m.Cause.REFUSED, rid: str = "r") -> None:
    one.plane.on_message(m.Dropped(rid, attempt, cause))


def done(one: Scene, worker: int) -> list[str]:
    return [command["do"] for command in one.instances[worker].commands]


async def test_a_request_moves() -> None:
    async with scene(TWO, **ON) as one:
        source = await start(one)
        target = 1 - source
        assert move(one, target) is None
        assert move(one, target) == "it is on its way already"
        order = await move_of(one)
        assert (order.decode, order.attempt, order.held_tokens) == (target, 2, 3)
        assert (order.prefill, order.bootstrap_host, order.bootstrap_port) == (source, "127.0.0.1", 8998)
        [hold] = one.instances[source].commands
        assert hold == {"do": "hold", "rid": "r", "room": order.bootstrap_room, "for_s": 10.0}
        assert one.open_at() == [1, 1]
        assert list(one.plane.dispatcher.ledger.rooms) == [order.bootstrap_room]
        join(one)
        assert one.open_at()[source] == 0
        await one.until(lambda: done(one, source) == ["hold", "commit"])
        await one.until(lambda: one.plane.dispatcher.ledger.audit(0.0).legs_open == 1)
        one.ended("r", output_tokens=9)
        await one.at_rest()
        assert one.instances[source].aborted == one.instances[target].aborted == []
        check_story(one, source, target)
        check_view(one, source, target)


def check_view(one: Scene, source: int, target: int) -> None:
    """On the page: from where to where, why, how much, and the pause of its client."""
    document = one.plane.draw_fleet(0.0)
    [[at_s, rid, *told]] = document["moves"]
    names = {worker.number: worker.view.name for worker in one.plane.table}
    kv_bytes = 52 * one.plane.policy.kv_bytes_per_token
    assert kv_bytes > 0
    assert (rid, told) == ("r", [names[source], names[target], "pull", "policy", kv_bytes, 0.125])
    assert at_s <= document["now_s"]
    assert document["moved"] == 1


def check_story(one: Scene, source: int, target: int) -> None:
    names = {worker.number: worker.view.name for worker in one.plane.table}
    told = one.admin("GET", "/pla/explain/r")[1]
    left, attempt = told["attempts"]
    assert (attempt["how"], attempt["cause"]) == ("pull", "policy")
    assert (attempt["delivered_tokens"], attempt["kv_tokens"]) == (3, 52)
    assert (left["decode"], attempt["decode"], attempt["gap_s"]) == (names[source], names[target], 0.125)
    assert [one["state"] for one in told["attempts"]] == ["over", "ended"]
    assert (told["decode"], told["end"]) == (names[source], "finished")
    metrics = one.admin("GET", "/metrics")[1]
    assert 'pla_router_migrations_total{how="pull",reason="policy"} 1.0' in metrics


async def test_a_request_moves_there_and_back() -> None:
    async with scene(TWO, **ON) as one:
        source = await start(one)
        for attempt, target in ((2, 1 - source), (3, source)):
            assert move(one, target) is None
            order = await move_of(one, attempt)
            assert order.decode == target
            join(one, attempt)
            assert one.open_at()[target] == 1
        assert one.instances[1 - source].commands[0]["rid"] == "pla-2~r"
        one.ended("r")
        await one.at_rest()


@pytest.mark.parametrize("status", ["finished", "unknown", "refused", "waiting", None])
async def test_a_request_that_cannot_be_held_stays_and_rests(status: str | None) -> None:
    async with scene(TWO, **ON) as one:
        source = await start(one)
        one.instances[source].hop_answers["hold"] = None if status is None else {"status": status}
        assert move(one, 1 - source) is None
        await one.until(lambda: one.plane.migration.failed == 1)
        assert move(one, 1 - source) == "it is in its cool-down, as its last move failed"
        assert one.open_at()[1 - source] == 0
        if status is None:  # it may be held, for all that is known
            await one.until(lambda: done(one, source) == ["hold", "resume"])
        assert find_moves(one) == []
        assert f'pla_router_migration_failures_total{{reason="{status}"}} 1.0' in one.admin("GET", "/metrics")[1]
        one.ended("r")
        await one.at_rest()
        assert one.instances[1 - source].aborted == []


@pytest.mark.parametrize("cause", m.Cause)
async def test_a_target_that_cannot_go_on(cause: m.Cause, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source is told to resume, unless it has; the next move has another room, number and id."""
    monkeypatch.setattr(moves, "COOL_DOWN_S", 0.0)
    async with scene(TWO, **ON) as one:
        source = await start(one)
        assert move(one, 1 - source) is None
        first = await move_of(one)
        drop(one, 2, cause)
        resumed = [] if cause is m.Cause.RESUMED else ["resume"]
        await one.until(lambda: done(one, source) == ["hold", *resumed])
        nothing_there = {m.Cause.NOT_SENT, m.Cause.FULL, m.Cause.REFUSED, m.Cause.ABORTED}  # as it has said
        aborting = cause not in nothing_there
        assert one.plane.dispatcher.ledger.audit(0.0).legs_aborting == aborting
        assert one.open_at()[1 - source] == 0
        assert move(one, 1 - source) is None
        second = await move_of(one, 3)
        assert second.attempt == 3
        assert second.bootstrap_room != first.bootstrap_room
        drop(one, 2, cause)  # late: it changes nothing
        join(one, 3)
        one.ended("r")
        await one.at_rest()
        assert set(one.instances[1 - source].aborted) == ({"pla-2~r"} if aborting else set())


@pytest.mark.parametrize("phase", ["holding", "pulling"])
@pytest.mark.parametrize("how", ["ended", "relay", "dead source", "dead target"])
async def test_what_may_happen_meanwhile(phase: str, how: str) -> None:
    async with scene(TWO, **ON) as one:
        source = await start(one)
        assert move(one, 1 - source) is None
        if phase == "pulling":
            await move_of(one)
        if how == "ended":
            one.ended("r", m.Outcome.CLIENT_GONE, aborted=(source,))
            was_sent = phase == "pulling"
            assert one.plane.dispatcher.ledger.audit(0.0).legs_aborting == was_sent
        elif how == "relay":
            one.plane.detach_relay(0)
            await one.until(lambda: "r" in one.instances[source].aborted)
        elif how == "dead source":
            order = one.ask_again("r", 1, tokens=3, over={"lost_with": (source,)})
            assert isinstance(order, m.Assign)
            assert (order.prefill, order.decode, order.held_tokens) == (None, 1 - source, None)
            join(one, order.attempt)
            one.ended("r")
        else:
            await one.instances[1 - source].stop()
            target = one.plane.table.by_number[1 - source]
            await one.until(lambda: target.state.value == "dead")
            assert not any(isinstance(said, m.Abort) for said in one.relay.told)
            if phase == "pulling":
                drop(one, 2, m.Cause.LOST)
            else:
                await move_of(one)
                drop(one, 2, m.Cause.NOT_SENT)
            one.ended("r")
            await one.instances[1 - source].start()
        await one.at_rest()


async def test_a_stream_that_ends_before_its_instance_has_answered_the_hold() -> None:
    """The target was not sent anything, so nobody is told to abort."""
    async with scene(TWO, **ON) as one:
        source = await start(one)
        gate = one.instances[source].hop_gates["hold"] = asyncio.Event()
        one.instances[source].hop_answers["hold"] = {"status": "finished"}
        move(one, 1 - source)
        await one.until(lambda: done(one, source) == ["hold"])
        one.ended("r")
        assert one.plane.dispatcher.ledger.audit(0.0).balanced
        gate.set()
        await one.at_rest()
        assert [instance.aborted for instance in one.instances] == [[], []]
        metrics = one.admin("GET", "/metrics")[1]
        assert not re.search(r"pla_router_aborts_total{[^}]*} [^0]", metrics)


@pytest.mark.parametrize("outcome", [m.Outcome.OK, m.Outcome.CLIENT_GONE])
@pytest.mark.parametrize("answer", [{"status": "committed"}, None])
async def test_a_stream_that_ends_before_the_commit_is_answered(
    answer: dict[str, Any] | None, outcome: m.Outcome
) -> None:
    """What the instance that was left answers decides whether it is told to abort."""
    async with scene(TWO, **ON) as one:
        source = await start(one)
        gate = one.instances[source].hop_gates["commit"] = asyncio.Event()
        one.instances[source].hop_answers["commit"] = answer
        move(one, 1 - source)
        await move_of(one)
        join(one)
        await one.until(lambda: done(one, source) == ["hold", "commit"])
        one.ended("r", outcome)
        gone = outcome is m.Outcome.CLIENT_GONE
        audit = one.plane.dispatcher.ledger.audit(0.0)
        assert (audit.legs_open, audit.legs_aborting, audit.problems) == (1, gone, [])
        gate.set()
        await one.at_rest()
        assert one.instances[source].aborted == ([] if answer else ["r"] * 2)
        assert one.instances[1 - source].aborted == ["pla-2~r"] * 2 * gone


async def test_a_stream_that_has_come_back_ends_before_the_commit_is_answered() -> None:
    """Its instance holds nothing of the present attempt; what it has of the first one, its answer will say."""
    async with scene(TWO, **ON) as one:
        source = await start(one)
        gate = one.instances[source].hop_gates["commit"] = asyncio.Event()
        one.instances[source].hop_answers["commit"] = {"status": "unknown", "code": 410}
        for attempt, target in ((2, 1 - source), (3, source)):
            move(one, target)
            await move_of(one, attempt)
            join(one, attempt)
        await one.until(lambda: done(one, source) == ["hold", "commit"])
        one.ended("r")
        assert one.plane.dispatcher.ledger.audit(0.0).legs_open
        gate.set()
        await one.at_rest()
        assert one.instances[source].aborted == ["r"] * 2


@pytest.mark.parametrize("answer", [{"status": "unknown", "code": 410}, None])
async def test_a_commit_that_is_not_carried_out_becomes_an_abort(answer: dict[str, Any] | None) -> None:
    """What has gone on by itself would compute for nobody."""
    async with scene(TWO, **ON) as one:
        source = await start(one)
        one.instances[source].hop_answers["commit"] = answer
        move(one, 1 - source)
        await move_of(one)
        join(one)
        await one.until(lambda: one.instances[source].aborted[:1] == ["r"])
        one.ended("r")
        await one.at_rest()


async def test_what_cannot_be_moved_is_refused_in_words() -> None:
    async with scene(TWO, **ON) as one:
        assert move(one, 1) == "it is not open"
        source = await start(one, movable=False)
        assert move(one, 1 - source) == "its stream cannot go on elsewhere"
        one.ended("r")
        source = await start(one, "s")
        assert move(one, source, "s") == "the target cannot take it"
        target = one.plane.table.by_number[1 - source]
        target.peers = {}
        assert move(one, 1 - source, "s") == "no KV cache can go to the target"
        one.ended("s")
        await one.at_rest()
        assert one.instances[source].commands == []


async def test_an_instance_that_drains_is_emptied_by_moves() -> None:
    """And what cannot move finishes there, as ever."""
    async with scene(THREE, **ON) as one:
        for rid in ("a", "b", "c", "d"):
            await start(one, rid)
        where = {rid: one.plane.dispatcher.ledger.records[rid].present.decode for rid in "abcd"}
        source = where["a"]
        assert source is not None
        there = [rid for rid, worker in where.items() if worker is source]
        one.plane.dispatcher.ledger.records[there[-1]].movable = len(there) == 1
        leaves = there if len(there) == 1 else there[:-1]
        assert one.admin("POST", f"/workers/{source.number}/drain")[0] == 202
        await one.until(lambda: len(find_moves(one)) == len(leaves))
        assert {order.reason for order in find_moves(one)} == {"drain"}
        assert source.number not in {order.decode for order in find_moves(one)}
        for rid in leaves:
            join(one, 2, rid)
        await one.until(lambda: one.instances[source.number].commands[-1]["do"] == "commit")
        assert source.load.open_requests() == len(there) - len(leaves)
        for rid in "abcd":
            one.ended(rid)
        await one.at_rest()
        assert one.instances[source.number].aborted == []


async def test_without_the_flag_a_drain_moves_nothing() -> None:
    async with scene(TWO, **ON | {"migration": "off"}) as one:
        source = await start(one)
        assert one.admin("POST", f"/workers/{source}/drain")[0] == 202
        one.plane.migration.sweep_moves()
        assert count_moves(one.plane) == 0
        one.ended("r")
        await one.at_rest()
