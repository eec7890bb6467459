"""DOPD's planner tells instances that batch by length their threshold and their timeout."""

from __future__ import annotations

import pytest
from support.router_scene import Scene, scene

from pla_sglang.fleet.router.control.workers import batching
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.policy.dopd.batching import BatchingKnobs
from pla_sglang.policy.dopd.planner import DopdController


def planner_of(one: Scene) -> int:
    """The number of DOPD's controller among those of the policy."""
    assert one.plane.policy.runner is not None
    controllers = one.plane.policy.runner.policy.controllers
    return next(number for number, each in enumerate(controllers) if isinstance(each, DopdController))


async def test_what_the_planner_finds_is_told_to_each_instance_that_batches() -> None:
    async with scene(["stateless", "stateless"], batches=True, policy="dopd") as one:
        assert one.admin("GET", "/pla/state")[1]["batching"] is None
        for index in range(4):
            one.ask(f"r{index}", input_tokens=200)
            one.reach(f"r{index}", m.Milestone.SENT, m.Milestone.PREFILL_DONE, m.Milestone.FIRST_TOKEN)
            one.ended(f"r{index}", output_tokens=20)
        one.plane._tick_controller(planner_of(one))
        state = one.admin("GET", "/pla/state")[1]["batching"]
        assert state["i_next_tokens"] >= 1
        assert 0 <= state["timeout_ms"] <= 100
        await one.until(lambda: all(fake.configs for fake in one.instances))
        wanted = {"boundary_tokens": state["i_next_tokens"], "batch_timeout_ms": state["timeout_ms"]}
        assert [fake.configs for fake in one.instances] == [[wanted], [wanted]]
        names = sorted(worker.view.name for worker in one.plane.table)
        await one.until(lambda: sorted(one.admin("GET", "/pla/state")[1]["batching"]["told"]) == names)


async def test_an_instance_that_comes_later_and_one_that_refused_are_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "RETRY_S", (0.02, 0.02))
    async with scene(["stateless", "stateless"], batches=True, policy="dopd") as one:
        first, second = one.instances
        second.config_status = 500
        for tokens in (700, 800):
            one.plane._batching.order_batching(BatchingKnobs(tokens, 0.05))
        await one.until(lambda: first.configs and first.configs[-1]["boundary_tokens"] == 800)
        assert second.configs == []
        second.config_status = 200
        await one.until(lambda: second.configs == [{"boundary_tokens": 800, "batch_timeout_ms": 50.0}])
        told = len(first.configs)
        await first.stop()
        await first.start()
        await one.until(lambda: len(first.configs) > told)
        assert first.configs[-1] == second.configs[-1]
        one.plane._batching.order_batching(None)
        assert one.admin("GET", "/pla/state")[1]["batching"]["i_next_tokens"] == 800, "what was told stays"


async def test_other_instances_and_other_policies_are_told_nothing() -> None:
    async with scene(["stateless", "null"], policy="dopd") as one:
        one.plane._batching.order_batching(BatchingKnobs(700, 0.05))
        assert one.plane._batching._telling == set()
    async with scene(["stateless", "stateless"], batches=True, policy="arrow") as one:
        assert one.plane.policy.batching is None
        one.plane._tick_controller(0)
        assert one.admin("GET", "/pla/state")[1]["batching"] is None
