"""What one engine's passes take: the step model of prefills, and what decodes cost, fitted side by side."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from pla_sglang.policy.common.step_fit import Solve, StepFit, StepSample
from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.slo.decode_fit import MixedBatchFit, MixedBatchSample
from pla_sglang.policy.slo.mixed_batches import START, MixedBatchModel

PURE = 16  # prefill passes without decodes; until there were as many, mixed passes stand in for them
KEPT = 256  # samples of each kind, as many as a fit looks at


class PassFits:
    """Takes each measured pass once. Deterministic; ``solve`` as in ``StepFit``.

    Prefills of a loaded engine with mixed batches hardly ever run without decodes. So while few have, a mixed pass
    counts as one of prefills, too: the tokens of its decodes are new ones, and reading their context is taken off. What
    else decodes add is not known apart from it, and stays in.
    """

    def __init__(self, start: StepModel, *, solve: Solve | None = None) -> None:
        self.prefills = StepFit(start, solve=solve)
        self.decodes = MixedBatchFit(START, solve=solve)
        self._pure = 0
        # The latest of each, for those who come after: see ``list_samples``.
        self._prefill_samples: deque[StepSample] = deque(maxlen=KEPT)
        self._decode_samples: deque[tuple[int, int, float]] = deque(maxlen=KEPT)
        self._mixed_samples: deque[MixedBatchSample] = deque(maxlen=KEPT)

    def observe_prefill(self, sample: StepSample) -> None:
        """A pass without decodes."""
        self._prefill_samples.append(sample)
        self._pure += 1
        self._fit_prefill(sample)

    def observe_mixed(self, sample: MixedBatchSample) -> None:
        """A pass with prefills and piggybacked decodes."""
        self._mixed_samples.append(sample)
        if self._pure < PURE:
            self._fit_prefill(_as_prefill(sample, self.decodes.model))
        self.decodes.observe_mixed(sample, self.prefills.model)

    def observe_decode(self, batch: int, context_tokens: int, step_s: float) -> None:
        self._decode_samples.append((batch, context_tokens, step_s))
        self.decodes.observe_decode(batch, context_tokens, step_s)

    def list_samples(self) -> dict[str, list[Sequence[float]]]:
        """The latest measured passes as plain values, for ``observe_samples`` of another process."""
        return {
            "prefills": [dataclasses.astuple(sample) for sample in self._prefill_samples],
            "decodes": list(self._decode_samples),
            "mixed": [dataclasses.astuple(sample) for sample in self._mixed_samples],
        }

    def observe_samples(self, samples: Mapping[str, Sequence[Sequence[Any]]]) -> None:
        """Takes what ``list_samples`` gave. Raises KeyError, TypeError or ValueError for anything else."""
        prefills = [StepSample(*row) for row in samples["prefills"]]
        decodes = [(int(batch), int(context), float(step_s)) for batch, context, step_s in samples["decodes"]]
        mixed = [MixedBatchSample(*row) for row in samples["mixed"]]
        for sample in prefills:
            self.observe_prefill(sample)
        for decode in decodes:
            self.observe_decode(*decode)
        for joined in mixed:
            self.observe_mixed(joined)

    def _fit_prefill(self, sample: StepSample) -> None:
        if self.prefills.observe(sample):
            self.decodes.on_step_model(self.prefills.model)


def _as_prefill(sample: MixedBatchSample, model: MixedBatchModel) -> StepSample:
    read_s = model.read_s * sample.context_tokens
    new_tokens = sample.new_tokens + sample.piggybacked
    return StepSample(new_tokens, sample.history_tokens, sample.attention, sample.pass_s - read_s)
