"""Plain dispatchers, migration by load and autoscalers as tables.

Prefill takes 10 ms + 1 ms a token, a decode step 10 ms + 0.1 ms a request + 1 us a token of context.
"""

from __future__ import annotations

import collections
import random
from typing import Any

import pytest
from support.fleets import LinearSteps, decode, fleet, mixed, predictor, prefill, request

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.baselines.dispatch import (
    CacheAware,
    MinimalLoad,
    PoolDispatcher,
    RoundRobin,
    TwoChoices,
    least_requests,
)
from pla_sglang.policy.baselines.migration import LoadMigration
from pla_sglang.policy.baselines.scalers import SlaKnobs, SlaScaler, ThresholdKnobs, ThresholdScaler
from pla_sglang.policy.common.dispatch import least_tokens, split_roles
from pla_sglang.policy.common.scaling import Limits, Scaling
from pla_sglang.policy.common.tables import DecodeTable, PrefillTable
from pla_sglang.policy.interface.decisions import Migrate, ScaleTo
from pla_sglang.policy.interface.fleet import DecodeBatch, FleetView, InstanceState, Role
from pla_sglang.policy.interface.reasons import FleetReason as R


def two_choices() -> TwoChoices:
    return TwoChoices(random.Random(4))


ALL: dict[str, Any] = {
    "round robin": RoundRobin,
    "least requests": least_requests,
    "least tokens": least_tokens,
    "two choices": two_choices,
    "minimal load": lambda: MinimalLoad(predictor()),
    "cache aware": CacheAware,
}


def test_a_dispatcher_without_a_choice_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="choose_decode"):
        PoolDispatcher()  # type: ignore[abstract]


@pytest.mark.parametrize("name", ALL)
def test_phases_go_to_their_pools(name: str) -> None:
    router: PoolDispatcher = ALL[name]()
    view = fleet(prefill(), decode())
    first = router.dispatch(request(), view, 0.0)
    assert (first.prefill, first.decode) == (view.instances[0], None)
    second = router.place_decode(request(prefilled_on=view.instances[0]), view, 0.0)
    assert second.decode is view.instances[1]


@pytest.mark.parametrize("name", ALL)
def test_mixed_instances_keep_their_requests(name: str) -> None:
    router: PoolDispatcher = ALL[name]()
    view = fleet(mixed(), mixed())
    first = router.dispatch(request(), view, 0.0)
    assert first.prefill is first.decode is not None
    kept = router.place_decode(request(prefilled_on=first.prefill), view, 0.0)
    assert (kept.decode, kept.reason) == (first.prefill, R.KEEP_LOCAL)
    view.set_state(first.prefill, InstanceState.DEAD)
    moved = router.place_decode(request(prefilled_on=first.prefill), view, 0.0)
    assert moved.decode is view.ready[0]


@pytest.mark.parametrize("name", ALL)
def test_nobody_and_only_the_other_role(name: str) -> None:
    router: PoolDispatcher = ALL[name]()
    assert router.dispatch(request(), fleet(), 0.0).reason is R.NO_INSTANCE
    assert router.place_decode(request(), fleet(), 0.0).reason is R.NO_INSTANCE
    alone = fleet(decode())
    assert router.dispatch(request(), alone, 0.0).prefill is alone.instances[0]


def chosen(router: PoolDispatcher, view: FleetView, **fields: Any) -> tuple[str, R]:
    answer = router.dispatch(request(**fields), view, 0.0)
    assert answer.prefill is not None
    return answer.prefill.name, answer.reason


def test_round_robin_goes_on_when_instances_come_and_go() -> None:
    router, view = RoundRobin(), fleet(mixed(), mixed(), mixed())
    assert [chosen(router, view)[0] for _ in range(4)] == ["i0", "i1", "i2", "i0"]
    view.set_state(view.instances[1], InstanceState.DEAD)
    assert [chosen(router, view)[0] for _ in range(3)] == ["i2", "i0", "i2"]


@pytest.mark.parametrize(
    ("name", "view", "expected"),
    [
        ("least requests", fleet(mixed(queued_tokens=9), mixed(running=0)), "i1"),
        ("least requests", fleet(mixed(queued_prefills=2), mixed(running=1, context_tokens=9000)), "i1"),
        ("least tokens", fleet(mixed(queued_prefills=2, queued_tokens=99), mixed(context_tokens=100)), "i0"),
        ("least tokens", fleet(mixed(waiting_decode_tokens=50), mixed(queued_tokens=49)), "i1"),
        ("minimal load", fleet(prefill(queued_prefills=9, queued_tokens=9), prefill(queued_tokens=80)), "i1"),
    ],
)
def test_least_of_each(name: str, view: FleetView, expected: str) -> None:
    assert chosen(ALL[name](), view)[0] == expected


