"""The rest of an answer as its engine predicts it from the model's own state (STAR, section 4), else by survival."""

from __future__ import annotations

from typing import Any

import numpy as np

from pla_sglang.policy.common.survival import SurvivalPredictor
from pla_sglang.policy.interface.remaining_length import EndedAnswer, Floats, RemainingPredictor, RunningAnswers


class LearnedPredictor(RemainingPredictor):
    """What the place of an answer predicts, at most up to its limit. Where it says nothing, the survival curve does.

    The curve learns all the while: an engine may have no predictor, has none yet for a new answer, or loses it.
    """

    def __init__(self) -> None:
        self._survival = SurvivalPredictor()
        self._by_place = 0  # predictions since the start
        self._by_survival = 0

    def predict(self, answers: RunningAnswers) -> Floats:
        fallback = self._survival.predict(answers)
        if answers.predicted is None:
            self._by_survival += len(answers.rids)
            return fallback
        missing = np.isnan(answers.predicted)
        absent = int(missing.sum())
        self._by_place += len(answers.rids) - absent
        self._by_survival += absent
        predicted = np.maximum(1.0, np.minimum(answers.predicted, answers.limit_tokens - answers.generated))
        return np.where(missing, fallback, predicted)

    def observe_end(self, answer: EndedAnswer) -> None:
        self._survival.observe_end(answer)

    def to_dict(self) -> dict[str, Any]:
        """For operators: predictions so far by who made them, and what the curve has learned."""
        return {"by_engine": self._by_place, "by_survival": self._by_survival, **self._survival.to_dict()}
