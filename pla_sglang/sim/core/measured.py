"""What one simulated engine measures of its own passes, as a real one does for its load reports."""

from __future__ import annotations

from pla_sglang.policy.common.curve import solve_nonnegative
from pla_sglang.policy.common.step_fit import StepSample
from pla_sglang.policy.common.step_model import GPU_START
from pla_sglang.policy.measured_steps import InstanceSteps
from pla_sglang.policy.slo.decode_fit import MixedBatchSample
from pla_sglang.policy.slo.pass_fits import PassFits
from pla_sglang.sim.core.prefill import PrefillPass


class PassMeasurement:
    """Fits step times; ``report`` hands them to ``steps``, from which policies have them."""

    def __init__(self, steps: InstanceSteps) -> None:
        self._steps = steps
        self._fits = PassFits(GPU_START, solve=solve_nonnegative)

    def on_prefill(self, done: PrefillPass, batch: int, context_tokens: int, pass_s: float) -> None:
        """A pass with prefills has ended, which a batch of decodes has joined; none: 0."""
        new, history, attention = done.new_tokens, done.history_tokens, float(done.attention)
        if batch:
            self._fits.observe_mixed(MixedBatchSample(new, history, attention, batch, context_tokens, pass_s))
        else:
            self._fits.observe_prefill(StepSample(new, history, attention, pass_s))

    def on_decode(self, batch: int, context_tokens: int, step_s: float) -> None:
        """A run of decode steps has ended, whose first took so long."""
        self._fits.observe_decode(batch, context_tokens, step_s)

    def report(self) -> None:
        prefills, decodes = self._fits.prefills, self._fits.decodes
        self._steps.learn(prefills.model, decodes.model, prefills=prefills.passes, decodes=decodes.decodes)
