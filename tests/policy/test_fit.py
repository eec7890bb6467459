"""The fit finds models it can know, and says nothing of what it cannot."""

from __future__ import annotations

import dataclasses
import random

import pytest

from pla_sglang.policy.boundary import CPU_START, GPU_START, StepModel
from pla_sglang.policy.fit import FitKnobs, StepFit, StepSample

TRUTH = StepModel(g0_s=6e-3, gw_s=0.0, gr_s=2e-8, k0_s=1e-3, kr_s=0.0, b_s=3e-5, a_s=5e-10)


def sample(new: int, history: int, model: StepModel = TRUTH, *, factor: float = 1.0) -> StepSample:
    attention = float(new * (new + 2 * history))
    return StepSample(new, history, attention, factor * model.step_s(new, history, attention))


def samples(count: int, *, noise: float = 0.0, outliers: float = 0.0, seed: int = 1) -> list[StepSample]:
    """Passes of both regimes: a share of ``outliers`` took several times as long, as when another process ran."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        new = int(2 ** rng.uniform(3, 13))
        history = rng.choice((0, 0, rng.randrange(20_000)))
        factor = 1 + rng.uniform(-noise, noise)
        if rng.random() < outliers:
            factor *= rng.uniform(3, 10)
        made.append(sample(new, history, factor=factor))
    return made


def fitted(observed: list[StepSample], start: StepModel = GPU_START, **knobs: int) -> StepFit:
    fit = StepFit(start, FitKnobs(**knobs) if knobs else None)
    for one in observed:
        fit.observe(one)
    return fit


def worst_error(model: StepModel) -> float:
    grid = [(new, history) for new in (8, 64, 200, 512, 2048, 8192) for history in (0, 4096, 16_384)]
    return max(abs(model.step_s(*point) / TRUTH.step_s(*point) - 1) for point in grid)


@pytest.mark.parametrize(
    ("name", "noise", "outliers", "tolerance"),
    [("exact", 0.0, 0.0, 0.01), ("noise", 0.05, 0.0, 0.05), ("noise and outliers", 0.05, 0.05, 0.10)],
)
@pytest.mark.parametrize("start", [GPU_START, CPU_START], ids=["gpu start", "cpu start"])
def test_recovers_a_known_model(name: str, noise: float, outliers: float, tolerance: float, start: StepModel) -> None:
    fit = fitted(samples(256, noise=noise, outliers=outliers), start)
    assert worst_error(fit.model) < tolerance
    assert fit.error is not None
    assert fit.error < max(noise, 0.01)


def test_finds_the_boundary_of_a_known_model() -> None:
    model = fitted(samples(256, noise=0.03)).model
    assert model.crossing_tokens(0) == pytest.approx(TRUTH.crossing_tokens(0), rel=0.15)


def test_coefficients_are_never_negative() -> None:
    rng = random.Random(3)
    noise_only = [StepSample(rng.randrange(1, 4000), 0, rng.random(), rng.uniform(1e-3, 1)) for _ in range(128)]
    model = fitted(noise_only).model
    assert min(dataclasses.astuple(model)) >= 0


def test_same_samples_give_the_same_model() -> None:
    observed = samples(200, noise=0.1, outliers=0.1)
    assert fitted(observed).model == fitted(observed).model


def test_too_few_samples_keep_the_start() -> None:
    fit = fitted(samples(11))
    assert (fit.model, fit.fits, fit.error) == (GPU_START, 0, None)
    assert fit.observe(samples(1, seed=2)[0])
    assert fit.fits == 1


def test_refits_every_few_samples() -> None:
    fit = fitted(samples(12 + 16 * 3, noise=0.02), min_samples=12, refit_every=16)
    assert fit.fits == 4


def test_window_forgets_the_past() -> None:
    slow = StepModel(g0_s=6e-2, gw_s=0.0, gr_s=2e-7, k0_s=1e-2, kr_s=0.0, b_s=3e-4, a_s=5e-9)
    old = [sample(one.new_tokens, one.history_tokens, slow) for one in samples(256)]
    assert worst_error(fitted(old + samples(256, seed=5)).model) < 0.01


@pytest.mark.parametrize(
    "useless",
    [StepSample(0, 10, 0.0, 0.01), StepSample(10, 0, 100.0, 0.0), StepSample(10, 0, 100.0, -1.0)],
    ids=["no tokens", "no time", "negative time"],
)
def test_samples_that_say_nothing_are_dropped(useless: StepSample) -> None:
    fit = fitted([useless] * 50)
    assert (len(fit), fit.fits) == (0, 0)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("memory-bound only", (8, 16, 24, 32)), ("compute-bound only", (2048, 3000, 4096, 8192)), ("one size", (512,))],
)
def test_one_regime_predicts_what_it_saw(name: str, sizes: tuple[int, ...]) -> None:
    """A server that has only seen one kind of pass must still predict that kind."""
    model = fitted([sample(size, 0) for _ in range(40) for size in sizes]).model
    for size in sizes:
        assert model.step_s(size, 0) == pytest.approx(TRUTH.step_s(size, 0), rel=0.05)


@pytest.mark.parametrize("size", [40, 400, 3000])
def test_one_size_keeps_the_boundary_of_the_start(size: int) -> None:
    """Nothing is known but one point; without the start model's shape every class would be as good as another."""
    model = fitted([sample(size, 0, factor=1.7)] * 100, CPU_START).model
    assert model.step_s(size, 0) == pytest.approx(1.7 * TRUTH.step_s(size, 0), rel=0.02)
    assert model.crossing_tokens(0) == pytest.approx(CPU_START.crossing_tokens(0), rel=0.25)


def test_without_any_history_its_costs_stay_in_proportion() -> None:
    observed = [sample(new, 0) for new in (8, 32, 128, 512, 2048, 8192) for _ in range(20)]
    model = fitted(observed).model
    assert 0 < model.gr_s < 5 * GPU_START.gr_s
