"""What is known of how many tokens a running request has still to come.

A driver has one predictor. It asks it for the answers that run on an instance (``DecodeBatch.remaining``), and tells it
of each answer that has ended; policies see what it says, and a recording keeps it.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class RunningAnswer(NamedTuple):
    """One row of ``RunningAnswers``, in its order. ``known``, ``predicted``: nan where the driver has none."""

    rid: str
    generated: float
    known: float = np.nan
    prompt_tokens: float = 1.0
    limit_tokens: float = np.inf
    streamed: bool = True
    started_s: float = 0.0
    predicted: float = np.nan


@dataclasses.dataclass(slots=True, eq=False)
class RunningAnswers:
    """Answers that run in one place, as a driver sees them; columns of shape [requests].

    Attributes:
        generated: tokens so far.
        known: tokens still to come, as far as the driver knows them; nan: not.
        prompt_tokens: of the prompt.
        limit_tokens: ``max_tokens``; inf: none is known.
        streamed: as the request asks for it, 0 or 1.
        started_s: when the answer began.
        place: name of the instance.
        now_s: of this look, by the clock of ``started_s``.
        models: by request, what counts as a model of its own; empty: all have one model.
        predicted: tokens still to come as the place itself predicts; nan: it does not. None: of no request.
    """

    rids: Sequence[str]
    generated: Floats
    known: Floats
    prompt_tokens: Floats
    limit_tokens: Floats
    streamed: Floats
    started_s: Floats
    place: str = ""
    now_s: float = 0.0
    models: Sequence[str] = ()
    predicted: Floats | None = None

    @classmethod
    def of(
        cls, rows: Iterable[RunningAnswer], place: str = "", now_s: float = 0.0, models: Sequence[str] = ()
    ) -> RunningAnswers:
        rows = list(rows)
        columns = np.array([row[1:] for row in rows], dtype=np.float64).reshape(len(rows), 7).T
        generated, known, prompts, limits, streamed, started_s, predicted = columns
        rids = [row[0] for row in rows]
        return cls(rids, generated, known, prompts, limits, streamed, started_s, place, now_s, models, predicted)


@dataclasses.dataclass(frozen=True, slots=True)
class EndedAnswer:
    """An answer that comes to no more tokens; fields as in ``RunningAnswers``.

    ``tokens``: of the answer. ``whole``: the model has ended it; False: its limit, its client or a fault has.
    """

    rid: str
    tokens: int
    whole: bool
    prompt_tokens: int = 1
    limit_tokens: float = np.inf
    streamed: bool = True
    started_s: float = 0.0
    ended_s: float = 0.0
    model: str = ""


class RemainingPredictor(abc.ABC):
    """What one driver asks, and tells.

    Attributes:
        is_blind: it says nan whatever it sees, so a driver with thousands of requests need not describe them.
    """

    is_blind = False

    @abc.abstractmethod
    def predict(self, answers: RunningAnswers) -> Floats:
        """Tokens still to come, at least 0; nan: unknown; shape [requests]."""

    def observe_end(self, answer: EndedAnswer) -> None:  # noqa: B027  # most learn nothing
        """Called once for each request that has ended, however it did."""

    def to_dict(self) -> dict[str, Any]:
        """For operators: what it has learned."""
        return {}


class Oracle(RemainingPredictor):
    """What the driver knows, unchanged."""

    def predict(self, answers: RunningAnswers) -> Floats:
        return answers.known


class NoPrediction(RemainingPredictor):
    """Knows nothing."""

    is_blind = True

    def predict(self, answers: RunningAnswers) -> Floats:
        return np.full(len(answers.rids), np.nan)
