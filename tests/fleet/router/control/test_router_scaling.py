"""What a planner wants, carried out: instances that are ordered, get ready, fail, drain, and are stopped when empty."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import FakeSglang
from support.router_scene import Scene, scene

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.actuators.interface import ActuatorError, StartedInstance
from pla_sglang.fleet.router.control import scale_orders
from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.fleet.router.control.scale_orders import ScaleOrders, ScalingKnobs
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.parity import replay_file
from pla_sglang.policy.interface.decisions import ScaleTo
from pla_sglang.policy.interface.fleet import Role
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.policy.runner import Refusal
from pla_sglang.view_recording import make_document

REASON = FleetReason.DOPD_TOTAL
KNOBS = ScalingKnobs(planner="dopd", actuator="local:fleet.json", instances_max=3, interval_s=3600.0)


class FakeLease:
    def __init__(self) -> None:
        self.free, self.owner = True, "another"

    def acquire(self) -> bool:
        return self.free

    def release(self) -> None:
        self.free = True


class FakeActuator:
    """Starts instances that speak SGLang's HTTP; ``fails``, ``away`` and ``slow`` say what does not work;
    ``late``: addresses of what it starts are not known until they are shown."""

    def __init__(self) -> None:
        self.lease = FakeLease()
        self.rows: dict[str, StartedInstance] = {}
        self.instances: dict[str, FakeSglang] = {}
        self.ordered: list[tuple[str, int]] = []
        self.stopped: list[str] = []
        self.fails = self.away = self.slow = self.late = False

    def list_one(self, instance: FakeSglang, name: str, plan: int | None, state: str = "ready") -> StartedInstance:
        self.instances[name] = instance
        self.rows[name] = StartedInstance(name, instance.url, "stateless", state, plan)
        return self.rows[name]

    async def start_instance(self, kind: str, plan: int) -> StartedInstance:
        self.ordered.append((kind, plan))
        if self.fails:
            raise ActuatorError("start: no room")
        instance = FakeSglang("stateless")
        await instance.start()
        if self.slow:
            await instance.stop()  # its address is known, and nobody answers there
        one = self.list_one(instance, f"new-{plan}", plan, "starting")
        if self.late:
            self.rows[one.name] = dataclasses.replace(one, url="")
        return self.rows[one.name]

    def show_address(self, name: str) -> None:
        self.rows[name] = dataclasses.replace(self.rows[name], url=self.instances[name].url)

    async def stop_instance(self, name: str) -> None:
        self.stopped.append(name)
        self.rows.pop(name, None)
        await self.instances[name].stop()

    async def list_instances(self) -> list[StartedInstance]:
        if self.away:
            raise ActuatorError("list: nobody answers")
        return list(self.rows.values())

    async def close(self) -> None:
        self.lease.release()


@pytest.fixture(autouse=True)
def actuator(monkeypatch: pytest.MonkeyPatch) -> FakeActuator:
    made = FakeActuator()
    monkeypatch.setattr(scale_orders, "open_actuator", lambda text: made)
    monkeypatch.setattr(scale_orders, "FOLLOW_S", 0.02)
    monkeypatch.setattr(time, "time_ns", lambda: 1_000_000)
    return made


@contextlib.asynccontextmanager
async def scaled(actuator: FakeActuator, count: int = 2, **knobs: Any) -> AsyncIterator[Scene]:
    """Stateless instances that the actuator knows, behind a router with a planner."""
    given = {"scaling": KNOBS, "policy": "combined"} | knobs
    async with scene(["stateless"] * count, **given) as one:
        for number, instance in enumerate(one.instances):
            actuator.list_one(instance, f"old-{number}", None)
        await one.until(lambda: len(one.plane.scaling._listed) == count)
        try:
            yield one
        finally:
            for instance in actuator.instances.values():
                if instance not in one.instances:
                    await instance.stop()


def grow(one: Scene, count: int = 1, role: Role = Role.MIXED) -> Refusal | None:
    alive = len(list(one.plane.table))
    return one.plane.scaling.scale(ScaleTo(role, alive + count, REASON, start=count))


def shrink(one: Scene, number: int) -> Refusal | None:
    worker = one.plane.table.by_number[number]
    return one.plane.scaling.scale(ScaleTo(Role.MIXED, 1, REASON, drain=(worker.view,)))


async def test_an_instance_that_is_ordered_serves_once_it_is_ready(actuator: FakeActuator) -> None:
    async with scaled(actuator) as one:
        assert grow(one) is None
        assert grow(one) is Refusal.REPEATED, "the first is not known yet, so it would be counted twice"
        await one.ready(3)
        await one.until(lambda: one.describe_planner()["starts"] == {"ready": 1})
        assert actuator.ordered == [("stateless", 1)]
        fleet = one.plane.table.fleet
        assert fleet.startup_s == one.describe_planner()["startup_s"] > 0
        newcomer = one.plane.table.by_number[2].view
        assert newcomer.is_cold(newcomer.ready_s + 1.0), "its first passes teach nobody"
        assert not one.plane.table.by_number[0].view.is_cold(0.0)
        text = one.plane.series.render_text().decode()
        assert 'pla_router_instance_starts_total{outcome="ready"} 1.0' in text
        assert "pla_router_instance_start_seconds_count 1.0" in text
        assert 'pla_router_planned_instances{role="mixed"} 3.0' in text
        assert "pla_router_gpu_hours" in text


async def test_how_long_starts_take_is_known_after_a_restart(actuator: FakeActuator, tmp_path: Path) -> None:
    async with scaled(actuator, memory_file=tmp_path / "memory.json") as one:
        assert grow(one) is None
        await one.until(lambda: one.describe_planner()["startup_s"])
        took_s = one.describe_planner()["startup_s"]
    actuator.rows.clear()
    async with scaled(actuator, memory_file=tmp_path / "memory.json") as one:
        assert one.plane.table.fleet.startup_s == took_s


async def test_one_that_leaves_finishes_what_it_has_and_is_stopped_only_then(actuator: FakeActuator) -> None:
    async with scaled(actuator) as one:
        assert grow(one) is None
        await one.ready(3)
        went = one.assign("r1")
        leaving = one.plane.table.by_number[went.decode]
        name = next(name for name, row in actuator.rows.items() if row.url == leaving.url)
        one.reach("r1", m.Milestone.SENT)
        assert shrink(one, went.decode) is None
        one.plane._sweep()
        assert actuator.stopped == []
        one.ended("r1", output_tokens=3)
        await one.until(lambda: actuator.stopped == [name])
        await one.until(lambda: one.describe_planner()["stopped"] == 1)
        assert one.plane.table.at(leaving.address) is None
        removed = one.plane._state_file.state.removed  # one that was given at the start is not asked for at the next
        await one.until(lambda: (leaving.url in removed) == name.startswith("old"))


async def test_a_newcomer_that_leaves_as_soon_as_it_is_ready_was_ready(actuator: FakeActuator) -> None:
    async with scaled(actuator) as one:
        assert grow(one) is None
        await one.ready(3)
        worker = one.plane.table.by_number[2]
        url = worker.url
        await one.until(lambda: worker.address in one.plane.scaling._listed)  # else it is a stranger that stays
        assert shrink(one, 2) is None
        await one.until(lambda: actuator.stopped == ["new-1"])
        await one.until(lambda: one.describe_planner()["stopped"] == 1)
        assert one.describe_planner()["starts"] == {"ready": 1}
        await one.until(lambda: url not in one.plane._state_file.state.removed)


async def test_a_list_with_an_address_that_cannot_be_read_is_no_answer(actuator: FakeActuator) -> None:
    async with scaled(actuator) as one:
        actuator.rows["odd"] = StartedInstance("odd", "http://[", "stateless", "ready", 9)
        await one.until(lambda: one.describe_planner()["actuator_error"])
        assert grow(one) is Refusal.ACTUATOR_AWAY
        del actuator.rows["odd"]
        await one.until(lambda: not one.describe_planner()["actuator_error"])
        assert grow(one) is None


async def test_bounds_hold_whatever_a_plan_says(actuator: FakeActuator) -> None:
    async with scaled(actuator) as one:
        assert grow(one, 2) is Refusal.OUT_OF_BOUNDS
        assert shrink(one, 0) is None
        assert shrink(one, 1) is Refusal.OUT_OF_BOUNDS
        assert actuator.ordered == []


@pytest.mark.parametrize("how", ["refused", "ended", "expired"])
async def test_a_start_that_comes_to_nothing_is_counted_and_cleared_away(how: str, actuator: FakeActuator) -> None:
    knobs = KNOBS if how != "expired" else ScalingKnobs(**{**vars(KNOBS), "start_timeout_s": 0.2})
    async with scaled(actuator, scaling=knobs) as one:
        actuator.fails, actuator.slow = how == "refused", how != "refused"
        assert grow(one) is None
        if how == "ended":
            await one.until(lambda: "new-1" in actuator.rows)
            actuator.list_one(actuator.instances["new-1"], "new-1", 1, "dead")
        outcome = "expired" if how == "expired" else "failed"
        await one.until(lambda: one.describe_planner()["starts"] == {outcome: 1})
        assert one.plane.table.fleet.startup_s is None
        assert sum(one.plane.table.fleet.starting.values()) == 0
        if how != "refused":
            await one.until(lambda: actuator.stopped == ["new-1"])
        actuator.fails = actuator.slow = False
        assert grow(one) is None
        await one.ready(3)
        assert actuator.ordered[-1] == ("stateless", 2), "a number is never used twice"


async def test_without_the_actuator_or_the_lease_what_is_there_serves_on(actuator: FakeActuator) -> None:
    async with scaled(actuator) as one:
        actuator.away = True
        await one.until(lambda: one.describe_planner()["actuator_error"])
        assert grow(one) is Refusal.ACTUATOR_AWAY
        assert one.assign("r1").decode in (0, 1)
        actuator.away, actuator.lease.free = False, False
        await one.until(lambda: not one.describe_planner()["leads"])
        assert grow(one) is Refusal.NO_LEASE
        assert one.describe_planner()["lease_owner"] == "another"
        actuator.lease.free = True
        await one.until(lambda: one.describe_planner()["leads"])
        assert grow(one) is None


async def test_what_another_router_has_started_is_a_worker_here_too(actuator: FakeActuator) -> None:
    async with scaled(actuator) as one:
        actuator.lease.free = False
        started = await actuator.start_instance("stateless", 7)
        await one.ready(3)
        assert started.url in [worker.url for worker in one.plane.table]
        actuator.lease.free = True
        await one.until(lambda: one.describe_planner()["leads"])
        assert shrink(one, 2) is None
        await one.until(lambda: actuator.stopped == ["new-7"])
        assert grow(one) is None
        await one.until(lambda: actuator.ordered[-1] == ("stateless", 8))


async def test_an_instance_that_the_actuator_does_not_know_stays(actuator: FakeActuator) -> None:
    async with scaled(actuator) as one:
        del actuator.rows["old-0"]
        await one.until(lambda: len(one.plane.scaling._listed) == 1)
        assert shrink(one, 0) is Refusal.UNSUPPORTED
        assert one.plane.table.by_number[0].is_ready()


async def test_a_dry_run_starts_and_stops_nothing(actuator: FakeActuator) -> None:
    knobs = ScalingKnobs(planner="dopd", instances_max=3, dry_run=True)
    async with scene(["stateless", "stateless"], policy="combined", scaling=knobs) as one:
        assert grow(one) is Refusal.DRY_RUN
        assert shrink(one, 0) is Refusal.DRY_RUN
        assert one.describe_planner()["wanted"] == {"mixed": 1}
        assert actuator.ordered == []


async def test_the_planner_is_asked_at_its_interval_and_its_wishes_go_through_the_policys_runner(
    actuator: FakeActuator,
) -> None:
    """A threshold planner that finds its caches full orders one more."""
    knobs = ScalingKnobs(planner="threshold", actuator="local:fleet.json", instances_max=3)
    async with scaled(actuator, scaling=knobs) as one:
        runner = one.plane.policy.runner
        assert runner is not None
        for view in one.plane.table.fleet.ready:
            view.kv_used_tokens = view.kv_capacity_tokens
        one.plane._tick_controller(len(runner.policy.controllers) - 1)
        await one.ready(3)
        assert any(action.startswith("ScaleTo:") for action in runner.actions)


async def test_state_view_and_series_tell_the_same_of_a_plan() -> None:
    knobs = dataclasses.replace(KNOBS, dry_run=True)
    async with scene(["stateless", "stateless"], policy="combined", scaling=knobs) as one:
        runner = one.plane.policy.runner
        assert runner is not None
        assert one.describe_planner()["load"] is None
        for index in range(4):
            one.ask(f"r{index}", input_tokens=600)
            one.reach(f"r{index}", m.Milestone.SENT, m.Milestone.PREFILL_DONE, m.Milestone.FIRST_TOKEN)
            one.ended(f"r{index}", output_tokens=200)
        one.plane._tick_controller(len(runner.policy.controllers) - 1)
        one.plane._sweep()
        told = one.describe_planner()["load"]
        assert told["output_tokens"] == {"load": 200.0, "forecast": pytest.approx(200.0), "by": "peak"}
        plan = one.plane.draw_fleet(0.0)["plan"]
        assert plan["plans"][-1][1:] == [one.describe_planner()["wanted"].get("mixed", 2), told]
        assert plan["fleet"][-1][1:4] == [2, 0, 0]
        assert plan["fleet"][-1][4] == pytest.approx(one.describe_planner()["gpu_hours"], abs=1e-4)
        text = one.plane.series.render_text().decode()
        for figure, values in told.items():
            assert f'pla_router_plan_load{{figure="{figure}"}} {values["load"]}' in text
            assert f'pla_router_plan_forecast{{figure="{figure}"}} {values["forecast"]}' in text


async def test_starts_are_told_with_how_long_they_took(actuator: FakeActuator) -> None:
    async with scaled(actuator) as one:
        assert grow(one) is None
        await one.until(lambda: one.describe_planner()["last_starts"])
        actuator.fails = True
        assert shrink(one, 0) is None
        await one.until(lambda: one.describe_planner()["stopped"] == 1)
        assert grow(one) is None
        await one.until(lambda: len(one.describe_planner()["last_starts"]) == 2)
        ready, failed = one.describe_planner()["last_starts"]
        assert (ready["outcome"], failed["outcome"]) == ("ready", "failed")
        assert ready["took_s"] == pytest.approx(one.describe_planner()["startup_s"], abs=1e-3)
        starts = one.plane.draw_fleet(0.0)["plan"]["starts"]
        assert [round(ended - ordered, 2) for ordered, ended, _ in starts] == [
            pytest.approx(start["took_s"], abs=0.02) for start in (ready, failed)
        ]


async def test_what_a_planner_has_decided_replays(actuator: FakeActuator, tmp_path: Path) -> None:
    """It looks as far ahead as starts take, which the recording says."""
    path, knobs = tmp_path / "run.jsonl", dataclasses.replace(KNOBS, interval_s=0.05)
    async with scaled(actuator, record=path, scaling=knobs) as one:
        for index in range(40):
            one.ask(f"r{index}", input_tokens=6000)
            one.reach(f"r{index}", m.Milestone.SENT, m.Milestone.PREFILL_DONE, m.Milestone.FIRST_TOKEN)
            if index % 2:
                one.ended(f"r{index}", output_tokens=200)
            await asyncio.sleep(0.02)
        await one.until(lambda: one.describe_planner()["startup_s"])
        for index in range(0, 40, 2):
            one.ended(f"r{index}", output_tokens=200)
        await asyncio.sleep(0.2)
        live = one.plane.draw_fleet(0.0)["plan"]
    _, result = replay_file(path)
    assert result.identical_share == 1.0
    recorded = make_document(path)["plan"]
    assert 0 < len(recorded["plans"]) == pytest.approx(len(live["plans"]), abs=3), "those after the last sweep lack"
    assert recorded["plans"][:-3] == live["plans"][: len(recorded["plans"]) - 3]
    assert recorded["starts"] == live["starts"]
    assert any("scale_to" in str(line) for line in path.read_text().splitlines())


async def test_without_a_planner_there_is_none_and_nobody_asks_for_instances(actuator: FakeActuator) -> None:
    async with scene(["stateless", "stateless"], policy="combined") as one:
        assert one.describe_planner() is None
        assert one.plane.draw_fleet(0.0)["plan"] is None
        assert grow(one) is Refusal.UNSUPPORTED
        assert "planned_instances" not in one.plane.series.render_text().decode()
        assert isinstance(one.plane.scaling, ScaleOrders)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"planner": "dopd", "actuator": "local:a.json"}, "--planner needs --instances-max"),
        ({"planner": "dopd", "instances_max": 4}, "--planner needs --actuator"),
        ({"planner": "dopd", "instances_max": 2, "instances_min": 3, "dry_run": True}, "is below --instances-min 3"),
        ({"planner": "best"}, "none, dopd, threshold, sla"),
        ({"instances_min": 0}, "at least 1"),
    ],
)
def test_what_an_operator_may_not_ask_for(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ScalingKnobs(**fields)


def test_knobs_of_the_planner_are_knobs_of_the_policy() -> None:
    ControlKnobs(
        policy="combined",
        policy_knobs=("threshold.high=0.9",),
        scaling=ScalingKnobs(planner="threshold", instances_max=4, dry_run=True),
    )
    with pytest.raises(ConfigError, match=r"threshold\.high"):
        ControlKnobs(policy="combined", policy_knobs=("threshold.high=0.9",))


async def test_an_address_that_is_known_later_is_waited_for(actuator: FakeActuator) -> None:
    async with scaled(actuator) as one:
        actuator.late = True
        assert grow(one) is None
        await one.until(lambda: one.describe_planner()["starting"])
        assert grow(one) is Refusal.REPEATED, "it is not in the table yet, so it would be counted twice"
        assert len(list(one.plane.table)) == 2
        actuator.show_address("new-1")
        await one.ready(3)
        await one.until(lambda: one.describe_planner()["starts"] == {"ready": 1})
        assert grow(one) is Refusal.OUT_OF_BOUNDS


async def test_one_that_another_source_has_brought_is_known_by_its_order(actuator: FakeActuator) -> None:
    async with scaled(actuator) as one:
        actuator.late = True
        assert grow(one) is None
        await one.until(lambda: one.describe_planner()["starting"])
        assert one.admin("POST", "/workers", {"url": actuator.instances["new-1"].url})[0] < 300
        await one.ready(3)
        actuator.show_address("new-1")
        await one.until(lambda: one.describe_planner()["starts"] == {"ready": 1})


@pytest.mark.parametrize("how", ["ended", "expired"])
async def test_a_start_that_never_has_an_address_is_given_up(how: str, actuator: FakeActuator) -> None:
    knobs = KNOBS if how == "ended" else ScalingKnobs(**{**vars(KNOBS), "start_timeout_s": 0.2})
    async with scaled(actuator, scaling=knobs) as one:
        actuator.late = True
        assert grow(one) is None
        await one.until(lambda: "new-1" in actuator.rows)
        if how == "ended":
            await one.until(lambda: one.describe_planner()["starting"])
            actuator.rows["new-1"] = dataclasses.replace(actuator.rows["new-1"], state="dead")
        outcome = "failed" if how == "ended" else "expired"
        await one.until(lambda: one.describe_planner()["starts"] == {outcome: 1})
        await one.until(lambda: actuator.stopped == ["new-1"])
        actuator.late = False
        assert grow(one) is None
        await one.ready(3)
