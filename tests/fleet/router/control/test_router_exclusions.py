"""Whom a request that was at others before does not go to, and by what name operators see it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.router_scene import scene

from pla_sglang.fleet.router.control.workers.breaker import BreakerKnobs
from pla_sglang.fleet.router.control.workers.discovery import Description, parse_url
from pla_sglang.fleet.router.control.workers.exclusions import Exclusion, Exclusions
from pla_sglang.fleet.router.control.workers.table import WorkerReason, WorkerState, WorkerTable
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.interface.fleet import InstanceKind

FULL, REFUSED = Exclusion.FULL, Exclusion.REFUSED
LOST, AVOIDED, NO_REST = Exclusion.LOST, Exclusion.AVOIDED, Exclusion.NO_REST
BREAKER = Exclusion.BREAKER
S, P, D, U = InstanceKind.STATELESS, InstanceKind.PREFILL, InstanceKind.DECODE, InstanceKind.UNIFIED


def table_of(*members: tuple[InstanceKind, bool], time_scale: float = 1.0) -> WorkerTable:
    """Kinds, and whether their streams can carry their token ids."""
    table = WorkerTable(BreakerKnobs(), clock=DeviceClock(time_scale))
    for index, (kind, hops) in enumerate(members):
        worker = table.add(parse_url(f"http://h:{index + 1}"), 0.0)
        said = Description(kind, f"i{index}", f"h:{index}", 1000, 1, 1, "m", "t", "0.5.17", hops=hops)
        table.describe(worker, said, 0.0)
        table.move(worker, WorkerState.READY, WorkerReason.ANSWERS, 0.0)
    return table


@pytest.mark.parametrize(
    ("name", "members", "full", "over", "expected"),
    [
        ("it has not been anywhere", [(S, True)] * 2, [], None, {}),
        ("one of two is full", [(U, False)] * 2, [0], None, {0: FULL}),
        (
            "... of all full ones one has refused it",
            [(U, False)] * 2,
            [0, 1],
            {"refused_by": (0,)},
            {0: REFUSED, 1: FULL},
        ),
        ("all are full", [(U, False)] * 2, [0, 1], None, {}),
        ("all that prefill are full, and one decodes", [(P, False)] * 2 + [(D, False)] * 2, [0, 1, 2], None, {2: FULL}),
        ("who has refused it is gone", [(U, False)], [], {"refused_by": (9,)}, {}),
        ("where it was lost", [(S, True)] * 3, [], {"lost_with": (0, 2)}, {0: LOST, 2: LOST}),
        ("where it could not be sent", [(S, True)] * 2, [], {"avoid": (1,)}, {1: AVOIDED}),
        ("who has refused it", [(S, True)] * 2, [], {"refused_by": (1,)}, {1: REFUSED}),
        ("... amid its answer, for now", [(S, True)] * 2, [], {"refused_by": (1,), "shown": True}, {1: AVOIDED}),
        (
            "each for its own reason",
            [(S, True)] * 4,
            [3],
            {"lost_with": (0,), "avoid": (1,), "refused_by": (2,)},
            {0: LOST, 1: AVOIDED, 2: REFUSED, 3: FULL},
        ),
        ("lost, whatever else", [(S, True)] * 2, [], {"lost_with": (0,), "avoid": (0,), "refused_by": (0,)}, {0: LOST}),
        (
            "an answer that has begun goes where streams have their token ids",
            [(S, True), (S, False), (P, True), (D, True)],
            [],
            {"shown": True},
            {1: NO_REST, 2: NO_REST, 3: NO_REST},
        ),
        ("one that has not begun goes anywhere", [(S, False), (P, True), (D, True)], [], {"lost_with": (9,)}, {}),
        (
            "full ones are better than none",
            [(S, True)] * 3,
            [1, 2],
            {"lost_with": (0,), "shown": True},
            {0: LOST},
        ),
        (
            "... but not for a part of an answer that they cannot take",
            [(S, True), (S, False)],
            [1],
            {"lost_with": (0,), "shown": True},
            {0: LOST, 1: NO_REST},
        ),
    ],
)
def test_whom_a_request_does_not_go_to(
    name: str,
    members: list[tuple[InstanceKind, bool]],
    full: list[int],
    over: dict[str, Any] | None,
    expected: dict[int, Exclusion],
) -> None:
    table = table_of(*members)
    exclusions = Exclusions(table, 1.0)
    for number in full:
        exclusions.note_full(table.by_number[number], 10.0)
    told = None if over is None else m.Over(1, m.Cause.LOST, 10.5, **over)
    left_out = exclusions.find(10.5, over=told)
    assert {view.index: reason for view, reason in left_out.items()} == expected, name
    if over is None:
        assert not exclusions.find(11.0)
        assert not table.restricted


def test_a_full_instance_on_a_slow_device_is_avoided_for_as_long_in_device_time() -> None:
    table = table_of((U, False), (U, False), time_scale=4.0)
    exclusions = Exclusions(table, 1.0)
    exclusions.note_full(table.by_number[0], 10.0)
    assert set(exclusions.find(13.9).values()) == {FULL}
    assert not exclusions.find(14.0)


def test_an_open_breaker_is_left_out_whatever_else() -> None:
    table = table_of((U, False))
    worker = table.by_number[0]
    exclusions = Exclusions(table, 0.1)
    worker.breaker.on_failure(0.0, refused=True)
    table.restricted.add(worker)
    assert exclusions.find(0.1) == {worker.view: BREAKER}
    worker.breaker.tick(9.0)
    assert exclusions.find(9.0) == {}
    worker.breaker.start_trial("r")
    assert exclusions.find(9.0) == {worker.view: BREAKER}
    worker.breaker.on_success(9.1, "r")
    assert exclusions.find(9.1) == {}
    assert not table.restricted


async def test_operators_see_whom_a_lost_request_was_kept_from() -> None:
    async with scene(["stateless"] * 4, policy="least-tokens", migration="on", hops=True) as one:
        first = one.assign("r")
        one.reach("r", m.Milestone.SENT)
        for worker in one.plane.table:
            worker.heard_s = time.monotonic() + 60.0  # so that nobody is waited for
        second = one.ask_again("r", 1, over={"lost_with": (first.decode,)})
        assert isinstance(second, m.Assign)
        for worker in one.plane.table:
            worker.heard_s = time.monotonic() + 60.0
        third = one.ask_again("r", 2, m.Cause.NOT_SENT, over={"lost_with": (first.decode,), "avoid": (second.decode,)})
        assert isinstance(third, m.Assign)
        names = {worker.number: worker.view.name for worker in one.plane.table}
        told = one.admin("GET", "/pla/explain/r")[1]["excluded"]
        assert told == {names[first.decode]: "lost_with_it", names[second.decode]: "avoided"}
        metrics = one.admin("GET", "/metrics")[1]
        assert 'pla_router_exclusions_total{reason="lost_with_it"} 2.0' in metrics
        assert 'pla_router_exclusions_total{reason="avoided"} 1.0' in metrics
        one.ended("r")
        await one.until(lambda: not one.plane.dispatcher.ledger.records)
        assert one.plane.dispatcher.ledger.audit(time.monotonic()).balanced


async def test_operators_see_that_the_rest_of_an_answer_goes_to_few() -> None:
    async with scene(["stateless", "stateless", "null"], policy="least-tokens", migration="on", hops=True) as one:
        for worker in list(one.plane.table)[2:]:
            assert not worker.takes_rest()
            one.admin("POST", f"/workers/{worker.number}/drain")
        first = one.assign("r")
        one.admin("POST", "/workers/2/undrain")
        one.reach("r", m.Milestone.SENT, m.Milestone.FIRST_TOKEN)
        second = one.ask_again("r", 1, tokens=3, over={"lost_with": (first.decode,)})
        assert isinstance(second, m.Assign)
        assert second.decode == 1 - first.decode
        assert 'pla_router_exclusions_total{reason="takes_no_rest"} 1.0' in one.admin("GET", "/metrics")[1]
        one.ended("r")
        await one.at_rest()
