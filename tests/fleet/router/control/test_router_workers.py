"""The worker table and health: every move, pools, draining, and a process that dies and comes back."""

from __future__ import annotations

import dataclasses

import pytest

from pla_sglang.common.errors import ConfigError, IllegalMoveError
from pla_sglang.fleet.router.control.workers.breaker import BreakerKnobs
from pla_sglang.fleet.router.control.workers.discovery import Address, Description
from pla_sglang.fleet.router.control.workers.errors import WorkerError
from pla_sglang.fleet.router.control.workers.health import Health, HealthKnobs, ProbeResult
from pla_sglang.fleet.router.control.workers.instance_client import InstanceClient
from pla_sglang.fleet.router.control.workers.monitor import InstanceMonitor
from pla_sglang.fleet.router.control.workers.table import LEGAL, Worker, WorkerReason, WorkerState, WorkerTable
from pla_sglang.fleet.router.tls import TlsContext, WorkerTls
from pla_sglang.load import report as telemetry
from pla_sglang.load.instance_load import InstanceLoad
from pla_sglang.load.tracker import Phase, TrackedRequest
from pla_sglang.policy.interface.fleet import InstanceKind, InstanceState, LoadAmounts, Role
from pla_sglang.policy.interface.prefill import PrefillClass

UNIFIED = Description(InstanceKind.UNIFIED, "p1", "h:1", 1000, 1, 1, "m", "t", "0.5.17")
PREFILL = dataclasses.replace(UNIFIED, kind=InstanceKind.PREFILL, bootstrap_port=9)
DECODE = dataclasses.replace(UNIFIED, kind=InstanceKind.DECODE)
WAYS = {  # how a worker gets into a state
    WorkerState.STARTING: [],
    WorkerState.READY: [WorkerState.READY],
    WorkerState.SUSPECT: [WorkerState.READY, WorkerState.SUSPECT],
    WorkerState.DRAINING: [WorkerState.READY, WorkerState.DRAINING],
    WorkerState.DEAD: [WorkerState.DEAD],
}


def make(*descriptions: Description, pools: bool = False) -> tuple[WorkerTable, Health, list[Worker]]:
    """A table with these workers, ready."""
    table = WorkerTable(BreakerKnobs(consecutive=2, cool_down_s=2), pools=pools)
    health = Health(table, HealthKnobs(misses=2, refused=2))
    workers = []
    for port, description in enumerate(descriptions, 1):
        worker = table.add(Address("h", port), 0.0)
        table.describe(worker, description, 0.0)
        health.on_probe(worker, ProbeResult.OK, 0.0)
        workers.append(worker)
    return table, health, workers


def test_an_instance_that_starts_is_looked_at_more_often() -> None:
    table, health, [worker] = make(UNIFIED)
    starting = table.add(Address("h", 9), 0.0)
    assert (health.check_interval_s(worker), health.check_interval_s(starting)) == (1.0, 0.25)
    quick = Health(table, HealthKnobs(interval_s=0.05))
    assert (quick.check_interval_s(worker), quick.check_interval_s(starting)) == (0.05, 0.05)


def test_each_worker_has_its_own_chunk() -> None:
    _, _, workers = make(UNIFIED, dataclasses.replace(UNIFIED, chunk_max_tokens=1024))
    assert [worker.view.chunk_max_tokens for worker in workers] == [None, 1024]


def test_polls_do_not_show_the_legs_of_a_stateless_instance() -> None:
    stateless = dataclasses.replace(UNIFIED, kind=InstanceKind.STATELESS, bootstrap_port=9, incarnation="a")
    _, health, workers = make(UNIFIED, stateless)
    for worker in workers:
        worker.load.on_load(InstanceLoad(amounts=LoadAmounts()), 1.0)
    assert [health.needs_check(worker, 1.0) for worker in workers] == [False, True]
    workers[1].load.on_report(telemetry.Report(instance="h:1", sequence=1), 1.0)
    assert not health.needs_check(workers[1], 1.0)


