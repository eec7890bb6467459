"""Preemptive SRPT on one server: by hand, against every order of few jobs, and against theory."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.lab.fluid_srpt import fluid_srpt
from pla_sglang.common.errors import ConfigError


def test_fluid_srpt_by_hand() -> None:
    """4 s of work at 0; 1 s at 1 interrupts it; 2 s at 2 does too, as 3 s are left of the first."""
    assert fluid_srpt([(0.0, 4.0), (1.0, 1.0), (2.0, 2.0)]) == [7.0, 1.0, 2.0]
    assert fluid_srpt([]) == []
    assert fluid_srpt([(5.0, 1.0), (9.0, 1.0)]) == [1.0, 1.0]


def served(arrivals: list[tuple[float, float]], order: tuple[int, ...]) -> float:
    now_s, total_s = 0.0, 0.0
    for index in order:
        now_s = max(now_s, arrivals[index][0]) + arrivals[index][1]
        total_s += now_s - arrivals[index][0]
    return total_s


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 5)), min_size=1, max_size=5))
def test_no_order_without_interruption_is_better(jobs: list[tuple[float, float]]) -> None:
    arrivals = sorted(jobs)
    best_s = min(served(arrivals, order) for order in itertools.permutations(range(len(arrivals))))
    assert sum(fluid_srpt(arrivals)) <= best_s + 1e-9


def test_fluid_srpt_against_theory() -> None:
    """M/M/1 under SRPT at load 0.7: mean response over mean service is 2.13 (Schrage and Miller's integral, evaluated
    numerically here), against 3.33 under first come first served."""
    rng = random.Random(11)
    now_s, arrivals = 0.0, []
    for _ in range(200_000):
        now_s += rng.expovariate(0.7)
        arrivals.append((now_s, rng.expovariate(1.0)))
    measured = sum(fluid_srpt(arrivals)) / len(arrivals)
    assert measured == pytest.approx(schrage_miller_mm1(0.7), rel=0.03)


def schrage_miller_mm1(load: float) -> float:
    """E[T] = int f(x) [ (lambda/2) m2(x) / (1-rho(x))^2 + int_0^x dt/(1-rho(t)) ] dx for exponential service."""
    step, total, residence = 0.001, 0.0, 0.0
    for index in range(1, 25_000):
        x = index * step
        tail = math.exp(-x)
        rho = load * (1 - tail * (1 + x))
        second = 2 - tail * (x * x + 2 * x + 2) + x * x * tail  # E[min(S, x)^2]
        residence += step / (1 - rho)
        total += tail * step * (load * second / 2 / (1 - rho) ** 2 + residence)
    return total


@pytest.mark.parametrize(("arrivals", "message"), [([(1.0, 1.0), (0.0, 1.0)], "arrival_s"), ([(0.0, 0.0)], "work_s")])
def test_bad_arrivals(arrivals: list[tuple[float, float]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fluid_srpt(arrivals)