def test_minimal_load_predicts() -> None:
    view = fleet(prefill(queued_tokens=90))
    assert MinimalLoad(predictor()).dispatch(request(90), view, 0.0).predicted_ttft_s == pytest.approx(0.200)


def test_two_choices_takes_the_better_of_two_and_draws_evenly() -> None:
    router = two_choices()
    view = fleet(mixed(context_tokens=5), mixed(context_tokens=4), mixed(context_tokens=3), mixed(context_tokens=2))
    counts = collections.Counter(chosen(router, view)[0] for _ in range(6000))
    assert "i0" not in counts  # never the better one
    assert counts["i3"] / 6000 == pytest.approx(1 / 2, abs=0.03)  # in three of six pairs
    assert counts["i2"] / 6000 == pytest.approx(1 / 3, abs=0.03)


CACHE: dict[str, tuple[FleetView, dict[int, int], str, R]] = {
    "hit": (fleet(mixed(), mixed(running=9)), {1: 60}, "i1", R.CACHE_HIT),
    "longest hit": (fleet(mixed(), mixed()), {0: 60, 1: 70}, "i1", R.CACHE_HIT),
    "the share itself is not more": (fleet(mixed(running=1), mixed()), {0: 30}, "i1", R.CACHE_MISS),
    "the holder, though busier": (fleet(mixed(), mixed(), mixed(running=60)), {2: 31}, "i2", R.CACHE_HIT),
    "miss": (fleet(mixed(running=1), mixed()), {}, "i1", R.CACHE_MISS),
    "imbalance": (fleet(mixed(), mixed(running=70)), {1: 100}, "i0", R.CACHE_IMBALANCE),
    "large but level": (fleet(mixed(running=400), mixed(running=500)), {1: 100}, "i1", R.CACHE_HIT),
}


@pytest.mark.parametrize(("view", "cached", "expected", "reason"), CACHE.values(), ids=CACHE)
def test_cache_aware(view: FleetView, cached: dict[int, int], expected: str, reason: R) -> None:
    assert chosen(CacheAware(), view, cached=cached) == (expected, reason)


def test_static_splits() -> None:
    assert split_roles(3, 1) == [Role.PREFILL, Role.DECODE, Role.DECODE]
    assert split_roles(2, 0) == [Role.MIXED, Role.MIXED]
    for count, prefills in ((2, 2), (0, 0), (2, -1)):
        with pytest.raises(ConfigError, match="instances"):
            split_roles(count, prefills)


ROWS: list[tuple[str, int, float | None]] = [("a", 400, None), ("b", 300, None), ("c", 100, None)]
MOVES: dict[str, tuple[dict[str, Any], dict[str, Any], str | None, R]] = {
    "shortest": ({"context_tokens": 800}, {}, "c", R.CURRENT_LOAD),
    "level enough": ({"context_tokens": 800}, {"context_tokens": 750}, None, R.BALANCED),
    "what is on its way counts": ({"context_tokens": 800}, {"waiting_decode_tokens": 750}, None, R.BALANCED),
    "target full": ({"context_tokens": 1600}, {"context_tokens": 870}, None, R.STAR_NO_CANDIDATE),
}


@pytest.mark.parametrize(("source", "target", "rid", "reason"), MOVES.values(), ids=MOVES)
def test_load_migration(source: dict[str, Any], target: dict[str, Any], rid: str | None, reason: R) -> None:
    made = DecodeBatch.of(ROWS)
    members = fleet(*[decode(kv_capacity_tokens=1000, **fields) for fields in (source, target)]).instances
    (action,) = LoadMigration().tick(FleetView(members, decodes=lambda instance: made), 0.0)
    assert action.reason is reason
    assert (action.rid if isinstance(action, Migrate) else None) == rid


def test_load_migration_needs_two() -> None:
    assert LoadMigration().tick(fleet(decode()), 0.0)[0].reason is R.BALANCED


def threshold(**changes: Any) -> ThresholdScaler:
    return ThresholdScaler(ThresholdKnobs(ttft_slo_s=1.0, **changes), predictor())


def threshold_planner(**changes: Any) -> ThresholdScaler:
    """Of a whole fleet of 1 to 8."""
    return ThresholdScaler(ThresholdKnobs(ttft_slo_s=1.0, **changes), predictor(), Scaling(Limits(1, 8)))