@pytest.mark.parametrize("source", WorkerState)
@pytest.mark.parametrize("target", WorkerState)
def test_every_move(source: WorkerState, target: WorkerState) -> None:
    table = WorkerTable(BreakerKnobs())
    worker = table.add(Address("h", 1), 0.0)
    for state in WAYS[source]:
        table.move(worker, state, WorkerReason.ANSWERS, 0.0)
    if target in LEGAL[source]:
        table.move(worker, target, WorkerReason.OPERATOR, 1.0)
        assert (worker.state, worker.reason, worker.since_s) == (target, WorkerReason.OPERATOR, 1.0)
    else:
        with pytest.raises(IllegalMoveError, match="is not allowed"):
            table.move(worker, target, WorkerReason.OPERATOR, 1.0)
    table.check_integrity()


def test_kinds_decide_roles_and_what_can_be_served() -> None:
    table, _, workers = make(PREFILL)
    assert workers[0].view.role is Role.PREFILL
    assert not table.can_serve()
    table, _, workers = make(PREFILL, DECODE)
    assert [one.view.role for one in workers] == [Role.PREFILL, Role.DECODE]
    assert table.can_serve()
    assert make(UNIFIED)[0].can_serve()
    table.move(workers[1], WorkerState.SUSPECT, WorkerReason.HEALTH, 1.0)
    assert not table.can_serve()


def test_a_unified_instance_takes_no_hand_off() -> None:
    table, _, workers = make(UNIFIED, PREFILL, DECODE)
    assert table.fleet.decode_capable() == [workers[2].view]
    assert set(table.fleet.prefill_capable()) == {workers[0].view, workers[1].view}


def test_pools_fill_evenly_and_the_long_one_first() -> None:
    table, _, workers = make(PREFILL, DECODE, PREFILL, PREFILL, PREFILL, pools=True)
    classes = [one.view.length_class for one in workers]
    assert classes == [PrefillClass.LONG, None, PrefillClass.SHORT, PrefillClass.LONG, PrefillClass.SHORT]
    assert make(PREFILL, DECODE, pools=True)[2][0].view.length_class is None  # a lone one takes both
    table.check_integrity()


def test_an_instance_that_says_its_class_is_believed() -> None:
    short = dataclasses.replace(PREFILL, length_class=PrefillClass.SHORT, has_role=True)
    classes = [one.view.length_class for one in make(short, short, PREFILL, pools=True)[2]]
    assert classes == [PrefillClass.SHORT, PrefillClass.SHORT, PrefillClass.LONG]


def test_missed_checks_make_it_suspect_and_an_answer_ready() -> None:
    table, health, [worker] = make(UNIFIED)
    assert health.on_probe(worker, ProbeResult.FAILED, 1.0, "slow") is None
    assert worker.state is WorkerState.READY
    health.on_probe(worker, ProbeResult.FAILED, 2.0, "slow")
    assert (worker.state, worker.reason, worker.detail) == (WorkerState.SUSPECT, WorkerReason.HEALTH, "slow")
    assert table.fleet.ready == []
    health.on_probe(worker, ProbeResult.OK, 3.0)
    assert (worker.state, worker.reason) == (WorkerState.READY, WorkerReason.RECOVERED)
    assert table.fleet.ready == [worker.view]


def test_who_does_not_listen_is_dead_and_another_waits_in_its_place() -> None:
    table, health, [worker] = make(UNIFIED)
    health.on_failure(worker, 0.5, refused=True)
    assert worker.state is WorkerState.SUSPECT
    assert health.on_probe(worker, ProbeResult.REFUSED, 1.0) is None
    heir = health.on_probe(worker, ProbeResult.REFUSED, 2.0)
    assert (worker.state, worker.reason) == (WorkerState.DEAD, WorkerReason.NO_ANSWER)
    assert heir is not None
    assert (heir.address, heir.number, heir.state) == (worker.address, worker.number + 1, WorkerState.STARTING)
    assert health.on_probe(heir, ProbeResult.REFUSED, 3.0) is None  # it has never been there, so it does not die
    assert list(table) == [heir]
    table.describe(heir, UNIFIED, 4.0)
    health.on_probe(heir, ProbeResult.OK, 4.0)
    assert table.fleet.ready == [heir.view]
    table.check_integrity()


def test_a_fresh_report_makes_a_check_needless() -> None:
    _, health, [worker] = make(UNIFIED)
    assert health.needs_check(worker, 1.0)
    worker.load.on_load(InstanceLoad(LoadAmounts()), 1.0)
    assert not health.needs_check(worker, 1.5)
    assert health.needs_check(worker, 2.5)
    worker.misses = 1
    assert health.needs_check(worker, 1.5)


