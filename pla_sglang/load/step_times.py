"""The step times of one instance, as its load reports tell them."""

from __future__ import annotations

import dataclasses
import logging

from pla_sglang.load.report import Report
from pla_sglang.policy.common.step_model import BEND_TOKENS, StepModel
from pla_sglang.policy.interface.fleet import InstanceView
from pla_sglang.policy.interface.step_times import StepTimes
from pla_sglang.policy.measured_steps import InstanceSteps
from pla_sglang.policy.slo.mixed_batches import MixedBatchModel

logger = logging.getLogger(__name__)
_TERMS = len(dataclasses.fields(StepModel)) - 2  # before ``bend`` and ``edge``
_DECODE_TERMS = len(dataclasses.fields(MixedBatchModel))


def read_step_models(report: Report) -> tuple[StepModel, MixedBatchModel] | None:
    """The models of prefill passes and of decodes; None from an instance that sends none, or of another form.

    Further coefficients of decodes, which a later version may add, are ignored.
    """
    prefill, decode = report.step_model, report.decode_model
    if len(prefill) - _TERMS not in (0, len(BEND_TOKENS), 2 * len(BEND_TOKENS)) or len(decode) < _DECODE_TERMS:
        return None
    return StepModel.from_floats(prefill), MixedBatchModel(*decode[:_DECODE_TERMS])


class ReportedSteps:
    """Keeps ``view.steps`` of one instance up to date. Arguments as for ``InstanceSteps``."""

    def __init__(self, view: InstanceView, profile: StepTimes, name: str, *, own: bool = False) -> None:
        self._steps = InstanceSteps(view, profile, name, own=own)
        self._last: tuple[object, ...] = ()  # what the last report said of them
        self._log()

    def on_report(self, report: Report) -> None:
        told = (report.step_model, report.decode_model, report.fitted)
        if told == self._last:
            return
        self._last = told
        models, steps = read_step_models(report), self._steps
        if models is None:
            return
        measured = steps.measured
        changed = steps.learn(*models, prefills=report.fitted.prefills, decodes=report.fitted.decodes)
        if changed or steps.measured != measured:
            self._log()

    def describe(self) -> str:
        return self._steps.describe()

    def _log(self) -> None:
        logger.info("step times of %s: %s", self._steps.view.name, self.describe())
