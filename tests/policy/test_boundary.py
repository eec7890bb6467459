"""The step model's crossing against the paper's closed form and values computed by hand, the table of the hot path."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pla_sglang.policy.common.step_model import CPU_START, GPU_START, StepModel
from pla_sglang.policy.pla.boundary import BOUNDARY_MAX_TOKENS, BOUNDARY_MIN_TOKENS, FAIR_SHARE, Boundary, find_boundary


def model(**changes: float) -> StepModel:
    return StepModel(**dict.fromkeys(("g0_s", "gw_s", "gr_s", "k0_s", "kr_s", "b_s", "a_s"), 0.0) | changes)


@pytest.mark.parametrize(
    ("alpha", "beta", "gamma_w", "gamma_r", "history", "expected"),
    [
        (1.0, 0.0, 1.0, 5.0, 2, 2.0),  # L^2 + 3L - 10 = 0
        (1.0, 3.0, 1.0, 4.5, 4, math.sqrt(43) - 5),  # L^2 + 10L - 18 = 0
    ],
)
def test_the_boundary_of_the_paper_by_hand(
    alpha: float, beta: float, gamma_w: float, gamma_r: float, history: float, expected: float
) -> None:
    step = model(a_s=alpha, b_s=beta, gw_s=gamma_w, gr_s=gamma_r)
    assert step.crossing_tokens(history) == pytest.approx(expected)


def test_the_boundary_saturates_at_half_of_gamma_r_over_alpha() -> None:
    alpha, gamma_r = 2e-8, 4e-6
    limit = gamma_r / (2 * alpha)
    assert limit == pytest.approx(100.0)
    for beta in (1e-5, 3e-5):
        step = model(a_s=alpha, b_s=beta, gw_s=2e-5, gr_s=gamma_r)
        assert step.crossing_tokens(10**12) == pytest.approx(limit, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "coefficients", "history", "expected"),
    [
        ("quadratic", {"g0_s": 8.0, "b_s": 2.0, "a_s": 1.0}, 0, 2.0),  # L^2 + 2L = 8
        ("linear", {"g0_s": 8.0, "b_s": 2.0}, 0, 4.0),
        ("gw counts against b", {"g0_s": 8.0, "b_s": 3.0, "gw_s": 1.0}, 0, 4.0),
        ("k0 counts against g0", {"g0_s": 8.0, "k0_s": 4.0, "b_s": 2.0}, 0, 2.0),
        ("history", {"gr_s": 2.2, "a_s": 1.0}, 5, 1.0),  # L^2 + 10L = 11
        ("compute never catches up", {"g0_s": 8.0, "gw_s": 3.0, "b_s": 2.0}, 0, math.inf),
        ("compute is larger from the start", {"g0_s": 1.0, "k0_s": 1.0, "b_s": 1.0}, 0, 0.0),
    ],
)
def test_crossing(name: str, coefficients: dict[str, float], history: float, expected: float) -> None:
    assert model(**coefficients).crossing_tokens(history) == pytest.approx(expected)


def reprefill_boundary(alpha: float, beta: float, gamma_w: float, gamma_r: float, history_tokens: float) -> float:
    """L_m in tokens by PLA-Serve's section 2.1, on ``history_tokens`` cached ones."""
    linear = 2 * alpha * history_tokens + beta - gamma_w
    constant = gamma_r * history_tokens
    root = math.sqrt(linear * linear + 4 * alpha * constant)
    return 2 * constant / (linear + root) if linear > 0 else (root - linear) / (2 * alpha)


@given(
    alpha=st.floats(1e-10, 1e-7),
    beta=st.floats(0, 1e-3),
    gamma_w=st.floats(0, 1e-3),
    gamma_r=st.floats(1e-9, 1e-5),
    history=st.integers(1, 100_000),
)
def test_without_floors_the_crossing_is_the_boundary_of_the_paper(
    alpha: float, beta: float, gamma_w: float, gamma_r: float, history: int
) -> None:
    step = model(a_s=alpha, b_s=beta, gw_s=gamma_w, gr_s=gamma_r)
    expected = reprefill_boundary(alpha, beta, gamma_w, gamma_r, history)
    assert step.crossing_tokens(history) == pytest.approx(expected)


