"""Predictors that err as the paper's do (STAR sections 4 and 6.5), for a simulator, which knows the truth."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from pla_sglang.common.checks import require
from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.interface.remaining_length import EndedAnswer, Floats, RemainingPredictor, RunningAnswers

# Figure 7, requests of 30K to 32K tokens: mean absolute error by tokens generated, as a share of the rest of 31,000.
# What the curve shows behind its last printed value is not printed; the share is held there.
FIGURE_7_SHARES = ((0, 18_256 / 31_000), (8000, 2929 / 23_000))

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


class _ErrorDrawnOnce(RemainingPredictor):
    """A Laplace error of mean absolute size 1 a request, drawn when the request is first seen and kept to its end."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._errors: dict[str, float] = {}

    def errors_of(self, rids: Sequence[str]) -> Floats:
        """Shape [requests]."""
        return np.array([self._error(rid) for rid in rids], dtype=np.float64)

    def observe_end(self, answer: EndedAnswer) -> None:
        self._errors.pop(answer.rid, None)

    def _error(self, rid: str) -> float:
        error = self._errors.get(rid)
        if error is None:
            size = self._rng.expovariate(1.0)
            error = self._errors[rid] = size if self._rng.random() < 0.5 else -size
        return error


class Noisy(_ErrorDrawnOnce):
    """Adds an error of the given mean absolute size, drawn once a request (Laplace), so that it does not average out.

    Answers are at least 1 token, so near the end of a request errors are smaller than asked for.

    Args:
        mae_tokens: mean absolute error.
        rng: seeded source of the errors.
    """

    def __init__(self, mae_tokens: float, rng: Random) -> None:
        require("mae_tokens", mae_tokens, 0)
        super().__init__(rng)
        self._mae_tokens = mae_tokens

    def predict(self, answers: RunningAnswers) -> Floats:
        rids, known = answers.rids, answers.known
        return np.maximum(1.0, known + self._mae_tokens * self.errors_of(rids)) if len(rids) else known


class Proportional(_ErrorDrawnOnce):
    """Errs by a share of what remains: ``mae_share`` of it on average, drawn once a request (Laplace).

    So errors shrink as a request nears its end, which is what Figure 7 of the paper shows of its predictor. With a mean
    of M tokens remaining over all decode steps, ``mae_share`` = m / M has a mean absolute error of m tokens. Answers
    are at least 1 token.

    Args:
        mae_share: mean absolute error, as a share of the true remaining length.
        rng: seeded source of the errors.
    """

    def __init__(self, mae_share: float, rng: Random) -> None:
        require("mae_share", mae_share, 0)
        super().__init__(rng)
        self._mae_share = mae_share

    def predict(self, answers: RunningAnswers) -> Floats:
        rids, known = answers.rids, answers.known
        return np.maximum(1.0, known * (1.0 + self._mae_share * self.errors_of(rids))) if len(rids) else known


class Refining(_ErrorDrawnOnce):
    """Errs by a share of what remains that falls as tokens are generated, as Figure 7 shows of the paper's predictor.

    Between the points the share falls geometrically, and is held outside. What a request has generated is counted from
    the first time that it is seen, which is shortly after its decode began. Answers are at least 1 token.

    Args:
        shares: tokens generated, rising, and the mean absolute error as a share of the true remaining length.
        rng: seeded source of the errors.

    Raises:
        ConfigError: no points, tokens that do not rise, or a share that is not above 0.
    """

    def __init__(self, shares: Sequence[tuple[float, float]], rng: Random) -> None:
        tokens = [at for at, _ in shares]
        if not shares or sorted(set(tokens)) != tokens or min(share for _, share in shares) <= 0:
            raise ConfigError(f"shares must have rising tokens and values above 0, got {list(shares)}")
        super().__init__(rng)
        self._at = np.array(tokens, dtype=np.float64)
        self._log_shares = np.log([share for _, share in shares])
        self._first: dict[str, float] = {}  # what remained when the request was first seen

    def predict(self, answers: RunningAnswers) -> Floats:
        rids, known = answers.rids, answers.known
        if not len(rids):
            return known
        first = [self._first.setdefault(rid, left) for rid, left in zip(rids, known.tolist(), strict=True)]
        shares = np.exp(np.interp(np.array(first) - known, self._at, self._log_shares))
        return np.maximum(1.0, known * (1.0 + shares * self.errors_of(rids)))

    def observe_end(self, answer: EndedAnswer) -> None:
        super().observe_end(answer)
        self._first.pop(answer.rid, None)
