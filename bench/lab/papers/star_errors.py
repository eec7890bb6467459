"""The error of STAR's own predictor, as its Figure 7 shows it, for a simulator, which knows the truth."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.interface.remaining_length import EndedAnswer, Floats, RunningAnswers
from pla_sglang.policy.star.predictors import Noisy

# Figure 7, requests of 30K to 32K tokens: mean absolute error by tokens generated, as a share of the rest of 31,000.
# What the curve shows behind its last printed value is not printed; the share is held there.
FIGURE_7_SHARES = ((0, 18_256 / 31_000), (8000, 2929 / 23_000))


class Refining(Noisy):
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
        super().__init__(0.0, rng)
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