@given(
    g0=st.floats(1e-3, 1e-1),
    gr=st.floats(0, 1e-6),
    k0_share=st.floats(0, 0.9),
    b=st.floats(1e-6, 1e-3),
    a=st.one_of(st.just(0.0), st.floats(1e-300, 1e-7)),
    history=st.integers(0, 100_000),
)
def test_both_terms_are_equal_at_the_crossing(
    g0: float, gr: float, k0_share: float, b: float, a: float, history: int
) -> None:
    step = StepModel(g0_s=g0, gw_s=0.0, gr_s=gr, k0_s=k0_share * g0, kr_s=0.0, b_s=b, a_s=a)
    tokens = step.crossing_tokens(history)
    compute_s = step.compute_s(tokens, history, tokens * (tokens + 2 * history))
    assert compute_s == pytest.approx(step.memory_s(tokens, history), rel=1e-5)


def test_step_is_the_larger_of_the_two_terms() -> None:
    step = model(g0_s=10.0, gr_s=1.0, k0_s=1.0, kr_s=0.5, b_s=2.0, a_s=1.0)
    assert step.step_s(1, 2) == 12.0  # memory 10 + 2, compute 1 + 1 + 2 + 1 * (1 + 4)
    assert step.step_s(2, 2) == 18.0  # memory 10 + 2, compute 1 + 1 + 4 + 2 * (2 + 4)
    assert step.step_s(4, 0) == 25.0  # memory 10, compute 1 + 8 + 16
    assert step.step_s(4, 0, attention=8.0) == 17.0  # two requests of 2: 2 * 4 instead of 16


@pytest.mark.parametrize(
    ("name", "coefficients", "tokens", "chunk", "expected"),
    [
        ("each chunk pays its launch", {"k0_s": 1.0, "b_s": 1.0}, 10, 4, 13.0),
        ("attention does not depend on the cut", {"a_s": 1.0}, 10, 1, 100.0),
        ("memory-bound chunks", {"g0_s": 100.0, "b_s": 1.0}, 10, 4, 300.0),
        ("one chunk", {"k0_s": 1.0, "b_s": 1.0}, 10, 10, 11.0),
        # 8 tokens in 4 passes read 0, 2, 4 and 6 of their own and, each, the 100 from before
        ("each chunk reads the history anew", {"kr_s": 1.0}, 8, 2, 412.0),
        ("nothing left", {"k0_s": 1.0, "b_s": 1.0}, 0, 4, 0.0),
        ("a chunk below one token counts as one token", {"k0_s": 1.0}, 3, 0.5, 3.0),
    ],
)
def test_chunked(name: str, coefficients: dict[str, float], tokens: int, chunk: float, expected: float) -> None:
    history = 100 if "kr_s" in coefficients else 0
    assert model(**coefficients).chunked_s(tokens, history, chunk) == pytest.approx(expected)


def test_fixed_boundary_ignores_the_model() -> None:
    boundary = Boundary(fixed_tokens=300, model=GPU_START)
    boundary.update(CPU_START)
    assert {boundary.tokens(0), boundary.tokens(10_000), boundary.tokens(10_000_000)} == {300}
    boundary.set_fixed(None, GPU_START)
    assert boundary.tokens(0) == find_boundary(GPU_START, 0, BOUNDARY_MAX_TOKENS) == 1470
    boundary.set_fixed(64, GPU_START)
    assert boundary.tokens(0) == 64


def test_a_request_at_the_boundary_is_long() -> None:
    boundary = Boundary(fixed_tokens=300)
    assert boundary.is_short(299, 0)
    assert not boundary.is_short(300, 0)


