"""Length-aware prefill batching on one prefill instance (DOPD Algorithm 1), as an engine policy.

The algorithm pops requests in order: one of at least ``i_next`` tokens runs at once and alone (lines 18, 24), shorter
ones gather until their tokens reach ``i_next`` (line 4), their timer reaches the timeout (line 4), or the queue is
empty (lines 10 to 13). ``decide`` is asked when the device is free and finds the same next pass by one walk over the
queue, so nothing is ever taken out of it before it runs. The timer of lines 1, 6 and 13 is
``_since_s``; line 3 is ``BatchingKnobs.timeout_s``. A driver may ask twice in a pass: the timer is cleared by
``on_pass``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pla_sglang.common.checks import Range, check_fields, knob
from pla_sglang.policy.interface.prefill import Action, EnginePolicy, PassDecision, PassReason, PassView, WaitingView


@dataclasses.dataclass(frozen=True)
class BatchingKnobs:
    """``i_next``: forecast of the mean input length (line 9 of Algorithm 2); ``timeout_s``: eq. 18."""

    i_next_tokens: int = knob(1024, allowed=Range(1))
    timeout_s: float = knob(0.1, allowed=Range(0))

    def __post_init__(self) -> None:
        check_fields(self, "dopd")


class LengthAwareBatching(EnginePolicy):
    """Algorithm 1."""

    def __init__(self, knobs: BatchingKnobs) -> None:
        self.knobs = knobs
        self._since_s: float | None = None  # when the oldest gathered short was first seen; None: none gathered

    def decide(self, view: PassView, now_s: float) -> PassDecision:
        if view.chunk is not None:  # a long that did not fit one pass goes on; Algorithm 1 knows no chunks
            return PassDecision(Action.LONG, PassReason.ORDER, chunk_tokens=view.pass_budget_tokens)
        if not view.waiting:
            self._since_s = None
            return PassDecision(Action.HOLD, PassReason.EMPTY)
        if view.slots <= 0:
            return PassDecision(Action.HOLD, PassReason.BLOCKED)
        batch: list[WaitingView] = []
        tokens = 0
        for request in view.waiting:
            if request.new_tokens >= self.knobs.i_next_tokens:
                if self._timed_out(batch, now_s):
                    return PassDecision(Action.SHORT, PassReason.WINDOW, tuple(batch))
                return PassDecision(Action.LONG, PassReason.ORDER, (request,), chunk_tokens=view.pass_budget_tokens)
            if batch and (tokens + request.new_tokens > view.pass_budget_tokens or len(batch) >= view.slots):
                return PassDecision(Action.SHORT, PassReason.TOKENS, tuple(batch))
            batch.append(request)
            tokens += request.new_tokens
            if self._since_s is None:
                self._since_s = now_s
            if tokens >= self.knobs.i_next_tokens:
                return PassDecision(Action.SHORT, PassReason.TOKENS, tuple(batch))
        return PassDecision(Action.SHORT, PassReason.QUEUE_END, tuple(batch))

    def on_pass(self, decision: PassDecision, view: PassView, admitted: Sequence[WaitingView], now_s: float) -> None:
        if decision.action is Action.SHORT:
            self._since_s = None

    def _timed_out(self, batch: list[WaitingView], now_s: float) -> bool:
        return bool(batch) and self._since_s is not None and now_s - self._since_s >= self.knobs.timeout_s
