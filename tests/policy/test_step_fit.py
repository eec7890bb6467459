"""The fit finds models it can know, and says nothing of what it cannot."""

from __future__ import annotations

import random

import pytest
from support.views import waiting

from pla_sglang.policy.common.step_fit import FitKnobs, StepFit, StepSample
from pla_sglang.policy.common.step_model import BEND_TOKENS, CPU_START, GPU_START, StepModel
from pla_sglang.policy.pla.long_prompts import LongKnobs, chunk_tokens

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


def test_it_says_from_how_many_passes_the_model_is() -> None:
    fit = fitted(samples(3))
    assert (fit.passes, fit.model) == (0, GPU_START)
    assert fitted(samples(5)).passes == 4, "the fifth waits for the next fit"
    assert fitted(samples(400)).passes == 400, "those that have left the window counted once"


def test_finds_the_boundary_of_a_known_model() -> None:
    model = fitted(samples(256, noise=0.03)).model
    assert model.crossing_tokens(0) == pytest.approx(TRUTH.crossing_tokens(0), rel=0.15)


def test_coefficients_are_never_negative() -> None:
    rng = random.Random(3)
    noise_only = [StepSample(rng.randrange(1, 4000), 0, rng.random(), rng.uniform(1e-3, 1)) for _ in range(128)]
    model = fitted(noise_only).model
    assert min(model.to_floats()) >= 0


def test_same_samples_give_the_same_model() -> None:
    observed = samples(200, noise=0.1, outliers=0.1)
    assert fitted(observed).model == fitted(observed).model


def test_too_few_samples_keep_the_start() -> None:
    fit = fitted(samples(3))
    assert (fit.model, fit.fits, fit.error) == (GPU_START, 0, None)
    assert fit.observe(samples(1, seed=2)[0])
    assert fit.fits == 1


def test_refits_every_few_samples_at_first_and_then_less_often() -> None:
    assert [fitted(samples(count, noise=0.02)).fits for count in (4, 16, 31, 32, 64)] == [1, 4, 4, 5, 7]


@pytest.mark.parametrize("factor", [1.0, 20.0])
def test_a_few_passes_tell_how_fast_the_device_is(factor: float) -> None:
    """The start model is 20 times too fast here; and the first passes of all may load kernels, 20 times as slow."""
    slow = StepModel(g0_s=0.02, gw_s=0.0, gr_s=0.0, k0_s=0.02, kr_s=0.0, b_s=1e-3, a_s=0.0)
    sizes = (29, 1, 219, 209, 185, 218, 205, 801)
    observed = [sample(new, 0, slow, factor=factor if index < 2 else 1.0) for index, new in enumerate(sizes)]
    model = fitted(observed, CPU_START).model
    for new in (200, 800, 2400):
        assert model.step_s(new, 0) == pytest.approx(slow.step_s(new, 0), rel=0.35)


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


def test_the_hosts_part_is_never_taken_for_a_floor() -> None:
    """Prompts of two lengths and a tenth of noise: a floor without launch cost fits as well as the truth does."""
    rng = random.Random(4)
    truth = StepModel(g0_s=0.0, gw_s=0.0, gr_s=0.0, k0_s=0.0, kr_s=0.0, b_s=4e-5, a_s=0.0)
    observed = []
    for _ in range(256):
        new = rng.choice((400, 1600))
        device_s = truth.step_s(new, 0) * rng.uniform(0.9, 1.1)
        host_s = 0.004 * rng.uniform(0.8, 1.2)
        observed.append(StepSample(new, 0, float(new * new), device_s + host_s, host_s))
    model = fitted(observed, CPU_START).model
    assert model.k0_s >= 0.0035
    for new in (400, 1600):
        assert model.step_s(new, 0) == pytest.approx(truth.step_s(new, 0) + 0.004, rel=0.05)


# Passes of a toy model on two CPU cores as measured, by new and history tokens: what bench hol shows to the fit.
HOL_PASSES_S = {(400, 0): 0.025, (1638, 0): 0.100, (1638, 1638): 0.205, (1524, 3276): 0.338}


