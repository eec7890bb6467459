"""The error of STAR's predictor over the tokens generated."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from bench.lab.papers.star_errors import FIGURE_7_SHARES, Refining
from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.interface.remaining_length import EndedAnswer, RunningAnswer, RunningAnswers


def test_errors_over_generated_tokens_are_those_of_figure_7() -> None:
    """Requests of 31,000 tokens: 18,256 at the start, 2,929 after 8,000 tokens; the share does not grow later."""
    erring = Refining(FIGURE_7_SHARES, random.Random(1))
    rids = [f"r{index}" for index in range(4000)]

    def answers(rids: Sequence[str], known: npt.NDArray[np.float64]) -> RunningAnswers:
        return RunningAnswers.of(RunningAnswer(rid, 0, left) for rid, left in zip(rids, known, strict=True))

    def error_tokens(generated: int) -> float:
        known = np.full(4000, 31_000.0 - generated)
        predicted = erring.predict(answers(rids, known))
        errors = np.array([erring._error(rid) for rid in rids])
        seen = np.where(predicted > 1.0, np.abs(predicted - known) / np.abs(errors), np.nan)
        return float(np.nanmedian(seen))  # a Laplace error of size 1 becomes this many tokens

    assert error_tokens(0) == pytest.approx(18_256)
    assert 2929 < error_tokens(4000) < 18_256
    assert error_tokens(8000) == pytest.approx(2929)
    assert error_tokens(20_000) == pytest.approx(2929 / 23_000 * 11_000)
    assert np.isnan(erring.predict(answers(["x"], np.array([np.nan])))).all()
    assert not len(erring.predict(answers([], np.zeros(0))))
    erring.observe_end(EndedAnswer("r0", 5, whole=True))
    assert erring._first.keys() == {*rids, "x"} - {"r0"}


@pytest.mark.parametrize("shares", [[], [(5, 0.1), (0, 0.2)]])
def test_bad_shares(shares: list[tuple[float, float]]) -> None:
    with pytest.raises(ConfigError, match="rising tokens"):
        Refining(shares, random.Random(1))
