"""DOPD's closed forms against the paper's own figures, and the tables they read.

Table I of the paper: one H100, Llama-70B-FP8; milliseconds of one prefill, and of one decode step at a concurrency.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fleets import LinearSteps

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.common.tables import DecodeTable, PrefillTable
from pla_sglang.policy.dopd.ratio import batch_timeout_s, kingman_wait_s, optimal_ratio, servers_for_wait, split_cv2

LENGTHS = [100, 200, 700, 1200, 1700]
TTFT = PrefillTable(LENGTHS, [0.036, 0.046, 0.125, 0.193, 0.269])
TPOT = DecodeTable(
    [104, 200, 248],
    LENGTHS,
    [
        [0.028, 0.031, 0.033, 0.035, 0.037],
        [0.045, 0.046, 0.047, 0.050, 0.053],
        [0.047, 0.049, 0.053, 0.057, 0.061],
    ],
)


@pytest.mark.parametrize(
    ("input_tokens", "output_tokens", "concurrency", "paper"), [(1000, 150, 235, 4.58), (3000, 300, 78, 3.18)]
)
def test_ratio_of_figure_6(input_tokens: int, output_tokens: int, concurrency: int, paper: float) -> None:
    """From Table I and the concurrency that section VI-B3 states; 3,000 tokens lie beyond the table."""
    found = optimal_ratio(
        prefill_s=TTFT.at(input_tokens),
        step_s=TPOT.at(concurrency, input_tokens + output_tokens / 2),
        output_tokens=output_tokens,
        concurrency=concurrency,
    )
    assert found == pytest.approx(paper, rel=0.05)


@given(st.floats(1e-3, 10), st.floats(1e-3, 1), st.floats(1, 10_000), st.floats(1, 1000))
def test_eq_15_balances_both_sides(prefill_s: float, step_s: float, output: float, concurrency: float) -> None:
    ratio = optimal_ratio(prefill_s=prefill_s, step_s=step_s, output_tokens=output, concurrency=concurrency)
    assert ratio / prefill_s == pytest.approx(concurrency / (step_s * output))


def test_tables_give_back_what_was_measured() -> None:
    for length, seconds in zip(LENGTHS, TTFT.seconds, strict=True):
        assert TTFT.at(length) == pytest.approx(seconds)
    for batch, row in zip(TPOT.batches, TPOT.seconds, strict=True):
        for length, seconds in zip(LENGTHS, row, strict=True):
            assert TPOT.at(batch, length) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("length", "expected"), [(950, 0.159), (2200, 0.345), (50, 0.031), (-10_000, 0.2 * 0.036)], ids=str
)
def test_prefill_between_and_beyond(length: float, expected: float) -> None:
    assert TTFT.at(length) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("batch", "length", "expected"),
    [(152, 700, 0.040), (224, 950, (0.0485 + 0.055) / 2), (104, 2200, 0.039), (8, 700, 0.019), (-99, 100, 0.2 * 0.028)],
)
def test_decode_between_and_beyond(batch: float, length: float, expected: float) -> None:
    assert TPOT.at(batch, length) == pytest.approx(expected, rel=1e-6)


def test_tables_from_a_profile() -> None:
    assert PrefillTable.profile(LinearSteps()).at(1000) == pytest.approx(1.010)
    assert DecodeTable.profile(LinearSteps()).at(100, 1000) == pytest.approx(0.010 + 0.01 + 0.1)


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("one point", lambda: PrefillTable([1], [1.0]), "two rising values"),
        ("not rising", lambda: PrefillTable([2, 2], [1.0, 1.0]), "two rising values"),
        ("other length", lambda: PrefillTable([1, 2], [1.0]), "2 lengths but 1 times"),
        ("zero time", lambda: PrefillTable([1, 2], [1.0, 0.0]), "above 0"),
        ("ragged", lambda: DecodeTable([1, 2], [1, 2], [[1.0, 1.0], [1.0]]), "2 rows of 2 times"),
        (
            "no output",
            lambda: optimal_ratio(prefill_s=1, step_s=1, output_tokens=0, concurrency=1),
            "output_tokens 0 is out of range; allowed: above 0",
        ),
    ],
)
def test_bad_values(name: str, make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_kingman_is_exact_where_theory_is() -> None:
    assert kingman_wait_s(5.0, 0.1, 1.0, 1.0) == pytest.approx(0.1)  # M/M/1: rho/(1-rho) * E[S]
    assert kingman_wait_s(5.0, 0.1, 1.0, 0.0) == pytest.approx(0.05)  # M/D/1: half of it
    assert kingman_wait_s(10.0, 0.1, 1.0, 1.0) == float("inf")


@given(st.floats(0.1, 50), st.floats(0.01, 1), st.floats(0, 5), st.floats(0, 5))
def test_servers_are_enough_and_one_less_is_not(rate: float, service_s: float, ca2: float, cs2: float) -> None:
    budget_s = 1.5 * service_s
    count = servers_for_wait(rate, service_s, budget_s=budget_s, arrival_cv2=ca2, service_cv2=cs2)

    def ttft_s(servers: int) -> float:
        return kingman_wait_s(rate / servers, service_s, split_cv2(ca2, servers), cs2) + service_s

    assert ttft_s(count) <= budget_s
    if count > 1:
        assert ttft_s(count - 1) > budget_s


@pytest.mark.parametrize(("ca2", "count"), [(30.0, 1), (30.0, 4), (9.0, 10)])
def test_bursts_are_split_among_instances_as_chance_splits_them(ca2: float, count: int) -> None:
    """Gaps that are short or long (hyperexponential); every request goes to one of the instances at random."""
    rng = np.random.default_rng(4)
    short = (1 + math.sqrt((ca2 - 1) / (ca2 + 1))) / 2  # balanced means, Whitt 1982
    is_short = rng.random(400_000) < short
    gaps = rng.exponential(np.where(is_short, 1 / (2 * short), 1 / (2 * (1 - short))))
    mine = np.diff(np.cumsum(gaps)[rng.random(len(gaps)) < 1 / count])
    assert mine.var() / mine.mean() ** 2 == pytest.approx(split_cv2(ca2, count), rel=0.1)


@given(st.floats(0, 1), st.integers(1, 99))
def test_steady_arrivals_stay_as_steady(ca2: float, count: int) -> None:
    assert split_cv2(ca2, count) == pytest.approx(ca2)


def test_servers_where_the_budget_is_hopeless_or_nobody_comes() -> None:
    assert servers_for_wait(8.0, 1.0, budget_s=0.5, arrival_cv2=1, service_cv2=1) == 10  # utilisation 0.8
    assert servers_for_wait(0.0, 1.0, budget_s=0.5, arrival_cv2=1, service_cv2=1) == 1


def test_eq_18() -> None:
    assert batch_timeout_s(0.4, safety=0.5, longest_s=1.0) == 0.2
    assert batch_timeout_s(float("inf"), safety=0.5, longest_s=1.0) == 1.0
    with pytest.raises(ConfigError, match="safety"):
        batch_timeout_s(0.4, safety=1.5, longest_s=1.0)
