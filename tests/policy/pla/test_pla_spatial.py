"""PLA-Serve's pressure controller, spatial dispatcher and graph buckets.

Prefill takes 10 ms + 1 ms a token; the TTFT target is 1 s, so that 1 s of backlog is a pressure of 1.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fleets import apply, fleet, mixed, predictor, prefill, request

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.interface.decisions import SetLengthClass
from pla_sglang.policy.interface.fleet import FleetView, InstanceState
from pla_sglang.policy.interface.prefill import PrefillClass
from pla_sglang.policy.interface.reasons import FleetReason as R
from pla_sglang.policy.pla.fitted_boundary import FittedBoundary
from pla_sglang.policy.pla.graphs.layouts import Bucket, GridLayout, VariableLayout, token_steps
from pla_sglang.policy.pla.pressure import PressureController, PressureKnobs, percentile
from pla_sglang.policy.pla.spatial import SpatialDispatcher, SpatialKnobs

S, L = PrefillClass.SHORT, PrefillClass.LONG
KNOBS = PressureKnobs(ttft_slo_s=1.0, alpha=1.0, beta=0.5, gamma=0.1, tau=0.5, cool_down_s=10.0)


def pools(short_prompts: list[dict[str, Any]], long_prompts: list[dict[str, Any]]) -> FleetView:
    return fleet(
        *[prefill(length_class=S, **fields) for fields in short_prompts],
        *[prefill(length_class=L, **f) for f in long_prompts],
    )


def backlog(tokens: int, **fields: Any) -> dict[str, Any]:
    return {"queued_tokens": tokens, **fields}


def test_psi_by_hand() -> None:
    """1.0 * 0.5 s of backlog / 1 s + 0.5 * (1.4 - 1) - 0.1 * 0.8."""
    view = fleet(prefill(queued_tokens=490, ttft_ratio=1.4, utilisation=0.8))
    assert PressureController(KNOBS, predictor()).pressure(view.instances[0]) == pytest.approx(0.5 + 0.2 - 0.08)


def test_a_ttft_below_target_is_no_deviation() -> None:
    view = fleet(prefill(ttft_ratio=0.2))
    assert PressureController(KNOBS, predictor()).pressure(view.instances[0]) == 0.0


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([], 90, 0.0), ([3.0], 90, 3.0), ([1.0, 2.0], 90, 2.0), ([float(n) for n in range(1, 21)], 90, 18.0)],
)
def test_percentile(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == expected


TICKS: dict[str, tuple[FleetView, str | None, R]] = {
    "balanced": (pools([backlog(500)], [backlog(500)]), None, R.PRESSURE_BALANCED),
    "within hysteresis": (pools([backlog(740)], [backlog(490), {}]), None, R.PRESSURE_BALANCED),
    "short asks, the least loaded long leaves": (pools([backlog(900)], [backlog(90), {}]), "i2", R.PRESSURE_SHORT),
    "long asks": (pools([{}, backlog(9)], [backlog(900)]), "i0", R.PRESSURE_LONG),
    "the other pool keeps its minimum": (pools([backlog(900)], [{}]), None, R.PRESSURE_MINIMUM),
    "nearly idle: no ratio of small numbers": (pools([backlog(80)], [{}, {}]), None, R.PRESSURE_BALANCED),
    "it would be asked back": (pools([backlog(790), {}], [backlog(490), backlog(490)]), None, R.PRESSURE_RETURN),
    "it would be too busy": (pools([backlog(900)], [{"utilisation": 0.5}] * 2), None, R.PRESSURE_RETURN),
    "the asker is busier still": (
        pools([backlog(900, utilisation=1.0)], [{"utilisation": 0.48}] * 2),
        "i1",
        R.PRESSURE_SHORT,
    ),
    "deviation counts too": (pools([{"ttft_ratio": 2.0}], [{}, {}]), "i1", R.PRESSURE_SHORT),
    "nobody": (fleet(), None, R.PRESSURE_BALANCED),
    "a pool without members asks for nothing": (pools([], [backlog(50), {}]), None, R.PRESSURE_BALANCED),
}


@pytest.mark.parametrize(("view", "moved", "reason"), TICKS.values(), ids=TICKS)
def test_algorithm_2(view: FleetView, moved: str | None, reason: R) -> None:
    (action,) = PressureController(KNOBS, predictor()).tick(view, 0.0)
    assert action.reason is reason
    assert (action.instance.name if isinstance(action, SetLengthClass) else None) == moved


def test_cool_down() -> None:
    controller = PressureController(KNOBS, predictor())
    view = pools([backlog(900)], [{}, {}, {}])
    reasons = [controller.tick(view, now_s)[0].reason for now_s in (0.0, 9.9, 10.0)]
    assert reasons == [R.PRESSURE_SHORT, R.COOL_DOWN, R.PRESSURE_SHORT]


@pytest.mark.parametrize("seed", range(5))
def test_constant_load_moves_at_most_once_an_hour_after_settling(seed: int) -> None:
    """Six instances; 0.8 s of short and 2.4 s of long work arrive each second, shared by each pool, with 10 % noise."""
    rng = random.Random(seed)
    controller = PressureController(KNOBS, predictor())
    view = pools([{} for _ in range(3)], [{} for _ in range(3)])
    waiting_s = {instance.index: 0.0 for instance in view.instances}
    moves = []
    for second in range(2 * 3600):
        for length_class, work_s in ((S, 0.8), (L, 2.4)):
            members = [instance for instance in view.instances if instance.length_class is length_class]
            for member in members:
                arriving_s = work_s * rng.uniform(0.9, 1.1) / len(members)
                waiting_s[member.index] = max(0.0, waiting_s[member.index] + arriving_s - 1.0)
                member.queued_tokens = int(1000 * waiting_s[member.index])
                member.queued_prefills = int(waiting_s[member.index] > 0)
        actions = controller.tick(view, float(second))
        apply(view, actions, float(second))
        moves.append(sum(isinstance(action, SetLengthClass) for action in actions))
    assert sum(moves[3600:]) <= 1


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5000)), max_size=60), st.integers(1, 3))
def test_no_pool_falls_below_its_minimum(events: list[tuple[int, int]], minimum: int) -> None:
    controller = PressureController(dataclasses.replace(KNOBS, minimum=minimum, cool_down_s=0.0), predictor())
    view = pools([{}, {}, {}], [{}, {}, {}])
    for step, (index, tokens) in enumerate(events):
        view.instances[index].queued_tokens = tokens
        view.instances[index].queued_prefills = int(tokens > 0)
        apply(view, controller.tick(view, float(step)), float(step))
        short_prompts = sum(instance.length_class is S for instance in view.instances)
        assert minimum <= short_prompts <= 6 - minimum


def dispatcher(**knobs: Any) -> SpatialDispatcher:
    boundary = FittedBoundary(fixed_tokens=256)
    return SpatialDispatcher(SpatialKnobs(ttft_slo_s=1.0, **knobs), predictor(), boundary)


SPATIAL: dict[str, tuple[FleetView, Any, str | None, R]] = {
    "short": (pools([{}], [{}]), request(255), "i0", R.PLA_SHORT),
    "the boundary is long": (pools([{}], [{}]), request(256), "i1", R.PLA_LONG),
    "new tokens count": (pools([{}], [{}]), request(5000, cached={0: 4900}), "i0", R.PLA_SHORT),
    "short where its history is, in the long pool": (
        pools([{}], [{}]),
        request(5000, cached={1: 4900}),
        "i1",
        R.PLA_HOLDER,
    ),
    "too late there": (pools([{}], [backlog(9000)]), request(800, cached={1: 700}), "i0", R.PLA_RECOMPUTE),
    "the holder, up to what it saves": (pools([{}], [backlog(680)]), request(800, cached={1: 700}), "i1", R.PLA_HOLDER),
    "and no further": (pools([{}], [backlog(700)]), request(800, cached={1: 700}), "i0", R.PLA_RECOMPUTE),
    "of its own class": (pools([backlog(50), {}], [{}]), request(800, cached={0: 700}), "i0", R.PLA_SHORT),
    "the longest history": (
        pools([{}, {}], [{}, {}]),
        request(5000, cached={0: 64, 2: 4096, 3: 4032}),
        "i2",
        R.PLA_LONG,
    ),
    "the next to it": (
        pools([{}], [backlog(200), {}]),
        request(5000, cached={1: 4096, 2: 4032}),
        "i2",
        R.PLA_RECOMPUTE,
    ),
    "what all hold: by class": (pools([{}], [{}]), request(900, cached={0: 512, 1: 512}), "i1", R.PLA_LONG),
    "and the short ones": (pools([{}], [{}]), request(700, cached={0: 512, 1: 512}), "i0", R.PLA_SHORT),
    "least backlog": (pools([backlog(9), {}], [{}]), request(9), "i1", R.PLA_SHORT),
    "spill": (pools([backlog(1500)], [{}]), request(9), "i1", R.PLA_SPILL),
    "over three quarters of the target": (pools([backlog(740)], [{}]), request(9), "i1", R.PLA_SPILL),
    "up to that there is no need": (pools([backlog(720)], [{}]), request(9), "i0", R.PLA_SHORT),
    "of what is left of it": (pools([backlog(360)], [{}]), request(9, arrival_s=-0.5), "i1", R.PLA_SPILL),
    "the others have no time either": (pools([backlog(900)], [backlog(740)]), request(9), "i0", R.PLA_SHORT),
    "no spill where both are late": (pools([backlog(1500)], [backlog(1400)]), request(9), "i0", R.PLA_SHORT),
    "the own pool is gone": (pools([], [backlog(1400)]), request(9), "i0", R.PLA_SPILL),
    "instances without class take both": (fleet(prefill(), prefill(length_class=L)), request(9), "i0", R.PLA_SHORT),
    "nobody": (fleet(), request(9), None, R.NO_INSTANCE),
}


@pytest.mark.parametrize(("view", "ask", "chosen", "reason"), SPATIAL.values(), ids=SPATIAL)
def test_spatial_dispatch(view: FleetView, ask: Any, chosen: str | None, reason: R) -> None:
    answer = dispatcher().dispatch(ask, view, 0.0)
    assert (answer.prefill.name if answer.prefill else None, answer.reason) == (chosen, reason)


def test_decodes_of_spatial_pools() -> None:
    router = dispatcher()
    view = fleet(mixed(length_class=S), mixed(length_class=L, context_tokens=5))
    kept = router.place_decode(request(prefilled_on=view.instances[1]), view, 0.0)
    assert (kept.decode, kept.reason) == (view.instances[1], R.KEEP_LOCAL)
    view.set_state(view.instances[1], InstanceState.DEAD)
    moved = router.place_decode(request(prefilled_on=view.instances[1]), view, 0.0)
    assert (moved.decode, moved.reason) == (view.instances[0], R.LEAST_TOKENS)


# Without a limit to padding: what holds a batch at all. The limit has its own tests in tests/policy/buckets.
GRID = GridLayout(max_padding=math.inf)
VARIABLE = VariableLayout([64, 128, 256, 512], [4, 16], longest=256, max_padding=math.inf)


@pytest.mark.parametrize(
    ("lengths", "grid", "variable"),
    [
        ([8], Bucket(8, 1, 8), Bucket(64, 4, 256)),
        ([9], Bucket(16, 1, 16), Bucket(64, 4, 256)),
        ([60, 9, 9], Bucket(64 * 4, 4, 64), Bucket(128, 4, 256)),
        ([256, 256], Bucket(512, 2, 256), Bucket(512, 4, 256)),
        ([257], None, None),
        ([1] * 17, Bucket(8 * 32, 32, 8), None),
        ([1] * 65, None, None),
        ([200, 200, 200], Bucket(1024, 4, 256), None),
        ([], None, None),
    ],
)
def test_nearest_graph(lengths: list[int], grid: Bucket | None, variable: Bucket | None) -> None:
    assert GRID.nearest(lengths) == grid
    assert VARIABLE.nearest(lengths) == variable


@given(st.lists(st.integers(1, 300), min_size=1, max_size=70))
def test_the_nearest_is_the_smallest_that_holds_the_batch(lengths: list[int]) -> None:
    for layout in (GRID, VARIABLE):
        holds = [
            bucket
            for bucket in layout.buckets()
            if bucket.length >= max(lengths) and bucket.slots >= len(lengths) and (bucket.tokens >= sum(lengths))
        ]
        found = layout.nearest(lengths)
        assert (found is None) == (not holds)
        if found is not None:
            assert found in holds
            assert (found.tokens, found.slots) == min((bucket.tokens, bucket.slots) for bucket in holds)


def test_the_paper_s_grid_wastes_more_on_mixed_lengths() -> None:
    rng = random.Random(2)
    variable = VariableLayout(token_steps(4096), [4, 16, 64], longest=256, max_padding=math.inf)
    wastes: dict[str, list[float]] = {"grid": [], "variable": []}
    for _ in range(300):
        lengths = [min(256, 1 + int(rng.lognormvariate(4.0, 1.0))) for _ in range(rng.randint(2, 32))]
        for name, layout in (("grid", GRID), ("variable", variable)):
            bucket = layout.nearest(lengths)
            assert bucket is not None
            wastes[name].append(bucket.tokens / sum(lengths))
    mean = {name: sum(values) / len(values) for name, values in wastes.items()}
    assert mean["variable"] < 1.15
    assert mean["grid"] > 2.0


def test_token_steps() -> None:
    steps = token_steps(1000)
    assert (steps[0], steps[-1]) == (8, 1000)
    assert all(step % 8 == 0 for step in steps)
    assert all(after <= max(before + 8, 1.125 * before) for before, after in itertools.pairwise(steps))
    assert token_steps(20) == [8, 16, 20]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GridLayout([16, 8]), "grid lengths must be rising"),
        (lambda: GridLayout([8], []), "grid batches"),
        (lambda: VariableLayout([0, 8], [1], 8), "token buckets"),
        (lambda: token_steps(7), "token buckets, largest"),
        (lambda: PressureKnobs(ttft_slo_s=0), "ttft_slo_s"),
        (lambda: dataclasses.replace(KNOBS, minimum=0), "minimum"),
        (lambda: dataclasses.replace(KNOBS, percentile=101), "percentile"),
        (lambda: SpatialKnobs(1.0, spill_at=0.0), "spill_at"),
        (lambda: SpatialKnobs(1.0, spill_at=1.1), "spill_at"),
    ],
)
def test_bad_values(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