@pytest.mark.parametrize("seed", range(60))
def test_cutting_is_not_free_after_a_few_shapes_of_passes(seed: int) -> None:
    """Four shapes do not tell launch, history and length apart. Measured, the rest of a long (1,524 tokens after 3,276)
    takes 338 ms in one pass and 543 ms in two: no state of the fit may cut it.
    """
    rng = random.Random(seed)
    fit = StepFit(CPU_START)
    level = rng.uniform(0.8, 1.6)
    rest = waiting(1524, history_tokens=3276)
    for new, history in [*HOL_PASSES_S] * 30:
        step_s = level * HOL_PASSES_S[new, history] * rng.lognormvariate(0, 0.12)
        fit.observe(StepSample(new, history, float(new * (new + 2 * history)), step_s, 0.002))
        chunk = chunk_tokens(
            rest,
            long_prompts=9,
            passing_rate_per_s=2.0,
            passing_tokens=400.0,
            model=fit.model,
            knobs=LongKnobs(chunk_max_tokens=1638, chunk_min_tokens=205),
        )
        if fit.fits:
            assert chunk is not None
            assert chunk >= 1524, f"after {len(fit)} passes with {fit.model}"


@pytest.mark.parametrize("seed", range(6))
def test_a_few_slow_passes_do_not_take_a_term_for_themselves(seed: int) -> None:
    """One shape, a long now and then, a twenty-fifth of the passes held up: no state of the fit predicts nonsense."""
    rng = random.Random(seed)
    fit = StepFit(CPU_START)
    shapes = {key: step_s for key, step_s in HOL_PASSES_S.items() if key != (400, 0)}

    def passed(new: int, history: int, attention: float, step_s: float) -> None:
        held_up = rng.uniform(1.5, 4) if rng.random() < 0.04 else 1.0
        step_s *= held_up * rng.lognormvariate(0, 0.12)
        if fit.observe(StepSample(new, history, attention, step_s + 0.002, 0.002)):
            for (length, cached), seconds in shapes.items():
                assert fit.model.step_s(length, cached) == pytest.approx(seconds, rel=0.6)

    for index in range(700):
        if index < 3 or index % 90 == 50:
            for (new, history), step_s in shapes.items():
                passed(new, history, float(new * (new + 2 * history)), step_s)
        passed(1600, 0, 4 * 400.0 * 400.0, 0.080)


@pytest.mark.parametrize(
    ("name", "bend", "near", "expected"),
    [
        ("as the terms say", 1.0, 20, 1.0),
        ("slower where they meet, as a GPU", 1.2, 20, 2.0),
        ("not seen there", 1.0, 3, 2.0),
    ],
)
def test_chunks_may_be_as_small_as_the_crossing_where_passes_there_were_seen_to_be_quick(
    name: str, bend: float, near: int, expected: float
) -> None:
    """TRUTH crosses at 166 tokens."""
    observed = [sample(new, 0) for new in (16, 32, 64, 100, 500, 800, 2000, 6000) for _ in range(12)]
    observed += [sample(170 + 5 * index, 0, factor=bend) for index in range(near)]
    assert fitted(observed).model.ridge == expected


def test_an_edge_is_learned_where_passes_behind_it_take_longer() -> None:
    slower = [sample(new, 0, factor=1.5 if new > 512 else 1.0) for new in (64, 300, 480, 512, 540, 600, 1000, 4000)]
    model = fitted(slower * 12).model
    place = BEND_TOKENS.index(512)
    assert model.edge[place] / model.bend[place] == pytest.approx(1.5, rel=0.15)
    assert model.step_s(513, 0) > 1.3 * model.step_s(512, 0)
    assert fitted([sample(new, 0) for new in (64, 300, 480, 512, 540, 600, 1000, 4000)] * 12).model.edge == ()


def test_scaling_the_start_model_leaves_the_ridge_alone() -> None:
    model = fitted([sample(400, 0, factor=30.0)] * 40).model
    assert model.ridge in (1.0, 2.0)
