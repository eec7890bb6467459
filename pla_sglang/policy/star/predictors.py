"""Remaining-length predictors, behind one interface (STAR sections 4 and 6.5).

A driver hands over what it knows: the simulator the truth, an engine the estimate of its learned predictor. These
objects turn it into what the rescheduler is allowed to see.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pla_sglang.errors import ConfigError
from pla_sglang.policy.checks import require

Floats = npt.NDArray[np.float64]

# Bins of section 6.5, in tokens of remaining length.
PAPER_BINS: dict[int, tuple[float, ...]] = {
    2: (0, 8192, 32768),
    4: (0, 4096, 8192, 16384, 32768),
    6: (0, 2048, 4096, 6144, 8192, 16384, 32768),
}


class RemainingPredictor(Protocol):
    """``known`` and the answer have shape [requests]; nan means unknown."""

    def predict(self, rids: Sequence[str], known: Floats) -> Floats: ...

    def forget(self, rid: str) -> None:
        """The request has ended."""
        ...


class Oracle:
    """What the driver knows, unchanged. Serves the learned predictor too: its estimates arrive in ``known``."""

    def predict(self, rids: Sequence[str], known: Floats) -> Floats:
        return known

    def forget(self, rid: str) -> None:
        pass


class NoPrediction:
    """Knows nothing: migration by current load only."""

    def predict(self, rids: Sequence[str], known: Floats) -> Floats:
        return np.full(len(rids), np.nan)

    def forget(self, rid: str) -> None:
        pass


class Binned:
    """Knows the bin and answers its middle (Table 3). The last bin takes all that is longer.

    Raises ConfigError unless ``edges`` has at least two rising values.
    """

    def __init__(self, edges: Sequence[float]) -> None:
        if len(edges) < 2 or any(edges[i + 1] <= edges[i] for i in range(len(edges) - 1)):
            raise ConfigError(f"bins must have at least two rising edges, got {list(edges)}")
        self._edges = np.array(edges, dtype=np.float64)
        self._middles = (self._edges[:-1] + self._edges[1:]) / 2

    def predict(self, rids: Sequence[str], known: Floats) -> Floats:
        places = np.clip(np.searchsorted(self._edges, known, side="right") - 1, 0, len(self._middles) - 1)
        return np.where(np.isnan(known), np.nan, self._middles[places])

    def forget(self, rid: str) -> None:
        pass


class _DrawnOnce:
    """A Laplace error of mean absolute size 1 a request, drawn when the request is first seen and kept to its end."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._errors: dict[str, float] = {}

    def of(self, rids: Sequence[str]) -> Floats:
        """Shape [requests]."""
        return np.array([self._error(rid) for rid in rids], dtype=np.float64)

    def forget(self, rid: str) -> None:
        self._errors.pop(rid, None)

    def _error(self, rid: str) -> float:
        error = self._errors.get(rid)
        if error is None:
            size = self._rng.expovariate(1.0)
            error = self._errors[rid] = size if self._rng.random() < 0.5 else -size
        return error


class Noisy:
    """Adds an error of the given mean absolute size, drawn once a request (Laplace), so that it does not average out.

    Answers are at least 1 token, so near the end of a request errors are smaller than asked for.

    Args:
        mae_tokens: mean absolute error.
        rng: seeded source of the errors.
    """

    def __init__(self, mae_tokens: float, rng: Random) -> None:
        require("mae_tokens", mae_tokens, 0)
        self._mae_tokens = mae_tokens
        self._errors = _DrawnOnce(rng)

    def predict(self, rids: Sequence[str], known: Floats) -> Floats:
        return np.maximum(1.0, known + self._mae_tokens * self._errors.of(rids)) if len(rids) else known

    def forget(self, rid: str) -> None:
        self._errors.forget(rid)


class Proportional:
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
        self._mae_share = mae_share
        self._errors = _DrawnOnce(rng)

    def predict(self, rids: Sequence[str], known: Floats) -> Floats:
        return np.maximum(1.0, known * (1.0 + self._mae_share * self._errors.of(rids))) if len(rids) else known

    def forget(self, rid: str) -> None:
        self._errors.forget(rid)
