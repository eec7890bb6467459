"""Errors of a predictor on requests that it was not trained on, beside those of what needs no hidden state.

- constant: the median rest of all training rows, which has the least error of all constants.
- prompt only: an MLP of the same kind, trained in the same way on the hidden state at the prompt's last token, predicts
  the length once; what has been generated is taken off.
- survival: the curve that the router learns, from all training requests. Requests that their limit cut are part of it.

All are asked at the same rows. Mean absolute errors, in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pla_sglang.policy.common.survival import SurvivalKnobs, SurvivalPredictor
from pla_sglang.predictor.model import LengthMlp
from pla_sglang.predictor.rows import TEST, TRAIN, Floats, Rows
from pla_sglang.predictor.train import Samples, ShowEpoch, TrainKnobs, predict, train_on_prompts, whole_rows

LEARNED, CONSTANT, PROMPT, SURVIVAL = "", "constant", "prompt_only", "survival"
ARMS = (LEARNED, CONSTANT, PROMPT, SURVIVAL)
Figures = dict[str, Any]


def key_of(arm: str) -> str:
    return f"mae_{arm}" if arm else "mae"


def evaluate(mlp: LengthMlp, rows: Rows, knobs: TrainKnobs, show: ShowEpoch) -> Figures:
    """Figures on the test split of ``rows``; what is compared with learns from their training split.

    ``show``: of the training of what sees the prompt only. Raises PredictorError.
    """
    whole = whole_rows(rows)
    train, test = whole.split(TRAIN, knobs.seed), whole.split(TEST, knobs.seed)
    constant = float(np.median(train.rest))
    curve = predict_by_curve(rows.split(TRAIN, knobs.seed), test)
    predicted = {
        LEARNED: predict(mlp, Samples.of(test, test.rest).hidden).numpy().astype(np.float64),
        CONSTANT: np.full(len(test), constant),
        PROMPT: predict_by_prompt(train_on_prompts(whole, knobs, show), test),
        SURVIVAL: np.where(np.isnan(curve), constant, curve),  # where half go on beyond all that was seen
    }
    errors = {arm: np.abs(predicted[arm] - test.rest) for arm in ARMS}
    return {
        **summarize(errors),
        "rows": len(test),
        "requests": len(test.rids),
        "survival_unknown_share": float(np.isnan(curve).mean()),
        "mae_by_generated": by_bucket(errors, test.generated, rows.origin.every_steps),
        "mae_by_length": by_bucket(errors, test.tokens[test.request], rows.origin.every_steps),
    }


def predict_by_curve(learned: Rows, test: Rows) -> Floats:
    """By a curve whose window holds all requests that were learned from; nan where it says nothing."""
    predictor = SurvivalPredictor(SurvivalKnobs(window_ends=len(learned.rids)))
    for answer in learned.ended():
        predictor.observe_end(answer)
    return predictor.predict(test.running())


def predict_by_prompt(mlp: LengthMlp, test: Rows) -> Floats:
    """The length predicted at each request's first row, less what has been generated, at least 0."""
    first = np.flatnonzero(test.at_prompts())
    lengths = np.zeros(len(test.rids))
    lengths[test.request[first]] = predict(mlp, Samples.of(test, test.rest, first).hidden).numpy()
    return np.maximum(lengths[test.request] - test.generated, 0.0)


def summarize(errors: Mapping[str, Floats]) -> Figures:
    return {key_of(arm): float(of_arm.mean()) for arm, of_arm in errors.items()}


def by_bucket(errors: Mapping[str, Floats], tokens: Floats | Any, first_edge: int) -> list[Figures]:
    """Errors by buckets of ``tokens``, each twice as wide as the one before; empty ones are left out."""
    edges = [0, first_edge]
    while edges[-1] <= tokens.max():
        edges.append(2 * edges[-1])
    places = np.searchsorted(edges, tokens, side="right") - 1
    return [
        {
            "from_tokens": edges[place],
            "below_tokens": edges[place + 1],
            "rows": int((places == place).sum()),
            **summarize({arm: of_arm[places == place] for arm, of_arm in errors.items()}),
        }
        for place in np.unique(places).tolist()
    ]
