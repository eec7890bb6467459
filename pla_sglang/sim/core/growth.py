"""SGLang's new-token ratio: the share of the running requests' limits that admission counts on.

With ``EngineKnobs.reserve_by_lengths`` it is a share of what is predicted of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from pla_sglang.sim.core.engine_knobs import EngineKnobs
from pla_sglang.sim.core.request import SimRequest
from pla_sglang.sim.core.running import RunningBatch

Floats = npt.NDArray[np.float64]
# What is left of requests that have so many tokens, nan where it is unknown. True: they are all that run there.
Predict = Callable[[Sequence[tuple[SimRequest, int]], bool], Floats]

RETRACT_STEPS = 20  # decode steps that SGLang looks ahead when it sets the ratio after a retraction
PREDICT_STEPS = 20  # decode steps from one prediction of a running request to the next, as STAR has it


class GrowthRatio:
    """Falls with every decode step, rises when memory ran out, and starts anew when the engine is idle."""

    def __init__(self, knobs: EngineKnobs) -> None:
        self._start = knobs.growth_start
        self._least = knobs.growth_least
        self._decay = (knobs.growth_start - knobs.growth_least) / knobs.growth_decay_steps
        self.value = knobs.growth_start

    def on_steps(self, steps: int) -> None:
        self.value = max(self._least, self.value - steps * self._decay)

    def on_idle(self) -> None:
        self.value = self._start

    def on_retract(self, *, decoded_tokens: int, requests: int, limit_tokens: int) -> None:
        """What the requests that stay have used of their limits, and a little more."""
        if limit_tokens > 0:
            self.value = min(1.0, (decoded_tokens + RETRACT_STEPS * requests) / limit_tokens)


class AnswerLimits:
    """What requests may still get, as admission counts it: their limits, clipped, or what is predicted of each.

    Admission counts the same share of either (``GrowthRatio``), so exact lengths are as good as exact limits.

    Args:
        predict: of one engine's requests; None: by the limits that clients send.
    """

    def __init__(self, clip_tokens: int, predict: Predict | None = None) -> None:
        self._clip_tokens = clip_tokens
        self._predict = predict
        self._ends: dict[SimRequest, float] = {}  # step counters at which members are predicted to end; nan: unknown
        self._made_at = 0  # step counter

    def of_next(self, request: SimRequest) -> int:
        """What one that comes may get."""
        clipped_tokens = min(request.limit_left, self._clip_tokens)
        if self._predict is None:
            return clipped_tokens
        rest = float(self._predict([(request, request.done_tokens)], False)[0])
        return clipped_tokens if math.isnan(rest) else min(request.limit_left, max(1, math.ceil(rest)))

    def of_running(self, running: RunningBatch) -> int:
        """The sum over its members; one of whom nothing is known counts by its limit."""
        if self._predict is None:
            return running.growth_tokens()
        members = list(running.members)
        if not members:
            return 0
        is_old = not 0 <= running.step - self._made_at < PREDICT_STEPS
        if is_old or any(request not in self._ends for request in members):
            told = self._predict([(request, running.done_of(request)) for request in members], True)
            self._made_at, self._ends = running.step, dict(zip(members, (running.step + told).tolist(), strict=True))
        left = np.array([request.limit_tokens - running.done_of(request) for request in members], dtype=np.float64)
        rests = np.maximum(1.0, np.array([self._ends[request] for request in members]) - running.step)
        rests = np.where(np.isnan(rests), np.minimum(left, self._clip_tokens), np.minimum(rests, left))
        return math.ceil(float(rests.sum()))

    def in_full(self, running: RunningBatch) -> int:
        """Answer tokens of all members when they end, without the clip."""
        if self._predict is None:
            return sum(request.limit_tokens for request in running.members)
        return running.decoded_tokens() + self.of_running(running)
