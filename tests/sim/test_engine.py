"""One engine: times worked out by hand, chunks, mixing, memory, prefix cache, skipping ahead."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.sim import Fcfs, Route, profile, simulation, trace

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.interface.decisions import PolicySet
from pla_sglang.policy.interface.prefill import Action, PassDecision, PassReason, PassView
from pla_sglang.policy.pla.awd import AwdKnobs
from pla_sglang.policy.pla.long_prompts import LongKnobs
from pla_sglang.policy.pla.temporal import TemporalKnobs, TemporalPolicy
from pla_sglang.profiles import load_profile
from pla_sglang.sim.core import prefill
from pla_sglang.sim.core.config import InstanceSpec, MakeEngine, SimConfig
from pla_sglang.sim.core.costs import Segment, StepCosts
from pla_sglang.sim.core.engine_knobs import EngineKnobs
from pla_sglang.sim.core.errors import SimError
from pla_sglang.sim.core.simulation import RunResult, Simulation
from pla_sglang.sim.workload import Arrivals, chat_trace, generated_trace, length_model
from pla_sglang.sim.workload.lengths import fixed
from pla_sglang.sim.workload.trace import Trace

HAND = profile(token_s=1e-3, decode_base_s=0.01)


def run(workload: Trace, **options: object) -> RunResult:
    one = simulation(workload, options.pop("fleet", HAND), **options)  # type: ignore[arg-type]
    result = one.run()
    one.cluster.check_integrity()
    return result


def test_prefill_then_decode_by_hand() -> None:
    """100 tokens take 0.1 s, ten more tokens 0.01 s each."""
    served = run(trace((1.0, 100, 11))).served
    assert served.first_token_s[0] == pytest.approx(1.1)
    assert served.finish_s[0] == pytest.approx(1.2)


def test_an_arrival_cuts_in_at_the_next_step_boundary() -> None:
    """The second comes at 1.123, its prefill starts at 1.13 and stops the first for 0.2 s."""
    served = run(trace((1.0, 100, 11), (1.123, 200, 1))).served
    assert served.first_token_s[1] == pytest.approx(1.33)
    assert served.finish_s[0] == pytest.approx(1.4)


def test_equal_times_share_a_pass_and_an_end_is_seen_by_an_arrival_of_its_instant() -> None:
    served = run(trace((1.0, 100, 1), (1.0, 50, 1), (1.15, 30, 1))).served
    assert served.first_token_s.tolist() == pytest.approx([1.15, 1.15, 1.18])


def test_long_prompts_go_in_chunks_and_the_rest_shares_no_pass_before() -> None:
    engine = EngineKnobs(chunk_tokens=100)
    served = run(trace((0.0, 250, 1), (0.01, 10, 1)), engine=engine).served
    assert served.first_token_s.tolist() == pytest.approx([0.25, 0.26])


def test_mixed_passes_give_running_requests_a_token() -> None:
    """Separate: the running one waits 0.3 s for the prefill; mixed: it goes on in each chunk."""
    rows = trace((0.0, 100, 31), (0.101, 300, 2))
    apart = run(rows, engine=EngineKnobs(chunk_tokens=101))
    mixed = run(rows, engine=EngineKnobs(chunk_tokens=101, mixed=True))
    assert mixed.served.finish_s[0] < apart.served.finish_s[0]
    assert mixed.served.finish_s[0] - mixed.served.first_token_s[0] < 0.65


@pytest.mark.parametrize(
    ("interval", "first_s", "finish_s"),
    [(0, 0.41, 0.70), (2, 0.46, 0.70), (50, 0.70, 0.40)],
    ids=["off", "two steps", "for longer than it runs"],
)
def test_decode_steps_between_prefill_passes(interval: int, first_s: float, finish_s: float) -> None:
    """Three chunks of 0.1 s beside a request that decodes in steps of 0.01 s from 0.1 s on."""
    engine = EngineKnobs(chunk_tokens=100, decode_interval=interval)
    served = run(trace((0.0, 100, 31), (0.101, 300, 1)), engine=engine).served
    assert (served.first_token_s[1], served.finish_s[0]) == (pytest.approx(first_s), pytest.approx(finish_s))


def test_memory_runs_out_retracts_and_everybody_ends() -> None:
    rows = trace(*((0.001 * index, 100, 200) for index in range(12)))
    small = profile(token_s=1e-4, kv_capacity_tokens=1500)
    result = run(rows, fleet=small, engine=EngineKnobs(growth_start=0.0, growth_least=0.0))
    assert result.counts["retractions"] > 0
    assert result.counts["finished"] == 12
    roomy = run(rows, fleet=small, engine=EngineKnobs(growth_start=1.0, growth_least=1.0))
    assert roomy.counts["retractions"] == 0, "who counts on every token never runs out"


def test_with_lose_all_everybody_is_computed_again_when_memory_runs_out() -> None:
    """Three of 100 + 200 tokens in 750: none has ended when they run out, so all lose their KV, and all at once."""
    rows = trace(*((0.0, 100, 200) for _ in range(3)))
    small = profile(token_s=1e-4, kv_capacity_tokens=750)
    knobs = {"growth_start": 0.0, "growth_least": 0.0}
    single, everybody = (
        run(rows, fleet=small, engine=EngineKnobs(**knobs, lose_all=lose_all))  # type: ignore[arg-type]
        for lose_all in (False, True)
    )
    assert single.retractions.tolist().count(0) == 2
    assert (everybody.retractions >= 1).all()
    assert everybody.counts["finished"] == 3
    assert everybody.served.finish_s.min() > single.served.finish_s.min(), "who is done first has been computed twice"


def test_what_can_never_fit_is_refused_on_arrival() -> None:
    result = run(trace((0.0, 100, 10), (0.0, 900, 200)), fleet=profile(kv_capacity_tokens=1000))
    assert result.stage == ["finished", "refused"]
    assert np.isnan(result.served.first_token_s[1])


def test_slots_bound_the_running_batch() -> None:
    rows = trace(*((0.0, 10, 11) for _ in range(4)))
    served = run(rows, engine=EngineKnobs(slots=2)).served
    assert served.first_token_s[2] > served.finish_s[1] - 1e-9


def test_a_prompt_in_the_cache_is_not_computed_again() -> None:
    ids = ((1, 2), (1, 2, 3))
    result = run(trace((0.0, 130, 1), (10.0, 200, 1), hash_ids=ids, block_tokens=64))
    assert result.served.ttft_s().tolist() == pytest.approx([0.13, 0.2 - 0.128])
    assert result.hit_tokens.tolist() == result.predicted_hit_tokens.tolist() == [0, 128]


class LastFirst(Fcfs):
    """Whoever came last, alone."""

    def decide(self, view: PassView, now_s: float) -> PassDecision:
        return PassDecision(Action.SHORT, PassReason.ORDER, tuple(view.waiting[-1:]))


def test_a_request_beyond_the_match_window_is_matched_when_it_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "MATCH_WINDOW", 1)
    ids = ((1, 2), (1, 2, 3), (1, 2, 4))
    rows = trace((0.0, 130, 1), (0.05, 200, 1), (0.05, 200, 1), hash_ids=ids, block_tokens=64)
    result = run(rows, policy=LastFirst)
    assert result.served.ttft_s().tolist() == pytest.approx([0.13, 0.08 + 2 * 0.072, 0.08 + 0.072])
    assert result.hit_tokens.tolist() == [0, 128, 128]
    assert result.predicted_hit_tokens.tolist() == [0, 0, 0], "nothing was computed yet when they were sent"


def test_a_full_match_still_computes_one_token_or_more() -> None:
    result = run(trace((0.0, 128, 1), (10.0, 128, 1), hash_ids=((1, 2), (1, 2)), block_tokens=64))
    assert result.served.ttft_s().tolist() == pytest.approx([0.128, 0.064])


def stepwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decode step is an event of its own."""

    def one_step(self: StepCosts, batch: int, context_tokens: int, most_steps: int) -> Segment:
        return Segment(self.decode_s(batch, context_tokens), 0.0, 0.0, 1)

    monkeypatch.setattr(StepCosts, "segment", one_step)