@pytest.mark.parametrize(
    ("name", "fixed", "cap", "coefficients", "expected"),
    [
        ("clipped from below", None, None, {"k0_s": 1.0, "b_s": 1.0}, BOUNDARY_MIN_TOKENS),
        ("one time for all sizes: 10 % off a full pass", None, None, {"g0_s": 1.0, "b_s": 1e-4}, 3724),
        ("cap on the fitted", None, 256, {"g0_s": 1.0, "b_s": 1e-9}, 233),  # 10 % off the cheapest that the cap allows
        ("cap on the fixed", 2000, 256, {}, 256),
        ("cap below the least", None, 16, {"k0_s": 1.0, "b_s": 1.0}, 16),
        ("in range", None, 1024, {"g0_s": 10.0, "b_s": 0.1}, 91),
        ("the cost of a pass", None, 100_000, {"pass_s": 5.0, "b_s": 0.1}, 441),
    ],
)
def test_range_and_cap(
    name: str, fixed: int | None, cap: int | None, coefficients: dict[str, float], expected: int
) -> None:
    assert Boundary(fixed_tokens=fixed, cap_tokens=cap, model=model(**coefficients)).tokens(0) == expected


@pytest.mark.parametrize("history", [0, 500, 8192, 65_536, 131_072, 300_000])
def test_a_request_of_the_boundary_s_length_gains_little_from_company(history: int) -> None:
    step = StepModel(g0_s=5e-3, gw_s=0.0, gr_s=1e-7, k0_s=0.0, kr_s=0.0, b_s=2e-5, a_s=4e-10, pass_s=5e-3)
    tokens = Boundary(model=step).tokens(history)
    at = min(history // Boundary.STEP_TOKENS, Boundary.TABLE_SIZE) * Boundary.STEP_TOKENS

    def gain(size: float) -> float:
        """Seconds alone over those of its part in a full pass."""
        count, attention = BOUNDARY_MAX_TOKENS / size, size * (size + 2 * at)
        return step.step_s(size, at) / (step.step_s(BOUNDARY_MAX_TOKENS, count * at, count * attention) / count)

    assert gain(tokens * 1.02) <= 1 + FAIR_SHARE
    assert tokens == BOUNDARY_MIN_TOKENS or gain(tokens * 0.98) >= 1 + FAIR_SHARE


def test_a_pass_of_a_measured_size_takes_its_measured_time() -> None:
    step = StepModel(0.0, 0.0, 0.0, 0.0, b_s=1e-4, a_s=0.0, pass_s=0.01, bend=(1.0,) * 4 + (1.5, 1.0) + (1.0,) * 5)
    assert [step.step_s(size, 0) for size in (128, 256, 384, 512)] == pytest.approx([0.0228, 0.0484, 0.058, 0.0612])
    assert step.chunked_s(512, 0, 256) == pytest.approx(2 * 0.01 + 1.5 * 0.0512)


def test_a_pass_behind_an_edge_takes_longer_at_once() -> None:
    """An H100: 512 tokens 12 ms, 569 tokens 17."""
    ones = (1.0,) * 11
    step = StepModel(0.0, 0.0, 0.0, 0.0, b_s=1e-4, a_s=0.0, bend=ones, edge=(*ones[:5], 1.5, *ones[6:]))
    assert [round(step.step_s(size, 0), 4) for size in (256, 257, 512, 513, 768, 1024)] == [
        *(0.0256, 0.0257, 0.0512, 0.0769, 0.096, 0.1024),
    ]


def test_a_model_travels_as_numbers() -> None:
    bent = dataclasses.replace(GPU_START, pass_s=0.002, bend=tuple(1 + index / 10 for index in range(11)))
    for step in (GPU_START, bent, dataclasses.replace(bent, edge=(1.5,) * 11)):
        assert StepModel.from_floats(step.to_floats()) == step
