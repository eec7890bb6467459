"""Online fit of what decodes cost, alone and in prefill passes, from measured passes.

Decode steps give base, request and read by non-negative least squares on relative errors. Passes with piggybacked
decodes give what they take beyond the step model of prefills: a constant (a lost graph) and a part for each piggybacked
decode. The error is the 99th percentile of measured over predicted, so that a pass planned with it is late once in a
hundred. What the samples do not say comes from the start model, scaled to their level, with little weight.
"""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np

from pla_sglang.policy.common.step_fit import Solve, scipy_solver
from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.slo.mixed_batches import MixedBatchModel

# Half and twice of these, of the windows below and of those of ``step_fit.py`` and ``pass_fits.py`` moved no finish
# time on named workloads in the simulator, whose instances have true profiles (bench/lab/docs/fleets.md).
PERCENTILE = 99.0
ERROR_MAX = 1.0  # of the first passes some are compiled or captured; a plan for twice the prediction is careful enough
ANCHORS = ((1.0, 100.0), (8.0, 8_000.0), (64.0, 64_000.0), (8.0, 200_000.0))  # batch and context tokens
ANCHOR_WEIGHT = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class MixedBatchSample:
    """One measured pass with piggybacked decodes: sums over its prefills, piggybacked decodes and tokens of their
    context, duration."""

    new_tokens: int
    history_tokens: int
    attention: float
    piggybacked: int
    context_tokens: int
    pass_s: float


class MixedBatchFit:
    """Sliding windows, refitted every few samples. Deterministic: same samples, same model.

    ``solve``: as in ``StepFit``.
    """

    WINDOW = 256
    DECODE_WINDOW = 64
    MIN_SAMPLES = 8  # for a first fit, and new ones for the next
    # For a first fit of passes with piggybacked decodes: where these are dear, each costs as much as two without. The
    # next fits wait for twice as many each, up to MIN_SAMPLES.
    MIN_MIXED = 3

    def __init__(self, start: MixedBatchModel, *, solve: Solve | None = None) -> None:
        self._solve = scipy_solver() if solve is None else solve
        self.model = start
        self._start = start
        self._decodes: deque[tuple[int, int, float]] = deque(maxlen=self.DECODE_WINDOW)
        self._mixed: deque[MixedBatchSample] = deque(maxlen=self.WINDOW)
        self._fresh_decodes = self._fresh_mixed = 0
        self._enough_mixed = self.MIN_MIXED
        self.decodes = self.mixed = 0  # passes behind the terms of each; 0: start values
        self._observed_decodes = self._observed_mixed = 0

    def __len__(self) -> int:
        return len(self._mixed)

    def observe_decode(self, batch: int, context_tokens: int, step_s: float) -> bool:
        """A decode step; True when the model changed."""
        if batch <= 0 or step_s <= 0:
            return False
        self._decodes.append((batch, context_tokens, step_s))
        self._observed_decodes += 1
        self._fresh_decodes += 1
        if self._fresh_decodes < self.MIN_SAMPLES:
            return False
        self._fresh_decodes, self.decodes = 0, self._observed_decodes
        return self._replace(**self._fit_decodes())

    def observe_mixed(self, sample: MixedBatchSample, step: StepModel) -> bool:
        """A pass with piggybacked decodes, and the step model of prefills as it is now; True when the model changed."""
        if sample.new_tokens <= 0 or sample.piggybacked <= 0 or sample.pass_s <= 0:
            return False
        self._mixed.append(sample)
        self._observed_mixed += 1
        self._fresh_mixed += 1
        if self._fresh_mixed < self._enough_mixed:
            return False
        self.mixed = self._observed_mixed
        self._fresh_mixed, self._enough_mixed = 0, min(self.MIN_SAMPLES, 2 * self._enough_mixed)
        return self._replace(**self._fit_mixed(step))

    def on_step_model(self, step: StepModel) -> bool:
        """The step model of prefills was fitted again; True when this model changed with it.

        What piggybacked decodes add is measured against that model. While it is rough, they may look dear; then none
        join, no new sample comes, and only judging the kept ones again can show that it is cheap.
        """
        return len(self._mixed) >= self.MIN_MIXED and self._replace(**self._fit_mixed(step))

    def _replace(self, **terms: float) -> bool:
        before, self.model = self.model, dataclasses.replace(self.model, **terms)
        return self.model != before

    def _fit_decodes(self) -> dict[str, float]:
        rows = np.array(self._decodes, dtype=np.float64)
        start = self._start
        level = float(np.median([step_s / start.decode_s(int(batch), context) for batch, context, step_s in rows]))
        anchors = np.array([(*point, level * start.decode_s(int(point[0]), point[1])) for point in ANCHORS])
        weight = np.concatenate((np.ones(len(rows)), np.full(len(anchors), ANCHOR_WEIGHT)))
        table = np.vstack((rows, anchors))
        columns = np.column_stack((np.ones(len(table)), table[:, 0], table[:, 1]))
        base, request, read = self._relative(columns, table[:, 2], table[:, 2], weight)
        return {"base_s": base, "request_s": request, "read_s": read}

    def _fit_mixed(self, step: StepModel) -> dict[str, float]:
        model = self.model
        measured = np.array([sample.pass_s for sample in self._mixed])
        piggybacked = np.array([float(sample.piggybacked) for sample in self._mixed])
        known = np.array([_known_s(sample, step, model) for sample in self._mixed])
        columns = np.column_stack((np.ones(len(piggybacked)), piggybacked))
        extra, each = self._relative(columns, measured - known, measured, np.ones(len(piggybacked)))
        fitted = dataclasses.replace(model, extra_s=extra, piggyback_s=each)
        decode = np.array([fitted.decode_s(sample.piggybacked, sample.context_tokens) for sample in self._mixed])
        predicted = np.maximum(known + extra + each * piggybacked, decode)
        error = float(np.percentile(measured / predicted - 1, PERCENTILE))
        return {"extra_s": extra, "piggyback_s": each, "error": min(max(error, 0.0), ERROR_MAX)}

    def _relative(
        self, columns: np.ndarray, target_s: np.ndarray, scale_s: np.ndarray, weight: np.ndarray
    ) -> tuple[float, ...]:
        """Non-negative coefficients by least squares on ``target_s`` in parts of ``scale_s``."""
        scaled = columns * (weight / scale_s)[:, None]
        norm = np.linalg.norm(scaled, axis=0)
        norm[norm == 0] = 1.0
        return tuple(float(value) for value in self._solve(scaled / norm, weight * target_s / scale_s) / norm)


def _known_s(sample: MixedBatchSample, step: StepModel, model: MixedBatchModel) -> float:
    """What the model of prefills and the reading of the context account for."""
    dense_s = step.step_s(sample.new_tokens + sample.piggybacked, sample.history_tokens, sample.attention)
    return dense_s + model.read_s * sample.context_tokens
