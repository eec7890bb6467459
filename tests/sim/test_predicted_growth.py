"""Admission that takes predicted lengths for limits: what it counts, and what comes of it."""

from __future__ import annotations

import dataclasses

import numpy as np
from support.sim import Fcfs, Route, profile, trace

from pla_sglang.policy.common.survival import SurvivalPredictor
from pla_sglang.policy.interface.decisions import PolicySet
from pla_sglang.policy.interface.remaining_length import NoPrediction, Oracle, RemainingPredictor
from pla_sglang.sim.core.config import InstanceSpec, SimConfig
from pla_sglang.sim.core.engine_knobs import EngineKnobs
from pla_sglang.sim.core.growth import AnswerLimits
from pla_sglang.sim.core.request import SimRequest, SimStage
from pla_sglang.sim.core.running import RunningBatch
from pla_sglang.sim.core.simulation import RunResult, Simulation

SMALL = profile(token_s=1e-4, kv_capacity_tokens=1500)
ROWS = trace(*((0.001 * index, 100, 200) for index in range(12)))
LIMIT_TOKENS = 1000


def run(engine: EngineKnobs, lengths: RemainingPredictor, limit_tokens: int | None = LIMIT_TOKENS) -> RunResult:
    config = SimConfig([InstanceSpec(SMALL)], engine=engine, output_limit_tokens=limit_tokens)
    one = Simulation(ROWS, config, PolicySet("test", Route(), ()), lambda _profile, _knobs: Fcfs(), lengths)
    result = one.run()
    one.cluster.check_integrity()
    return result


def test_who_is_unknown_counts_as_with_sglang() -> None:
    """At most the clip."""
    growth = AnswerLimits(40, lambda rows, running: np.full(len(rows), np.nan))
    batch, member = RunningBatch(40), SimRequest(0, 0.0, 100, 30, limit_tokens=101)
    member.move(SimStage.PREFILL)
    member.done_tokens = 1
    batch.join(member)
    assert growth.of_running(batch) == 40
    assert growth.of_next(member) == 40


def test_a_prediction_is_asked_for_again_after_some_steps_and_for_newcomers() -> None:
    asked: list[int] = []

    def predict(rows: object, running: bool) -> np.ndarray:
        asked.append(len(list(rows)))  # type: ignore[call-overload]
        return np.full(asked[-1], 30.0)

    growth, batch = AnswerLimits(4096, predict), RunningBatch(4096)
    for row in range(2):
        member = SimRequest(row, 0.0, 100, 90, limit_tokens=90)
        member.move(SimStage.PREFILL)
        member.done_tokens = 1
        batch.join(member)
        assert growth.of_running(batch) == 30 * (row + 1)
    batch.advance(19)
    assert growth.of_running(batch) == 2 * 11
    batch.advance(1)
    assert growth.of_running(batch) == 2 * 30
    assert asked == [1, 2, 2]


def test_exact_lengths_are_as_good_as_exact_limits() -> None:
    full = dataclasses.replace(EngineKnobs(), growth_start=1.0, growth_least=1.0)
    limits, exact = run(full, NoPrediction()), run(dataclasses.replace(full, reserve_by_lengths=True), Oracle())
    stated = run(full, NoPrediction(), limit_tokens=None)
    assert limits.counts["retractions"] == exact.counts["retractions"] == 0
    assert exact.end_s == stated.end_s < 0.5 * limits.end_s, "a limit of 1,000 lets one request in at a time"


def test_without_a_prediction_nothing_changes() -> None:
    plain = EngineKnobs()
    kept = dataclasses.replace(plain, reserve_by_lengths=True)
    assert run(kept, NoPrediction()).digest() == run(plain, NoPrediction()).digest()


def test_a_survival_curve_serves_all() -> None:
    result = run(EngineKnobs(reserve_by_lengths=True), SurvivalPredictor())
    assert result.counts["finished"] == len(ROWS)
