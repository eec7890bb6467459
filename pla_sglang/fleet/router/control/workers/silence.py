"""How long an instance's scheduler has said nothing, beyond what the pass under way explains. Pure."""

from __future__ import annotations

from pla_sglang.fleet.router.control.workers.table import Worker
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.common.predictor import TtftPredictor

PASSES = 2.0  # of the predicted longest pass: a prediction may be wrong, and a word may have been missed between two


def silent_for_s(worker: Worker, predictor: TtftPredictor | None, clock: DeviceClock, at_s: float) -> float:
    """Wall seconds at ``at_s``; not above 0: it may be in a pass."""
    return at_s - worker.silent_since_s() - PASSES * clock.wall_s(longest_pass_s(worker, predictor))


def longest_pass_s(worker: Worker, predictor: TtftPredictor | None) -> float:
    """Device seconds: a prefill of what is queued there, no more than one pass takes, behind all that is before it; or
    a decode step."""
    view, said = worker.view, worker.description
    if predictor is None or said is None:
        return 0.0
    tokens = view.queued_tokens
    new = tokens if said.chunk_tokens is None else min(tokens, said.chunk_tokens)
    before = min(tokens - new + view.queued_history_tokens, max(0, view.kv_capacity_tokens - new))
    prefill_s = predictor.curve(view).time_s(new, before) * predictor.factor(view) if new else 0.0
    return max(prefill_s, view.token_interval_s or 0.0)
