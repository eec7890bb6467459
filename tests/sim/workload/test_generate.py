"""Generators: seeds, stated shares and means, conversations that grow."""

from __future__ import annotations

import itertools
import random
import statistics

import numpy as np
import pytest

from pla_sglang.sim.workload import Arrivals, TraceError, chat_trace, generated_trace, hol_trace, length_model
from pla_sglang.sim.workload.lengths import LengthModel, fixed

DRAWS = 20_000


@pytest.mark.parametrize(("name", "share"), [("lmsys_first_turn_prompt", 0.63), ("lmsys_later_turn_prompt", 0.81)])
def test_published_share_of_prompts_under_256_tokens(name: str, share: float) -> None:
    rng = random.Random(0)
    lengths = [length_model(name).draw(rng) for _ in range(DRAWS)]
    assert sum(length < 256 for length in lengths) / DRAWS == pytest.approx(share, abs=0.015)


@pytest.mark.parametrize(("name", "mean"), [("star_sharegpt_output", 7542), ("star_alpaca_output", 8596)])
def test_published_mean_of_reasoning_answers(name: str, mean: float) -> None:
    rng = random.Random(0)
    assert statistics.fmean(length_model(name).draw(rng) for _ in range(DRAWS)) == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 2.0])
def test_gaps_have_the_asked_rate_and_spread(cv: float) -> None:
    times = generated_trace(DRAWS, Arrivals(4.0, random.Random(3), cv=cv), fixed(1), fixed(1)).arrival_s
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.25, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.08)


def test_same_seed_same_trace() -> None:
    def make(seed: int) -> list[float]:
        return chat_trace(50, Arrivals(2.0, random.Random(seed))).arrival_s.tolist()

    assert make(5) == make(5)
    assert make(5) != make(6)


def test_conversations_grow_by_what_was_said() -> None:
    trace = chat_trace(300, Arrivals(2.0, random.Random(2)))
    assert trace.session is not None
    assert trace.turn is not None
    assert trace.hash_ids is not None
    for session in range(300):
        rows = np.flatnonzero(trace.session == session)
        assert trace.turn[rows].tolist() == list(range(len(rows)))
        said = trace.input_tokens[rows] + trace.output_tokens[rows]
        assert (trace.input_tokens[rows][1:] > said[:-1]).all()
        for earlier, later in itertools.pairwise(rows):
            assert trace.hash_ids[later][: len(trace.hash_ids[earlier])] == trace.hash_ids[earlier]
    turns = len(trace) / 300
    assert turns == pytest.approx(5.45, rel=0.15)


def test_hol_has_the_shape_of_the_issue() -> None:
    trace = hol_trace()
    assert sorted(set(trace.input_tokens.tolist())) == [2_000, 24_000]
    assert len(trace) == 29
    with pytest.raises(TraceError, match="not both 0"):
        hol_trace(longs=0, shorts=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate_per_s": 0.0}, "rate_per_s is 0.0; allowed: finite, above 0"),
        ({"rate_per_s": 1.0, "cv": -1.0}, "cv is -1.0"),
        ({"rate_per_s": 1.0, "think_s": float("inf")}, "think_s is inf"),
    ],
)
def test_bad_arrivals(values: dict[str, float], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        Arrivals(rng=random.Random(0), **values)


def test_bad_models_and_counts() -> None:
    with pytest.raises(TraceError, match="sum 1"):
        LengthModel((0.5,), (1.0,), (1.0,))
    with pytest.raises(TraceError, match="least <= most"):
        LengthModel((1.0,), (1.0,), (1.0,), least=5, most=4)
    with pytest.raises(TraceError, match="is not known; allowed: lmsys"):
        length_model("nobody")
    with pytest.raises(TraceError, match="0 requests"):
        generated_trace(0, Arrivals(1.0, random.Random(0)), fixed(1), fixed(1))
