"""Step times of an instance: measured where it has measured enough, the profile's elsewhere, and who plans by them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from support.fleets import CURVE, LinearSteps, instance

from pla_sglang.policy.arrow.policy import ArrowKnobs, ArrowPolicy
from pla_sglang.policy.common.client_gain import ClientGain, ClientGainKnobs, DecodeLoad
from pla_sglang.policy.common.fleet_policy import Setup
from pla_sglang.policy.common.predictor import TtftPredictor
from pla_sglang.policy.common.step_fit import StepSample
from pla_sglang.policy.common.step_model import GPU_START, StepModel
from pla_sglang.policy.interface.decisions import MeasuredPass, PrefillSample
from pla_sglang.policy.measured_steps import ENOUGH, InstanceSteps, MeasuredSteps
from pla_sglang.policy.slo.decode_fit import MixedBatchSample
from pla_sglang.policy.slo.mixed_batches import MixedBatchModel
from pla_sglang.policy.slo.pass_fits import PURE, PassFits

# As LinearSteps: prefill 10 ms + 1 ms a token, decode 10 ms + 0.1 ms a request + 1 us a token.
PREFILL = StepModel(g0_s=0.0, gw_s=0.0, gr_s=0.0, k0_s=0.010, b_s=0.001, a_s=0.0)
DECODE = MixedBatchModel(base_s=0.010, request_s=1e-4, read_s=1e-6)


def slower(factor: float) -> tuple[StepModel, MixedBatchModel]:
    prefill = dataclasses.replace(PREFILL, k0_s=factor * PREFILL.k0_s, b_s=factor * PREFILL.b_s)
    return prefill, MixedBatchModel(*(factor * value for value in dataclasses.astuple(DECODE)))


def known(**fields: bool) -> InstanceSteps:
    return InstanceSteps(instance(0), LinearSteps(), "linear", **fields)


def test_before_anything_was_measured_the_profile_counts() -> None:
    steps = known()
    assert not steps.learn(*slower(3), prefills=ENOUGH - 1, decodes=0)
    assert steps.view.steps is None
    assert steps.describe() == "profile linear, not measured"
    own = known(own=True)
    assert isinstance(own.view.steps, LinearSteps), "policies were made with another profile"


def test_what_was_not_measured_is_the_profile_s() -> None:
    steps = known()
    assert steps.learn(*slower(3), prefills=0, decodes=ENOUGH)
    assert steps.view.steps is not None
    assert steps.view.steps.decode_s(10, 5000) == pytest.approx(3 * LinearSteps().decode_s(10, 5000))
    assert steps.view.steps.prefill_s(100, 1e4, 0, 1) == LinearSteps().prefill_s(100, 1e4, 0, 1)
    assert steps.describe() == f"measured (0 prefill passes, {ENOUGH} decode steps); prefill: profile linear"
    assert steps.learn(*slower(3), prefills=40, decodes=50)
    assert steps.view.steps.prefill_s(100, 1e4, 0, 1) == pytest.approx(0.33)
    assert steps.describe() == "measured (40 prefill passes, 50 decode steps)"


def test_a_profile_that_is_right_is_kept() -> None:
    steps = known()
    assert not steps.learn(*slower(1.03), prefills=40, decodes=50)
    assert steps.view.steps is None
    assert steps.describe() == "measured (40 prefill passes, 50 decode steps), as profile linear has them"


def test_step_times_change_seldom() -> None:
    """Whoever derives something from them may keep it."""
    steps = known()
    assert steps.learn(*slower(2.0), prefills=40, decodes=50)
    first = steps.view.steps
    assert not steps.learn(*slower(2.06), prefills=400, decodes=500)
    assert steps.view.steps is first
    assert steps.learn(*slower(2.2), prefills=400, decodes=500)
    assert steps.learn(*slower(1.0), prefills=400, decodes=500), "the former one was wrong"


@pytest.mark.parametrize(
    "prefill",
    [
        dataclasses.replace(PREFILL, b_s=math.nan),
        dataclasses.replace(PREFILL, a_s=-1e-9),
        dataclasses.replace(PREFILL, k0_s=0.0, b_s=0.0),
        dataclasses.replace(PREFILL, b_s=math.inf),
    ],
    ids=["nan", "negative", "zero", "infinite"],
)
def test_models_that_give_no_duration_are_left_out(prefill: StepModel) -> None:
    steps = known()
    assert not steps.learn(prefill, MixedBatchModel(-1.0, 0.0, 0.0), prefills=100, decodes=100)
    assert steps.describe() == "profile linear, not measured"


def test_a_pass_that_decodes_join() -> None:
    steps = MeasuredSteps(LinearSteps(), PREFILL, dataclasses.replace(DECODE, extra_s=0.002, piggyback_s=1e-4))
    joint_s = 0.010 + 0.001 * (100 + 8) + 0.002 + 8e-4 + 4000e-6
    assert steps.mixed_s(100, 1e4, 0, 1, 8, 4000) == pytest.approx(joint_s)
    assert steps.mixed_s(1, 1, 0, 1, 8, 400_000) >= steps.decode_s(8, 400_000), "never faster than the decodes alone"
    half = MeasuredSteps(LinearSteps(), None, DECODE)
    assert half.mixed_s(100, 1e4, 0, 1, 8, 4000) == LinearSteps().mixed_s(100, 1e4, 0, 1, 8, 4000)
    assert (steps.prefill_s(0, 0, 0, 0), steps.decode_s(0, 0)) == (0.0, 0.0)


def test_instances_that_agree_have_the_same_step_times() -> None:
    """Else a choice of the fastest would send all to the one whose fit was lucky."""
    views = [instance(index) for index in range(3)] + [instance(3, profile="another")]
    steps = [InstanceSteps(view, LinearSteps(), "linear", peers=views) for view in views]
    for one, factor in zip(steps, (2.0, 2.04, 3.0, 2.0), strict=True):
        assert one.learn(*slower(factor), prefills=40, decodes=50)
    first, alike, apart, another = (view.steps for view in views)
    assert alike is first
    assert apart is not None
    assert apart.prefill_s(100, 1e4, 0, 1) == pytest.approx(0.33)
    assert another is not None
    assert another is not first, "what it has not measured would be of a profile that is not its own"


def test_an_instance_that_is_as_its_profile_again_has_that() -> None:
    for own in (False, True):
        steps = known(own=own)
        assert steps.learn(*slower(2.0), prefills=40, decodes=50)
        assert steps.learn(*slower(1.0), prefills=400, decodes=500)
        assert isinstance(steps.view.steps, LinearSteps) is own
        assert (steps.view.steps is None) is not own


# -- who plans by them -------------------------------------------------------------------------------------------------


def test_each_instance_has_its_own_curve() -> None:
    predictor = TtftPredictor({"": CURVE})
    told, own = instance(0, queued_tokens=900), instance(1, queued_tokens=500)
    assert predictor.least_delay([told, own]) is own
    own.steps = MeasuredSteps(LinearSteps(), slower(2)[0], None)
    assert predictor.least_delay([told, own]) is told
    assert predictor.delay_s(own) == pytest.approx(0.020 + 0.002 * 500, rel=0.01)
    assert predictor.curve(own) is predictor.curve(own), "fitted once"
    assert predictor.curve(told) is CURVE


def test_a_factor_is_of_one_curve() -> None:
    """What made up for a wrong profile must not be applied to the right times."""
    predictor, one = TtftPredictor({"": CURVE}), instance(0)
    for _ in range(200):
        measured = MeasuredPass(1000, 1_000_000, 0, 2 * CURVE.time_s(1000))
        predictor.on_prefill(PrefillSample(one, 1000, 1_000_000, 0, 1, 2 * CURVE.time_s(1000), (measured,)))
    assert predictor.factor(one) == pytest.approx(2.0, rel=0.01)
    one.steps = MeasuredSteps(LinearSteps(), slower(2)[0], None)
    assert predictor.backlog_s(one, 1, 1000, 1_000_000, 0) == pytest.approx(2 * CURVE.time_s(1000), rel=0.01)


def test_a_factor_serves_all_with_the_same_measured_step_times() -> None:
    """By value: in a replay each instance has an object of its own. With other times, nothing of it is left."""
    predictor, profile = TtftPredictor({"": CURVE}), LinearSteps()
    first, second = instance(0), instance(1)
    first.steps, second.steps = (MeasuredSteps(profile, slower(2)[0], None) for _ in range(2))
    for _ in range(200):
        measured = MeasuredPass(1000, 1_000_000, 0, 1.1 * predictor.curve(first).time_s(1000))
        predictor.on_prefill(PrefillSample(first, 1000, 1_000_000, 0, 1, 1.0, (measured,)))
    assert predictor.factor(second) == predictor.factor(first) == pytest.approx(1.1, rel=0.01)
    assert predictor.curve(second) is predictor.curve(first)
    second.steps = None
    assert predictor.factor(second) == 1
    assert predictor.factor(first) == pytest.approx(1.1, rel=0.01)
    first.steps = None
    assert predictor.factor(first) == 1
    first.steps = MeasuredSteps(profile, slower(2)[0], None)
    assert predictor.factor(first) == 1


def test_each_instance_has_its_own_max_running_tokens() -> None:
    setup = Setup(LinearSteps(), 100_000, 1.0, 0.050)
    arrow = ArrowPolicy(
        ArrowKnobs(1.0, 0.050, {"": setup.running_tokens()}), TtftPredictor({"": CURVE}), setup.running_tokens
    )
    told, own = instance(0), instance(1, kv_capacity_tokens=20_000)
    assert arrow.limit_tokens(own) == arrow.limit_tokens(told) == setup.running_tokens()
    own.steps = LinearSteps()
    assert arrow.limit_tokens(own) == int(0.9 * 20_000), "its own KV cache"
    own.steps = MeasuredSteps(LinearSteps(), None, slower(4)[1])
    limit = arrow.limit_tokens(own)
    assert own.steps.decode_s(round(limit / 1024), limit) <= 0.9 * 0.050 < own.steps.decode_s(8, limit + 2000)
    own.steps = MeasuredSteps(LinearSteps(), None, slower(9)[1])
    assert arrow.limit_tokens(own) == 1, "no step is fast enough"


def test_a_move_to_a_faster_device_pays_where_loads_are_equal() -> None:
    gain = ClientGain(ClientGainKnobs(base_s=0.01), LinearSteps())
    tokens, rest = np.array([1000.0]), np.array([500.0])
    here, there = DecodeLoad(4, 8000), DecodeLoad(4, 8000)
    assert not gain.pays(here, [there], tokens, rest, interval_s=0.02).any()
    slow = DecodeLoad(4, 8000, MeasuredSteps(LinearSteps(), None, slower(2)[1]))
    assert gain.pays(slow, [there], tokens, rest, interval_s=0.04).all()
    assert not gain.pays(here, [slow], tokens, rest, interval_s=0.02).any()


# -- fits of both phases -----------------------------------------------------------------------------------------------


def joined(new: int, batch: int) -> MixedBatchSample:
    context = 1000 * batch
    pass_s = PREFILL.step_s(new + batch, 0) + DECODE.read_s * context
    return MixedBatchSample(new, 0, float(new * new), batch, context, pass_s)


def test_an_engine_whose_prefills_never_run_alone_learns_what_they_take() -> None:
    fits = PassFits(GPU_START)
    for number in range(64):
        fits.observe_decode(4 + number % 8, 1000 * (4 + number % 8), DECODE.decode_s(4 + number % 8, 4000.0))
        fits.observe_mixed(joined(100 + 37 * number, 4 + number % 8))
    assert fits.prefills.passes > 0
    for new in (200, 1000, 2000):
        assert fits.prefills.model.step_s(new, 0) == pytest.approx(PREFILL.step_s(new, 0), rel=0.05)


def test_passes_without_decodes_are_enough_once_there_were_some() -> None:
    fits = PassFits(GPU_START)
    for number in range(PURE):
        new = 100 + 50 * number
        fits.observe_prefill(StepSample(new, 0, float(new * new), PREFILL.step_s(new, 0)))
    passes = fits.prefills.passes
    for number in range(64):
        fits.observe_mixed(dataclasses.replace(joined(100 + 37 * number, 8), pass_s=9.0))
    assert fits.prefills.passes == passes
    assert fits.decodes.model.extra_s > 1.0
