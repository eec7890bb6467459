"""The control plane and instances that are full: no failures, short exclusions, retries within their budget."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from support.router_scene import Scene, scene

from pla_sglang.fleet.router.control.workers.breaker import BreakerKnobs, BreakerState
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerState
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.policy.registry import build
from pla_sglang.policy.retry_budget import RetryBudgetKnobs
from pla_sglang.recording.file import read
from pla_sglang.recording.rows import Dispatched, Header
from pla_sglang.recording.setup import setup_of
from pla_sglang.sim.core.parity import Replay

LONG_S = 30.0


def refuse(one: Scene, rid: str, worker: int, *, attempt: int = 1, refused_by: tuple[int, ...] = ()) -> Any:
    """What a relay says of a request that ``worker`` has refused for load, and the answer. ``refused_by``: before."""
    one.plane.on_message(m.Failure(worker, m.FailureKind.FULL, "status 503", rid))
    return one.ask_again(rid, attempt, m.Cause.FULL, over={"refused_by": (*refused_by, worker)})


async def test_a_full_instance_is_well_and_the_request_goes_elsewhere() -> None:
    async with scene(["null"] * 3, full_avoid_s=LONG_S) as one:
        first = one.assign("r")
        second = refuse(one, "r", first.decode)
        assert isinstance(second, m.Assign)
        third = refuse(one, "r", second.decode, attempt=2, refused_by=(first.decode,))
        assert isinstance(third, m.Assign)
        assert {first.decode, second.decode, third.decode} == {0, 1, 2}
        one.reach("r", m.Milestone.SENT, m.Milestone.FIRST_TOKEN)
        one.ended("r")
        one.assert_at_rest()
        told = one.admin("GET", "/pla/explain/r")[1]
        assert sorted(told["excluded"].values()) == ["refused_it", "refused_it"]
        assert [attempt["over"] for attempt in told["attempts"]] == ["full", "full", None]
        assert [attempt["cause"] for attempt in told["attempts"]] == ["dispatch", "full", "full"]
        metrics = one.admin("GET", "/metrics")[1]
        assert 'pla_router_retries_total{reason="full"} 2.0' in metrics
        assert 'pla_router_exclusions_total{reason="refused_it"} 2.0' in metrics
        assert f'pla_router_instance_refusals_total{{worker="{name_of(one, first.decode)}"}} 1.0' in metrics
        assert not re.search(r"pla_router_instance_failures_total\{.*\} [1-9]", metrics)


def name_of(one: Scene, number: int) -> str:
    return one.plane.table.by_number[number].view.name


async def test_any_number_of_refusals_opens_no_breaker() -> None:
    async with scene(["null", "null"], retry_budget=RetryBudgetKnobs(share=0.0, least=0)) as one:
        for turn in range(60):
            assign = one.assign(f"r{turn}")
            answer = refuse(one, f"r{turn}", assign.decode)
            assert isinstance(answer, m.Refuse)
            one.ended(f"r{turn}", m.Outcome.INSTANCE_REFUSED)
        assert [worker.breaker.state for worker in one.plane.table] == [BreakerState.CLOSED] * 2
        assert [worker.state for worker in one.plane.table] == [WorkerState.READY] * 2
        assert not any(fake.aborted for fake in one.instances)  # what was refused is nowhere
        one.assert_at_rest()
        metrics = one.admin("GET", "/metrics")[1]
        assert 'pla_router_requests_total{end="instance_refused",model="chain",tenant=""} 60.0' in metrics


async def test_a_full_instance_is_avoided_for_a_while_by_others() -> None:
    async with scene(["null", "null"], full_avoid_s=LONG_S) as one:
        one.ask("r")
        refuse(one, "r", 0)
        assert {one.assign(f"x{turn}").decode for turn in range(6)} == {1}
        assert one.admin("GET", "/pla/explain/x0")[1]["excluded"] == {name_of(one, 0): "full"}
        one.plane.table.by_number[0].view.full_until_s = 0.0  # the while is over
        assert {one.assign(f"y{turn}").decode for turn in range(6)} == {0, 1}
        assert not one.plane.table.restricted


async def test_where_all_are_full_requests_go_out_all_the_same_and_are_not_tried_twice() -> None:
    async with scene(["null", "null"], full_avoid_s=LONG_S) as one:
        for number in (0, 1):
            one.plane.on_message(m.Failure(number, m.FailureKind.FULL, "", ""))
        assert {one.assign(f"r{turn}").decode for turn in range(4)} == {0, 1}
        answer = refuse(one, "r0", 0)
        assert isinstance(answer, m.Refuse)
        assert (answer.status, answer.code, answer.retry_after_s) == (503, "all_full", 1.0)


async def test_a_refused_request_that_a_new_control_plane_hears_of_first_goes_elsewhere_too() -> None:
    """It was refused, and the control plane was replaced before it had named another instance."""
    async with scene(["null", "null"]) as one:
        for turn in range(4):
            answer = one.ask_again(f"r{turn}", 1, m.Cause.FULL, over={"refused_by": (1,)})
            assert isinstance(answer, m.Assign)
            assert (answer.attempt, answer.decode) == (2, 0)
            one.ended(f"r{turn}")
        refused = one.ask_again("s", 2, m.Cause.FULL, over={"refused_by": (1, 0)})
        assert isinstance(refused, m.Refuse)
        assert (refused.code, refused.over) == ("all_full", 2)
        one.ended("s", m.Outcome.INSTANCE_REFUSED)
        one.assert_at_rest()


async def test_a_former_failure_to_connect_is_not_reported_again_with_a_refusal() -> None:
    """The instance has come back meanwhile: its breaker would open at once, without cause."""
    async with scene(["null"] * 3, full_avoid_s=0.0) as one:
        first = one.assign("r")
        avoid = ((first.decode + 1) % 3,)
        one.ask_again("r", 1, m.Cause.FULL, over={"refused_by": (first.decode,), "avoid": avoid})
        assert [worker.breaker.state for worker in one.plane.table] == [BreakerState.CLOSED] * 3
        one.ended("r")
        one.assert_at_rest()


async def test_retries_have_a_budget() -> None:
    budget = RetryBudgetKnobs(share=0.5, least=1)
    async with scene(["null", "null"], full_avoid_s=0.0, retry_budget=budget) as one:
        answers = []
        for turn in range(8):
            assign = one.assign(f"r{turn}")
            answers.append(refuse(one, f"r{turn}", assign.decode))
        retried = [isinstance(answer, m.Assign) for answer in answers]
        assert retried == [True, True, False, True, False, True, False, True]  # of n requests 1 + n / 2
        assert {answer.code for answer in answers if isinstance(answer, m.Refuse)} == {"retry_budget"}
        metrics = one.admin("GET", "/metrics")[1]
        assert 'pla_router_admissions_total{decision="refused",reason="retry_budget"} 3.0' in metrics
        assert "pla_router_retry_budget_left 0.0" in metrics


async def test_a_pair_is_left_where_one_of_it_is_full() -> None:
    async with scene(["prefill", "prefill", "decode", "decode"], full_avoid_s=LONG_S, policy="minimal-load") as one:
        first = one.assign("r")
        assert first.prefill is not None
        second = refuse(one, "r", first.prefill)
        assert isinstance(second, m.Assign)
        assert {first.prefill, second.prefill} == {0, 1}
        assert second.bootstrap_room != first.bootstrap_room
        third = refuse(one, "r", second.decode, attempt=2, refused_by=(first.prefill,))
        assert isinstance(third, m.Assign)
        assert (third.prefill, third.decode) == (second.prefill, 5 - second.decode)
        one.ended("r")
        one.assert_at_rest()


async def test_a_retry_that_finds_nobody_keeps_nobody_waiting() -> None:
    """It stands behind others in the queue when the instance that it could have gone to is drained."""
    async with scene(["null", "null"]) as one:
        one.assign("r")
        table = one.plane.table
        for worker in table:
            table.drain(worker, time.monotonic())
        assert one.ask("before") is None
        table.undrain(table.by_number[1], time.monotonic())
        table.drain(table.by_number[1], time.monotonic())
        assert one.ask("waits") is None
        one.plane.on_message(m.Failure(0, m.FailureKind.FULL, "", "r"))
        answer = refuse(one, "r", 0)
        assert isinstance(answer, m.Refuse)
        table.undrain(table.by_number[0], time.monotonic())
        sent = {message.rid for message in one.relay.told if isinstance(message, m.Assign)}
        assert {"before", "waits"} <= sent


# -- breakers --------------------------------------------------------------------------------------------------------


QUICK_BREAKER = BreakerKnobs(consecutive=1, cool_down_s=0.1, cool_down_max_s=0.2)


async def half_open(one: Scene) -> Worker:
    """The only instance, after a loss, its cool-down and a health check."""
    worker = one.plane.table.by_number[0]
    one.plane.on_message(m.Failure(0, m.FailureKind.LOST, "gone", "lost"))
    assert (worker.state, worker.breaker.state) == (WorkerState.SUSPECT, BreakerState.OPEN)
    await one.until(worker.is_ready)
    assert worker.breaker.state is BreakerState.HALF_OPEN
    return worker


@pytest.mark.parametrize("outcome", [m.Outcome.OK, m.Outcome.INSTANCE_REFUSED, m.Outcome.CLIENT_GONE])
async def test_one_request_is_on_trial_and_the_others_wait_for_its_end(outcome: m.Outcome) -> None:
    async with scene(["null"], breaker=QUICK_BREAKER) as one:
        worker = await half_open(one)
        one.assign("trial")
        assert [one.ask(rid) for rid in ("a", "b", "c")] == [None, None, None]
        one.ended("trial", outcome)
        sent = [message.rid for message in one.relay.told if isinstance(message, m.Assign)]
        if outcome is m.Outcome.OK:
            assert sent == ["trial", "a", "b", "c"]
            assert worker.breaker.state is BreakerState.CLOSED
        else:  # it has said nothing about the instance's health: the next one is the trial
            assert sent == ["trial", "a"]
            assert (worker.breaker.state, worker.breaker.opened) == (BreakerState.HALF_OPEN, 1)


async def test_others_need_not_wait_for_the_end_of_a_long_trial() -> None:
    async with scene(["null"], breaker=QUICK_BREAKER) as one:
        worker = await half_open(one)
        one.assign("trial")
        assert one.ask("waits") is None
        one.reach("trial", m.Milestone.SENT)
        assert worker.breaker.state is BreakerState.HALF_OPEN
        one.reach("trial", m.Milestone.FIRST_TOKEN)
        assert worker.breaker.state is BreakerState.CLOSED
        assert one.relay.last(m.Assign).rid == "waits"


async def test_a_trial_that_fails_opens_it_again() -> None:
    async with scene(["null"], breaker=QUICK_BREAKER) as one:
        worker = await half_open(one)
        one.assign("trial")
        assert one.ask("waits") is None
        one.plane.on_message(m.Failure(0, m.FailureKind.LOST, "gone", "trial"))
        one.ended("trial", m.Outcome.UPSTREAM_LOST)
        assert (worker.breaker.state, worker.breaker.opened) == (BreakerState.OPEN, 2)
        assert one.relay.last(m.Assign).rid == "trial"


# -- answers of 500 --------------------------------------------------------------------------------------------------


def status_failure(rid: str) -> m.Failure:
    return m.Failure(0, m.FailureKind.STATUS, "status 500", rid)


async def test_a_500_asks_for_a_health_check_and_counts_nothing_itself() -> None:
    async with scene(["null"], breaker=BreakerKnobs(consecutive=1)) as one:
        checks = 0
        health = one.plane._client.health

        async def counted(address: Any) -> None:
            nonlocal checks
            checks += 1
            await health(address)

        one.plane._client.health = counted  # type: ignore[method-assign]
        for turn in range(50):
            one.plane.on_message(status_failure(f"r{turn}"))
        await one.until(lambda: checks == 2)  # at once, and once more after the interval, for those that came since
        await one.until(lambda: not one.plane._monitor._busy)
        assert one.plane.table.by_number[0].breaker.state is BreakerState.CLOSED
        assert 'pla_router_instance_failures_total{kind="status"} 50.0' in one.admin("GET", "/metrics")[1]


async def test_a_health_check_that_fails_after_a_500_counts() -> None:
    async with scene(["null"], breaker=BreakerKnobs(consecutive=1)) as one:
        one.instances[0].healthy = False
        one.plane.on_message(status_failure("r"))
        worker = one.plane.table.by_number[0]
        await one.until(lambda: worker.state is WorkerState.SUSPECT)
        assert worker.breaker.opened == 1


@pytest.mark.parametrize("policy", ["round-robin", "minimal-load"])
async def test_a_recording_says_who_was_left_out_and_replays_alike(policy: str, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    async with scene(["null"] * 3, policy=policy, full_avoid_s=LONG_S, record=record) as one:
        one.ask("r")
        refuse(one, "r", 0)
        for turn in range(5):
            one.ask(f"x{turn}")
    header, *lines = read(record)
    assert isinstance(header, Header)
    hidden = [line.hidden for line in lines if isinstance(line, Dispatched)]
    assert hidden == [(), *[(0,)] * 6]
    setup = setup_of(header)
    result = Replay(build(header.policy, setup), lines, steps=setup.steps).run()
    assert (result.count, result.identical_share, result.differences) == (7, 1.0, [])