def test_a_drained_worker_leaves_when_it_has_finished() -> None:
    table, _, [worker] = make(UNIFIED)
    worker.load.add_request(("r", 1), TrackedRequest(5, 0, 0.0, Phase.QUEUED, True))
    table.drain(worker, 1.0, then_remove=True)
    assert worker.state is WorkerState.DRAINING
    assert table.fleet.ready == []
    assert table.remove_drained(2.0) == []
    worker.load.end_request(("r", 1), 3.0)
    worker.load.on_load(InstanceLoad(LoadAmounts(running=1, context_tokens=4)), 3.5)
    assert table.remove_drained(3.6) == []  # somebody else's request
    worker.load.on_load(InstanceLoad(LoadAmounts()), 4.0)
    assert table.remove_drained(4.0) == [worker]
    assert (worker.state, worker.reason) == (WorkerState.DEAD, WorkerReason.REMOVED)


def test_a_drain_can_be_taken_back() -> None:
    table, health, [worker] = make(UNIFIED)
    with pytest.raises(WorkerError, match="not draining"):
        table.undrain(worker, 1.0)
    table.drain(worker, 1.0)
    health.on_probe(worker, ProbeResult.OK, 1.5)
    assert worker.state is WorkerState.DRAINING  # an operator's wish outlives checks
    table.undrain(worker, 2.0)
    assert worker.state is WorkerState.READY


def test_a_draining_worker_that_dies_has_no_heir() -> None:
    table, health, [worker] = make(UNIFIED)
    table.drain(worker, 1.0)
    health.on_probe(worker, ProbeResult.REFUSED, 2.0)
    assert health.on_probe(worker, ProbeResult.REFUSED, 3.0) is None
    assert worker.state is WorkerState.DEAD
    assert list(table) == []


def test_numbers_and_addresses_are_unique() -> None:
    table, _, [worker] = make(UNIFIED)
    with pytest.raises(WorkerError, match="there already") as caught:
        table.add(worker.address, 1.0)
    assert caught.value.status == 409
    with pytest.raises(WorkerError, match="taken"):
        table.add(Address("h", 7), 1.0, number=worker.number)
    later = WorkerTable(BreakerKnobs(), next_number=40)
    assert later.add(Address("h", 8), 1.0).number == 40
    assert table.add(Address("h", 8), 1.0, number=40).number == 40
    with pytest.raises(WorkerError, match="no worker") as caught:
        table.find("77")
    assert caught.value.status == 404
    assert table.find("http://h:1") is worker
    starting = table.find("40")
    with pytest.raises(WorkerError, match="still starting"):
        table.drain(starting, 2.0)
    table.drain(starting, 2.0, then_remove=True)
    assert starting.state is WorkerState.DEAD
    assert starting.view.state is InstanceState.DEAD


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("interval_s", "--health-interval-ms"),
        ("timeout_s", "--health-timeout-ms"),
        ("misses", "health misses"),
        ("refused", "health refused"),
    ],
)
def test_bad_health_knobs(field: str, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        HealthKnobs(**{field: 0})


def test_reports_that_could_be_of_two_instances_are_of_none() -> None:
    """Two servers of one name (both listen on 0.0.0.0, say): each would seem to be restarted by the other's reports."""
    twin = dataclasses.replace(UNIFIED, identity="p2")
    table, _, workers = make(UNIFIED, dataclasses.replace(UNIFIED, report_key="other"))
    heard: list[Worker] = []
    monitor = InstanceMonitor(
        Health(table, HealthKnobs()),
        InstanceClient(TlsContext(WorkerTls(), now_s=0.0), timeout_s=1.0),
        clock=lambda: 1.0,
        poll_interval_s=1.0,
        on_report=lambda worker, _: heard.append(worker),
        on_description=lambda _: None,
        on_aborted=lambda order, outcome: None,
    )
    monitor.take_report(telemetry.Report(instance="h:1", sequence=1, running=3))
    assert heard == [workers[0]]
    assert workers[0].view.running == 3
    third = table.add(Address("h", 3), 1.0)
    table.describe(third, twin, 1.0)
    later = telemetry.Report(instance="h:1", sequence=1, started_s=9.0)
    monitor.take_report(later)
    assert (heard, monitor.reports_of_nobody) == ([workers[0]], 1)
    assert "--pla-instance" in workers[0].detail
    assert "--pla-instance" in third.detail
    assert workers[1].detail == ""
