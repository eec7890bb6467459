"""Where requests go on when their instance is lost: choice, ledger, loads, explain, metrics, and the take-over."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from support.router_scene import Scene, scene

from pla_sglang.common.errors import IllegalMoveError
from pla_sglang.fleet.router.control import failover
from pla_sglang.fleet.router.control.requests.hop_changes import start_hop
from pla_sglang.fleet.router.control.requests.hop_ledger import HopLedger
from pla_sglang.fleet.router.control.requests.ledger import Ledger
from pla_sglang.fleet.router.control.requests.prompts import Prompt
from pla_sglang.fleet.router.control.requests.request_record import LegState, MoveReason, RequestRecord, record_of
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.policy.interface.fleet import RequestView

THREE = ["stateless", "stateless", "stateless"]
SENT = (m.Milestone.SENT, m.Milestone.FIRST_TOKEN)
DEAD, NOT_SENT, FULL, *_ = m.LossReason
ON: dict[str, Any] = {"policy": "least-tokens", "migration": "on", "hops": True}


def lose(one: Scene, hop: int, tokens: int = 3, why: m.LossReason = DEAD, **fields: Any) -> Any:
    """The answer."""
    told = len(one.relay.told)
    shown = fields.pop("shown", bool(tokens))
    one.plane.on_message(m.Lost("r", hop, tokens, why, time.monotonic(), shown, **fields))
    answers = [said for said in one.relay.told[told:] if isinstance(said, (m.Continue, m.NoNextHop))]
    assert len(answers) <= 1
    return answers[0] if answers else None


def join(one: Scene, hop: int) -> None:
    one.plane.on_message(m.Joined("r", hop, time.monotonic(), 0.25))


def open_at(one: Scene) -> list[int]:
    """How many requests the load tracker of each instance has."""
    return [worker.load.open_requests() for worker in one.plane.table.workers]


def start(one: Scene) -> int:
    """A request that streams; its instance."""
    assign = one.assign("r")
    one.reach("r", *SENT)
    return assign.decode


async def test_a_stream_goes_on_at_another_instance() -> None:
    async with scene(THREE, **ON) as one:
        first = start(one)
        order = lose(one, 1, killed=(first,))
        assert isinstance(order, m.Continue)
        assert (order.hop, order.how, order.reason) == (2, m.MoveKind.REDO, "survive")
        assert order.target != first
        assert open_at(one)[order.target] == 1
        assert sum(open_at(one)) == 1
        record = one.plane.dispatcher.ledger.records["r"]
        assert record.view.rid == "pla-2~r"
        assert record.view.input_tokens == record.prompt.tokens + 3
        join(one, 2)
        one.ended("r", output_tokens=9)
        await one.until(lambda: not one.plane.dispatcher.ledger.records)
        assert one.instances[first].aborted[:1] == ["r"]  # it may be alive, and only its connection lost
        one.assert_at_rest()
        check_story(one, first, order.target)


def check_story(one: Scene, first: int, second: int) -> None:
    names = {worker.number: worker.view.name for worker in one.plane.table}
    told = one.admin("GET", "/pla/explain/r")[1]
    assert [(hop["hop"], hop["how"], hop["why"], hop["tokens"], hop["decode"]) for hop in told["hops"]] == [
        (1, None, None, 0, names[first]),
        (2, "redo", "survive", 3, names[second]),
    ]
    assert told["hops"][1]["gap_s"] == 0.25
    assert told["hops"][0]["ended_s"] <= told["hops"][1]["decided_s"] <= told["ended_s"]
    assert (told["decode"], told["end"], told["attempts"]) == (names[first], "finished", 2)
    assert sum(told["stages"].values()) == pytest.approx(told["ttft_s"], rel=1e-9)
    metrics = one.admin("GET", "/metrics")[1]
    assert 'pla_router_migrations_total{how="redo",reason="survive"} 1.0' in metrics
    assert "pla_router_migration_pause_seconds_sum 0.25" in metrics


async def test_who_was_lost_with_it_is_not_chosen_again_and_nobody_is_left_at_last() -> None:
    async with scene(THREE, **ON) as one:
        first = start(one)
        second = lose(one, 1, killed=(first,)).target
        third = lose(one, 2, 5, NOT_SENT, killed=(first,), avoided=(second,)).target
        assert {first, second, third} == {0, 1, 2}
        assert lose(one, 3, 5, killed=(first, second, third), shown=False) is None  # they may be about to come back
        await one.until(lambda: any(isinstance(said, m.NoNextHop) for said in one.relay.told))
        assert one.relay.last(m.NoNextHop).hop == 3
        metrics = one.admin("GET", "/metrics")[1]
        assert 'pla_router_migrations_total{how="redo",reason="not_sent"} 1.0' in metrics
        assert 'pla_router_migration_failures_total{reason="no_instance"} 1.0' in metrics
        one.ended("r", m.Outcome.UPSTREAM_LOST)
        await one.until(lambda: not one.plane.dispatcher.ledger.records)
        assert one.instances[second].aborted == []  # it never had it
        one.assert_at_rest()


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("ended", [False, True])
async def test_it_waits_for_an_instance_that_was_full(tokens: int, ended: bool) -> None:
    """Rather than lose what there is of the answer. Its client may give up meanwhile."""
    async with scene(["stateless", "stateless"], **ON) as one:
        first = start(one)
        second = lose(one, 1, tokens, killed=(first,)).target
        assert lose(one, 2, tokens, FULL, killed=(first,), avoided=(second,)) is None
        if ended:
            one.ended("r", m.Outcome.CLIENT_GONE)
            await asyncio.sleep(1.5 * failover.PAUSE_S)
            assert one.relay.last(m.Continue).hop == 2
        else:
            await one.until(lambda: one.relay.last(m.Continue).hop == 3)
            assert one.relay.last(m.Continue).target == second
            join(one, 3)
            one.ended("r")
        await one.at_rest()


@pytest.mark.parametrize("comes", [False, True])
async def test_it_waits_for_an_instance_that_starts(comes: bool) -> None:
    """No longer than a new request would."""
    pending_s = 20.0 if comes else 1.0
    async with scene(["stateless", "stateless"], **ON | {"pending_s": pending_s}) as one:
        first = start(one)
        other = one.plane.table.by_number[1 - first]
        await one.instances[1 - first].stop()
        await one.until(lambda: other.state.value == "dead")
        await one.instances[first].stop()
        assert lose(one, 1, killed=(first,)) is None
        if comes:
            await one.instances[1 - first].start()
            await one.until(lambda: any(isinstance(said, m.Continue) for said in one.relay.told))
            assert one.relay.last(m.Continue).target not in (first, other.number)
            join(one, 2)
            one.ended("r")
        else:
            await one.until(lambda: any(isinstance(said, m.NoNextHop) for said in one.relay.told))
            assert one.relay.last(m.NoNextHop).hop == 1
            one.ended("r", m.Outcome.UPSTREAM_LOST)
            await one.instances[1 - first].start()
        await one.instances[first].start()
        await one.at_rest()


@pytest.mark.parametrize(("hops", "tokens", "goes_on"), [(True, 3, True), (False, 3, False), (False, 0, True)])
async def test_only_instances_that_can_go_on_with_a_stream_get_one(hops: bool, tokens: int, goes_on: bool) -> None:
    async with scene(["stateless", "stateless"], **ON | {"hops": hops}) as one:
        table = one.relay.last(m.Table)
        assert table.migration
        assert [entry.hops for entry in table.workers] == [hops] * 2
        answer = lose(one, 1, tokens, killed=(start(one),))
        assert isinstance(answer, m.Continue) is goes_on
        one.ended("r")
        await one.at_rest()


async def test_without_the_flag_no_relay_is_told_to_mark_anything() -> None:
    async with scene(["stateless", "stateless"], policy="least-tokens", hops=True) as one:
        table = one.relay.last(m.Table)
        assert not table.migration
        assert not any(entry.hops for entry in table.workers)


async def test_a_pair_that_is_lost_goes_on_at_one_instance() -> None:
    async with scene(THREE, **ON | {"policy": "arrow-no-flips"}) as one:
        await one.until(lambda: all(worker.peers for worker in one.plane.table))
        assign = one.assign("r")
        assert assign.prefill is not None
        one.reach("r", m.Milestone.SENT, m.Milestone.PREFILL_DONE, m.Milestone.FIRST_TOKEN)
        order = lose(one, 1, killed=(assign.decode,))
        hop = one.plane.dispatcher.ledger.records["r"].hop
        assert order.target == assign.prefill, "the policy names a pair again, and its first does all"
        assert hop.prefill is hop.decode is one.plane.table.by_number[assign.prefill]
        assert [leg.leg for leg in hop.legs] == [m.Leg.WHOLE]
        join(one, 2)
        one.ended("r")
        await one.at_rest()


async def test_messages_that_come_too_late_change_nothing() -> None:
    async with scene(THREE, **ON) as one:
        first = start(one)
        assert lose(one, 2, killed=(first,)) is None
        order = lose(one, 1, killed=(first,))
        assert lose(one, 1, killed=(first,)) is None
        join(one, 1)
        join(one, 2)
        join(one, 2)
        assert open_at(one)[order.target] == 1
        one.ended("r")
        assert lose(one, 2, killed=(first,)) is None
        join(one, 2)
        await one.at_rest()


async def test_an_instance_that_the_control_plane_finds_dead() -> None:
    """It tells the relay which one; the relay says that the request is lost, and it was not given up."""
    async with scene(["stateless", "stateless"], **ON) as one:
        first = start(one)
        await one.instances[first].stop()
        await one.until(lambda: any(isinstance(said, m.Abort) for said in one.relay.told))
        assert one.relay.last(m.Abort).worker == first
        order = lose(one, 1, killed=(first,))
        assert order.target == 1 - first
        join(one, 2)
        one.ended("r")
        one.assert_at_rest()
        assert one.admin("GET", "/pla/explain/r")[1]["end"] == "finished"
        await one.instances[first].start()


@pytest.mark.parametrize("lost", [False, True])
async def test_the_take_over_after_a_restart(lost: bool) -> None:
    """A later hop is adopted with its number; one that is lost asks again."""
    async with scene(["stateless", "stateless"], **ON) as one:
        now_s = time.monotonic()
        ask = m.Ask("r", 0, m.Endpoint.CHAT, True, now_s, 9, 50, attempt=2, reached=1)
        progress = tuple(m.Progress("r", milestone, now_s, movable=True) for milestone in SENT)
        opened = m.OpenRequest(ask, m.Assign("r", 2, 0), progress, hop=2, tokens=4, lost=lost)
        one.plane.on_message(m.Hello(0, m.PROTOCOL, 1, (opened,)))
        record = one.plane.dispatcher.ledger.records["r"]
        assert (record.hop.number, record.hop.tokens, record.reached, record.movable) == (2, 4, 1, True)
        if lost:
            order = lose(one, 2, 6, killed=(0,))
            assert (order.hop, order.target) == (3, 1)
            join(one, 3)
            assert one.plane.dispatcher.ledger.records["r"].view.rid == "pla-3~r"
        one.ended("r")
        await one.until(lambda: not one.plane.dispatcher.ledger.records)
        assert one.instances[0].aborted[:1] == (["pla-2~r"] if lost else [])
        one.assert_at_rest()


async def test_a_relay_that_is_gone_leaves_nothing_of_any_hop() -> None:
    async with scene(THREE, **ON) as one:
        first = start(one)
        order = lose(one, 1, killed=(first,))
        one.plane.detach_relay(0)
        await one.until(lambda: not one.plane.dispatcher.ledger.records)
        assert one.instances[first].aborted[:1] == ["r"]
        assert one.instances[order.target].aborted[:1] == ["pla-2~r"]
        one.assert_at_rest()


# -- the ledger ------------------------------------------------------------------------------------------------------


def make_record(rid: str = "r") -> RequestRecord:
    ask = m.Ask(rid, 0, m.Endpoint.GENERATE, True, 0.0, 10, 5)
    view = RequestView(rid=rid, input_tokens=5, arrival_s=0.0)
    return record_of(ask, view, Prompt(5, False), default_ttft_slo_s=1.0, default_tpot_slo_s=0.1)


def next_hop(ledger: Ledger, record: RequestRecord, worker: int, *, executed: bool = True) -> list[Any]:
    orders = HopLedger(ledger).lose_hop(record, 1.0, executed=executed)
    view = RequestView(rid="next", input_tokens=9, arrival_s=1.0)
    start_hop(record, view, how=m.MoveKind.REDO, why=MoveReason.SURVIVE.value, tokens=4)
    ledger.assign(record, [(m.Leg.WHOLE, worker)], 1.0)
    return orders


def test_each_leg_of_each_hop_is_closed_once() -> None:
    """Also where the same instance comes twice, under two ids."""
    ledger, record = Ledger(), make_record()
    ledger.open(record)
    ledger.assign(record, [(m.Leg.PREFILL, 1), (m.Leg.DECODE, 2)], 0.0)
    ledger.first_token(record)
    orders = next_hop(ledger, record, 2)
    assert [(order.worker, order.attempt, order.rids) for order in orders] == [(1, 1, ("r",)), (2, 1, ("r",))]
    assert len(ledger.rooms) == 1
    ledger.first_token(record)
    second = next_hop(ledger, record, 1)
    assert [(order.worker, order.attempt, order.rids) for order in second] == [(2, 2, ("pla-2~r",))]
    for order in orders:
        ledger.confirm_abort(order, 2.0)
    assert not ledger.rooms
    assert [leg.state for leg in record.all_legs()] == [
        *(LegState.CLOSED, LegState.CLOSED),
        *(LegState.ABORTING, LegState.OPEN),
    ]
    [last] = ledger.end(record, m.Outcome.CLIENT_GONE, 3.0)
    assert (last.worker, last.attempt, last.rids) == (1, 3, ("pla-3~r",))
    assert ledger.records
    ledger.confirm_abort(second[0], 4.0)
    ledger.confirm_abort(last, 4.0)
    assert ledger.audit(4.0).balanced
    assert not ledger.records


def test_a_dead_instance_hits_only_the_hop_that_the_client_sees() -> None:
    ledger, record = Ledger(), make_record()
    ledger.open(record)
    ledger.assign(record, [(m.Leg.WHOLE, 1)], 0.0)
    next_hop(ledger, record, 2)
    assert ledger.worker_dead(1, 2.0) == []
    assert ledger.worker_dead(2, 2.0) == [record]
    assert ledger.audit(2.0).legs_open == ledger.audit(2.0).legs_aborting == 0
    with pytest.raises(IllegalMoveError):
        ledger.assign(record, [(m.Leg.WHOLE, 3)], 2.0)
