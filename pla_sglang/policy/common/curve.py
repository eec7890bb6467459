"""The quadratic of Arrow's TTFT predictor, fitted once at the start (Arrow section 5.3, "Instance Load Evaluation").

    time(L, H) = c0 + c1*L + c2*L*(L + 2*H) + c3*H

With H = 0 this is the paper's quadratic of the input length. L counts *uncached* tokens: a prompt that is in the prefix
cache costs what is left to compute, and reading its history.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from pla_sglang.common.checks import require
from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.interface.step_times import StepTimes

PROFILE_TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PROFILE_HISTORY_TOKENS = (0, 4096)


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillCurve:
    """Coefficients: c0 in s, c1 and c3 in s/token, c2 in s/token^2; none is negative.

    Raises ConfigError when one is negative or all are zero.
    """

    c0_s: float
    c1_s: float
    c2_s: float
    c3_s: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            require(f"prefill curve {field.name}", getattr(self, field.name), 0.0)
        if self.c0_s + self.c1_s + self.c2_s <= 0:
            raise ConfigError("prefill curve is zero everywhere; at least one of c0_s, c1_s, c2_s must be above 0")

    def time_s(self, new_tokens: float, history_tokens: float = 0.0) -> float:
        """What one request takes alone."""
        attention = new_tokens * (new_tokens + 2 * history_tokens)
        return self.c0_s + self.c1_s * new_tokens + self.c2_s * attention + self.c3_s * history_tokens

    def batch_s(self, requests: float, new_tokens: float, attention: float, history_tokens: float) -> float:
        """What a backlog takes, from its sums. Each request pays c0: prefills run one by one (section 4.1)."""
        return self.c0_s * requests + self.c1_s * new_tokens + self.c2_s * attention + self.c3_s * history_tokens


def fit_curve(samples: Sequence[tuple[float, float, float]]) -> PrefillCurve:
    """Least squares of relative errors with coefficients >= 0 over (new tokens, history tokens, seconds).

    Raises ConfigError with fewer than three samples, or a sample whose time or length is not above 0.
    """
    if len(samples) < 3:
        raise ConfigError(f"a prefill curve needs at least 3 samples, got {len(samples)}")
    for new, history, seconds in samples:
        require("prefill sample new_tokens", new, 0, above=True)
        require("prefill sample history_tokens", history, 0)
        require("prefill sample seconds", seconds, 0, above=True)
    new_tokens, history_tokens, times = np.array(samples, dtype=np.float64).T
    attention = new_tokens * (new_tokens + 2 * history_tokens)
    columns = np.stack([np.ones_like(times), new_tokens, attention, history_tokens], axis=1) / times[:, None]
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)  # columns differ by ten orders of magnitude
    c0, c1, c2, c3 = (float(value) for value in solve_nonnegative(columns / scale, np.ones_like(times)) / scale)
    return PrefillCurve(c0, c1, c2, c3)


def solve_nonnegative(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares with coefficients >= 0 of a few columns: the best of all sets of columns that may be above zero.

    Not scipy's: a router needs nothing else of it, and it is larger than all that a router does need.
    """
    best, best_error = np.zeros(columns.shape[1]), float(target @ target)
    for size in range(1, columns.shape[1] + 1):
        for chosen in itertools.combinations(range(columns.shape[1]), size):
            solution = np.linalg.lstsq(columns[:, chosen], target, rcond=None)[0]
            error = float(np.sum((columns[:, chosen] @ solution - target) ** 2))
            if error < best_error and solution.min() >= 0:
                best, best_error = np.zeros(columns.shape[1]), error
                best[list(chosen)] = solution
    return best


def profile_curve(steps: StepTimes) -> PrefillCurve:
    """What Arrow does at the launch of a cluster: time requests of several lengths, alone, and fit."""
    samples = [
        (float(new), float(history), steps.prefill_s(new, new * (new + 2 * history), history, 1))
        for new in PROFILE_TOKENS
        for history in PROFILE_HISTORY_TOKENS
    ]
    return fit_curve(samples)
