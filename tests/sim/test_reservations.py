"""KV cache of decode instances, given by slack: what the simulator does with the same order as live engines."""

from __future__ import annotations

import numpy as np
import pytest

from pla_sglang.policy.interface.prefill import ReservationReason
from pla_sglang.policy.slo.reservation import ReservationOrder
from pla_sglang.sim.core.experiment import Experiment, ExperimentResult, run_experiment
from pla_sglang.sim.core.host import HostKnobs
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.workload.trace import Trace

REASONS = {f"room.{reason.value}" for reason in ReservationReason}


def made_trace(requests: int = 600, rate_per_s: float = 18.0) -> Trace:
    """Prompts of a few hundred tokens and some of thousands, with answers of hundreds; Poisson arrivals."""
    rng = np.random.default_rng(3)
    arrival_s = np.cumsum(rng.exponential(1 / rate_per_s, requests))
    inputs = np.where(rng.random(requests) < 0.15, rng.integers(3000, 9000, requests), rng.integers(50, 900, requests))
    return Trace("mixed lengths", arrival_s, inputs.astype(np.int64), rng.integers(50, 500, requests))


def run(deadlines: str = "decide", *, engine: str = "temporal", kv_tokens: int = 40_000) -> ExperimentResult:
    """One prefill and one decode instance, which makes room before the prefill begins."""
    experiment = Experiment(
        policy="static-pd",
        slo=Slo(2.0, 0.1),
        engine=engine,
        deadlines=deadlines,
        instances=2,
        prefills=1,
        kv_capacity_tokens=kv_tokens,
        host=HostKnobs(overlap=True, room_first=True),
    )
    return run_experiment(experiment, made_trace())


def reasons_of(ran: ExperimentResult) -> dict[str, int]:
    return {name: count for name, count in ran.result.pass_reasons.items() if name in REASONS}


def test_where_room_is_short_more_are_in_target_than_first_come_first_served(monkeypatch: pytest.MonkeyPatch) -> None:
    by_slack = run()
    assert {"room.slack", "room.fits", "room.infeasible"} <= set(reasons_of(by_slack))
    monkeypatch.setattr(ReservationOrder, "decides", False)
    first_come = run()
    assert not reasons_of(first_come)
    assert by_slack.figures.attainment > first_come.figures.attainment + 0.05
    assert by_slack.figures.finished == first_come.figures.finished


def test_the_same_seed_gives_the_same_run() -> None:
    assert run().result.digest() == run().result.digest()


@pytest.mark.parametrize("settings", [{"deadlines": "advise"}, {"engine": "fcfs"}])
def test_while_deadlines_do_not_decide_nothing_changes(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    ran = run(**settings)  # type: ignore[arg-type]
    assert not reasons_of(ran)
    monkeypatch.setattr(ReservationOrder, "decides", False)
    assert run(**settings).result.digest() == ran.result.digest()  # type: ignore[arg-type]


def test_with_room_for_all_the_order_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = run(kv_tokens=1_000_000)
    monkeypatch.setattr(ReservationOrder, "decides", False)
    assert run(kv_tokens=1_000_000).result.digest() == ran.result.digest()
