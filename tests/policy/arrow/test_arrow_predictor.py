"""TTFT predictor: the fit recovers known curves, delays are sums, the factor learns, the error is what it says."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fleets import CURVE, LinearSteps, instance, predictor, request

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.common.capacity import max_running_tokens
from pla_sglang.policy.common.curve import PrefillCurve, fit_curve, profile_curve
from pla_sglang.policy.common.predictor import PredictorKnobs, TtftPredictor
from pla_sglang.policy.interface.decisions import MeasuredPass, PrefillSample
from pla_sglang.policy.interface.fleet import InstanceView

QUADRATIC = PrefillCurve(0.006, 1.6e-5, 9e-10, 2e-7)


def samples_of(curve: PrefillCurve, noise: float = 0.0) -> list[tuple[float, float, float]]:
    rng = random.Random(3)
    return [
        (float(new), float(history), curve.time_s(new, history) * (1 + rng.uniform(-noise, noise)))
        for new in (16, 64, 256, 1024, 4096, 16384)
        for history in (0, 2048, 8192)
    ]


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_the_fit_finds_the_curve(noise: float) -> None:
    fitted = fit_curve(samples_of(QUADRATIC, noise))
    for new, history in ((100, 0), (1000, 500), (10_000, 4000)):
        assert fitted.time_s(new, history) == pytest.approx(QUADRATIC.time_s(new, history), rel=1e-6 + 1.5 * noise)


def test_profiling_at_launch() -> None:
    curve = profile_curve(LinearSteps())
    assert (curve.c0_s, curve.c1_s) == (pytest.approx(0.010, rel=1e-6), pytest.approx(0.001, rel=1e-6))
    assert curve.c2_s == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "samples", "message"),
    [
        ("too few", [(1, 0, 1.0), (2, 0, 1.0)], "at least 3 samples, got 2"),
        ("no tokens", [(0, 0, 1.0)] * 3, "new_tokens 0 is out of range; allowed: above 0"),
        ("no time", [(1, 0, 0.0)] * 3, "seconds 0.0 is out of range; allowed: above 0"),
        ("negative history", [(1, -1, 1.0)] * 3, "history_tokens -1 is out of range; allowed: at least 0"),
    ],
)
def test_bad_samples(name: str, samples: list[tuple[float, float, float]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit_curve(samples)


def test_bad_curves() -> None:
    with pytest.raises(ConfigError, match="zero everywhere"):
        PrefillCurve(0.0, 0.0, 0.0)
    with pytest.raises(ConfigError, match=r"c1_s .* is out of range; allowed: at least 0"):
        PrefillCurve(1.0, -1e-9, 0.0)


@given(st.lists(st.tuples(st.integers(1, 20_000), st.integers(0, 20_000)), max_size=20))
def test_the_delay_of_a_backlog_is_the_sum_of_its_requests(backlog: list[tuple[int, int]]) -> None:
    view = instance(
        0,
        queued_prefills=len(backlog),
        queued_tokens=sum(new for new, _ in backlog),
        queued_attention=sum(new * (new + 2 * history) for new, history in backlog),
        queued_history_tokens=sum(history for _, history in backlog),
    )
    expected_s = sum(QUADRATIC.time_s(new, history) for new, history in backlog)
    assert TtftPredictor({"": QUADRATIC}).delay_s(view) == pytest.approx(expected_s)


def test_ttft_is_delay_plus_uncached_prefill() -> None:
    view = instance(0, queued_prefills=2, queued_tokens=300)
    assert predictor().ttft_s(request(100), view) == pytest.approx(0.320 + 0.110)
    assert predictor().ttft_s(request(100, cached={0: 60}), view) == pytest.approx(0.320 + 0.050)


def test_least_delay_is_the_minimum_and_an_idle_one_wins() -> None:
    pool = [instance(index, queued_tokens=tokens) for index, tokens in enumerate((500, 100, 300))]
    model = predictor()
    assert model.least_delay(pool) is pool[1]
    assert model.least_delay([*pool, instance(3)]) is not pool[1]
    assert model.least_delay([]) is None


def sample(view: InstanceView, seconds: float, tokens: int = 990, requests: int = 1) -> PrefillSample:
    """One pass without piggybacked decodes."""
    one = MeasuredPass(tokens, 0, 0, seconds, requests)
    return PrefillSample(view, tokens, 0, 0, requests, seconds, (one,))


def measure(model: TtftPredictor, times: dict[InstanceView, float], passes: int = 60) -> None:
    """Passes of 990 tokens in turn, which are fitted as 1 s, and take so many times as long."""
    for _ in range(passes):
        for view, factor in times.items():
            model.on_prefill(sample(view, factor))


def test_one_factor_serves_all_instances_of_a_profile() -> None:
    """An instance that was never measured is what the others are."""
    model = predictor()
    measured, other, untried = instance(0), instance(1), instance(2)
    alien = instance(3, profile="of another device")
    measure(model, {measured: 2.0, other: 2.0})
    for view in (measured, other, untried):
        assert model.factor(view) == pytest.approx(2.0, rel=0.01)
    assert model.factor(alien) == 1.0
    assert model.own_s(request(990), untried) == pytest.approx(2.0, rel=0.01)
    measure(model, {measured: 1.0}, passes=200)
    assert model.factor(untried) == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize(("factor", "own"), [(1.1, False), (0.9, False), (1.5, True), (0.6, True)])
def test_an_instance_has_its_own_only_where_it_is_clearly_slower_or_faster(factor: float, own: bool) -> None:
    model = predictor()
    *usual, unlike = [instance(index) for index in range(9)]
    measure(model, {**dict.fromkeys(usual, 1.0), unlike: factor})
    assert len({model.factor(view) for view in usual}) == 1
    assert (model.factor(unlike) != model.factor(usual[0])) is own
    if own:
        assert model.factor(unlike) == pytest.approx(factor, rel=0.05)
    measure(model, dict.fromkeys([*usual, unlike], 1.0), passes=200)
    assert model.factor(unlike) == model.factor(usual[0]) == pytest.approx(1.0, rel=0.02), "it is as the others again"


def test_an_instance_that_is_slower_counts_as_such_in_the_least_delay() -> None:
    model = predictor()
    slow, other = instance(0, queued_tokens=100), instance(1, queued_tokens=150)
    measure(model, {slow: 2.0, other: 1.0})
    assert model.least_delay([slow, other]) is other  # 0.11 s twice is more than 0.16 s


def test_passes_with_piggybacked_decodes_say_nothing_of_the_curve() -> None:
    model, view = predictor(), instance(0)
    for _ in range(60):
        model.on_prefill(PrefillSample(view, 990, 0, 0, 1, 9.0))  # two of them: their times are only in the sum
    assert model.factor(view) == 1.0
    pure = MeasuredPass(990, 0, 0, 2.0)
    for _ in range(60):
        model.on_prefill(PrefillSample(view, 2000, 0, 0, 3, 11.0, (pure,)))
    assert model.factor(view) == pytest.approx(2.0, rel=0.01)


def test_a_pass_of_many_requests_is_fitted_as_such() -> None:
    """Ten requests of 90 tokens: 1 s by the curve, of which a tenth is theirs alone."""
    model, view = predictor(), instance(0)
    for _ in range(60):
        model.on_prefill(sample(view, 1.0, tokens=900, requests=10))
    assert model.factor(view) == pytest.approx(1.0)


def test_the_factor_is_bounded_and_ignores_empty_passes() -> None:
    model = predictor()
    view = instance(0)
    model.on_prefill(sample(view, 1.0, tokens=0))
    assert model.factor(view) == 1.0
    for _ in range(100):
        model.on_prefill(sample(view, 1000.0))
    assert model.factor(view) == PredictorKnobs().factor_max


def test_the_error_is_averaged_over_recent_requests() -> None:
    model = predictor()
    model.on_first_token(request(predicted_ttft_s=1.0), now_s=2.0)
    assert (model.error.absolute_s, model.error.bias_s, model.error.relative) == (1.0, 1.0, 0.5)
    model.on_first_token(request(predicted_ttft_s=3.0), now_s=2.0)
    assert (model.error.absolute_s, model.error.bias_s, model.error.relative) == (1.0, 0.0, 0.5)
    model.on_first_token(request(), now_s=2.0)  # carries no prediction
    assert model.error.count == 2


def test_profiles_have_curves_of_their_own() -> None:
    model = TtftPredictor({"fast": PrefillCurve(0.0, 1e-4, 0.0), "": CURVE})
    assert model.own_s(request(100), instance(0, profile="fast")) == pytest.approx(0.010)
    assert model.own_s(request(100), instance(1, profile="unknown")) == pytest.approx(0.110)


@pytest.mark.parametrize(
    ("name", "slo_s", "capacity", "expected"),
    [
        # decode = 10 ms + 0.1 ms * N/1000 + 1 us * N = 10 ms + 1.1 us * N; 90 % of the target
        ("bandwidth binds", 0.040, 10**6, (0.036 - 0.010) / 1.1e-6),
        ("memory binds", 0.200, 100_000, 90_000),
        ("target below one step", 0.010, 100_000, 0),
    ],
)
def test_max_running_tokens(name: str, slo_s: float, capacity: int, expected: float) -> None:
    found = max_running_tokens(LinearSteps(), tpot_slo_s=slo_s, kv_capacity_tokens=capacity, mean_context_tokens=1000)
    assert found == pytest.approx(expected, abs=1000)


@pytest.mark.parametrize("bad", [{"tpot_slo_s": 0}, {"kv_capacity_tokens": 0}, {"margin": 1.5}])
def test_max_running_tokens_refuses(bad: dict[str, float]) -> None:
    arguments = {"tpot_slo_s": 0.1, "kv_capacity_tokens": 1000} | bad
    with pytest.raises(ConfigError, match=next(iter(bad))):
        max_running_tokens(LinearSteps(), **arguments)  # type: ignore[arg-type]
