"""STAR: summaries against step-by-step simulation, selection against brute force, and what must always hold."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.fleets import decode, fleet, prefill, request

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.interface.decisions import Migrate
from pla_sglang.policy.interface.fleet import DecodeBatch, FleetView
from pla_sglang.policy.interface.reasons import FleetReason as R
from pla_sglang.policy.interface.remaining_length import (
    EndedAnswer,
    NoPrediction,
    Oracle,
    RunningAnswer,
    RunningAnswers,
)
from pla_sglang.policy.star.horizon import Horizon, HorizonKnobs, expect_arrivals, summaries, summarise
from pla_sglang.policy.star.policy import StarKnobs, StarRescheduler
from pla_sglang.policy.star.predictors import PAPER_BINS, Binned, Noisy
from pla_sglang.policy.star.select import DecodeInstance, SelectKnobs, best_move, classify, objective

Rows = list[tuple[str, int, float | None]]
SMALL = HorizonKnobs(steps=40, points=8, half_life_steps=20.0)
ANY_GAIN = SelectKnobs(theta=0.1, min_gain=0.0, migrate_base_s=0.02, migrate_s_per_token=0.0)


def trace(tokens: int, remaining: float, steps: Sequence[float]) -> list[float]:
    """x_j of one request on the grid."""
    return [tokens + step if step < remaining else 0.0 for step in steps]


def reduction(
    source: Sequence[float], target: Sequence[float], moved: Sequence[float], weights: Sequence[float], instances: int
) -> float:
    """By how much the move lowers the objective, by definition."""
    total = 0.0
    for held, other, part, weight in zip(source, target, moved, weights, strict=True):
        total += weight * part * (held - other - part)
    return 2.0 / instances * total


def worker(rows: Rows, horizon: Horizon, room: int = 10**6, **fields: Any) -> DecodeInstance:
    return DecodeInstance(summarise(DecodeBatch.of(rows), horizon), room_tokens=room, **fields)


LOADS = st.lists(st.tuples(st.integers(1, 500), st.one_of(st.none(), st.integers(1, 60).map(float))), max_size=6).map(
    lambda pairs: [(f"r{index}", *pair) for index, pair in enumerate(pairs)]
)


@given(LOADS)
def test_a_summary_is_the_step_by_step_future(rows: Rows) -> None:
    horizon = Horizon(SMALL)
    summary = summarise(DecodeBatch.of(rows), horizon)
    traces = [trace(tokens, float("inf") if left is None else left, list(horizon.steps)) for _, tokens, left in rows]
    expected = np.sum(traces, axis=0) if traces else np.zeros(len(horizon.steps))
    assert summary.loads == pytest.approx(expected)
    assert summary.weighted == pytest.approx(float(horizon.beta @ expected[1:]))
    assert summary.ends.tolist() == [sum(value > 0 for value in row) for row in traces]


@given(st.lists(LOADS, min_size=1, max_size=5), st.sampled_from([0, 40]))
def test_workers_summed_up_together_are_each_as_if_alone(batches: list[Rows], steps: int) -> None:
    horizon = Horizon(dataclasses.replace(SMALL, steps=steps))
    for rows, together in zip(batches, summaries([DecodeBatch.of(rows) for rows in batches], horizon), strict=True):
        alone = summarise(DecodeBatch.of(rows), horizon)
        assert together.batch.rids == alone.batch.rids
        for field in ("loads", "sum_wn", "sum_wtn", "peak", "largest", "ends"):
            assert np.array_equal(getattr(together, field), getattr(alone, field)), field
        assert together.weighted == pytest.approx(alone.weighted, rel=1e-12)


def with_arrivals(workers: list[DecodeInstance], horizon: Horizon) -> list[DecodeInstance]:
    reports = expect_arrivals([one.summary for one in workers], horizon)
    return [dataclasses.replace(one, summary=report) for one, report in zip(workers, reports, strict=True)]


def expected_loads(batches: list[Rows], horizon: Horizon) -> npt.NDArray[np.float64]:
    return np.stack([one.summary.loads for one in with_arrivals([worker(rows, horizon) for rows in batches], horizon)])


def variance_objective(batches: list[Rows], horizon: Horizon) -> float:
    return objective(expected_loads(batches, horizon), horizon)


def brute_force(batches: list[Rows], horizon: Horizon, knobs: SelectKnobs, room: int) -> float:
    """Best reduction over all feasible moves, by carrying each one out and computing eq. 4 anew."""
    workers = [worker(rows, horizon, room) for rows in batches]
    overloaded, underloaded = classify(with_arrivals(workers, horizon), knobs.theta)
    best, before, expected = 0.0, variance_objective(batches, horizon), expected_loads(batches, horizon)
    for source, target in itertools.product(overloaded, underloaded):
        for row in batches[source]:
            _, tokens, remaining = row
            left = float(knobs.unknown_tokens) if remaining is None else remaining
            if source == target or (remaining is not None and remaining <= knobs.migrate_base_s / 0.02):
                continue
            steps = list(horizon.steps)
            alive = [step for step in steps if remaining is None or step < remaining]
            loads = workers[target].summary.loads
            together = [loads[steps.index(step)] + step + tokens for step in alive]
            limit = knobs.memory_share * room
            if loads[0] + tokens + left > limit or max(together) > limit:
                continue
            moved = np.array(trace(tokens, float("inf") if remaining is None else remaining, steps))
            after = expected.copy()  # arrivals stay where they were expected
            after[source] -= moved
            after[target] += moved
            best = max(best, before - objective(after, horizon))
    return best


@settings(deadline=None, max_examples=150)
@given(st.lists(LOADS, min_size=2, max_size=5), st.sampled_from([300, 1500, 10**6]), st.sampled_from([0, 40]))
def test_the_selection_is_the_best_feasible_move(batches: list[Rows], room: int, steps: int) -> None:
    horizon = Horizon(dataclasses.replace(SMALL, steps=steps))
    knobs = dataclasses.replace(ANY_GAIN, unknown_tokens=30)
    move = best_move([worker(rows, horizon, room) for rows in batches], horizon, knobs).move
    expected = brute_force(batches, horizon, knobs, room)
    scale = 1e-9 * max(1.0, variance_objective(batches, horizon))
    assert (0.0 if move is None else move.gain) == pytest.approx(expected, rel=1e-6, abs=scale)


@given(st.lists(LOADS, min_size=2, max_size=4))
def test_the_gain_is_the_definition(batches: list[Rows]) -> None:
    horizon = Horizon(SMALL)
    workers = [worker(rows, horizon) for rows in batches]
    move = best_move(workers, horizon, ANY_GAIN).move
    if move is None:
        return
    _, tokens, left = batches[move.source][move.request]
    moved = trace(tokens, float("inf") if left is None else left, list(horizon.steps))
    loads = expected_loads(batches, horizon)
    source, target = (loads[index].tolist() for index in (move.source, move.target))
    expected = reduction(source, target, moved, list(horizon.weights), len(workers))
    assert move.gain == pytest.approx(expected, abs=1e-6)


@given(st.lists(LOADS, min_size=2, max_size=4))
def test_a_move_brings_at_least_its_gain(batches: list[Rows]) -> None:
    """Arrivals that are spread anew after the move can but lower the objective further."""
    horizon = Horizon(SMALL)
    move = best_move([worker(rows, horizon) for rows in batches], horizon, ANY_GAIN).move
    if move is None:
        return
    before = variance_objective(batches, horizon)
    after = [list(rows) for rows in batches]
    after[move.target].append(after[move.source].pop(move.request))
    assert before - variance_objective(after, horizon) >= move.gain - 1e-9 * max(1.0, before)


@given(st.lists(LOADS, min_size=2, max_size=5))
def test_arrivals_fill_the_lowest_loads_to_one_level(batches: list[Rows]) -> None:
    horizon = Horizon(SMALL)
    loads = np.stack([worker(rows, horizon).summary.loads for rows in batches])
    filled = expected_loads(batches, horizon)
    assert filled.sum(axis=0) == pytest.approx(np.maximum(loads.sum(axis=0), loads[:, 0].sum()))
    raised = filled > loads + 1e-9 * filled.max()
    for step in range(loads.shape[1]):
        if raised[:, step].any():
            assert filled[raised[:, step], step] == pytest.approx(filled[:, step].min())
    assert np.array_equal(filled[:, 0], loads[:, 0])


@given(st.lists(LOADS, min_size=2, max_size=5))
def test_without_lengths_nothing_ends_and_no_arrival_is_expected(batches: list[Rows]) -> None:
    horizon = Horizon(SMALL)
    unknown: list[Rows] = [[(rid, tokens, None) for rid, tokens, _ in rows] for rows in batches]
    reports = summaries([DecodeBatch.of(rows) for rows in unknown], horizon)
    assert expect_arrivals(reports, horizon) is reports


def test_answers_shorter_than_the_horizon_leave_targets() -> None:
    """Line 15 compares the load now with the one to come, which without arrivals is next to nothing here."""
    horizon = Horizon(HorizonKnobs())
    rows: Rows = [(f"r{index}", 500, 300.0) for index in range(12)]
    workers = [worker(rows[:count], horizon) for count in (12, 8, 8)]
    assert classify(workers, 0.1)[1] == []
    move = best_move(workers, horizon, ANY_GAIN).move
    assert move is not None
    assert move.source == 0


# Worked examples. Without prediction: loads 90 and 10, variance 1,600; moving 40 levels them and takes all of it.
NOW = Horizon(HorizonKnobs(steps=0))


def test_current_load_by_hand() -> None:
    workers = [worker([("a", 40, None), ("b", 50, None)], NOW), worker([("c", 10, None)], NOW)]
    knobs = dataclasses.replace(ANY_GAIN, unknown_tokens=0)
    move = best_move(workers, NOW, knobs).move
    assert move is not None
    assert (move.source, move.target, move.request) == (0, 1, 0)
    assert move.gain == pytest.approx(1600.0)


def test_prediction_prefers_the_request_that_stays() -> None:
    """Two requests of equal size: one is about to end, so that moving it would level nothing for long."""
    horizon = Horizon(HorizonKnobs(steps=100, points=10))
    workers = [worker([("ends", 500, 3.0), ("stays", 500, 1000.0), ("stays too", 500, 1000.0)], horizon)]
    workers.append(worker([], horizon))
    move = best_move(workers, horizon, ANY_GAIN).move
    assert move is not None
    assert move.request == 1


CLASSES: dict[str, tuple[list[int], list[int], list[int]]] = {
    "level": ([100, 100, 100], [], [0, 1, 2]),
    "one heavy": ([200, 100, 90], [0], [1, 2]),
    "within theta": ([105, 100, 95], [], [0, 1, 2]),
    "empty fleet": ([0, 0], [], []),
}


@pytest.mark.parametrize(("loads", "over", "under"), CLASSES.values(), ids=CLASSES)
def test_classification(loads: list[int], over: list[int], under: list[int]) -> None:
    workers = [worker([("r", load, None)] if load else [], NOW) for load in loads]
    assert classify(workers, 0.1) == (over, under)


def test_an_instance_that_is_overloaded_now_is_a_source_though_its_future_is_not() -> None:
    horizon = Horizon(HorizonKnobs(steps=1000, points=10))
    soon_over = worker([("a", 600, 20.0), ("b", 600, 20.0)], horizon)
    others = [worker([("c", 300, 2000.0)], horizon), worker([("d", 300, 2000.0)], horizon)]
    workers = [soon_over, *others]
    assert soon_over.summary.weighted < others[0].summary.weighted  # line 14 would not look at it
    overloaded, _ = classify(workers, 0.1)
    assert 0 in overloaded


def star(**changes: Any) -> StarRescheduler:
    knobs = StarKnobs(horizon=SMALL, select=ANY_GAIN)
    return StarRescheduler(dataclasses.replace(knobs, **changes))


def loaded(*batches: Rows, room: int = 10_000, **fields: Any) -> FleetView:
    """No two requests have a prefix in common."""
    made = [DecodeBatch.of(rows) for rows in batches]
    used = [{"kv_used_tokens": int(one.tokens.sum()), **fields} for one in made]
    view = fleet(*[decode(kv_capacity_tokens=room, **one) for one in used])
    return FleetView(view.instances, decodes=lambda instance: made[instance.index])


HEAVY: Rows = [("a", 400, 50.0), ("b", 300, 50.0), ("c", 100, 50.0)]
TICKS: dict[str, tuple[FleetView, SelectKnobs, str | None, R]] = {
    "move": (loaded(HEAVY, []), ANY_GAIN, "a", R.STAR_MIGRATE),
    "balanced": (loaded(HEAVY, HEAVY), ANY_GAIN, None, R.STAR_BALANCED),
    "one instance": (loaded(HEAVY), ANY_GAIN, None, R.STAR_BALANCED),
    "nobody": (loaded(), ANY_GAIN, None, R.STAR_BALANCED),
    "nothing fits": (loaded(HEAVY, [], room=100), ANY_GAIN, None, R.STAR_NO_CANDIDATE),
    "only the small one fits": (loaded(HEAVY, [], room=200), ANY_GAIN, "c", R.STAR_MIGRATE),
    "it must hold what is still to come": (loaded(HEAVY, [], room=150), ANY_GAIN, None, R.STAR_NO_CANDIDATE),
    "arrivals on their way take room": (
        loaded(HEAVY, [], room=500, waiting_decode_tokens=300),
        ANY_GAIN,
        "c",
        R.STAR_MIGRATE,
    ),
    "near completion: 50 steps of 20 ms are less than the move takes": (
        loaded(HEAVY, []),
        dataclasses.replace(ANY_GAIN, migrate_base_s=1.0),
        None,
        R.STAR_NO_CANDIDATE,
    ),
    "too little gain": (
        loaded([("a", 500, 50.0), ("b", 30, 50.0)], [("c", 400, 50.0)]),
        dataclasses.replace(ANY_GAIN, min_gain=0.9),
        None,
        R.STAR_NO_GAIN,
    ),
}


@pytest.mark.parametrize(("view", "select", "rid", "reason"), TICKS.values(), ids=TICKS)
def test_tick(view: FleetView, select: SelectKnobs, rid: str | None, reason: R) -> None:
    (action,) = star(select=select).tick(view, 0.0)
    assert action.reason is reason
    assert (action.rid if isinstance(action, Migrate) else None) == rid


def test_several_moves_in_one_tick_see_each_other() -> None:
    view = loaded([("a", 400, 50.0), ("b", 400, 50.0), ("c", 400, 50.0)], [], [])
    moves = star(moves=5).tick(view, 0.0)
    assert [(move.rid, move.target.name) for move in moves if isinstance(move, Migrate)] == [("a", "i1"), ("b", "i2")]


def test_a_moved_request_rests() -> None:
    policy = star(rest_s=5.0)
    view = loaded([("a", 400, 50.0), ("b", 390, 50.0)], [])
    asked = [policy.tick(view, now_s)[0] for now_s in (0.0, 4.9, 5.0)]
    assert [action.rid for action in asked if isinstance(action, Migrate)] == ["a", "b", "a"]
    policy.on_finish(request(rid="a"), 10, 5.1)
    again = policy.tick(view, 5.2)[0]
    assert isinstance(again, Migrate)
    assert again.rid == "a"  # another request of that name


@settings(deadline=None, max_examples=40)
@given(LOADS, LOADS)
def test_requests_that_are_not_listed_count_as_such_of_unknown_length(listed: Rows, rest: Rows) -> None:
    horizon = Horizon(SMALL)
    unknown: Rows = [(f"u{rid}", tokens, None) for rid, tokens, _ in rest]
    short = DecodeBatch.of(listed)
    short.unlisted_requests, short.unlisted_tokens = len(rest), sum(row[1] for row in rest)
    found, whole = summarise(short, horizon), summarise(DecodeBatch.of(listed + unknown), horizon)
    assert found.loads == pytest.approx(whole.loads)
    assert found.peak == pytest.approx(whole.peak)
    assert found.weighted == pytest.approx(whole.weighted)


def test_an_instance_whose_requests_are_not_listed_is_no_target() -> None:
    """It is as full as the other one, and has said nothing of what runs there."""
    view = loaded(HEAVY, [], room=10_000)
    assert isinstance(star().tick(view, 0.0)[0], Migrate)
    silent = view.decodes(view.instances[1])
    silent.unlisted_requests, silent.unlisted_tokens = 3, 800
    assert star().tick(view, 10.0)[0].reason is R.STAR_BALANCED


def test_moves_of_one_tick_keep_what_is_not_listed() -> None:
    view = loaded([("a", 400, 50.0), ("b", 400, 50.0), ("c", 400, 50.0)], [], [])
    view.decodes(view.instances[1]).unlisted_tokens = 500
    moves = star(moves=5).tick(view, 0.0)
    assert [(move.rid, move.target.name) for move in moves if isinstance(move, Migrate)] == [("a", "i2")]


def test_prefill_instances_take_no_part() -> None:
    made = DecodeBatch.of(HEAVY)
    view = FleetView(fleet(prefill(), decode()).instances, decodes=lambda instance: made)
    assert star().tick(view, 0.0)[0].reason is R.STAR_BALANCED


@pytest.mark.parametrize(
    ("name", "used_tokens", "waiting_tokens", "moves"),
    [
        # 300 tokens, and 50 to come of each, into 95 % of 1,500; of three prompts of 450 the target holds 1,350 or less
        ("nothing in common", 1350, 0, False),
        ("400 tokens in common, twice", 550, 0, True),
        ("arrivals on their way take room", 550, 300, True),
        ("until there is none", 550, 400, False),
    ],
)
def test_a_prefix_that_requests_share_takes_room_once(
    name: str, used_tokens: int, waiting_tokens: int, moves: bool
) -> None:
    source: Rows = [(f"s{number}", 300, 50.0) for number in range(9)]
    target: Rows = [(f"t{number}", 450, 50.0) for number in range(3)]
    view = loaded(source, target, room=1500)
    view.instances[0].kv_capacity_tokens = 10_000
    view.instances[1].kv_used_tokens = used_tokens
    view.instances[1].waiting_decode_tokens = waiting_tokens
    (action,) = star().tick(view, 0.0)
    assert action.reason is (R.STAR_MIGRATE if moves else R.STAR_NO_CANDIDATE)


@settings(deadline=None, max_examples=60)
@given(st.lists(LOADS, min_size=2, max_size=5), st.integers(50, 2000))
def test_never_to_a_target_that_cannot_hold_it(batches: list[Rows], room: int) -> None:
    view = loaded(*batches, room=room)
    planned = [sum(row[1] for row in rows) for rows in batches]
    for move in star(moves=10).tick(view, 0.0):
        if isinstance(move, Migrate):
            rows = {row[0]: row for row in batches[move.source.index]}
            remaining = rows[move.rid][2]
            planned[move.target.index] += move.tokens
            planned[move.source.index] -= move.tokens
            left = ANY_GAIN.unknown_tokens if remaining is None else remaining
            assert planned[move.target.index] + left <= 0.95 * room


@settings(deadline=None, max_examples=30)
@given(st.lists(LOADS, min_size=2, max_size=5))
@example([[], [("r0", 186, None)]])  # a swap brings nothing, and rounding made it 1e-13
def test_moves_come_to_an_end(batches: list[Rows]) -> None:
    """Each move lowers the objective, so that a load that stands still is not moved about for ever."""
    placed = [list(rows) for rows in batches]
    policy = star(rest_s=0.0)
    for _ in range(60):
        view = loaded(*[[(f"{i}/{row[0]}", *row[1:]) for row in rows] for i, rows in enumerate(placed)])
        (action,) = policy.tick(view, 0.0)
        if not isinstance(action, Migrate):
            return
        source, rid = action.rid.split("/", 1)
        row = next(row for row in placed[int(source)] if row[0] == rid)
        placed[int(source)].remove(row)
        placed[action.target.index].append(row)
    raise AssertionError("still moving after 60 ticks")


def answers(rids: Sequence[str], known: Sequence[float] | npt.NDArray[np.float64]) -> RunningAnswers:
    return RunningAnswers.of(RunningAnswer(rid, 0, left) for rid, left in zip(rids, known, strict=True))


def test_predictors() -> None:
    known = np.array([100.0, 5000.0, 40_000.0, np.nan])
    rids = ["a", "b", "c", "d"]
    assert Oracle().predict(answers(rids, known)).tolist()[:3] == known.tolist()[:3]
    assert np.isnan(NoPrediction().predict(answers(rids, known))).all()
    assert Binned(PAPER_BINS[2]).predict(answers(rids, known))[:3].tolist() == [4096.0, 4096.0, 20480.0]
    assert Binned(PAPER_BINS[6]).predict(answers(rids, known))[:3].tolist() == [1024.0, 5120.0, 24576.0]
    assert np.isnan(Binned(PAPER_BINS[4]).predict(answers(rids, known))[3])


def test_noise_has_the_asked_size_and_stays_with_its_request() -> None:
    noisy = Noisy(1000.0, random.Random(1))
    rids = [f"r{index}" for index in range(4000)]
    known = np.full(4000, 50_000.0)
    first = noisy.predict(answers(rids, known))
    assert np.abs(first - known).mean() == pytest.approx(1000.0, rel=0.05)
    assert (noisy.predict(answers(rids, known)) == first).all()
    noisy.observe_end(EndedAnswer("r0", 5, whole=True))
    assert noisy.predict(answers(["r0"], known[:1]))[0] != first[0]
    assert noisy.predict(answers(["x"], np.array([1.0]))).min() >= 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SelectKnobs(theta=-1), "theta"),
        (lambda: SelectKnobs(memory_share=1.1), "memory_share"),
        (lambda: HorizonKnobs(points=0), "points"),
        (lambda: StarKnobs(moves=0), "moves"),
        (lambda: Binned([1.0]), "two rising edges"),
        (lambda: Noisy(-1.0, random.Random(1)), "mae_tokens"),
    ],
)
def test_bad_knobs(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
