"""Predictors that err as the paper's do (STAR sections 4 and 6.5), for a simulator, which knows the truth."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from pla_sglang.common.checks import require
from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.interface.remaining_length import EndedAnswer, Floats, RemainingPredictor, RunningAnswers

# Bins of section 6.5, in tokens of remaining length.
PAPER_BINS: dict[int, tuple[float, ...]] = {
    2: (0, 8192, 32768),
    4: (0, 4096, 8192, 16384, 32768),
    6: (0, 2048, 4096, 6144, 8192, 16384, 32768),
}


class Binned(RemainingPredictor):
    """Knows the bin and answers its middle (Table 3). The last bin takes all that is longer.

    Raises ConfigError unless ``edges`` has at least two rising values.
    """

    def __init__(self, edges: Sequence[float]) -> None:
        if len(edges) < 2 or any(edges[i + 1] <= edges[i] for i in range(len(edges) - 1)):
            raise ConfigError(f"bins must have at least two rising edges, got {list(edges)}")
        self._edges = np.array(edges, dtype=np.float64)
        self._middles = (self._edges[:-1] + self._edges[1:]) / 2

    def predict(self, answers: RunningAnswers) -> Floats:
        known = answers.known
        places = np.clip(np.searchsorted(self._edges, known, side="right") - 1, 0, len(self._middles) - 1)
        return np.where(np.isnan(known), np.nan, self._middles[places])


class Noisy(RemainingPredictor):
    """Adds an error of the given mean absolute size, drawn once a request (Laplace), so that it does not average out.

    It is drawn when the request is first seen and kept to its end. Answers are at least 1 token, so near the end of a
    request errors are smaller than asked for.

    Args:
        mae_tokens: mean absolute error.
        rng: seeded source of the errors.
    """

    def __init__(self, mae_tokens: float, rng: Random) -> None:
        require("mae_tokens", mae_tokens, 0)
        self._mae_tokens = mae_tokens
        self._rng = rng
        self._errors: dict[str, float] = {}  # of mean absolute size 1

    def predict(self, answers: RunningAnswers) -> Floats:
        rids, known = answers.rids, answers.known
        return np.maximum(1.0, known + self._mae_tokens * self.errors_of(rids)) if len(rids) else known

    def errors_of(self, rids: Sequence[str]) -> Floats:
        """Those of mean absolute size 1; shape [requests]."""
        return np.array([self._error(rid) for rid in rids], dtype=np.float64)

    def observe_end(self, answer: EndedAnswer) -> None:
        self._errors.pop(answer.rid, None)

    def _error(self, rid: str) -> float:
        error = self._errors.get(rid)
        if error is None:
            size = self._rng.expovariate(1.0)
            error = self._errors[rid] = size if self._rng.random() < 0.5 else -size
        return error
