"""Where requests go on when their instance is lost: choice, ledger, loads, explain, metrics, and the take-over."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from support.router_scene import Scene, scene

from pla_sglang.fleet.router.control import request_dispatcher
from pla_sglang.fleet.router.wire import messages as m

THREE = ["stateless", "stateless", "stateless"]
SENT = (m.Milestone.SENT, m.Milestone.FIRST_TOKEN)
LOST, NOT_SENT, FULL = m.Cause.LOST, m.Cause.NOT_SENT, m.Cause.FULL
ON: dict[str, Any] = {"policy": "least-tokens", "migration": "on", "hops": True}


def lose(one: Scene, attempt: int, tokens: int = 3, cause: m.Cause = LOST, **over: Any) -> Any:
    """The answer, if there is one at once. All others have just been heard of, so that nobody is waited for."""
    for worker in one.plane.table:
        if worker.number not in over.get("lost_with", ()):
            worker.heard_s = max(worker.heard_s, time.monotonic() + 0.1)
    return one.ask_again("r", attempt, cause, tokens=tokens, over=over)


def join(one: Scene, attempt: int) -> None:
    one.reach("r", m.Milestone.FIRST_TOKEN, attempt=attempt, gap_s=0.25)


def start(one: Scene, tokens: int = 3) -> int:
    """A request that streams, or of which nothing is shown yet; its instance."""
    assign = one.assign("r")
    one.reach("r", *SENT[: 2 if tokens else 1])
    return assign.decode


async def test_a_stream_goes_on_at_another_instance() -> None:
    async with scene(THREE, **ON) as one:
        first = start(one)
        order = lose(one, 1, lost_with=(first,))
        assert isinstance(order, m.Assign)
        assert (order.attempt, order.prefill, order.held_tokens) == (2, None, None)
        assert order.decode != first
        assert one.open_at()[order.decode] == 1
        assert sum(one.open_at()) == 1
        record = one.plane.dispatcher.ledger.records["r"]
        assert record.view.rid == "pla-2~r"
        assert record.view.input_tokens == record.prompt.tokens + 3
        join(one, 2)
        one.ended("r", output_tokens=9)
        await one.until(lambda: not one.plane.dispatcher.ledger.records)
        assert one.instances[first].aborted[:1] == ["r"]  # it may be alive, and only its connection lost
        one.assert_at_rest()
        check_story(one, first, order.decode)


def check_story(one: Scene, first: int, second: int) -> None:
    names = {worker.number: worker.view.name for worker in one.plane.table}
    told = one.admin("GET", "/pla/explain/r")[1]
    rows = told["attempts"]
    assert [
        (row["attempt"], row["how"], row["cause"], row["over"], row["delivered_tokens"], row["decode"]) for row in rows
    ] == [(1, None, "dispatch", "lost", 0, names[first]), (2, "redo", "lost", None, 3, names[second])]
    assert rows[1]["gap_s"] == 0.25
    assert rows[0]["ended_s"] <= rows[1]["decided_s"] <= told["ended_s"]
    assert (told["decode"], told["end"]) == (names[first], "finished")
    assert sum(told["stages"].values()) == pytest.approx(told["ttft_s"], rel=1e-9)
    metrics = one.admin("GET", "/metrics")[1]
    assert 'pla_router_migrations_total{how="redo",reason="lost"} 1.0' in metrics
    assert "pla_router_migration_pause_seconds_sum 0.25" in metrics


@pytest.mark.parametrize("tokens", [0, 3])
async def test_who_was_lost_with_it_is_not_chosen_again_and_nobody_is_left_at_last(tokens: int) -> None:
    async with scene(THREE, **ON) as one:
        first = start(one, tokens)
        second = lose(one, 1, tokens, lost_with=(first,)).decode
        third = lose(one, 2, tokens, NOT_SENT, lost_with=(first,), avoid=(second,)).decode
        assert {first, second, third} == {0, 1, 2}
        counted = 'migrations_total{how="redo",reason="not_sent"}' if tokens else 'retries_total{reason="not_sent"}'
        assert f"pla_router_{counted} 1.0" in one.admin("GET", "/metrics")[1]
        await asyncio.sleep(0.15)  # beyond what ``lose`` has pretended
        assert lose(one, 3, tokens, lost_with=(first, second, third)) is None  # they may be about to come back
        if tokens:  # one of them is well, and has not died of what has shown tokens
            await one.until(lambda: one.relay.last(m.Assign).attempt == 4)
        else:
            await one.until(lambda: any(isinstance(said, m.Refuse) for said in one.relay.told))
            refuse = one.relay.last(m.Refuse)
            assert (refuse.status, refuse.code, refuse.over) == (502, "no_instance", 3)
            metrics = one.admin("GET", "/metrics")[1]
            assert 'pla_router_move_failures_total{reason="no_instance"} 1.0' in metrics
        one.ended("r", m.Outcome.UPSTREAM_LOST)
        await one.until(lambda: not one.plane.dispatcher.ledger.records)
        assert "pla-2~r" not in one.instances[second].aborted  # it never had it
        one.assert_at_rest()


@pytest.mark.parametrize("ended", [False, True])
async def test_a_stream_waits_for_an_instance_that_was_full(ended: bool) -> None:
    """Rather than lose what there is of the answer. Its client may give up meanwhile."""
    async with scene(["stateless", "stateless"], **ON) as one:
        first = start(one)
        second = lose(one, 1, lost_with=(first,)).decode
        assert lose(one, 2, 3, FULL, lost_with=(first,), refused_by=(second,)) is None
        if ended:
            one.ended("r", m.Outcome.CLIENT_GONE)
            await asyncio.sleep(1.5 * request_dispatcher.PAUSE_S)
            assert one.relay.last(m.Assign).attempt == 2
        else:
            await one.until(lambda: one.relay.last(m.Assign).attempt == 3)
            assert one.relay.last(m.Assign).decode == second
            join(one, 3)
            one.ended("r")
        await one.at_rest()


async def test_what_has_not_begun_is_refused_where_all_others_are_full() -> None:
    """As one that was lost nowhere."""
    async with scene(["stateless", "stateless"], **ON) as one:
        first = start(one, tokens=0)
        second = lose(one, 1, 0, lost_with=(first,)).decode
        answer = lose(one, 2, 0, FULL, lost_with=(first,), refused_by=(second,))
        assert (answer.status, answer.code, answer.over) == (503, "all_full", 2)
        one.ended("r", m.Outcome.INSTANCE_REFUSED)
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
        assert lose(one, 1, lost_with=(first,)) is None
        if comes:
            await one.instances[1 - first].start()
            await one.until(lambda: one.relay.last(m.Assign).attempt == 2)
            assert one.relay.last(m.Assign).decode not in (first, other.number)
            join(one, 2)
            one.ended("r")
        else:
            await one.until(lambda: any(isinstance(said, m.Refuse) for said in one.relay.told))
            assert one.relay.last(m.Refuse).over == 1
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
        answer = lose(one, 1, tokens, lost_with=(start(one, tokens),))
        assert isinstance(answer, m.Assign) is goes_on
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
        order = lose(one, 1, lost_with=(assign.decode,))
        attempt = one.plane.dispatcher.ledger.records["r"].present
        assert (order.prefill, order.decode) == (None, assign.prefill), (
            "the policy names a pair again, and its first does all"
        )
        assert attempt.prefill is attempt.decode is one.plane.table.by_number[assign.prefill]
        assert [leg.worker for leg in attempt.legs] == [assign.prefill]
        join(one, 2)
        one.ended("r")
        await one.at_rest()


async def test_a_pair_that_is_lost_before_anything_was_shown_is_any_other_request() -> None:
    """To the policy it is the same one: with its deadline, and for a pair."""
    async with scene(THREE, **ON | {"policy": "arrow-no-flips"}) as one:
        await one.until(lambda: all(worker.peers for worker in one.plane.table))
        assign = one.assign("r", ago_s=5.0)
        record = one.plane.dispatcher.ledger.records["r"]
        view, arrival_s = record.view, record.view.arrival_s
        one.reach("r", m.Milestone.SENT)
        order = lose(one, 1, 0, lost_with=(assign.decode,))
        assert assign.decode not in (order.prefill, order.decode)
        assert len({assign.decode, order.prefill, order.decode}) == 3
        assert order.bootstrap_room != assign.bootstrap_room
        assert record.view is view
        assert (view.rid, view.arrival_s, view.input_tokens) == ("r", arrival_s, record.prompt.tokens)
        one.reach("r", m.Milestone.SENT, m.Milestone.PREFILL_DONE, m.Milestone.FIRST_TOKEN, attempt=2)
        one.ended("r")
        await one.at_rest()
        told = one.admin("GET", "/pla/explain/r")[1]
        assert [row["how"] for row in told["attempts"]] == [None, "redo"]
        assert told["ttft_s"] >= 5.0
        assert 'pla_router_migrations_total{how="redo",reason="lost"} 1.0' in one.admin("GET", "/metrics")[1]


async def test_messages_that_come_too_late_change_nothing() -> None:
    async with scene(THREE, **ON) as one:
        first = start(one)
        assert lose(one, 2, lost_with=(first,)) is None
        order = lose(one, 1, lost_with=(first,))
        assert lose(one, 1, lost_with=(first,)) is None
        join(one, 1)
        join(one, 2)
        join(one, 2)
        assert one.open_at()[order.decode] == 1
        one.ended("r")
        join(one, 2)
        await one.at_rest()


async def test_an_instance_that_the_control_plane_finds_dead() -> None:
    """It tells the relay which one; the relay says that the request is lost, and it was not given up."""
    async with scene(["stateless", "stateless"], **ON) as one:
        first = start(one)
        await one.instances[first].stop()
        await one.until(lambda: any(isinstance(said, m.Abort) for said in one.relay.told))
        assert one.relay.last(m.Abort).worker == first
        order = lose(one, 1, lost_with=(first,))
        assert order.decode == 1 - first
        join(one, 2)
        one.ended("r")
        one.assert_at_rest()
        assert one.admin("GET", "/pla/explain/r")[1]["end"] == "finished"
        await one.instances[first].start()


@pytest.mark.parametrize("what", ["runs on", "is lost later", "asks"])
async def test_the_take_over_after_a_restart(what: str) -> None:
    """A later attempt is adopted with its number; one that is over asks again."""
    async with scene(["stateless", "stateless"], **ON) as one:
        now_s = time.monotonic()
        ask = m.Ask("r", 0, m.Endpoint.CHAT, True, now_s, 9, 50)
        progress = tuple(m.Progress("r", milestone, now_s, movable=True, attempt=2) for milestone in SENT)
        opened = m.OpenRequest(ask, m.Assign("r", 2, 0), progress, delivered_tokens=4, last_attempt=2)
        if what == "asks":
            one.plane.on_message(m.Hello(0, m.PROTOCOL, asking=("r",)))
        else:
            one.plane.on_message(m.Hello(0, m.PROTOCOL, (opened,)))
            record = one.plane.dispatcher.ledger.records["r"]
            assert (record.present.number, record.present.delivered_tokens, record.movable) == (2, 4, True)
        if what != "runs on":
            order = lose(one, 2, 6, lost_with=(0,))
            assert (order.attempt, order.decode) == (3, 1)
            join(one, 3)
            record = one.plane.dispatcher.ledger.records["r"]
            assert (record.view.rid, record.admission) == ("pla-3~r", "adopted")
            assert record.view.input_tokens == record.prompt.tokens + 6
        one.ended("r")
        await one.until(lambda: not one.plane.dispatcher.ledger.records)
        assert one.instances[0].aborted[:1] == (["pla-2~r"] if what == "is lost later" else [])
        one.assert_at_rest()


async def test_a_number_is_not_given_again_after_a_restart() -> None:
    """The relay has seen a higher one, of which nothing came."""
    async with scene(["stateless", "stateless"], **ON) as one:
        now_s = time.monotonic()
        ask = m.Ask("r", 0, m.Endpoint.CHAT, True, now_s, 9, 50)
        progress = tuple(m.Progress("r", milestone, now_s) for milestone in SENT)
        opened = m.OpenRequest(ask, m.Assign("r", 1, 0), progress, delivered_tokens=4, last_attempt=3)
        one.plane.on_message(m.Hello(0, m.PROTOCOL, (opened,)))
        assert lose(one, 1, 6, lost_with=(0,)).attempt == 4
        one.ended("r")
        await one.at_rest()


async def test_a_relay_that_is_gone_leaves_nothing_of_any_attempt() -> None:
    async with scene(THREE, **ON) as one:
        first = start(one)
        order = lose(one, 1, lost_with=(first,))
        one.plane.detach_relay(0)
        await one.until(lambda: not one.plane.dispatcher.ledger.records)
        assert one.instances[first].aborted[:1] == ["r"]
        assert one.instances[order.decode].aborted[:1] == ["pla-2~r"]
        one.assert_at_rest()
