"""Running decodes piggybacked on prefill passes, in the simulator with the engine's own policy object.

The step model of the policy is that of the simulated device, so its error is none and every target that passes can
keep at all must be kept.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sim import Route, profile, trace

from pla_sglang.policy.interface.decisions import PolicySet
from pla_sglang.policy.interface.prefill import Action, PassDecision, PassReason, PassView, Piggyback
from pla_sglang.policy.pla.long_prompts import LongKnobs
from pla_sglang.policy.pla.temporal import TemporalKnobs, TemporalPolicy
from pla_sglang.policy.slo.knobs import SloKnobs
from pla_sglang.policy.slo.mixed_batches import MixedBatches
from pla_sglang.profiles import load_profile
from pla_sglang.sim.core.config import InstanceSpec, SimConfig
from pla_sglang.sim.core.engine_knobs import EngineKnobs
from pla_sglang.sim.core.experiment import engine_policy, mixed_batch_model, step_model
from pla_sglang.sim.core.simulation import RunResult, Simulation

DEVICE = profile(token_s=1e-4, base_s=0.001, attention_s=1e-9, decode_base_s=0.010, decode_read_s=1e-8)
DEVICE = dataclasses.replace(DEVICE, prefill=dataclasses.replace(DEVICE.prefill, floor_s=0.010, read_s=1e-8))
BOUNDARY_TOKENS, CHUNK_TOKENS = 100, 1000
# A pass of one short, or of a chunk at the crossing, with twenty riders and their context; then their next token.
LEAST_TPOT_S = 0.025
EXAMPLES = settings(max_examples=80, deadline=None, derandomize=True)

rows = st.lists(
    st.tuples(
        st.floats(0, 2).map(lambda value: round(value, 4)),
        st.one_of(st.integers(1, 99), st.integers(100, 1500), st.integers(1500, 6000)),
        st.sampled_from((1, 2, 5, 40, 150)),
    ),
    min_size=2,
    max_size=20,
)
targets = st.sampled_from((LEAST_TPOT_S, 0.05, 0.1, None))


class Watched(MixedBatches):
    """Keeps what was decided, and what was seen then."""

    def __init__(self, log: list[tuple[PassView, PassDecision]]) -> None:
        knobs = TemporalKnobs(
            boundary_tokens=BOUNDARY_TOKENS, long_prompts=LongKnobs(chunk_max_tokens=CHUNK_TOKENS, chunk_min_tokens=1)
        )
        super().__init__(TemporalPolicy(knobs, step_model(DEVICE)), SloKnobs(), mixed_batch_model(DEVICE))
        self.log = log

    def decide(self, view: PassView, now_s: float) -> PassDecision:
        decision = super().decide(view, now_s)
        self.log.append((dataclasses.replace(view, waiting=[]), decision))
        return decision


def run(
    work: list[tuple[float, int, int]], tpot_s: float | None, *, mixed: bool = True, kv_tokens: int = 1 << 30
) -> tuple[RunResult, list[tuple[PassView, PassDecision]]]:
    log: list[tuple[PassView, PassDecision]] = []
    spec = InstanceSpec(dataclasses.replace(DEVICE, kv_capacity_tokens=kv_tokens))
    rows = trace(*sorted(work))
    knobs = EngineKnobs(chunk_tokens=CHUNK_TOKENS, mixed=mixed)
    config = SimConfig([spec], engine=knobs, tpot_slo_s=tpot_s)
    one = Simulation(rows, config, PolicySet("test", Route(), ()), lambda _profile, _knobs: Watched(log))
    result = one.run()
    one.cluster.check_integrity()
    return result, log


@EXAMPLES
@given(rows, targets)
def test_no_next_token_is_later_than_its_target(work: list[tuple[float, int, int]], tpot_s: float | None) -> None:
    result, log = run(work, tpot_s)
    assert result.counts["finished"] == len(work)
    if tpot_s is None:
        return
    late = [value for value in result.served.tpot_s() if value > tpot_s * (1 + 1e-9)]
    assert not late
    assert all(decision.piggyback is not Piggyback.LATE for _, decision in log)


@EXAMPLES
@given(rows, targets, st.sampled_from((6200, 9000)))
def test_each_pass_is_one_that_the_host_can_run_and_all_end(
    work: list[tuple[float, int, int]], tpot_s: float | None, kv_tokens: int
) -> None:
    """Also where memory runs out and requests are retracted."""
    result, log = run(work, tpot_s, kv_tokens=kv_tokens)
    assert result.counts["finished"] == len(work)
    for view, decision in log:
        if decision.action is Action.SHORT:
            assert decision.park == (view.chunk is not None and not decision.shares_with_chunk)
        if decision.chunk_tokens is not None and (decision.shares_with_chunk or len(decision.selected) > 1):
            assert decision.chunk_tokens <= view.pass_budget_tokens
        assert decision.piggyback is None or view.running > 0
        if view.running and decision.action is not Action.HOLD:
            assert decision.piggyback is not None, "every pass beside decodes says whether they join"


@EXAMPLES
@given(rows)
def test_a_target_that_no_pass_can_keep_starves_no_prefill(work: list[tuple[float, int, int]]) -> None:
    """Between two prefill passes there is at most one decode step of this rule."""
    result, log = run(work, 0.001)
    assert result.counts["finished"] == len(work)
    holds = [decision.reason is PassReason.TOKEN_DEADLINE for _, decision in log]
    assert not any(first and second for first, second in itertools.pairwise(holds))


def test_without_mixed_passes_nothing_rides() -> None:
    work = [(0.0, 50, 100), (0.1, 3000, 5)]
    _, log = run(work, 0.05, mixed=False)
    assert {decision.piggyback for _, decision in log} == {None}


def test_decodes_go_on_beside_a_long_and_the_long_beside_decodes() -> None:
    """30 chunks of a tenth of a second; the running request gets a token in each, and the long is hardly later."""
    work = [(0.0, 50, 60), (0.05, 30_000, 2)]
    apart, _ = run(work, None, mixed=False)
    riding, log = run(work, None)
    piggybacks = [decision.piggyback for _, decision in log if decision.piggyback is not None]
    assert piggybacks.count(Piggyback.TOGETHER) >= 30
    assert riding.served.finish_s[0] < apart.served.finish_s[0] / 1.01
    assert riding.served.first_token_s[1] == pytest.approx(apart.served.first_token_s[1], rel=0.02)


def told(entry: tuple[PassView, PassDecision]) -> tuple[object, ...]:
    decision = entry[1]
    return decision.action, [view.rid for view in decision.selected], decision.chunk_tokens, decision.piggyback


def test_an_infinite_target_is_none() -> None:
    """No steps times infinity is no number: with such a slack, chunks of longs were cut as for a target."""
    work = [(0.0, 50, 60), (0.05, 3000, 40), *((0.06, 80, 20) for _ in range(12))]
    without, log = run(work, None)
    infinite, seen = run(work, math.inf)
    assert {view.token_slack_s for view, _ in seen} == {None}
    assert list(map(told, seen)) == list(map(told, log))
    assert infinite.served.finish_s.tolist() == without.served.finish_s.tolist()


def test_the_policy_knows_the_chunks_of_its_engine() -> None:
    policy = engine_policy("temporal", load_profile("h100-llama3.1-8b-tp1"), EngineKnobs(chunk_tokens=2048, mixed=True))
    assert isinstance(policy, MixedBatches)
    assert policy.prefills.knobs.long_prompts.chunk_max_tokens == 2048
