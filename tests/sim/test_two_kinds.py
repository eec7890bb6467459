"""Fleets of two kinds of instances: who has which profile, and what policies know of their step times."""

from __future__ import annotations

import random

import pytest

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.interface.fleet import Role
from pla_sglang.profiles.load import load_profile
from pla_sglang.sim.core import experiment as experiments
from pla_sglang.sim.core.config import InstanceSpec, KnownSteps, SimConfig
from pla_sglang.sim.core.experiment import Experiment, read_kinds, run_experiment
from pla_sglang.sim.core.simulation import Simulation
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.workload import Arrivals, Trace, chat_trace

H100, SLOW = "h100-llama3.1-8b-tp1", "h200-qwen2.5-32b-tp1"
SLO = Slo(1.0, 0.030)


def chats(count: int = 200) -> Trace:
    return chat_trace(count, Arrivals(2.0, random.Random(1), think_s=20.0))


def mixed_fleet(known: KnownSteps, **fields: object) -> Experiment:
    values = {"engine": "temporal", "mixed": True, "rate_per_s": 24.0, "instances_of": (f"{SLOW}:4",)} | fields
    return Experiment("combined", SLO, known_steps=known, **values)  # type: ignore[arg-type]


def test_kinds_stand_in_the_order_of_the_roles() -> None:
    """Prefill at TP 1 beside decode at TP 2, as DOPD ran."""
    one = Experiment("static-pd", SLO, instances=6, prefills=2, instances_of=("h100-llama3.1-70b-fp8-tp2:4",))
    assert read_kinds(one) == [H100] * 2 + ["h100-llama3.1-70b-fp8-tp2"] * 4


@pytest.mark.parametrize("text", ["x", "x:", ":3", "x:0", "x:-1", "x:1.5"])
def test_what_is_no_kind_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="allowed: PROFILE:COUNT"):
        Experiment("arrow", SLO, instances_of=(text,))


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="names 9 instances; allowed: at most --instances, 8"):
        Experiment("arrow", SLO, instances_of=(f"{SLOW}:5", f"{H100}:4"))
    with pytest.raises(ConfigError, match="unknown profile 'x'"):
        run_experiment(Experiment("arrow", SLO, instances_of=("x:1",)), chats(2))


def test_step_times_that_a_router_measures_are_as_good_as_exact_ones() -> None:
    """Told nothing of four instances that are slower, it sends them too much; what they measure mends that."""
    trace = chats(400)
    kept = {known: run_experiment(mixed_fleet(known), trace).figures.attainment for known in KnownSteps}
    assert kept[KnownSteps.MEASURED] == pytest.approx(kept[KnownSteps.EXACT], abs=0.03)
    assert kept[KnownSteps.EXACT] > kept[KnownSteps.TOLD] + 0.05


def test_measured_step_times_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Simulation] = []

    class Kept(Simulation):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(experiments, "Simulation", Kept)
    run_experiment(mixed_fleet(KnownSteps.MEASURED), chats())
    profile = load_profile(SLOW)
    for view in made[0].cluster.fleet.view.instances[4:]:
        assert view.steps is not None
        assert view.steps.decode_s(16, 16_000) == pytest.approx(profile.decode_s(16, 16_000), rel=0.05)
        assert view.steps.prefill_s(512, 512**2, 0, 1) == pytest.approx(profile.prefill_s(512, 512**2, 0, 1), rel=0.06)


def test_of_one_kind_all_that_is_told_is_exact() -> None:
    one = Experiment("arrow", SLO, instances=4, rate_per_s=12.0)
    digests = {
        run_experiment(
            Experiment("arrow", SLO, instances=4, rate_per_s=12.0, known_steps=known), chats(60)
        ).result.digest()
        for known in (KnownSteps.EXACT, KnownSteps.TOLD)
    }
    assert digests == {run_experiment(one, chats(60)).result.digest()}


def test_instances_of_the_profile_that_policies_were_made_with_have_no_others() -> None:
    h100, slow = load_profile(H100), load_profile(SLOW)
    fleet = [InstanceSpec(h100, role=Role.PREFILL), InstanceSpec(slow, role=Role.DECODE)]
    config = SimConfig(fleet, known_steps=KnownSteps.EXACT)
    assert config.told_profile is None
    setup = experiments._setup(Experiment("minimal-load", SLO, instances=2), h100, chats(2))
    chosen = experiments.build("minimal-load", setup)
    one = Simulation(chats(2), config, chosen, lambda its, knobs: experiments.engine_policy("fcfs", its, knobs))
    views = one.cluster.fleet.view.instances
    assert [view.steps for view in views] == [None, slow]
