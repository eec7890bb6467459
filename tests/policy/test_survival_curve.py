"""The survival curve of answers: what it says of the rest of one, from which others, and what it is not misled by."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.common.survival import (
    KINDS,
    Seen,
    SurvivalCurve,
    SurvivalKnobs,
    SurvivalPredictor,
    fit_curve,
    kinds_of,
)
from pla_sglang.policy.interface.remaining_length import EndedAnswer, RunningAnswer, RunningAnswers

LENGTHS = st.lists(st.tuples(st.integers(1, 400), st.booleans()), min_size=1, max_size=60)


def running(*generated: float, now_s: float = 0.0, place: str = "i0", **fields: Any) -> RunningAnswers:
    rows = (RunningAnswer(f"r{place}{number}", tokens, **fields) for number, tokens in enumerate(generated))
    return RunningAnswers.of(rows, place, now_s)


def learned(lengths: Iterable[tuple[int, bool]], knobs: SurvivalKnobs | None = None) -> SurvivalPredictor:
    made = SurvivalPredictor(knobs)
    for tokens, whole in lengths:
        made.observe_end(EndedAnswer("x", tokens, whole))
    return made


def rests(predictor: SurvivalPredictor, *generated: float, **fields: Any) -> list[float]:
    """By a look at requests in another place each time, so that they are not taken for what runs."""
    return predictor.predict(running(*generated, **fields)).tolist()


# -- what it says ------------------------------------------------------------------------------------------------------


def test_the_median_of_what_is_longer() -> None:
    predictor = learned([(10, True), (20, True), (30, True), (40, True)])
    assert rests(predictor, 0, 9, 10, 25, 39) == [20.0, 11.0, 20.0, 5.0, 1.0]


def test_without_data_nothing_is_known() -> None:
    predictor = SurvivalPredictor()
    assert np.isnan(predictor.predict(running(0, 5))).all()
    predictor.observe_end(EndedAnswer("x", 0, whole=True))  # refused
    assert np.isnan(predictor.predict(running(0, 5))).all()
    assert predictor.predict(running()).shape == (0,)
    assert np.isnan(learned([(10, True)]).predict(running(10))).all(), "longer than all that was seen"
    assert np.isnan(learned([(10, False), (20, False)]).predict(running(5))).all(), "none has come to its own end"


def test_a_limit_ends_what_goes_on() -> None:
    cut = [(10, True), (100, False), (100, False), (100, False)]
    assert rests(learned(cut), 20, limit_tokens=100) == [80.0]
    assert np.isnan(rests(learned(cut), 20, limit_tokens=1000)).all(), "nothing was seen beyond 100"
    assert rests(learned([(60, True)] * 3), 20, limit_tokens=50) == [30.0]
    assert rests(learned([(60, True)] * 3), 55, limit_tokens=50) == [1.0], "it runs, so a token is to come"


@given(LENGTHS)
def test_a_prediction_is_consistent_with_the_curve(lengths: list[tuple[int, bool]]) -> None:
    """More tokens generated never bring the end forward, and half of the curve is left at it, by its definition."""
    places = np.arange(0, 420, 3)
    found = learned(lengths).predict(running(*places))
    known = found[~np.isnan(found)]
    assert (known >= 1.0).all()
    ends = (places + found)[~np.isnan(found)]
    assert (np.diff(ends) >= 0).all()
    assert not np.isnan(found[: len(known)]).any(), "beyond where nothing is known, nothing is"
    for at, end in zip(places[: len(known)], ends, strict=True):
        assert share_left(lengths, at, end) <= 0.5 + 1e-9
        assert share_left(lengths, at, end - 1) > 0.5


def share_left(lengths: list[tuple[int, bool]], after: float, to: float) -> float:
    """S(to) / S(after), by the product itself."""
    left = 1.0
    for length in sorted({tokens for tokens, whole in lengths if whole and after < tokens <= to}):
        ends = sum(whole and tokens == length for tokens, whole in lengths)
        left *= 1 - ends / sum(tokens >= length for tokens, _ in lengths)
    return left


@given(LENGTHS, st.randoms(use_true_random=False))
def test_the_order_of_ends_does_not_matter(lengths: list[tuple[int, bool]], rng: random.Random) -> None:
    places = np.arange(0, 420, 7)
    there = learned(lengths).predict(running(*places))
    rng.shuffle(lengths)
    np.testing.assert_array_equal(learned(lengths).predict(running(*places)), there)


@pytest.mark.parametrize(("at", "median"), [(0, 5.0), (5, 50.0), (20, 50.0), (50, 60.0)])
def test_ends_of_nobody_at_risk_do_not_end_the_curve(at: int, median: float) -> None:
    """With delayed entry the first lengths may have few at risk; who came in later still has a curve."""
    seen = Seen(np.array([0.0, 10.0, 10.0]), np.array([5.0, 50.0, 60.0]), np.array([True, True, True]))
    curve = fit_curve(seen)
    assert value_at(curve, at)[0] == median


# -- what it is not misled by ------------------------------------------------------------------------------------------


def long_tailed(rng: random.Random) -> int:
    return max(1, round(rng.lognormvariate(5.0, 1.2)))


def exact_median(draw: Callable[[random.Random], int], after: int) -> float:
    rng = random.Random(99)
    longer = [length for length in (draw(rng) for _ in range(40_000)) if length > after]
    return float(np.median(longer)) - after


def serve(
    predictor: SurvivalPredictor,
    lengths: Sequence[int],
    *,
    until_s: float,
    rate_per_s: float = 10.0,
    limit: float = math.inf,
    aborts: float = 0.0,
) -> list[tuple[int, float]]:
    """Requests that come evenly and give a token a 50th of a second; looked at every second. What runs at the end: its
    length, and its tokens then."""
    rng = random.Random(5)
    come = [(number / rate_per_s, length) for number, length in enumerate(lengths)]
    plans = []
    for start_s, length in come:
        cut = min(float(length), limit, 1 + rng.expovariate(1 / 200) if rng.random() < aborts else math.inf)
        plans.append((start_s, max(1, round(cut)), cut >= length and length < limit))
    events = sorted((start_s + tokens / 50, start_s, tokens, whole) for start_s, tokens, whole in plans)
    places = itertools.takewhile(lambda at_s: at_s <= until_s, itertools.count(0.0))
    done = 0
    for now_s in places:
        while done < len(events) and events[done][0] <= now_s:
            end_s, start_s, tokens, whole = events[done]
            predictor.observe_end(EndedAnswer("x", tokens, whole, started_s=start_s, ended_s=end_s, limit_tokens=limit))
            done += 1
        open_now = [(start_s, tokens) for end_s, start_s, tokens, _ in events[done:] if start_s < now_s]
        rows = [
            RunningAnswer(str(number), 50 * (now_s - start_s), started_s=start_s, limit_tokens=limit)
            for number, (start_s, _) in enumerate(open_now)
        ]
        predictor.predict(RunningAnswers.of(rows, "i0", now_s))
    return [(tokens, 50 * (until_s - start_s)) for start_s, tokens in open_now]


CASES = {
    "the window is not full: long answers still run": (4096, 40.0, math.inf, 0.0),
    "the window has just run over, long ones of the start still run": (300, 60.0, math.inf, 0.0),
    "the window has run over often": (1000, 400.0, math.inf, 0.0),
    "a limit cuts a fifth": (4096, 300.0, 400.0, 0.0),
    "half of the clients go away": (4096, 300.0, math.inf, 0.5),
}


@pytest.mark.parametrize(("window", "until_s", "limit", "aborts"), CASES.values(), ids=CASES)
def test_censored_answers_do_not_bias(window: int, until_s: float, limit: float, aborts: float) -> None:
    """The mean over seeds lies within the error of the median by the answers that were seen."""
    found = []
    for seed in range(6):
        rng = random.Random(seed)
        predictor = SurvivalPredictor(SurvivalKnobs(window_ends=window, refit_share=0.0))
        serve(predictor, [long_tailed(rng) for _ in range(4000)], until_s=until_s, limit=limit, aborts=aborts)
        found.append(predictor.predict(running(0, 100, now_s=until_s, place="i1")))
    wanted = [exact_median(long_tailed, after) for after in (0, 100)]
    means = np.mean(found, axis=0)
    assert means == pytest.approx(wanted, rel=0.12)


def test_what_has_left_the_window_is_forgotten() -> None:
    predictor = learned([(1000, True)] * 200 + [(10, True)] * 100, SurvivalKnobs(window_ends=100))
    assert rests(predictor, 0) == [10.0]


def test_what_ran_in_a_place_that_is_gone_is_forgotten() -> None:
    predictor = SurvivalPredictor(SurvivalKnobs(refit_share=0.0))
    predictor.predict(running(*[500.0] * 50, place="gone", now_s=0.0))
    predictor.observe_end(EndedAnswer("x", 10, whole=True, ended_s=1.0))
    assert np.isnan(predictor.predict(running(0, now_s=1.0))).all(), "most go on beyond 10"
    predictor.observe_end(EndedAnswer("x", 10, whole=True, ended_s=60.0))
    assert rests(predictor, 0, now_s=60.0) == [10.0]


# -- models and kinds --------------------------------------------------------------------------------------------------


def test_models_have_curves_of_their_own() -> None:
    predictor = SurvivalPredictor()
    for _ in range(3):
        predictor.observe_end(EndedAnswer("x", 10, whole=True, model="a"))
        predictor.observe_end(EndedAnswer("x", 90, whole=True, model="b"))
    rows = [RunningAnswer(name, 0) for name in "abc"]
    found = predictor.predict(RunningAnswers.of(rows, models=["a", "b", "c"]))
    assert found[:2].tolist() == [10.0, 90.0]
    assert np.isnan(found[2]), "nothing was seen of it"
    assert predictor.to_dict()["by_model"] == {"a": 3, "b": 3}


def test_a_kind_with_enough_ends_has_a_curve_of_its_own_as_far_as_they_go() -> None:
    predictor = SurvivalPredictor(SurvivalKnobs(least_ends=32))
    ends = [(length, True) for length in range(1, 101)]
    for tokens, whole in ends:
        predictor.observe_end(EndedAnswer("x", tokens, whole, prompt_tokens=10))
        predictor.observe_end(EndedAnswer("x", 10 * tokens, whole, prompt_tokens=10_000))
    short = rests(predictor, 0, 60, 90, prompt_tokens=10)
    long = rests(predictor, 0, 60, 90, prompt_tokens=10_000)
    assert short[:2] == [50.0, 20.0]
    assert long[:2] == [500.0, 470.0]
    assert short[2] > 10, "10 ends are behind 90: the whole answers"
    few = SurvivalPredictor(SurvivalKnobs(least_ends=101))
    for tokens, whole in ends:
        few.observe_end(EndedAnswer("x", tokens, whole, prompt_tokens=10))
        few.observe_end(EndedAnswer("x", 10 * tokens, whole, prompt_tokens=10_000))
    assert rests(few, 0, prompt_tokens=10) == rests(few, 0, prompt_tokens=10_000)


@given(LENGTHS, LENGTHS, st.integers(1, 20))
def test_a_spliced_curve_is_one_and_then_the_other(
    own: list[tuple[int, bool]], whole: list[tuple[int, bool]], least: int
) -> None:
    curves = [fit_curve(seen_of(lengths)) for lengths in (own, whole)]
    spliced = curves[0].spliced(curves[1], least)
    assert (np.diff(spliced.generated) > 0).all()
    for at in range(0, 420, 5):
        first = value_at(curves[0], at)
        wanted = first if first[1] >= least else value_at(curves[1], at)
        assert value_at(spliced, at) == pytest.approx(wanted, nan_ok=True)


def seen_of(lengths: list[tuple[int, bool]]) -> Seen:
    until = np.array([tokens for tokens, _ in lengths], dtype=np.float64)
    return Seen(np.zeros(len(until)), until, np.array([whole for _, whole in lengths]))


def value_at(curve: SurvivalCurve, at: int) -> tuple[float, int]:
    place = np.searchsorted(curve.generated, at, side="right") - 1
    return float(curve.median[place]), int(curve.behind[place])


def test_kinds_are_told_apart_by_what_requests_say() -> None:
    columns = np.array(list(itertools.product((10, 1000, 9000), (10, 1000, math.inf), (0, 1))), dtype=np.float64).T
    assert sorted(kinds_of(*columns).tolist()) == list(range(KINDS))


# -- the constants -----------------------------------------------------------------------------------------------------


def error_of(least_ends: int, window: int = 4096) -> float:
    """Mean absolute error on requests of which the kind says something, after few ends of each kind."""
    rng = random.Random(3)
    errors: list[float] = []
    predictor = SurvivalPredictor(SurvivalKnobs(least_ends=least_ends, window_ends=window))
    for _ in range(3000):
        prompt = rng.choice((100, 1000, 10_000))
        length = max(1, round(rng.expovariate(5 / prompt)))
        generated = rng.randrange(length)
        told = predictor.predict(running(generated, prompt_tokens=prompt))[0]
        if not math.isnan(told):
            errors.append(abs(length - generated - told))
        predictor.observe_end(EndedAnswer("x", length, whole=True, prompt_tokens=prompt))
        predictor._running.clear()
    return float(np.mean(errors))


def test_half_and_twice_as_many_ends_make_no_difference() -> None:
    chosen = error_of(32)
    assert error_of(16) == pytest.approx(chosen, rel=0.03)
    assert error_of(64) == pytest.approx(chosen, rel=0.03)
    assert error_of(100_000) > 1.05 * chosen, "that kinds count at all does"


@pytest.mark.parametrize("field", ["window_ends", "least_ends"])
def test_knobs_out_of_range_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        SurvivalKnobs(**{field: 0})
