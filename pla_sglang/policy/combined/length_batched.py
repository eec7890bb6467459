"""DOPD's length-aware batching in an engine that decodes beside its prefills.

Algorithm 1 says which prefills run. What it leaves open is that of PLA-Serve's temporal policy: running requests get
their decode steps in between, and a chunk under way takes no more than there is room for. The boundary between short
and long is the threshold i_next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.dopd.batching import BatchingKnobs, LengthAwareBatching
from pla_sglang.policy.interface.prefill import Action, PassDecision, PassReason, PassView, WaitingView
from pla_sglang.policy.pla.temporal import TemporalPolicy
from pla_sglang.policy.slo.knobs import EnginePolicyKnobs


class LengthBatchedPolicy(TemporalPolicy):
    """Algorithm 1 on one engine. The knobs of waits and ageing have no effect."""

    knobs: EnginePolicyKnobs

    def __init__(self, knobs: EnginePolicyKnobs, model: StepModel) -> None:
        super().__init__(knobs, model)
        self._batching = LengthAwareBatching(self._batching_knobs())

    def set_knobs(self, knobs: EnginePolicyKnobs) -> None:  # type: ignore[override]  # as it was made from
        super().set_knobs(knobs)
        self._batching.knobs = self._batching_knobs()

    def set_model(self, model: StepModel) -> None:
        super().set_model(model)
        self._batching.knobs = self._batching_knobs()

    def _batching_knobs(self) -> BatchingKnobs:
        return BatchingKnobs(max(1, self.boundary.tokens(0)), self.knobs.batch_timeout_s)

    def on_pass(self, decision: PassDecision, view: PassView, admitted: Sequence[WaitingView], now_s: float) -> None:
        super().on_pass(decision, view, admitted, now_s)
        self._batching.on_pass(decision, view, admitted, now_s)

    def decide(self, view: PassView, now_s: float, pass_model: StepModel | None = None) -> PassDecision:
        if self._decode_is_due(view):
            return PassDecision(Action.HOLD, PassReason.DECODE_TURN, release_s=now_s)
        if view.chunk is not None and not self._has_room_for_piece(view.chunk, view):
            return PassDecision(Action.HOLD, PassReason.KV_DRAIN)
        decision = self._batching.decide(view, now_s)
        if decision.action is not Action.LONG:
            return decision
        largest, grid = self.knobs.long_prompts.chunk_max_tokens, self.knobs.long_prompts.grid_tokens
        if largest is None:  # prompts are not chunked
            return dataclasses.replace(decision, chunk_tokens=None)
        tokens = min(largest, view.pass_budget_tokens)
        if view.chunk is not None:
            tokens = min(tokens, max(grid, view.kv_room_tokens // grid * grid))
        return dataclasses.replace(decision, chunk_tokens=tokens)