@pytest.mark.parametrize("mixed", [False, True])
def test_skipping_ahead_changes_nothing(monkeypatch: pytest.MonkeyPatch, mixed: bool) -> None:
    """Against the same run with every decode step visited: all times agree to rounding."""
    rng = random.Random(4)
    rows = generated_trace(300, Arrivals(80.0, rng, cv=1.5), length_model("sharegpt4_first_turn_prompt"), fixed(150))
    options = {
        "fleet": [InstanceSpec(load_profile("h100-llama3.1-8b-tp1"), count=2, kv_capacity_tokens=6_000)],
        "engine": EngineKnobs(mixed=mixed, chunk_tokens=512, growth_start=0.0, growth_least=0.0),
    }
    skipped = run(rows, **options)
    stepwise(monkeypatch)
    walked = run(rows, **options)
    assert skipped.counts["retractions"] == walked.counts["retractions"] > 0
    assert skipped.events < walked.events / 2
    assert skipped.served.finish_s == pytest.approx(walked.served.finish_s, rel=1e-9)
    assert skipped.served.first_token_s == pytest.approx(walked.served.first_token_s, rel=1e-9)


def temporal() -> TemporalPolicy:
    model = StepModel(g0_s=6.8e-3, gw_s=0.0, gr_s=4e-8, k0_s=5e-4, b_s=2.1e-5, a_s=4.3e-10)
    return TemporalPolicy(TemporalKnobs(boundary_tokens=512, awd=AwdKnobs(), long_prompts=LongKnobs()), model)


