"""The boundary between short and long of a fleet, fitted to the prefill passes that its instances report.

An engine fits the step model to its own passes (``step_fit.py``). Pools fit one to the passes of all instances: one of
a short pool hardly sees a long. Pools in one server, the router and the simulator hold the same object.
"""

from __future__ import annotations

import itertools

from pla_sglang.policy.common.step_fit import FitKnobs, Solve, StepFit, StepSample
from pla_sglang.policy.common.step_model import GPU_START, StepModel
from pla_sglang.policy.interface.decisions import PrefillSample
from pla_sglang.policy.interface.prefill import PrefillClass
from pla_sglang.policy.interface.step_times import StepTimes
from pla_sglang.policy.pla.boundary import Boundary

PROFILE_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
PROFILE_HISTORY_TOKENS = (0, 1024, 4096, 16384)

# A fleet's passes are many and its dispatcher's thread has other work: a fit of 256 passes after each 64.
FLEET_FIT = FitKnobs(refit_every=64, min_samples=16)
PASS_GAP_S = 1 / 16
NO_CAP = 1 << 60


def profile_model(steps: StepTimes, solve: Solve) -> StepModel:
    """The step model of an instance from its step profile, before anything is measured."""
    lengths = list(itertools.product(PROFILE_TOKENS, PROFILE_HISTORY_TOKENS))
    fit = StepFit(GPU_START, FitKnobs(min_samples=len(lengths), refit_every=len(lengths)), solve=solve)
    for new, history in lengths:
        attention = new * (new + 2 * history)
        fit.observe(StepSample(new, history, attention, steps.prefill_s(new, attention, history, 1)))
    return fit.model


class FittedBoundary:
    """Short or long by new tokens and history.

    Args:
        fit: learns from passes; None: the boundary stays as it is.
        fixed_tokens: this many new tokens are long, whatever was fitted; None: as fitted.
        cap_tokens: upper limit of the boundary; None: only that of fitted ones.
        gap_s: once the fit has learned enough to be refitted at its own pace, at most one pass in so many device
            seconds is taken.
    """

    def __init__(
        self,
        fit: StepFit | None = None,
        *,
        fixed_tokens: int | None = None,
        cap_tokens: int | None = None,
        gap_s: float = 0.0,
    ) -> None:
        self.fit = fit
        self._fixed_tokens = fixed_tokens
        self._gap_s = gap_s
        self._next_s = float("-inf")
        limit = NO_CAP if cap_tokens is None else cap_tokens
        self.boundary = Boundary(fixed_tokens=fixed_tokens, cap_tokens=limit, model=self.model)

    @property
    def model(self) -> StepModel:
        """The step model of the last fit."""
        return GPU_START if self.fit is None else self.fit.model

    def set_fixed(self, tokens: int | None) -> None:
        """``None``: as fitted."""
        self._fixed_tokens = tokens
        self.boundary.set_fixed(tokens, self.model)

    def tokens(self, history_tokens: int) -> int:
        """A request with fewer new tokens than this is short; at least 1."""
        return max(1, self.boundary.tokens(history_tokens))

    def class_of(self, new_tokens: int, history_tokens: int) -> PrefillClass:
        return PrefillClass.SHORT if new_tokens < self.tokens(history_tokens) else PrefillClass.LONG

    def on_prefill(self, sample: PrefillSample, now_s: float) -> bool:
        """Learns from the single passes of ``sample``; True when the model changed."""
        if self.fit is None:
            return False
        changed = False
        for step in sample.steps:
            if not self._takes(now_s):
                break
            measured = StepSample(step.new_tokens, step.history_tokens, step.attention, step.duration_s)
            changed = self.fit.observe(measured) or changed
        if changed:
            self.boundary.update(self.fit.model)
        return changed

    def _takes(self, now_s: float) -> bool:
        """A pass that is known at ``now_s`` is looked at."""
        if not self._gap_s or self.fit is None or self.fit.is_young():
            return True
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self._gap_s
        return True


def fleet_boundary(steps: StepTimes, solve: Solve, fixed_tokens: int | None) -> FittedBoundary:
    """The boundary of instances that start from the profile ``steps``; with ``fixed_tokens`` nothing is fitted."""
    if fixed_tokens is not None:
        return FittedBoundary(fixed_tokens=fixed_tokens)
    return FittedBoundary(StepFit(profile_model(steps, solve), FLEET_FIT, solve=solve), gap_s=PASS_GAP_S)
