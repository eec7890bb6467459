"""The fit of piggybacked decodes finds the device that made the samples."""

from __future__ import annotations

import random

import pytest
from support.views import FLAT

from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.slo.decode_fit import ERROR_MAX, MixedBatchFit, MixedBatchSample
from pla_sglang.policy.slo.mixed_batches import START, MixedBatchModel

DEVICE = MixedBatchModel(base_s=0.008, request_s=2e-5, read_s=5e-8, extra_s=0.004, piggyback_s=1e-4)


def observe(fit: MixedBatchFit, rng: random.Random, count: int, noise: float = 0.0) -> None:
    for _ in range(count):
        piggybacked = rng.randrange(1, 60)
        context = piggybacked * rng.randrange(200, 4000)
        fit.observe_decode(piggybacked, context, DEVICE.decode_s(piggybacked, context))
        new = rng.randrange(200, 2000)
        exact_s = FLAT.step_s(new + piggybacked, 0) + DEVICE.added_s(piggybacked, context)
        pass_s = exact_s * (1 + noise * rng.random())
        fit.observe_mixed(MixedBatchSample(new, 0, float(new * new), piggybacked, context, pass_s), FLAT)


def test_exact_samples_give_the_device_back() -> None:
    fit = MixedBatchFit(START)
    observe(fit, random.Random(1), 256)
    model = fit.model
    assert model.decode_s(20, 30_000) == pytest.approx(DEVICE.decode_s(20, 30_000), rel=0.02)
    assert model.added_s(20, 30_000) == pytest.approx(DEVICE.added_s(20, 30_000), rel=0.1)
    assert model.error < 0.02


def test_the_error_is_what_one_pass_in_a_hundred_exceeds() -> None:
    fit, rng = MixedBatchFit(START), random.Random(2)
    observe(fit, rng, 256, noise=0.3)
    model, late = fit.model, 0
    for _ in range(500):
        piggybacked, new = rng.randrange(1, 60), rng.randrange(200, 2000)
        context = piggybacked * 1000
        predicted_s = FLAT.step_s(new + piggybacked, 0) + model.added_s(piggybacked, context)
        measured_s = (FLAT.step_s(new + piggybacked, 0) + DEVICE.added_s(piggybacked, context)) * (
            1 + 0.3 * rng.random()
        )
        late += measured_s > predicted_s * (1 + model.error)
    assert 0.05 < model.error < 0.4
    assert late <= 25


def test_few_or_odd_samples_leave_a_careful_model() -> None:
    fit = MixedBatchFit(START)
    assert fit.model == START
    for _ in range(MixedBatchFit.MIN_MIXED - 1):
        assert not fit.observe_mixed(MixedBatchSample(500, 0, 250_000.0, 4, 4000, 0.06), FLAT)
    assert fit.observe_mixed(MixedBatchSample(500, 0, 250_000.0, 4, 4000, 30.0), FLAT), "one was compiled"
    assert fit.model.error == ERROR_MAX
    assert fit.model.extra_s < 0.1


def test_it_says_from_how_many_passes_its_terms_are() -> None:
    fit = MixedBatchFit(START)
    for _ in range(MixedBatchFit.MIN_SAMPLES - 1):
        fit.observe_decode(4, 4000, 0.01)
    assert (fit.decodes, fit.mixed) == (0, 0)
    fit.observe_decode(4, 4000, 0.01)
    for _ in range(MixedBatchFit.MIN_MIXED + 1):
        fit.observe_mixed(MixedBatchSample(500, 0, 250_000.0, 4, 4000, 0.06), FLAT)
    assert (fit.decodes, fit.mixed) == (MixedBatchFit.MIN_SAMPLES, MixedBatchFit.MIN_MIXED)


def test_a_rough_step_model_does_not_keep_riding_dear() -> None:
    """The first passes with riders were judged by a model that was ten times too quick; later nobody rode."""
    fit, rng = MixedBatchFit(START), random.Random(4)
    quick = StepModel.from_floats([value / 10 for value in FLAT.to_floats()])
    for _ in range(MixedBatchFit.MIN_SAMPLES):
        piggybacked, new = rng.randrange(1, 60), rng.randrange(200, 2000)
        pass_s = FLAT.step_s(new + piggybacked, 0) + DEVICE.added_s(piggybacked, 1000 * piggybacked)
        fit.observe_mixed(MixedBatchSample(new, 0, float(new * new), piggybacked, 1000 * piggybacked, pass_s), quick)
    assert fit.model.added_s(20, 20_000) > 3 * DEVICE.added_s(20, 20_000)
    assert fit.on_step_model(FLAT)
    assert fit.model.added_s(20, 20_000) == pytest.approx(DEVICE.added_s(20, 20_000), rel=0.2)


def test_without_samples_a_step_model_changes_nothing() -> None:
    fit = MixedBatchFit(START)
    assert not fit.on_step_model(FLAT)
    assert fit.model == START


@pytest.mark.parametrize("sample", [(0, 4, 0.1), (100, 0, 0.1), (100, 4, 0.0)], ids=str)
def test_samples_that_say_nothing_are_dropped(sample: tuple[int, int, float]) -> None:
    new, piggybacked, pass_s = sample
    fit = MixedBatchFit(START)
    fit.observe_mixed(MixedBatchSample(new, 0, 0.0, piggybacked, 100, pass_s), FLAT)
    assert len(fit) == 0