def half(share: float) -> dict[str, Any]:
    return {"context_tokens": int(1000 * share), "kv_capacity_tokens": 1000}


THRESHOLDS: dict[str, tuple[FleetView, list[R], list[int]]] = {
    "both busy": (
        fleet(prefill(queued_tokens=900), decode(**half(0.9))),
        [R.UTILISATION_HIGH, R.UTILISATION_HIGH],
        [2, 2],
    ),
    "in band": (fleet(prefill(queued_tokens=500), decode(**half(0.5))), [R.UTILISATION_IN_BAND] * 2, []),
    "idle": (fleet(prefill(), prefill(), decode(), decode()), [R.UTILISATION_LOW, R.UTILISATION_LOW], [1, 1]),
    "the last one stays": (fleet(prefill(), decode()), [R.UTILISATION_IN_BAND] * 2, []),
    "nobody": (fleet(), [R.NO_DATA, R.NO_DATA], []),
}


@pytest.mark.parametrize(("view", "reasons", "sizes"), THRESHOLDS.values(), ids=THRESHOLDS)
def test_threshold_scaler(view: FleetView, reasons: list[R], sizes: list[int]) -> None:
    actions = threshold().tick(view, 0.0)
    assert [action.reason for action in actions] == reasons
    assert [action.count for action in actions if isinstance(action, ScaleTo)] == sizes


def test_threshold_scaler_cools_down_and_has_a_maximum() -> None:
    scaler, view = threshold(cool_down_s=60.0), fleet(prefill(queued_tokens=900), decode(**half(0.5)))
    reasons = [scaler.tick(view, now_s)[0].reason for now_s in (0.0, 59.0, 60.0)]
    assert reasons == [R.UTILISATION_HIGH, R.COOL_DOWN, R.UTILISATION_HIGH]
    assert threshold(role_max=1).tick(view, 0.0)[0].reason is R.UTILISATION_IN_BAND


@pytest.mark.parametrize("cool_down_s", [30.0, 60.0, 120.0])
def test_threshold_keeps_a_newcomer_for_the_cool_down(cool_down_s: float) -> None:
    """It is ready 90 s after its order, when the order is no longer recent; more may come meanwhile."""
    newcomer = mixed(ready_s=90.0)
    scaler, view = threshold_planner(cool_down_s=cool_down_s), fleet(mixed(), newcomer, mixed())
    asked_s = (90.0, 89.0 + cool_down_s, 90.0 + cool_down_s)
    assert [scaler.tick(view, now_s)[0].reason for now_s in asked_s] == [R.COOL_DOWN, R.COOL_DOWN, R.UTILISATION_LOW]
    busy = fleet(mixed(queued_tokens=900), newcomer, mixed(queued_tokens=9000))
    assert threshold_planner(cool_down_s=cool_down_s).tick(busy, 90.0)[0].reason is R.UTILISATION_HIGH


def test_sla_scaler_by_hand() -> None:
    """4 a second of 990 tokens: 4 s of prefill a second, at 0.8: 5. A step of b requests of 1,040 tokens takes
    10 ms + 1.14 ms * b, so 35 ms allow 21; 4 * 100 tokens * 33.9 ms = 13.6 running, on one instance."""
    tables = PrefillTable.profile(LinearSteps()), DecodeTable.profile(LinearSteps())
    scaler = SlaScaler(SlaKnobs(tpot_slo_s=0.035, concurrency_max=256), *tables)
    assert scaler.concurrency(1040.0) == 21
    assert scaler.replicas(990.0, 100.0, 4.0) == (5, 1)
    assert scaler.replicas(990.0, 100.0, 8.0) == (10, 2)
    view = fleet(prefill(), decode())
    assert scaler.tick(view, 0.0)[0].reason is R.NO_DATA
    for index in range(40):
        scaler.on_arrival(request(990), index / 4)
        scaler.on_finish(request(990), 100, index / 4)
    actions = scaler.tick(view, 10.0)
    assert [(action.reason, getattr(action, "start", 0)) for action in actions] == [
        (R.SLA_DEMAND, 4),
        (R.SLA_UNCHANGED, 0),
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ThresholdKnobs(ttft_slo_s=1.0, low=0.9),
            "threshold low 0.9 is above high 0.8; allowed: minimum <= maximum",
        ),
        (lambda: SlaKnobs(tpot_slo_s=0.0, concurrency_max=1), "tpot_slo_s"),
    ],
)
def test_bad_knobs(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
