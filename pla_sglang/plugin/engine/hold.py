"""A pass that was held back is not repeated before something changes: the host need not match every prompt again."""

from __future__ import annotations

import dataclasses
from typing import Any

from pla_sglang.policy.interface.prefill import Action, PassDecision

HOLD_RECHECK_S = 0.02  # a hold that waits for freed memory looks again this often


@dataclasses.dataclass(frozen=True, slots=True)
class HeldPass:
    """Until ``release_s``, and while the queue and the running requests stay as they were."""

    release_s: float
    waiting: int
    last: Any
    running: int

    def lasts(self, scheduler: Any, running_batch: Any, now_s: float) -> bool:
        queue = scheduler.waiting_queue
        return (
            len(queue) == self.waiting
            and queue[-1] is self.last
            and scheduler.chunked_req is None
            and not scheduler.grammar_manager.has_waiting_grammars()
            and len(running_batch.reqs) == self.running
            and now_s < self.release_s
        )


def hold_after(decision: PassDecision, scheduler: Any, running: int, now_s: float) -> HeldPass | None:
    """The hold that follows a pass without a batch; None where only trying again can help."""
    queue = scheduler.waiting_queue
    if not queue or scheduler.chunked_req is not None or scheduler.enable_hierarchical_cache:
        return None
    if decision.action is not Action.HOLD and running == 0:
        return None  # nothing will be freed
    release_s = now_s + HOLD_RECHECK_S if decision.release_s is None else decision.release_s
    return HeldPass(release_s, len(queue), queue[-1], running)