def test_the_temporal_policy_runs_unchanged_and_keeps_shorts_fast() -> None:
    """The policy object of the engine, in the simulator: shorts overtake a queue of longs."""
    long_prompts = [(0.0, 24_000, 4)] * 6
    short_prompts = [(0.2 + 0.1 * index, 100, 4) for index in range(20)]
    rows = trace(*long_prompts, *short_prompts)
    spec = InstanceSpec(load_profile("h100-llama3.1-8b-tp1"))
    config = SimConfig([spec], engine=EngineKnobs(chunk_tokens=2048))

    def ttft(engine: MakeEngine) -> RunResult:
        one = Simulation(rows, config, PolicySet("test", Route(), ()), engine)
        result = one.run()
        one.cluster.check_integrity()
        return result

    fcfs = ttft(lambda _profile, _knobs: Fcfs()).served.ttft_s()[6:]
    ours = ttft(lambda _profile, _knobs: temporal()).served.ttft_s()[6:]
    assert np.median(ours) < np.median(fcfs) / 10


class Refuses(Fcfs):
    """Never asks for anything."""

    def decide(self, view: PassView, now_s: float) -> PassDecision:
        return PassDecision(Action.HOLD, PassReason.BLOCKED)


def test_a_policy_that_never_serves_is_an_error_not_a_hang() -> None:
    with pytest.raises(SimError, match=r"1 requests can never end \(prefill; r0\)"):
        run(trace((0.0, 10, 1)), policy=Refuses)


def test_same_seed_same_run() -> None:
    def one(seed: int) -> str:
        rows = chat_trace(60, Arrivals(3.0, random.Random(seed)))
        return run(rows, fleet=[InstanceSpec(load_profile("h100-llama3.1-8b-tp1"), count=3)]).digest()

    assert one(1) == one(1)
    assert one(1) != one(2)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens 0 is out of range; allowed: at least 1"),
        ({"slots": 0}, "slots 0 is out of range"),
        ({"growth_start": 0.1, "growth_least": 0.2}, "growth_least 0.2 is out of range; allowed: 0 to 0.1"),
    ],
)
def test_bad_engine_knobs(knobs: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineKnobs(**knobs)  # type: ignore[arg-type]
