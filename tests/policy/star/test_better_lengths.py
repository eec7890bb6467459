"""A small fleet of decode steps alone: the better the lengths that STAR is told, the more even its loads, over seeds.

No engine and no memory limit, so that one run differs from another by the moves only: arrivals and lengths are those of
the seed, and dispatch sends each to the instance with the fewest tokens. What counts is the variance between instances
as a share of the squared mean, averaged over ticks (eq. 3).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from statistics import fmean

import numpy as np
import numpy.typing as npt
import pytest

from pla_sglang.policy.interface.fleet import DecodeBatch
from pla_sglang.policy.star.horizon import Horizon, HorizonKnobs, summaries
from pla_sglang.policy.star.select import DecodeInstance, SelectKnobs, best_move

Draw = Callable[[np.random.Generator], float]  # the length of an answer
Told = Callable[[npt.NDArray[np.float64], npt.NDArray[np.int64]], npt.NDArray[np.float64]]  # of rests and numbers
INSTANCES, REQUESTS_EACH, PROMPT_TOKENS = 4, 12, 300
TICKS, WARM_TICKS, STEPS, REST_TICKS = 300, 100, 25, 10
SEEDS = range(4)
ANSWERS: dict[str, tuple[Draw, float]] = {  # and the mean
    "shorter than the horizon": (lambda rng: rng.exponential(300), 300.0),
    "as long as the horizon": (lambda rng: rng.exponential(1500), 1500.0),
    "some at the limit": (lambda rng: 8000.0 if rng.random() < 0.15 else rng.exponential(500), 1625.0),
}


def exact(rests: npt.NDArray[np.float64], numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    return rests


def unknown(rests: npt.NDArray[np.float64], numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    return np.full(len(rests), np.nan)


def off(rests: npt.NDArray[np.float64], numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Off by a factor from 1/4 to 4, the same for a request all its life."""
    return rests * 4.0 ** (numbers % 101 / 50.0 - 1.0)


@dataclasses.dataclass
class Decodes:
    """What runs on one instance; columns of shape [requests]."""

    numbers: npt.NDArray[np.int64] = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    tokens: npt.NDArray[np.int64] = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    rests: npt.NDArray[np.float64] = dataclasses.field(default_factory=lambda: np.zeros(0))

    def add(self, number: int, tokens: int, rest: float) -> None:
        self.numbers, self.tokens = np.append(self.numbers, number), np.append(self.tokens, tokens)
        self.rests = np.append(self.rests, rest)

    def keep(self, which: npt.NDArray[np.bool_]) -> None:
        self.numbers, self.tokens, self.rests = self.numbers[which], self.tokens[which], self.rests[which]

    def step(self) -> None:
        self.tokens, self.rests = self.tokens + STEPS, self.rests - STEPS
        self.keep(self.rests > 0)


def move_one(fleet: list[Decodes], told: Told, tick: int, moved: dict[int, int], horizon: Horizon) -> None:
    """One tick of Algorithm 1."""
    batches = []
    for one in fleet:
        rested = np.array([tick - moved.get(int(number), -REST_TICKS) >= REST_TICKS for number in one.numbers], bool)
        rids = [str(number) for number in one.numbers]
        batches.append(DecodeBatch(rids, one.tokens, told(one.rests, one.numbers), rested))
    workers = [DecodeInstance(report, room_tokens=10**9) for report in summaries(batches, horizon)]
    move = best_move(workers, horizon, SelectKnobs()).move
    if move is not None:
        source, row = fleet[move.source], move.request
        moved[int(source.numbers[row])] = tick
        fleet[move.target].add(int(source.numbers[row]), int(source.tokens[row]), float(source.rests[row]))
        source.keep(np.arange(len(source.numbers)) != row)


def unevenness(answers: str, told: Told | None, seed: int, knobs: HorizonKnobs | None = None) -> float:
    """Mean variance between instances, of the squared mean load. ``told`` None: nothing moves."""
    rng, horizon = np.random.default_rng(seed), Horizon(knobs or HorizonKnobs())
    draw, mean_tokens = ANSWERS[answers]
    fleet, moved, number, found = [Decodes() for _ in range(INSTANCES)], dict[int, int](), 0, []
    for tick in range(TICKS):
        for _ in range(rng.poisson(INSTANCES * REQUESTS_EACH * STEPS / mean_tokens)):
            emptiest = min(fleet, key=lambda one: int(one.tokens.sum()))
            emptiest.add(number, 1 + int(rng.exponential(PROMPT_TOKENS)), 1.0 + draw(rng))
            number += 1
        if told is not None:
            move_one(fleet, told, tick, moved, horizon)
        for one in fleet:
            one.step()
        if tick >= WARM_TICKS:
            loads = np.array([one.tokens.sum() for one in fleet], dtype=float)
            found.append(float(loads.var() / max(1.0, loads.mean()) ** 2))
    return fmean(found)


@functools.cache
def of_seeds(answers: str, told: Told | None, knobs: HorizonKnobs | None = None) -> float:
    return fmean(unevenness(answers, told, seed, knobs) for seed in SEEDS)


@pytest.mark.parametrize("answers", list(ANSWERS))
def test_better_lengths_are_never_worse(answers: str) -> None:
    """By more than a twentieth, which is what the seeds differ by where errors hardly matter."""
    best, rough, none = (of_seeds(answers, told) for told in (exact, off, unknown))
    assert best < 1.05 * rough
    assert rough < 1.05 * none


@pytest.mark.parametrize("answers", list(ANSWERS))
def test_known_lengths_are_better_than_no_moves(answers: str) -> None:
    """A tenth at least. Where the loads to come are counted without arrivals, short answers find no target at all."""
    assert of_seeds(answers, exact) < 0.9 * of_seeds(answers, None)


@pytest.mark.parametrize("answers", list(ANSWERS))
def test_a_horizon_with_known_lengths_is_not_worse_than_none(answers: str) -> None:
    """Who looks ahead and knows the lengths does no worse than who knows them and looks at now alone, by a tenth."""
    assert of_seeds(answers, exact) < 1.1 * of_seeds(answers, exact, HorizonKnobs(steps=0))
