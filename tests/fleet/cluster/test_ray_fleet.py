"""A fleet in a real Ray of two nodes, with processes that only say that they are healthy in place of engines."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from support.rays import running_ray
from support.serving import until, until_ended

from pla_sglang.fleet.actuators.interface import ActuatorError, StartedInstance
from pla_sglang.fleet.actuators.ray_actuator import LEASE_S, RayActuator, RayLease
from pla_sglang.fleet.actuators.ray_names import RayFleetName
from pla_sglang.fleet.cluster.children import ClusterError
from pla_sglang.fleet.cluster.spec import ClusterConfig

LIMIT_S = 60.0
ENGINE = "support.fake_engine"
CONFIG = ClusterConfig(
    counts={"unified": 1, "decode": 1},
    router="none",
    common=("--device", "cpu"),
    own={"decode": ("--fail",)},
    most_instances=2,
)
WIDE = ClusterConfig(
    counts={"unified": 1, "prefill": 1, "decode": 1},
    router="none",
    common=("--device", "cpu", "--tp-size", "3"),
    own={
        "unified": ("--nnodes", "2", "--tp-size", "2"),
        "prefill": ("--nnodes", "3"),  # more than there are
        "decode": ("--nnodes", "2", "--tp-size", "2", "--fail-on-node", "1"),
    },
)
NAMES = (f"fleet-{number}" for number in itertools.count())
Row = dict[str, Any]


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    with running_ray() as cluster:
        yield cluster.address


@contextlib.contextmanager
def running_fleet(address: str, config: ClusterConfig, **options: Any) -> Iterator[RayFleetName]:
    """A fleet without instances; what a test leaves of it is ended."""
    from pla_sglang.fleet.cluster.ray_fleet import create_fleet

    made = RayFleetName(address, next(NAMES))
    create_fleet(made, config, {}, engine=ENGINE, **options)
    yield made
    actuator = RayActuator(made)
    asyncio.run(actuator.end_fleet())
    asyncio.run(actuator.close())


@pytest.fixture
def where(ray_address: str) -> Iterator[RayFleetName]:
    with running_fleet(ray_address, CONFIG) as made:
        yield made


async def until_listed(actuator: RayActuator, name: str, holds: Callable[[Row], bool]) -> Row:
    """Its row, once that holds; an empty one once it is gone."""
    end_s = time.monotonic() + LIMIT_S
    while True:
        row = {row["name"]: row for row in await actuator.list_rows()}.get(name, {})
        if holds(row):
            return row
        assert time.monotonic() < end_s, row
        await asyncio.sleep(0.1)


def run(where: RayFleetName, act: Callable[[RayActuator], Any]) -> None:
    async def act_and_close() -> None:
        actuator = RayActuator(where)
        try:
            await act(actuator)
        finally:
            await actuator.close()

    asyncio.run(act_and_close())


def test_instances_start_once_a_plan_and_stop(where: RayFleetName) -> None:
    async def act(actuator: RayActuator) -> None:
        assert await actuator.list_instances() == []
        first, second = await asyncio.gather(*(actuator.start_instance("unified", 7) for _ in range(2)))
        assert (first.name, first.kind, first.plan) == ("unified-plan-7", "unified", 7)
        assert second.url == first.url
        row = await until_listed(actuator, first.name, lambda row: row["state"] == "ready")
        assert [one.url for one in await actuator.list_instances()] == [first.url]
        with pytest.raises(ActuatorError, match="plan 7 has started unified-plan-7, which is not of kind 'decode'"):
            await actuator.start_instance("decode", 7)
        with pytest.raises(ActuatorError, match="no kind 'prefill' in this fleet; there are: unified, decode"):
            await actuator.start_instance("prefill", 8)
        with pytest.raises(ActuatorError, match="no instance 'nobody'"):
            await actuator.stop_instance("nobody")
        await actuator.stop_instance(first.name)
        await actuator.stop_instance(first.name)
        assert await until_listed(actuator, first.name, lambda row: not row) == {}
        await actuator.stop_instance(first.name)
        until_ended(row["pid"])
        assert await actuator.start_instance("unified", 7) == dataclasses.replace(first, state="dead")

    run(where, act)


def test_one_that_cannot_start_stays_as_dead_and_says_why(where: RayFleetName) -> None:
    async def act(actuator: RayActuator) -> None:
        started = await actuator.start_instance("decode", 1)
        row = await until_listed(actuator, started.name, lambda row: row["state"] == "dead")
        assert row["detail"] == ": error: this engine was told to fail"
        await actuator.stop_instance(started.name)
        await until_listed(actuator, started.name, lambda row: not row)

    run(where, act)


@pytest.mark.parametrize("victim", ["pid", "actor_pid"])
def test_a_lost_instance_comes_back(where: RayFleetName, victim: str) -> None:
    """Whether the engine ends or its actor; that one takes its engine with it."""

    async def act(actuator: RayActuator) -> None:
        for plan in (1, 2):
            await actuator.start_instance("unified", plan)
        with pytest.raises(ActuatorError, match="2 instances are there; allowed: --most-instances 2"):
            await actuator.start_instance("unified", 3)
        lost = await until_listed(actuator, "unified-plan-1", lambda row: row["state"] == "ready")
        other = await until_listed(actuator, "unified-plan-2", lambda row: row["state"] == "ready")
        os.kill(lost[victim], signal.SIGKILL)
        back = await until_listed(
            actuator, "unified-plan-1", lambda row: row["pid"] != lost["pid"] and row["state"] == "ready"
        )
        until_ended(lost["pid"])
        assert (back["plan"], back["restarts"]) == (1, 1)
        assert (await until_listed(actuator, "unified-plan-2", bool))["pid"] == other["pid"]

    run(where, act)


def until_groups(where: RayFleetName, expected: dict[str, list[dict[str, float]]]) -> None:
    """Until its placement groups that hold nodes, or wait for them, have these bundles, by name."""
    import ray
    from ray.util.placement_group import get_placement_group, placement_group_table

    def list_groups() -> dict[str, list[dict[str, float]]]:
        groups = {}
        for group in placement_group_table().values():
            with contextlib.suppress(ValueError):  # another fleet's, or gone
                if group["state"] != "REMOVED" and get_placement_group(group["name"]):
                    groups[group["name"]] = list(group["bundles"].values())
        return groups

    ray.init(address=where.address, namespace=where.name, logging_level="ERROR", log_to_driver=False)
    try:
        until(lambda: list_groups() == expected, what=f"groups {expected}", patience_s=LIMIT_S)
    finally:
        ray.shutdown()


def list_processes(row: Row) -> list[int]:
    return [node[key] for node in row["nodes"] for key in ("pid", "actor_pid")]


def test_nodes_of_an_instance_live_and_end_together(ray_address: str) -> None:
    """It is lost and comes back as a whole, whichever process of it is killed."""

    async def act(actuator: RayActuator) -> None:
        started = await actuator.start_instance("unified", 1)
        assert (await actuator.start_instance("unified", 1)).url == started.url
        row = await until_listed(actuator, started.name, lambda row: row["state"] == "ready")
        for number, (node, victim) in enumerate([(1, "pid"), (1, "actor_pid"), (0, "actor_pid")], start=1):
            lost = row
            assert len(set(list_processes(lost))) == 4
            os.kill(lost["nodes"][node][victim], signal.SIGKILL)
            row = await until_listed(
                actuator, started.name, lambda row, lost=lost: row["url"] != lost["url"] and row["state"] == "ready"
            )
            assert row["restarts"] == number
            for pid in list_processes(lost):
                until_ended(pid)
        assert [one.name for one in await actuator.list_instances()] == [started.name]
        await actuator.stop_instance(started.name)
        assert await until_listed(actuator, started.name, lambda row: not row) == {}
        for pid in list_processes(row):
            until_ended(pid)

    with running_fleet(ray_address, WIDE) as where:
        run(where, act)
        until_groups(where, {})


def test_nodes_that_are_not_there_are_said_and_asked_for_no_more(ray_address: str) -> None:
    async def act(actuator: RayActuator) -> None:
        line = r"has taken prefill-0 for 5 s: it needs 1 CPU and 0 GPUs of each of 3 nodes"
        with pytest.raises(ActuatorError, match=line):
            await actuator.start_instance("prefill", None)
        assert await actuator.list_instances() == []

    with running_fleet(ray_address, WIDE, placed_s=5.0) as where:
        run(where, act)
        until_groups(where, {})


def test_a_node_that_cannot_start_leaves_the_instance_dead_and_says_why(ray_address: str) -> None:
    async def act(actuator: RayActuator) -> None:
        started = await actuator.start_instance("decode", 1)
        row = await until_listed(actuator, started.name, lambda row: row["state"] == "dead")
        assert row["detail"] == f" on {row['nodes'][1]['node']}: error: this engine was told to fail"
        for pid in (row["pid"], *row["nodes"][1].values()):
            if isinstance(pid, int):
                until_ended(pid)

    with running_fleet(ray_address, WIDE) as where:
        run(where, act)
        until_groups(where, {"decode-plan-1": [{"CPU": 1.0}] * 2})
    until_groups(where, {})


def test_one_actuator_has_the_lease(where: RayFleetName) -> None:
    async def act(first: RayActuator) -> None:
        second = RayActuator(where)
        try:
            assert not first.lease.acquire(), "nobody was asked yet"
            await first.list_instances()
            assert first.lease.acquire()
            second.lease.acquire()
            await second.list_instances()
            assert not second.lease.acquire()
            assert second.lease.owner == first.lease.holder
            await first.close()
            await second.list_instances()
            assert second.lease.acquire()
        finally:
            await second.close()

    run(where, act)


def test_a_lease_runs_out_by_the_clock_of_its_holder() -> None:
    now_s = 100.0
    lease = RayLease(lambda: now_s)
    assert not lease.acquire()
    lease.note_answer(99.0, "me", leads=True)
    assert lease.acquire()
    now_s = 99.0 + LEASE_S
    assert not lease.acquire()


@pytest.mark.parametrize("config", [CONFIG, WIDE], ids=["on one node", "on two"])
def test_the_fleets_actor_finds_its_instances_again(ray_address: str, config: ClusterConfig) -> None:
    """And ends them with their placement groups."""
    import ray

    async def act(where: RayFleetName, actuator: RayActuator) -> None:
        started = await actuator.start_instance("unified", 5)
        await until_listed(actuator, started.name, lambda row: row["state"] == "ready")
        ray.init(address=where.address, namespace=where.name, logging_level="ERROR", log_to_driver=False)
        try:
            ray.kill(ray.get_actor("fleet"), no_restart=False)
        finally:
            ray.shutdown()
        end_s = time.monotonic() + LIMIT_S
        listed: list[StartedInstance] = []
        while not listed and time.monotonic() < end_s:
            try:
                listed = await actuator.list_instances()
            except ActuatorError:
                await asyncio.sleep(0.1)
        assert listed == [dataclasses.replace(started, state="ready")]
        assert (await actuator.start_instance("unified", 5)).url == started.url

    with running_fleet(ray_address, config) as where:
        run(where, functools.partial(act, where))
    until_groups(where, {})


def test_a_second_fleet_of_the_name_is_refused(where: RayFleetName) -> None:
    from pla_sglang.fleet.cluster.ray_fleet import create_fleet

    with pytest.raises(ClusterError, match="is there already"):
        create_fleet(where, CONFIG, {}, engine=ENGINE)


def test_a_fleet_that_is_not_there_is_named(ray_address: str) -> None:
    async def act(actuator: RayActuator) -> None:
        with pytest.raises(ActuatorError, match=r"list_instances: ray:.*/nobody: .*fleet"):
            await actuator.list_instances()

    run(RayFleetName(ray_address, "nobody"), act)


def test_a_head_that_is_not_there_is_said() -> None:
    pytest.importorskip("ray", reason="Ray is an extra")
    from pla_sglang.fleet.cluster.ray_fleet import create_fleet

    async def act(actuator: RayActuator) -> None:
        with pytest.raises(ActuatorError, match=r"list_instances: ray:127\.0\.0\.1:1/pla: no head of Ray listens"):
            await actuator.list_instances()

    nowhere = RayFleetName("127.0.0.1:1", "pla")
    with pytest.raises(ClusterError, match=r"ray:127\.0\.0\.1:1/pla: no head of Ray listens at 127\.0\.0\.1:1"):
        create_fleet(nowhere, CONFIG, {}, engine=ENGINE)
    run(nowhere, act)


def test_a_head_that_is_gone_is_said() -> None:
    """In a Ray of its own, which ends before its fleet does."""
    pytest.importorskip("ray", reason="Ray is an extra")
    from pla_sglang.fleet.cluster.ray_fleet import create_fleet

    with running_ray(nodes=1) as cluster:
        own = RayFleetName(cluster.address, "alone")
        create_fleet(own, CONFIG, {}, engine=ENGINE)

        async def act(actuator: RayActuator) -> None:
            started = await actuator.start_instance("unified", 1)
            row = await until_listed(actuator, started.name, lambda row: row["state"] == "ready")
            os.kill(cluster.head_node.all_processes["gcs_server"][0].process.pid, signal.SIGKILL)
            with pytest.raises(ActuatorError, match=f"the head of Ray at {cluster.address} is gone"):
                await until_listed(actuator, started.name, lambda row: False)  # its port may be open a moment longer
            assert psutil.pid_exists(row["pid"])

        run(own, act)


def test_an_instance_that_loses_a_node_comes_back_on_another() -> None:
    """In a Ray of its own, where the second of two raylets is killed. A third one takes its place later."""
    on_gpus = dataclasses.replace(WIDE, common=("--model-path", "m", "--tp-size", "4", "--nnodes", "2"), own={})
    with running_ray(gpus=2) as cluster, running_fleet(cluster.address, on_gpus) as where:
        (lost_node,) = cluster.worker_nodes

        async def act(actuator: RayActuator) -> None:
            started = await actuator.start_instance("unified", 1)
            lost = await until_listed(actuator, started.name, lambda row: row["state"] == "ready")
            raylet = lost_node.all_processes["raylet"][0].process
            raylet.kill()
            raylet.wait()
            await until_listed(actuator, started.name, lambda row: row["state"] == "starting")
            for pid in list_processes(lost):
                until_ended(pid)
            cluster.add_node(num_cpus=4, num_gpus=2)
            back = await until_listed(
                actuator, started.name, lambda row: row["url"] != lost["url"] and row["state"] == "ready"
            )
            assert len(set(list_processes(back))) == 4
            until_groups(where, {started.name: [{"CPU": 1.0, "GPU": 2.0}] * 2})

        run(where, act)
