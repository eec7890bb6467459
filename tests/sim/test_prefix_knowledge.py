"""A policy that knows of prefix caches only what a router does, in a simulated fleet."""

from __future__ import annotations

import dataclasses
import random

import pytest
from support.sim import Script, stop_first

from pla_sglang.policy.interface.decisions import Controller
from pla_sglang.policy.registry import Setup, build
from pla_sglang.profiles.load import load_profile
from pla_sglang.sim.core.config import InstanceSpec, PrefixKnowledge, SimConfig
from pla_sglang.sim.core.engine_knobs import AnswerCaching, EngineKnobs
from pla_sglang.sim.core.experiment import Experiment, engine_policy, run_experiment
from pla_sglang.sim.core.simulation import Simulation
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.workload import Arrivals, Trace, chat_trace

SLO = Slo(1.0, 0.030)
CAPACITY_TOKENS = 20_000


def chats(count: int = 150) -> Trace:
    return chat_trace(count, Arrivals(4.0, random.Random(1), think_s=20.0)).with_session_hashes()


def simulation(*controllers: Controller) -> Simulation:
    """Two small instances behind a policy that follows prefixes."""
    steps = load_profile("h100-llama3.1-8b-tp1")
    setup = Setup(steps=steps, kv_capacity_tokens=CAPACITY_TOKENS, ttft_slo_s=1.0, tpot_slo_s=0.03, instances=2)
    config = SimConfig(
        [InstanceSpec(steps, count=2, kv_capacity_tokens=CAPACITY_TOKENS)],
        engine=EngineKnobs(answers=AnswerCaching.KEPT),
        prefix_knowledge=PrefixKnowledge.INDEX,
    )
    policy = dataclasses.replace(build("cache-aware", setup), controllers=controllers)
    return Simulation(chats(), config, policy, lambda profile, knobs: engine_policy("fcfs", profile, knobs))


@pytest.mark.parametrize("policy", ["combined", "cache-aware"])
def test_what_a_router_knows_is_nearly_as_good(policy: str) -> None:
    kept = {
        known: run_experiment(
            Experiment(policy, SLO, instances=2, rate_per_s=6.0, answers=AnswerCaching.KEPT, prefix_knowledge=known),
            chats(),
        ).figures.attainment
        for known in PrefixKnowledge
    }
    assert kept[PrefixKnowledge.INDEX] == pytest.approx(kept[PrefixKnowledge.EXACT], abs=0.03)


def test_what_is_known_stays_within_the_cache() -> None:
    made = simulation()
    made.run()
    fleet = made.cluster.fleet
    known = [fleet.cache.count_tokens(one.view.index) for one in fleet.instances]
    assert all(0.8 * CAPACITY_TOKENS < tokens <= CAPACITY_TOKENS for tokens in known), known
    for one in fleet.instances:
        assert 0 < one.view.kv_cached_tokens <= CAPACITY_TOKENS
        assert one.view.evicted_next_s is not None
        assert one.view.evicted_next_s == pytest.approx(one.pool.evicted_next_s, abs=60)


def test_an_instance_that_has_left_is_known_to_have_nothing() -> None:
    made = simulation(Script((20.0, stop_first)))
    made.run()
    fleet = made.cluster.fleet
    assert fleet.cache.count_tokens(0) == 0 < fleet.cache.count_tokens(1)
