"""The boundary of a fleet: starts from a profile, learns from passes that are reported, and looks at the history."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from support.fleets import fleet, predictor, prefill, request

from pla_sglang.load.instance_load import prefill_sample
from pla_sglang.load.report import PassTiming, PassTotals, Report
from pla_sglang.policy.common.curve import solve_nonnegative
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.common.step_fit import StepFit, scipy_solver
from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.interface.decisions import MeasuredPass, PrefillSample
from pla_sglang.policy.interface.prefill import PrefillClass
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.policy.pla.boundary import Boundary
from pla_sglang.policy.pla.fitted_boundary import FLEET_FIT, PASS_GAP_S, FittedBoundary, fleet_boundary, profile_model
from pla_sglang.policy.pla.spatial import SpatialDispatcher, SpatialKnobs
from pla_sglang.policy.registry import Setup, build
from pla_sglang.policy.runner import Effects, FleetRunner
from pla_sglang.profiles.load import load_profile, profile_names

# Its boundary: 597 tokens without history, 297 with 8,192 tokens of it.
DEVICE = StepModel(g0_s=0.02, gw_s=0.0, gr_s=0.0, k0_s=0.002, b_s=2.88e-5, a_s=2e-9)
H100 = load_profile("h100-llama3.1-8b-tp1")
VIEW = fleet(prefill()).instances[0]


def passes(count: int, *, seed: int = 1) -> Iterator[MeasuredPass]:
    rng = random.Random(seed)
    for _ in range(count):
        new, history = int(2 ** rng.uniform(4, 12)), rng.choice((0, rng.randrange(16_384)))
        attention = new * (new + 2 * history)
        yield MeasuredPass(new, attention, history, DEVICE.step_s(new, history, attention))


def sample_of(*steps: MeasuredPass) -> PrefillSample:
    return PrefillSample(VIEW, 0, 0, 0, 0, 0.0, steps)


def test_the_device_of_these_tests() -> None:
    boundary = Boundary(model=DEVICE)
    assert (boundary.tokens(0), boundary.tokens(8192)) == (597, 297)


@pytest.mark.parametrize("name", profile_names())
def test_a_profile_s_step_model(name: str) -> None:
    """Also with a solver that needs no scipy, as routers have it."""
    steps = load_profile(name)
    model, same = profile_model(steps, solve_nonnegative), profile_model(steps, scipy_solver())
    for history in (0, 4096):
        assert Boundary(model=model).tokens(history) == pytest.approx(Boundary(model=same).tokens(history), abs=1)
        for new in (512, 2048, 8192):
            measured_s = steps.prefill_s(new, new * (new + 2 * history), history, 1)
            assert model.step_s(new, history) == pytest.approx(measured_s, rel=0.15)


def test_passes_move_the_boundary() -> None:
    boundary = fleet_boundary(H100, solve_nonnegative, None)
    assert boundary.tokens(0) == pytest.approx(633, abs=30)
    for number, step in enumerate(passes(400)):
        boundary.on_prefill(sample_of(step), number * 0.1)
    assert boundary.tokens(0) == pytest.approx(597, rel=0.1)
    assert boundary.tokens(8192) == pytest.approx(297, rel=0.1)
    assert boundary.class_of(400, 0) is PrefillClass.SHORT
    assert boundary.class_of(400, 8192) is PrefillClass.LONG


def test_a_fixed_boundary_stays_and_the_model_is_still_fitted() -> None:
    boundary = FittedBoundary(StepFit(profile_model(H100, solve_nonnegative)), fixed_tokens=5000)
    for step in passes(200):
        boundary.on_prefill(sample_of(step), 0.0)
    assert [boundary.tokens(history) for history in (0, 8192)] == [5000, 5000]
    boundary.set_fixed(None)
    assert boundary.tokens(8192) == pytest.approx(297, rel=0.1)


def test_without_a_fit_nothing_is_learned() -> None:
    boundary = fleet_boundary(H100, solve_nonnegative, 256)
    assert not boundary.on_prefill(sample_of(*passes(100)), 0.0)
    assert (boundary.fit, boundary.tokens(0), boundary.tokens(8192)) == (None, 256, 256)


def test_a_busy_fleet_s_passes_are_sampled() -> None:
    """Once there are enough for a first model, one pass in a sixteenth of a second is taken."""
    boundary = fleet_boundary(H100, solve_nonnegative, None)
    assert boundary.fit is not None
    boundary.on_prefill(sample_of(*passes(500)), 0.0)
    young = FLEET_FIT.refit_every + 1
    assert len(boundary.fit) == young + 1
    for number, step in enumerate(passes(80)):
        boundary.on_prefill(sample_of(step, step, step), (number + 1) * PASS_GAP_S / 4)
    assert len(boundary.fit) == young + 1 + 20


@pytest.mark.parametrize(
    ("new", "history", "chosen", "reason"),
    [
        (400, 0, "i0", FleetReason.PLA_SHORT),
        (700, 0, "i1", FleetReason.PLA_LONG),
        (200, 8192, "i0", FleetReason.PLA_SHORT),
        (400, 8192, "i1", FleetReason.PLA_LONG),
    ],
)
def test_the_dispatcher_looks_at_the_history(new: int, history: int, chosen: str, reason: FleetReason) -> None:
    """A short and a long instance hold the same history; with 8,192 tokens of it 400 new ones are long."""
    boundary = FittedBoundary(StepFit(DEVICE))
    view = fleet(prefill(length_class=PrefillClass.SHORT), prefill(length_class=PrefillClass.LONG))
    ask = request(history + new, cached={0: history, 1: history} if history else {})
    answer = SpatialDispatcher(SpatialKnobs(ttft_slo_s=60.0), predictor(), boundary).dispatch(ask, view, 0.0)
    assert (str(answer.prefill), answer.reason) == (chosen, reason)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_load_reports_teach_the_policy_that_routers_and_simulators_build(scale: float) -> None:
    """On slowed devices too: ``scale`` times as long by the wall."""
    setup = Setup(steps=H100, kv_capacity_tokens=100_000, ttft_slo_s=0.4, tpot_slo_s=0.1, instances=2)
    policy, clock = build("pla", setup), DeviceClock(scale)
    assert isinstance(policy.dispatcher, SpatialDispatcher)
    runner = FleetRunner(policy, fleet(prefill(), prefill()), Effects(), clock=clock)
    for number, step in enumerate(passes(200)):
        timing = PassTiming(step.new_tokens, step.attention, step.history_tokens, 1, clock.wall_s(step.duration_s))
        now_s = clock.wall_s(number * 0.1)
        report = Report(instance="a", sequence=number + 1, steps=(timing,), passes=PassTotals.of([timing]))
        learned = prefill_sample(runner.fleet.instances[number % 2], report, clock)
        assert learned is not None
        runner.prefilled(learned, now_s)
    boundary = policy.dispatcher.boundary
    assert [boundary.tokens(history) for history in (0, 8192)] == [
        pytest.approx(597, rel=0.1),
        pytest.approx(297, rel=0.1),
    ]
