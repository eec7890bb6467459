"""The step times of one instance, as its load reports tell them, or its state where it sends none."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, NamedTuple

import msgspec

from pla_sglang.load.report import FittedPasses, Report
from pla_sglang.policy.common.step_model import BEND_TOKENS, StepModel
from pla_sglang.policy.measured_steps import InstanceSteps
from pla_sglang.policy.slo.mixed_batches import MixedBatchModel

logger = logging.getLogger(__name__)
_TERMS = len(dataclasses.fields(StepModel)) - 2  # before ``bend`` and ``edge``
_DECODE_TERMS = len(dataclasses.fields(MixedBatchModel))


class FittedModels(NamedTuple):
    """What an instance says of its step times; the fields are those of a load report."""

    step_model: tuple[float, ...]
    decode_model: tuple[float, ...]
    fitted: FittedPasses

    @classmethod
    def of_report(cls, report: Report) -> FittedModels:
        return cls(report.step_model, report.decode_model, report.fitted)

    @classmethod
    def of_state(cls, state: Any) -> FittedModels | None:
        """From ``step_model_fits.told`` of its state; None where it is not as expected."""
        try:
            step_model, decode_model, fitted = state
            passes = msgspec.convert(fitted, FittedPasses)
            return cls(tuple(map(float, step_model)), tuple(map(float, decode_model)), passes)
        except (TypeError, ValueError, msgspec.ValidationError):
            return None


def read_step_models(report: FittedModels) -> tuple[StepModel, MixedBatchModel] | None:
    """The models of prefill passes and of decodes; None from an instance that sends none, or of another form.

    Further coefficients of decodes, which a later version may add, are ignored.
    """
    prefill, decode = report.step_model, report.decode_model
    if len(prefill) - _TERMS not in (0, len(BEND_TOKENS), 2 * len(BEND_TOKENS)) or len(decode) < _DECODE_TERMS:
        return None
    return StepModel.from_floats(prefill), MixedBatchModel(*decode[:_DECODE_TERMS])


class ReportedSteps:
    """Hands ``steps`` what one instance tells, and logs where its step times are from, once for each such source."""

    def __init__(self, steps: InstanceSteps) -> None:
        self._steps = steps
        self._last: FittedModels | None = None
        self._source = steps.source
        self._log()

    def on_models(self, told: FittedModels) -> None:
        if told == self._last:
            return
        self._last = told
        models, steps = read_step_models(told), self._steps
        if models is None:
            return
        steps.learn(*models, prefills=told.fitted.prefills, decodes=told.fitted.decodes)
        if steps.source != self._source:  # not each time they change: on a busy host they do so many times a second
            self._source = steps.source
            self._log()

    def describe(self) -> str:
        return self._steps.describe()

    def _log(self) -> None:
        logger.info("step times of %s: %s", self._steps.view.name, self.describe())
