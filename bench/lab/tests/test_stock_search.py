"""Stock arms, the rounds over them, and the file that keeps what they have found."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from bench.lab.fleet_arms import (
    CHUNK_GROUPS,
    CHUNKS_TOKENS,
    INSTANCES,
    INTERVALS,
    ORDERS,
    OURS,
    ROUTERS,
    FleetArm,
    client_limit_tokens,
    read_arm,
    stock_arms,
)
from bench.lab.stock_frontier import Limit, best_stock_arm, geometric_mean_of_ratios, read_limits
from bench.lab.stock_search import TARGETS, Course, HeldRate, Pairs, Round, race_families, race_members, search_limits
from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.core.experiment import run_experiment
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.workload import Trace, hol_trace

SLO = Slo(4.0, 0.1)
BEST = FleetArm("two-choices", mixed=True, chunk_tokens=384, order="hrrn", decode_interval=4)


def rate_of(arm: FleetArm) -> float:
    """A made-up limit: 100/s, less for everything that differs from ``BEST``."""
    if arm == OURS:
        return 80.0
    unlike = [arm.policy != BEST.policy, arm.mixed != BEST.mixed, arm.order != BEST.order, arm.prefills > 0]
    steps = [
        abs(values.index(own) - values.index(best))
        for values, own, best in (
            (CHUNKS_TOKENS, arm.chunk_tokens, BEST.chunk_tokens),
            (INTERVALS, arm.decode_interval, BEST.decode_interval),
        )
    ]
    return 100.0 * 0.9 ** sum(unlike) * 0.97 ** sum(steps)


def course_of(this_round: Round, ran: list[FleetArm] | None = None) -> Course:
    def measure(pairs: Pairs, *, target: float) -> dict[tuple[FleetArm, int], float]:
        if ran is not None:
            ran.extend(arm for arm, _ in pairs)
        rates = {pair: this_round.ladder.rate_per_s(pair[1]) for pair in pairs}
        return {pair: min(1.0, 0.9 * rate_of(pair[0]) / rate) for pair, rate in rates.items()}

    return Course(this_round, measure, dict.fromkeys(TARGETS, 500.0), 400.0)


def test_stock_is_every_combination_of_what_it_can_be_told() -> None:
    arms = stock_arms()
    unified, split = len(CHUNKS_TOKENS) * 2 * len(INTERVALS), len(CHUNKS_TOKENS) * (INSTANCES - 1)
    assert len(arms) == len(set(arms)) == len(ROUTERS) * len(ORDERS) * (unified + split)
    assert len({arm.name for arm in arms}) == len(arms)
    assert {arm.family for arm in arms} <= set(arms)
    assert all(arm.family.family == arm.family for arm in arms)
    assert len({arm.family for arm in arms}) == len(ROUTERS) * (1 + 3 * len(CHUNK_GROUPS) + INSTANCES - 1)
    assert OURS not in arms
    assert {arm.policy for arm in stock_arms(["cache-aware"])} == {"cache-aware"}
    with pytest.raises(ConfigError, match="router 'arrow' is not known; allowed: round-robin"):
        stock_arms(["arrow"])
    assert all(read_arm(json.loads(json.dumps(arm.as_json()))) == arm for arm in (*arms[:40], OURS))


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(
    "arm", [{"prefills": 3}, {"mixed": True, "chunk_tokens": 512, "order": "hrrn", "decode_interval": 1}]
)
def test_every_router_serves_a_split_and_mixed_engines(router: str, arm: dict[str, object]) -> None:
    burst = hol_trace()
    trace = Trace("burst", burst.arrival_s + 0.01, burst.input_tokens // 16, burst.output_tokens)
    outcome = run_experiment(FleetArm(router, **arm).experiment(SLO), trace)  # type: ignore[arg-type]
    assert outcome.figures.finished == len(trace)
    prefills = set(outcome.result.prefill_instance.tolist())
    assert prefills <= set(range(3 if "prefills" in arm else INSTANCES))
    assert ("prefills" in arm) == bool(prefills.isdisjoint(outcome.result.decode_instance.tolist()))


def test_nobody_is_told_how_long_an_answer_will_be() -> None:
    trace = Trace("two", np.zeros(2), np.full(2, 100), np.array([10, 20]))
    for arm in (OURS, BEST):
        experiment = arm.experiment(SLO, limit_tokens=client_limit_tokens(trace))
        assert (experiment.lengths, experiment.move_gain, experiment.output_limit_tokens) == ("none", 1.0, 4096)
    longer = Trace("two", np.zeros(2), np.full(2, 100), np.array([10, 9000]))
    assert client_limit_tokens(longer) == 9000, "a smaller one would cut an answer"


def test_a_limit_above_the_clip_of_sglang_counts_as_the_clip() -> None:
    trace = Trace("few", np.arange(12) / 8, np.full(12, 2000), np.full(12, 300))

    def digest(limit_tokens: int) -> str:
        experiment = dataclasses.replace(BEST.experiment(SLO, limit_tokens=limit_tokens), kv_capacity_tokens=8_000)
        return run_experiment(experiment, trace).result.digest()

    assert digest(4096) == digest(32_768) != digest(300)


def test_rounds_find_the_best_arm_of_a_family_that_its_plain_form_does_not_lead() -> None:
    families = race_families(course_of(Round(15.0, 1.2, 4)), stock_arms())
    assert BEST.family in [held.arm for held in families.best[0.9]]
    assert families.ran == len({arm.family for arm in stock_arms()})
    ran: list[FleetArm] = []
    members = race_members(course_of(Round(30.0, 1.05, 3), ran), stock_arms(), families)
    assert members.best[0.9][0].arm == members.best[0.99][0].arm == BEST
    assert {arm.family for arm in ran} == {held.arm for held in families.best[0.9]}
    result, ours = search_limits(course_of(Round(300.0, 1.01, 3)), members.best)
    assert result.best[0.9][0] == HeldRate(BEST, result.best[0.9][0].rate_per_s)
    assert result.best[0.9][0].rate_per_s == pytest.approx(100.0, rel=0.01)
    assert result.best[0.99][0] == HeldRate(BEST, result.best[0.99][0].rate_per_s)
    assert result.best[0.99][0].rate_per_s == pytest.approx(100.0 * 0.9 / 0.99, rel=0.01)
    assert [len(result.best[target]) for target in TARGETS] == [3, 3]
    assert ours == {0.9: pytest.approx(80.0, rel=0.01), 0.99: pytest.approx(80.0 * 0.9 / 0.99, rel=0.01)}


def limit(name: str, target: float, span_s: float, ours_per_s: float | None, high_per_s: float = 400.0) -> Limit:
    return Limit(
        name, target, span_s, 1.04, [HeldRate(BEST, 100.0), HeldRate(OURS, None)], ours_per_s, 170.0, high_per_s
    )


def test_a_frontier_is_read_as_it_was_kept(tmp_path: Path) -> None:
    path = tmp_path / "frontier.json"
    kept = [limit("a", 0.9, 300.0, 110.0), limit("b", 0.9, 300.0, 90.0), limit("a", 0.99, 30.0, None)]
    path.write_text(json.dumps({"bench": "x", "limits": [one.as_json() for one in kept]}))
    limits = read_limits(path)
    assert list(limits.values()) == kept
    assert best_stock_arm(path, "a") == BEST
    assert geometric_mean_of_ratios(limits, 0.9) == pytest.approx((1.1 * 0.9) ** 0.5)
    assert geometric_mean_of_ratios(limits, 0.99) is None
    with pytest.raises(ConfigError, match=r"no best stock arm of c at 0\.9 is known; allowed: a at 0\.9"):
        best_stock_arm(path, "c")
    path.write_text("{}")
    with pytest.raises(ConfigError, match="no frontier of stock engines"):
        read_limits(path)


def test_a_short_span_or_a_search_that_ended_at_its_end_gives_no_ratio() -> None:
    assert limit("a", 0.9, 300.0, 80.0).ours_vs_stock == pytest.approx(0.8)
    assert limit("a", 0.9, 299.0, 80.0).ours_vs_stock is None
    assert limit("a", 0.9, 300.0, None).ours_vs_stock is None
    assert limit("a", 0.9, 300.0, 80.0, high_per_s=102.0).ours_vs_stock is None  # stock's search ended at its end
